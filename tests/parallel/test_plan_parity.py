"""Loss, gradients and steps under a plan equal one device's, leaf by leaf, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_cases import EVERY_RUN, EVERY_STEP, grid, step_grid
from plan_models import batch_of, model_of
from plan_parity import (
    Case,
    compiled,
    differences,
    leaf_differences,
    of_one_device,
    of_plan,
    Outcome,
    trained_by_plan,
    trained_on_one_device,
)

from eqformer.parallel import AXES
from eqformer.training import make_gradient_function, next_token_loss


ROUNDING = 64 * float(np.finfo(np.float32).eps)


def wide(every_run: list[Case], grid: list[Case]) -> list:
    """Cases for every run, and others for the grid."""
    named = [pytest.param(case, id=case.name) for case in every_run]
    return named + [pytest.param(case, id=f"{case.name} {case.optimizer}", marks=pytest.mark.grid) for case in grid]


@pytest.mark.parametrize("case", wide(EVERY_RUN, grid()))
def test_loss_and_gradients_equal_one_devices(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.parametrize("case", wide(EVERY_STEP, step_grid()))
def test_steps_and_evaluation_equal_one_devices(case):
    """Losses, exact norms, and after three steps the parameters, the optimizer's memory and an evaluation."""
    got, want = trained_by_plan(case), trained_on_one_device(case.model, case.optimizer, case.dtypes)
    for found, expected in zip(got.metrics, want.metrics, strict=True):
        assert found == pytest.approx(expected, rel=ROUNDING)
    assert got.evaluation == pytest.approx(want.evaluation, rel=ROUNDING)
    # Muon's steps, of Newton-Schulz, magnify rounding; Adam's do where gradients are near its eps.
    assert leaf_differences(got.model, want.model, ROUNDING) == {}
    assert leaf_differences(got.memory, want.memory, 4 * ROUNDING, rounding=1e-5) == {}
    assert want.metrics[0]["loss"] > want.metrics[-1]["loss"]


FLOAT64 = [
    Case("llama", {"context": 2, "tensor": 4}, {"residual": "sequence", "context_method": "ring"}),
    Case("gpt2", {"fsdp": 4, "tensor": 2}, {"zero": 3, "residual": "feature", "overlap": "ring"}, "products"),
    Case("jaxformer", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 2, "schedule": "zb-h1", "microbatches": 2}),
    Case("llama", {"pipe": 2, "tensor": 4}, {"schedule": "interleaved", "microbatches": 2, "chunks": 2}),
    Case("windows", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 1, "residual": "replicated"}),
    Case("full norms", {"fsdp": 2, "tensor": 4}, {"zero": 3, "residual": "sequence"}),
    Case("latents", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "feature"}),
    # Queries and keys of four channels are scaled to length 1, which magnifies float32's rounding.
    Case("recurrence", {"fsdp": 4, "tensor": 2}, {"zero": 3, "residual": "replicated"}),
    Case("recurrence", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "sequence", "overlap": "ring"}, "products"),
    Case("recurrence", {"fsdp": 4, "tensor": 2}, {"zero": 2, "residual": "feature"}, "full"),
    Case("recurrence", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2, "residual": "replicated"}),
    Case("recurrence", {"fsdp": 2, "pipe": 2}, {"zero": 3, "schedule": "1f1b", "microbatches": 2}),
    Case("few recurrence", {"fsdp": 2, "tensor": 4}, {"residual": "replicated"}),
    Case("few recurrence", {"fsdp": 2, "tensor": 4}, {"residual": "sequence"}),
    Case("state space", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "sequence", "overlap": "ring"}, "products"),
    Case("state space", {"fsdp": 4, "tensor": 2}, {"zero": 3, "residual": "feature"}, "full"),
    Case("state space", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2, "residual": "replicated"}),
    Case("state space of one", {"fsdp": 2, "tensor": 4}, {"zero": 2, "residual": "replicated"}),
    Case("state space of one", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"schedule": "1f1b", "microbatches": 2}),
    Case("mixers side by side", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "sequence", "overlap": "ring"}),
    Case("mixers side by side", {"fsdp": 2, "tensor": 4}, {"zero": 3, "residual": "replicated"}, "products"),
    Case("mixers side by side", {"fsdp": 4, "tensor": 2}, {"zero": 3, "residual": "feature"}, "full"),
    Case("mixers side by side", {"pipe": 2, "tensor": 4}, {"schedule": "zb-h1", "microbatches": 2}),
    Case("short convolutions", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "feature"}),
    Case("short convolutions", {"fsdp": 2, "tensor": 4}, {"zero": 3, "residual": "sequence", "overlap": "ring"}),
    Case("channel recurrence", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "feature"}),
    Case("channel recurrence", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2}),
    Case("shared mixture", {"expert": 2, "tensor": 2}),
    Case("mixture", {"pipe": 2, "expert": 2}, {"microbatches": 2}),
]


@pytest.mark.parametrize("case", wide([], FLOAT64))
def test_in_float64_the_difference_is_rounding(case):
    with jax.enable_x64(True):
        case = case._replace(dtypes=("float64", "float64"))
        got, want = of_plan(case), of_one_device(case)
        assert got.gradients.embedding.weight.dtype == jnp.float64
        # A recurrence's triangular solves magnify the rounding of sums in another order.
        assert differences(got, want, 1e-11 if case.model.endswith("recurrence") else 1e-12) == {}


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"pipe": 2}])
def test_balance_over_the_batch_is_over_each_microbatch_as_on_one_device(sizes):
    """Which is another loss than the whole batch's: what a step's pieces are, pieces of any mesh are."""
    case = Case("batch mixture", sizes, {"microbatches": 2, "schedule": "1f1b"})
    plain = model_of(case.model)
    want = compiled(make_gradient_function(next_token_loss, microbatches=2), plain, batch_of(plain))
    assert differences(of_plan(case), want, ROUNDING) == {}
    assert "total" in differences(of_one_device(case), want, ROUNDING)


@pytest.mark.quick
def test_every_run_holds_every_choice():
    cases = EVERY_RUN + EVERY_STEP
    assert {axis for case in cases for axis in case.mesh} == set(AXES)
    chosen = {(name, value) for case in cases for name, value in case.choices.items()}
    wanted = {(name, value) for case in grid() for name, value in case.choices.items() if name != "microbatches"}
    elsewhere = {("expert_method", "gather"), ("expert_method", "exchange"), ("expert_factor", 0.5)}
    assert wanted <= chosen | {("overlap", "none")} | elsewhere
    assert {case.remat for case in cases} == {"none", "products", "full"}
    assert {case.model for case in cases} >= {"gpt2", "llama", "jaxformer"}
    assert all(case.plan.mesh.size > 1 for case in cases)  # its choices go together


def test_differences_are_seen():
    one = of_one_device(EVERY_RUN[0])
    assert differences(one, one, 0.0) == {}
    for part in ("total", "count"):
        changed = one._replace(**{part: getattr(one, part) * (1 + 1e-5)})
        assert list(differences(changed, one, ROUNDING)) == [part]
    leaf = one.gradients.norm.weight
    gradients = jax.tree.map(lambda x: x.at[0].multiply(1 + 1e-4) if x is leaf else x, one.gradients)
    assert list(differences(Outcome(one.total, one.count, gradients), one, ROUNDING)) == ["norm.weight"]
