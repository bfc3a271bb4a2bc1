"""Models whose maps hold codes and scales, with factors beside them, under plans."""

import jax.numpy as jnp
import pytest
from contract_cases import is_seen, named, of_plan, ROUNDING, ZERO
from plan_parity import Case, differences, of_one_device

from eqformer import nn
from eqformer.parallel.state import _stand_ins


SPLIT = Case("llama int4 lora", {"fsdp": 2, "pipe": 2, "tensor": 2}, ZERO | {"microbatches": 2})
EXPERTS = Case("mixture int4 lora", {"fsdp": 2, "expert": 2, "tensor": 2}, ZERO)
MORE = [
    EXPERTS,
    Case("llama int4 lora", {"tensor": 4}, {"residual": "feature"}),
    Case("llama int4 lora", {"tensor": 4}, {"residual": "sequence", "overlap": "ring"}),
    Case("llama int4 lora", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 2}, "full"),
    Case("mixture int4 lora", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case("shared mixture int4 lora", {"fsdp": 2, "expert": 2}, {"zero": 3, "expert_factor": 8.0}),
    Case("jaxformer int4 lora", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature"}),
    Case("llama int4 lora", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named([], [SPLIT, *MORE]))
def test_codes_are_split_like_any_weight(case):
    """The loss and the gradients, leaf by leaf, of factors, scales and all else but codes are one device's."""
    want = of_one_device(case)
    maps = [node for node in nn.linear_maps(want.gradients) if isinstance(node, nn.QuantisedLinear)]
    assert maps and all(node.codes is None and jnp.any(node.scales) for node in maps)
    assert all(jnp.any(lora.down.weight) for lora in nn.modules(want.gradients, nn.LoRA))
    assert differences(of_plan(case), want, ROUNDING) == {}


@pytest.mark.grid
def test_codes_of_other_devices_are_gathered(monkeypatch):
    """A device that had its own codes in the place of the others' would have another loss."""
    case = Case("llama int4 lora", {"fsdp": 2}, ZERO)
    assert not is_seen(case)
    gathered = _stand_ins._gather_plainly

    def own(dim, dtype, steps, used, value, leaf):
        whole = gathered(dim, dtype, steps, used, value, leaf)
        return whole if leaf.dtype != jnp.uint8 else jnp.concatenate([leaf, leaf], dim) + 0 * whole

    monkeypatch.setattr(_stand_ins, "_gather_plainly", own)
    assert is_seen(case)
