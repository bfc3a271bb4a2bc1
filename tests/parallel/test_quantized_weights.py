"""Models with quantized maps, and with LoRA beside such maps, under plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import is_seen, named, of_plan, ROUNDING, ZERO
from plan_models import model_of
from plan_parity import Case, differences, of_one_device, place

from eqformer import generation, nn, training
from eqformer.parallel import _fully_sharded, ShardedModel


SPLIT = Case("llama int4 lora", {"fsdp": 2, "pipe": 2, "tensor": 2}, ZERO | {"microbatches": 2})
EXPERTS = Case("mixture int4 lora", {"fsdp": 2, "expert": 2, "tensor": 2}, ZERO)
MORE = [
    EXPERTS,
    Case("llama int4 lora", {"tensor": 4}, {"residual": "feature"}),
    Case("llama int4 lora", {"tensor": 4}, {"residual": "sequence", "overlap": "ring"}),
    Case("llama int4 lora", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 2}, "full"),
    Case("mixture int4 lora", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case(
        "shared mixture int4 lora",
        {"fsdp": 2, "expert": 2},
        {"zero": 3, "expert_method": "exchange", "expert_factor": 0.5},
    ),
    Case("jaxformer int4 lora", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature"}),
    Case("llama int4 lora", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named([], [SPLIT, *MORE]))
def test_codes_are_split_like_any_weight(case):
    """The loss and the gradients, leaf by leaf, of factors, scales and all else but codes are one device's."""
    want = of_one_device(case)
    maps = [node for node in nn.linear_maps(want.gradients) if isinstance(node, nn.QuantizedLinear)]
    assert maps and all(node.codes is None and jnp.any(node.scales) for node in maps)
    assert all(jnp.any(lora.down.weight) for lora in nn.modules(want.gradients, nn.LoRA))
    assert differences(of_plan(case), want, ROUNDING) == {}


@pytest.mark.grid
def test_codes_of_other_devices_are_gathered(monkeypatch):
    """A device that had its own codes in the place of the others' would have another loss."""
    case = Case("llama int4 lora", {"fsdp": 2}, ZERO)
    assert not is_seen(case)
    gathered = _fully_sharded._gather_forward

    def own(dim, dtype, steps, used, value, leaf):
        whole = gathered(dim, dtype, steps, used, value, leaf)
        return whole if leaf.dtype != jnp.uint8 else jnp.concatenate([leaf, leaf], dim) + 0 * whole

    monkeypatch.setattr(_fully_sharded, "_gather_forward", own)
    assert is_seen(case)


@pytest.mark.grid
def test_text_and_checkpoints_of_codes(tmp_path):
    """A quantized model writes what its decoded weights do, is saved and restored, and writes the same over a mesh."""
    model = jax.jit(lambda: nn.quantize(model_of("llama"), "int4", group=4))()
    write = lambda model: generation.generate(model, [[3, 5, 7], [4]], max_new_tokens=6, key=jax.random.key(1)).ids
    ids = write(model)
    assert np.array_equal(ids, write(nn.dequantize(model)))
    spoiled = jax.tree.map(lambda x: x ^ 8 if x.dtype == jnp.uint8 else x, model)
    assert not np.array_equal(ids, write(spoiled))
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(model, 1, {})
        checkpointer.wait()
        restored, _ = checkpointer.restore(jax.tree.map(jnp.zeros_like, model), 1)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (restored, model))))
    plan = Case("llama", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"microbatches": 1}).plan
    assert np.array_equal(write(ShardedModel(place(restored, plan), plan)), ids)
