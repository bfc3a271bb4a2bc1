"""MuonClip over meshes gives one device's weights, however rows, heads and layers are split."""

import jax
import pytest
from plan_models import model_of, plan_over
from plan_parity import leaf_differences
from plan_steps import begun, stepped

from eqformer import training


LIMIT = 2.0  # Some heads of these models are above this limit, and others below.
SPREAD = {"zero": 0, "microbatches": 2, "edges": "spread", "schedule": "gpipe"}
CASES = [
    ("llama", {"fsdp": 2, "tensor": 2}, {"zero": 2, "smallest": 1, "residual": "sequence"}),
    ("llama", {"replica": 2, "fsdp": 4}, {"zero": 3, "smallest": 1}),
    ("llama", {"fsdp": 2}, {"zero": 1, "microbatches": 2}),
    ("five layers", {"fsdp": 2, "pipe": 2}, {"zero": 1, "smallest": 1, "microbatches": 2}),
    ("mixture", {"fsdp": 2, "expert": 2}, {"zero": 3, "smallest": 1}),
    ("latents", {"fsdp": 2, "tensor": 2}, {"zero": 1, "smallest": 1}),
]


def rule(model):
    return training.optimizer("muon", model, rate=1e-2)


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_one_devices(case):
    """Two steps; without the limit, the weights are others."""
    name, mesh, choices = case
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # metrics of routing mix dtypes in float64
        model, plan = model_of(name, dtypes=("float64", "float64")), plan_over(mesh, **choices)
        want, got = (stepped(model, each, rule(model), 2, clip_logits=LIMIT)[0].model for each in (None, plan))
        assert leaf_differences(plan.unshard(got), want, 1e-6, rounding=1e-9) == {}
        assert leaf_differences(stepped(model, None, rule(model), 2)[0].model, want, 1e-3, rounding=1e-9) != {}


@pytest.mark.grid
def test_a_run_goes_on_over_another_mesh(tmp_path):
    first = plan_over({"fsdp": 4, "tensor": 2}, zero=3, smallest=1)
    second = plan_over({"fsdp": 2, "pipe": 2}, zero=1, smallest=1, microbatches=2)
    model = model_of("llama")
    state, _ = stepped(model, first, rule(model), 1, clip_logits=LIMIT)
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1, {})
        checkpointer.wait()
        again, _ = checkpointer.restore(begun(model, second, rule(model)), 1)
    after = stepped(model, second, rule(model), 1, again, clip_logits=LIMIT)[0]
    alone = stepped(model, None, rule(model), 2, clip_logits=LIMIT)[0]
    assert leaf_differences(after.model, alone.model, 1e-3, rounding=1e-4) == {}


@pytest.mark.grid
@pytest.mark.parametrize(
    "name, mesh, choices, reason",
    [
        ("llama", {"context": 2}, {}, "no device sees all keys of a row"),
        ("llama", {"fsdp": 2, "pipe": 2}, SPREAD, "a stage does not know which rows of the batch"),
    ],
)
def test_meshes_that_hide_whose_logits_are_large_are_refused(name, mesh, choices, reason):
    model, plan = model_of(name), plan_over(mesh, **choices)
    with pytest.raises(ValueError, match=reason):
        stepped(model, plan, rule(model), 1, clip_logits=LIMIT)
