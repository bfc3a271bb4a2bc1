"""SOAP over meshes gives one device's weights in float64, however its bases are split, and after a checkpoint."""

import jax
import pytest
from plan_models import model_of, plan_over
from plan_parity import leaf_differences
from plan_steps import begun, stepped

from eqformer import training


DOUBLE = ("float64", "float64")  # Bases differ by rounding over the smallest eigenvalue, which float32 shows.
CASES = [
    ("llama", {"fsdp": 2, "tensor": 2}, {"zero": 2, "smallest": 1, "residual": "sequence"}),
    ("five layers", {"fsdp": 2, "pipe": 2}, {"zero": 1, "smallest": 1, "microbatches": 2}),  # rows of padding
    ("mixture", {"fsdp": 2, "expert": 2}, {"zero": 3, "smallest": 1}),
]


def rule(model, frequency=2):
    return training.optimizer("soap", model, rate=1e-3, eps=1e-3, frequency=frequency)


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_one_devices(case):
    """Three steps, of which the first two refresh the bases; other refreshments give other weights."""
    name, mesh, choices = case
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # metrics of routing mix dtypes in float64
        model, plan = model_of(name, dtypes=DOUBLE), plan_over(mesh, **choices)
        want, got = (stepped(model, each, rule(model), 3)[0].model for each in (None, plan))
        assert leaf_differences(plan.unshard(got), want, 1e-7, rounding=1e-9) == {}
        other = stepped(model, None, rule(model, frequency=3), 3)[0].model
        assert leaf_differences(other, want, 1e-6, rounding=1e-9) != {}


@pytest.mark.grid
def test_bases_are_restored_under_another_mesh(tmp_path):
    """A run goes on as one device does."""
    first = plan_over({"fsdp": 4, "tensor": 2}, zero=3, smallest=1)
    second = plan_over({"fsdp": 2, "pipe": 2}, zero=1, smallest=1, microbatches=2)
    with jax.enable_x64(True):
        model = model_of("llama", dtypes=DOUBLE)
        state, _ = stepped(model, first, rule(model), 2)
        with training.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state, 2, {})
            checkpointer.wait()
            again, _ = checkpointer.restore(begun(model, second, rule(model)), 2)
        after, alone = stepped(model, second, rule(model), 1, again)[0], stepped(model, None, rule(model), 3)[0]
        assert leaf_differences(after.model, alone.model, 1e-7, rounding=1e-9) == {}
