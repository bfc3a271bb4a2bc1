"""FP8 products under plans: slices that are rounded with their own scales give one device's results."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from contract_cases import is_seen, named, ROUNDING, STAGES, ZERO
from plan_models import model_of
from plan_parity import Case, differences, of_one_device, of_plan

from eqformer import nn, parallel, systems
from eqformer.nn import _precision


SPLIT = Case("eight layers fp8", {"fsdp": 2, "tensor": 2}, ZERO)
EXPERTS = Case("mixture fp8", {"fsdp": 2, "expert": 2}, ZERO)
MORE = [
    Case("eight layers fp8", {"fsdp": 2, "pipe": 2, "tensor": 2}, ZERO | {"microbatches": 2}),
    Case("eight layers fp8", {"tensor": 4}, {"residual": "feature"}),
    Case("llama fp8", {"tensor": 4}, {"residual": "feature"}),  # key heads that devices share are summed whole
    Case("eight layers fp8", {"fsdp": 2, "tensor": 4}, {"residual": "sequence", "overlap": "ring", "zero": 2}),
    Case("eight layers fp8", {"replica": 2, "context": 2, "tensor": 2}, {"residual": "sequence"}, "products"),
    Case("eight layers fp8", {"pipe": 2, "tensor": 4}, STAGES),
    Case("llama fp8", {"fsdp": 4, "pipe": 2}, ZERO | {"schedule": "zb-h1", "microbatches": 2}, "full"),
    Case("gpt2 fp8", {"fsdp": 4, "tensor": 2}, ZERO),
    Case("jaxformer fp8", {"fsdp": 2, "context": 2}, {"zero": 1}),
    Case(
        "shared mixture fp8", {"fsdp": 2, "expert": 2}, {"zero": 3, "expert_method": "exchange", "expert_factor": 0.5}
    ),
    Case("mixture fp8", {"fsdp": 2, "expert": 4}, {"zero": 3, "expert_method": "gather"}),
    Case("mixture fp8", {"expert": 2, "tensor": 2}, {}),
    Case("mixture fp8", {"expert": 2, "pipe": 2}, {"microbatches": 2}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named([SPLIT], [EXPERTS, *MORE]))
def test_losses_and_gradients_are_one_devices(case):
    """Leaf by leaf, to float32's rounding: no slice is rounded to other digits than the whole.

    In float64, as in float32 one of some 10^5 numbers that lies between two of 8 bits may be rounded to the other one.
    """
    case = case._replace(dtypes=("float64", "float64"))
    with jax.enable_x64(True):
        want = of_one_device(case)
        plain = of_one_device(case._replace(model=case.model.removesuffix(" fp8")))
        assert abs(float(want.total) / float(plain.total) - 1) > 1e-4  # products of 8 bits they are
        is_exact = "tensor" not in case.mesh  # whose slices of vectors have scales of their own
        assert differences(of_plan(case), want, 1e-9 if is_exact else ROUNDING) == {}


@pytest.mark.grid
def test_scales_that_are_no_powers_of_two_differ_from_slice_to_slice(monkeypatch):
    """As the usual scale would, which brings the largest magnitude to the largest number of 8 bits."""
    case = Case("eight layers fp8", {"tensor": 2, "pipe": 2}, {"microbatches": 2})
    assert not is_seen(case)

    def usual(x: Any, form: Any, dim: int | None) -> Any:
        scale = jnp.max(jnp.abs(x), dim, keepdims=dim is not None) / float(jnp.finfo(form).max)
        scale = jnp.where(scale > 0, scale, 1)
        return (x / scale).astype(form), scale

    monkeypatch.setattr(_precision, "round_to_fp8", usual)
    of_one_device.__globals__["_of_one_device"].cache_clear()
    try:
        assert is_seen(case)
    finally:
        of_one_device.__globals__["_of_one_device"].cache_clear()


@pytest.mark.quick
def test_maps_that_devices_repeat_are_refused():
    """Of key heads that devices share each device has the gradient of its own query heads."""
    for model, choices, name in (("llama fp8", {}, "key"), ("jaxformer fp8", {}, "query_down")):
        plan = parallel.Plan(parallel.make_mesh(tensor=4, fsdp=2), **choices)
        with pytest.raises(ValueError, match=rf"tensor=4: .*{name}.* multiplies in 8 bits and is replicated"):
            plan.check(model_of(model), rows=8, seq=16)
    plan = parallel.Plan(parallel.make_mesh(tensor=4, fsdp=2))
    some = nn.with_fp8(model_of("llama"), ["query", "output", "gate", "up", "down"])
    plan.check(some, rows=8, seq=16)


@pytest.mark.grid
def test_the_two_dim_layout_is_for_the_compute_dtype():
    mesh = parallel.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"the model multiplies in 8 bits; take nn.without_fp8\(model\)"):
        systems.WeightStationary(model_of("eight layers fp8"), mesh)
