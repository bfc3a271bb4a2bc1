"""Gradients are never summed in 16 bits over tokens, and rarely over devices, as `nn/_sums.py` states."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from narrow_sums import narrow_sums, NarrowSum
from plan_models import batch_of, filled, model_of, of_blocks
from plan_parity import Case
from plan_parts import EMBED

from eqformer import kernels, nn
from eqformer.parallel import filter_shard_map, make_mesh
from eqformer.training import make_gradient_function, next_token_loss


# What is added up in 16 bits, and why that is meant. Each is an activation or the gradient of one, token by token: as
# many addends as the axis has devices, each of which is rounded anyway. They are what a layout sends most of, and would
# be twice as large in float32.
MEANT = {
    # Partial sums of a map's outputs over the axis `tensor`, and of the gradients of its inputs.
    *((name, ("tensor",)) for name in ("column-parallel input", "row-parallel output", "head input")),
    *((name, ("tensor",)) for name in ("feature-parallel output", "replicated feature-parallel output")),
    *((name, ("tensor",)) for name in ("expert input over tensor", "expert output over tensor")),
    # The same by messages in a ring: added in float32, and rounded for each hop.
    ("all_gather_matmul", ()),
    ("matmul_reduce_scatter", ()),
    # A factor of LoRA's, a slice of whose outputs each device has.
    *((name, ("tensor",)) for name in ("apply_weight", "multiply_vectors")),
    # A token's chosen experts, on whatever devices they are, and the gradients that they have for it.
    *((name, ("expert",)) for name in ("gathered expert input", "summed expert output")),
    # Gradients of keys and values that were gathered.
    ("gathered keys and values", ("context",)),
}
# With narrow parameters their vectors are looked up narrow: one device has each, and the others add zeros.
MEANT_OF_NARROW = MEANT | {("token embeddings", ("tensor",))}

CASES = [
    Case("recurrence", {"fsdp": 2, "tensor": 2}, {"residual": "feature", "zero": 1}),
    Case("shared mixture", {}),
]
WIDER = [
    Case("shared mixture", {"expert": 2, "tensor": 2}, {"expert_method": "exchange", "expert_factor": 0.5}),
    Case("unlike stacks", {"fsdp": 2, "tensor": 4}, {"residual": "sequence", "zero": 3}),
    Case("windows", {"context": 2, "tensor": 2}, {"residual": "sequence", "overlap": "ring"}),
    Case("gpt2", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"microbatches": 2, "schedule": "zb-h1", "zero": 2}),
    Case("gpt2", {"replica": 2, "tensor": 2}, {"residual": "replicated"}),
    Case("mixture", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case("latents", {"tensor": 4}, {"residual": "replicated"}),
    Case("latents", {"tensor": 4}, {"residual": "feature"}),
    Case("windows", {"context": 2, "tensor": 2}, {"residual": "feature", "context_method": "gather"}),
    Case("windows", {"context": 2, "tensor": 2}, {"residual": "replicated", "context_method": "heads"}),
    Case("side by side", {"tensor": 4}, {"residual": "replicated"}),
    Case("mixture", {"expert": 2, "tensor": 2}, {"residual": "sequence"}),
    Case("choosing experts", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case("few recurrence", {"tensor": 4}, {"residual": "sequence"}),
    Case("gpt2", {"pipe": 2, "fsdp": 2}, {"microbatches": 2, "schedule": "gpipe", "edges": "spread", "zero": 3}),
    Case("llama lora", {"fsdp": 2, "tensor": 2}, {"residual": "feature", "zero": 3}),
    Case("vectors of layers", {}),
    Case("weighed inputs", {}),
    Case("batch mixture", {}),
    Case("choosing experts", {}),
    Case("latents lora", {}, {"microbatches": 2}),
]


def program_of(case: Case, model: Any = None, batch: Any = None, loss: Any = next_token_loss) -> Any:
    """The trace of the gradients, under the case's plan or on one device."""
    model = model_of(case.model, case.remat, case.dtypes) if model is None else model
    plan, pieces = (case.plan, 1) if case.mesh else (None, case.choices.get("microbatches", 1))
    function = make_gradient_function(loss, plan, microbatches=pieces)
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)
    batch = batch_of(model) if batch is None else batch
    arrays, rest = eqx.partition((model, batch, jax.random.key(7)), is_array)
    return jax.make_jaxpr(lambda arrays: eqx.filter(function(*eqx.combine(arrays, rest)), eqx.is_array))(arrays)


