"""Changing the order of layers of a training state takes no memory for a second state."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from eqformer import models
from eqformer.parallel import ParallelConfig
from eqformer.recipes import Mesh, Recipe
from eqformer.recipes._setup import make_optimizer, make_plan, make_train_state, model_shapes


def live():
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.grid
@pytest.mark.parametrize(
    "zero,layers", [(0, 8), *(pytest.param(*case, marks=pytest.mark.grid) for case in [(1, 8), (1, 13)])]
)
def test_a_state_in_another_order_takes_no_second_state(zero, layers):
    numbers = dataclasses.replace(models.preset("llama-byte-1m"), embed=32, layers=layers, heads=2, kv_heads=2, mlp=64)
    mesh = Mesh(pipe=2, fsdp=2)
    recipe = Recipe(
        numbers, mesh=mesh, plan=ParallelConfig(zero=zero, schedule="interleaved", chunks=2, microbatches=2)
    )
    plan = make_plan(recipe, jax.devices()[:4])
    states = make_train_state(recipe, plan, make_optimizer(recipe, model_shapes(recipe)))
    gc.collect()
    before = live()
    state = states.init()
    size = live() - before
    ring = [np.asarray(x) for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    places = [x.sharding for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    reading = states.unshard(state)
    assert live() - before < 1.25 * size  # `state` is still held, and has been consumed
    moved = [np.asarray(x) for x in jax.tree.leaves(reading) if isinstance(x, jax.Array)]
    assert (
        sum(x.shape != y.shape or (x != y).any() for x, y in zip(moved, ring)) > 4
    )  # the control: there was something to move
    if layers % 4:  # so a checkpoint is restored, whose arrays have no padding and are split all the same
        wanted = [x for x in jax.tree.leaves(states.shapes()) if isinstance(x, jax.ShapeDtypeStruct)]
        there = [x for x in jax.tree.leaves(reading) if isinstance(x, jax.Array)]
        assert [(x.shape, x.sharding) for x in there] == [(x.shape, x.sharding) for x in wanted]
        assert reading.model.stacks[0].numbers.shape == (13,)
    again = states.shard(reading)
    assert live() - before < 1.25 * size
    for x, expected, place in zip(jax.tree.leaves(again), ring, places):
        np.testing.assert_array_equal(x, expected)
        assert x.sharding == place
