"""Moments of 8 bits have the same codes on every mesh, and after a checkpoint."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_models import model_of, plan_over
from plan_parity import leaf_differences
from plan_steps import begun, stepped

from eqformer import training
from eqformer.training.optimizer import _moments
from eqformer.training.optimizer._moments import is_codes


DOUBLE = ("float64", "float64")  # in which no rounding brings a number across a threshold
CASES = [
    ("llama", {"fsdp": 2}, {"zero": 3, "smallest": 1}, "adamw"),
    ("llama", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}, "adamw"),
    ("five layers", {"fsdp": 2, "pipe": 2}, {"zero": 1, "smallest": 1, "microbatches": 2}, "muon"),  # rows of padding
    ("mixture", {"fsdp": 2, "expert": 2}, {"zero": 3, "smallest": 1}, "adamw"),
    ("llama", {"context": 2, "pipe": 2}, {"schedule": "interleaved", "chunks": 2, "microbatches": 2}, "adamw"),
    ("gpt2", {"replica": 2, "fsdp": 4}, {"zero": 2, "smallest": 1}, "sgd"),
]


def rule(model: Any, name: str, moments: str = "8bit") -> training.Optimizer:
    options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    return training.optimizer(name, model, rate=1e-3, moments=moments, **options)


def decoded(state: Any) -> Any:
    """What the codes of a state stand for."""
    tree = jax.tree.map(lambda x: _moments.decode_moment(x) if is_codes(x) else x, state.inner, is_leaf=is_codes)
    return eqx.filter(tree, eqx.is_inexact_array)


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_one_devices(case):
    """Three steps in float64: parameters and what all codes stand for; moments in float32 give others."""
    name, mesh, choices, optimizer = case
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # metrics of routing mix dtypes in float64
        model, plan = model_of(name, dtypes=DOUBLE), plan_over(mesh, **choices)
        want, got = (stepped(model, each, rule(model, optimizer), 3)[0] for each in (None, plan))
        coded = [x for x in jax.tree.leaves(want.optimizer_state, is_leaf=is_codes) if is_codes(x)]
        assert coded and {x.levels.dtype for x in coded} == {jnp.dtype("uint8")}
        for its in (lambda state: state.model, lambda state: decoded(state.optimizer_state)):
            assert leaf_differences(plan.unshard(its(got)), its(want), 1e-9, rounding=1e-11) == {}
        other, _ = stepped(model, None, rule(model, optimizer, "float32"), 3)
        assert leaf_differences(other.model, want.model, 1e-6, rounding=1e-11) != {}


@pytest.mark.grid
def test_scales_lie_beside_their_rows():
    """Where a mesh splits rows, each of its devices has the scale; where it splits other dims, so are the scales."""
    model = model_of("llama")
    state = begun(model, plan_over({"fsdp": 2, "tensor": 2}, zero=3, smallest=1), rule(model, "adamw"))
    up = state.optimizer_state.inner[0].mu.stacks[0].blocks.feed_forward.layer.up.weight  # layers mlp embed
    spec = (*up.levels.sharding.spec, None, None, None)[:3]
    assert "tensor" in spec and (*up.scale.sharding.spec, None, None, None)[:3] == (*spec[:2], None)
    assert up.scale.shape == (*up.levels.shape[:-1], 1)


@pytest.mark.grid
def test_they_are_restored_under_another_mesh(tmp_path):
    """Bit by bit, and go on as one device does."""
    first = plan_over({"fsdp": 4, "tensor": 2}, zero=3, smallest=1)
    second = plan_over({"fsdp": 2, "pipe": 2}, zero=1, smallest=1, microbatches=2)
    with jax.enable_x64(True):
        model = model_of("llama", dtypes=DOUBLE)
        optimizer = rule(model, "adamw")
        state, _ = stepped(model, first, optimizer, 2)
        with training.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state, 2, {})
            checkpointer.wait()
            again, _ = checkpointer.restore(begun(model, second, optimizer), 2)
        same = lambda one, other: np.array_equal(one, other) if isinstance(one, jax.Array) else True
        assert jax.tree.all(jax.tree.map(same, again, state))
        (after, _), (alone, _) = stepped(model, second, optimizer, 1, again), stepped(model, None, optimizer, 3)
        assert leaf_differences(after.model, alone.model, 1e-9, rounding=1e-11) == {}
        lost = eqx.tree_at(lambda s: s.optimizer_state.coded, again, jnp.zeros_like(again.optimizer_state.coded))
        assert leaf_differences(stepped(model, second, optimizer, 1, lost)[0].model, alone.model, 1e-9) == {}