def not_meant(found: list[NarrowSum], meant: set) -> list[NarrowSum]:
    """Those that are in no list; what is added over tokens is in none."""
    return [one for one in found if one.place not in meant]


def named(cases: list[Case], *marks: Any) -> list:
    """Parameters of a test."""
    return [pytest.param(case, id=case.name, marks=marks) for case in cases]


@pytest.mark.grid
@pytest.mark.parametrize("case", named(CASES + WIDER))
def test_a_step_in_mixed_precision_adds_up_in_float32(case):
    found = narrow_sums(program_of(case._replace(dtypes=("float32", "bfloat16"))))
    assert not_meant(found, MEANT) == []
    assert bool(found) == ("tensor" in case.mesh or "context_method" in case.choices)


@pytest.mark.grid
@pytest.mark.parametrize("case", named(CASES + WIDER))
def test_a_step_of_narrow_parameters_adds_up_in_float32(case):
    found = narrow_sums(program_of(case._replace(dtypes=("bfloat16", "bfloat16"))))
    assert not_meant(found, MEANT_OF_NARROW) == []


class NarrowBias(eqx.Module):
    """Adds its bias as it should not."""

    bias: Any

    def __call__(self, x: Any) -> Any:
        return x + self.bias.astype(x.dtype)


def test_a_bias_that_is_added_in_16_bits_is_found():
    def block(key: Any) -> nn.Block:
        one, two = jax.random.split(key)
        mixer = nn.Attention(embed=EMBED, heads=2, head_dim=4, core=kernels.ReferenceAttention(), key=one)
        return nn.Block(nn.Residual(mixer, nn.RMSNorm("embed", embed=EMBED)), nn.Residual(NarrowBias(jnp.zeros(EMBED))))

    for remat in ("none", "full"):
        model = nn.Precision(compute="bfloat16").apply(filled(lambda remat=remat: of_blocks(block, remat=remat)))
        (found,) = narrow_sums(program_of(Case("", {}), model))
        assert found.place == ("NarrowBias.__call__", ()) and found.primitive == "reduce_sum"


@pytest.mark.quick
def test_every_kind_of_sum_is_found_wherever_it_stands():
    x = jnp.ones((4, 3), jnp.bfloat16)
    spec = jax.sharding.PartitionSpec
    over = filter_shard_map(
        lambda x: jax.lax.psum(x, "fsdp"), make_mesh(fsdp=2, devices=jax.devices()[:2]), (spec("fsdp"),), spec()
    )
    carried = lambda x: jax.lax.scan(lambda total, row: (total + row, None), x[0], x)[0]
    wide = lambda x: jax.lax.scan(lambda total, row: (total + row.astype("float32"), None), x[0].astype("float32"), x)
    summed = lambda g: jax.vjp(lambda row: jnp.broadcast_to(row, g.shape), g[0])[1](g)[0]
    custom = jax.custom_vjp(lambda x: x)
    custom.defvjp(lambda x: (x, None), lambda _, g: (g * summed(g),))
    cases = {
        "psum_invariant": over,
        "scan that adds": carried,
        "cumsum": lambda x: jax.lax.cumsum(x),
        "scatter-add": lambda x: x.at[jnp.array([0, 0])].add(x[:2]),
        "reduce_sum": jax.grad(lambda x: jnp.sum(jax.checkpoint(custom)(x).astype("float32"))),
    }
    for primitive, function in cases.items():
        program = jax.make_jaxpr(lambda x, function=function: jax.lax.cond(True, function, function, x))(x)
        assert {one.primitive for one in narrow_sums(program)} == {primitive}
    assert narrow_sums(jax.make_jaxpr(wide)(x)) == []
    assert narrow_sums(jax.make_jaxpr(lambda x: jnp.sum(x, 0))(x)) == []  # which JAX widens
