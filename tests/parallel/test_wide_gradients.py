"""Gradients are summed over devices, microbatches and uses in float32, whatever dtype the parameters have."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from narrow_sums import narrow_sums, NarrowSum
from plan_models import batch_of, model_of
from plan_parity import Case, compiled, hastily, place
from test_narrow_sums import MEANT_OF_NARROW, not_meant

from eqformer import training
from eqformer.training import make_gradient_function, next_token_loss


NARROW = ("bfloat16", "bfloat16")
PIPE: dict[str, Any] = {"microbatches": 2, "smallest": 1}
CASES = [
    Case("gpt2", {"replica": 2, "expert": 2}, {"microbatches": 2}),
    Case("shared mixture", {"expert": 2, "tensor": 2}),
]
MORE = [
    *(Case("tied", {"fsdp": 2, "context": 2}, {"zero": zero, "smallest": 1}) for zero in range(4)),
    Case("llama", {"fsdp": 2, "context": 2}, {"context_method": "heads"}),
    Case("gpt2 lora", {"fsdp": 2, "tensor": 2}, {"residual": "feature"}),
    Case("gpt2", {"fsdp": 2, "tensor": 2}, {"residual": "sequence", "overlap": "ring"}),
    *(Case("llama", {"fsdp": 2, "pipe": 2}, PIPE | {"zero": zero, "schedule": "zb-h1"}) for zero in (1, 3)),
    *(
        Case("llama", {"fsdp": 2, "pipe": 2}, PIPE | {"zero": zero, "schedule": "gpipe", "edges": "spread"})
        for zero in (0, 2, 3)
    ),
]


def named(every_run: list[Case], grid: list[Case]) -> list:
    """Cases for every run, and others for the grid."""
    return [pytest.param(case, id=case.name) for case in every_run] + [
        pytest.param(case, id=case.name, marks=pytest.mark.grid) for case in grid
    ]


def sums_not_meant(case: Case) -> list[NarrowSum]:
    """What a program that gives gradients adds up in 16 bits, beside streams between layers."""
    model, plan = model_of(case.model, dtypes=NARROW), case.plan
    arrays, static = eqx.partition(plan.shard(model), eqx.is_array)
    gradients = make_gradient_function(next_token_loss, plan)
    run = lambda arrays, batch: jax.tree.leaves(gradients(eqx.combine(arrays, static), batch, None)[2])
    program, shapes = jax.make_jaxpr(run, return_shape=True)(arrays, batch_of(model))
    assert {str(x.dtype) for x in shapes} == {"float32"}
    return not_meant(narrow_sums(program), MEANT_OF_NARROW)


@pytest.mark.by_default("gpt2 replica2.expert2 microbatches2")
@pytest.mark.parametrize("case", named(CASES, MORE))
def test_no_gradient_of_a_parameter_adds_up_in_16_bits(case):
    assert sums_not_meant(case) == []


@pytest.mark.quick
def test_gradients_of_the_parameters_dtype_would_be_seen(monkeypatch):
    monkeypatch.setattr("eqformer.parallel.has_wider_grad", lambda x: False)
    monkeypatch.setattr("eqformer.parallel._plan.has_wider_grad", lambda x: False)
    with pytest.raises(AssertionError, match="bfloat16"):
        sums_not_meant(CASES[0])


def of_first_weights(model: Any, batch: Any, key: Any = None, *, tokens: Any = None, vocabulary: Any = None) -> tuple:
    """A sum of which each entry of the table has the gradient: the first weight of each row, added up."""
    total = jnp.sum(batch.weights[:, 0])
    return total * jnp.sum(model.embedding.weight.astype(jnp.float32)), total


@pytest.mark.parametrize(
    "case",
    named(
        [
            Case("tied", {"replica": 2, "expert": 2, "fsdp": 2}),
            Case("tied", {"replica": 2, "fsdp": 2}, {"zero": 3, "smallest": 1, "microbatches": 2}),
        ],
        [
            Case("tied", {"fsdp": 4, "pipe": 2}, {"zero": 3, "smallest": 1, "schedule": "1f1b", "microbatches": 2}),
            Case("tied", {"replica": 2, "fsdp": 4}, {"zero": 1, "smallest": 1}),
            Case("tied", {"fsdp": 8}, {"zero": 2, "smallest": 1}),
            Case("tied", {"fsdp": 8}, {"zero": 3, "smallest": 1}),
            Case("tied", {"fsdp": 2}, {"microbatches": 4}),
        ],
    ),
)
def test_what_a_16_bit_sum_would_round_away_is_there(case):
    """256 of one row and 1 of each other: in bfloat16 the next number is 258."""
    model = model_of(case.model, dtypes=NARROW)
    batch = batch_of(model)
    weights = np.ones_like(batch.weights)
    weights[0] = 256
    batch = eqx.tree_at(lambda b: b.weights, batch, weights)
    got = compiled(make_gradient_function(of_first_weights, case.plan), place(model, case.plan), batch)
    assert np.asarray(got.gradients.embedding.weight).tolist() == np.full((50, 32), 263.0).tolist()


@pytest.mark.grid
def test_clipped_gradients_of_narrow_parameters_have_the_norm_exactly():
    """Momentum remembers what the optimizer is given; in bfloat16 the norm would be off by a thousandth or two."""
    model = model_of("tied", dtypes=NARROW)
    batch = batch_of(model)
    rule = training.optimizer("sgd", model, rate=1e-3, momentum=0.9)
    state = eqx.filter_jit(lambda model: training.init_state(model, rule))(model)
    state, metrics = training.make_step(next_token_loss, rule, clip=0.125)(state, batch)
    given = [x for x in jax.tree.leaves(state.optimizer_state) if eqx.is_inexact_array(x)]
    assert metrics["grad_norm"] > 0.125
    norm = jax.jit(training.global_norm)
    assert float(norm(given)) == pytest.approx(0.125, rel=1e-6)
    rounded = [np.asarray(x).astype(jnp.bfloat16) for x in given]
    assert abs(float(norm(rounded)) / 0.125 - 1) > 1e-6


@pytest.mark.grid
@pytest.mark.parametrize(
    "case",
    named(
        [Case("mixture", {"fsdp": 2, "pipe": 2}, PIPE | {"zero": 3, "schedule": "1f1b"})],
        [
            Case("mixture", {"fsdp": 2, "pipe": 2}, PIPE | {"zero": 3, "schedule": "zb-h1"}),
            Case("mixture", {"fsdp": 2, "context": 2}, {"microbatches": 2}),
        ],
    ),
)
def test_a_loss_scale_changes_no_bit(case):
    """Of powers of two, where nothing overflows: those of balancing losses have it too."""
    plan, plain = case.plan, model_of(case.model)
    of_batch = make_gradient_function(next_token_loss, plan)
    model, batch, key = place(plan.shard(plain), plan), batch_of(plain), jax.random.key(0)
    run = hastily(lambda *given: of_batch(*given)[2], model, batch, key, jnp.float32(1))
    one, other = (run(model, batch, key, jnp.float32(scale)) for scale in (1, 2**12))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
