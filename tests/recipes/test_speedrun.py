"""The recipe `speedrun`: the sizes that each depth decides, and depths that are refused."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import pytest

from eqformer import models, nn
from eqformer.parallel import make_mesh
from eqformer.recipes import describe_speedrun, find_recipe, setup, speedrun_recipe


# depth: width, heads, head's channels, window, rows a step, tokens a row, steps, microbatches, rate of the head
TABLE = {
    1: (64, 1, 64, 64, 4, 256, 960, 1, 0.036),
    2: (128, 2, 64, 64, 16, 256, 1920, 1, 0.036),
    4: (256, 4, 64, 128, 32, 512, 3840, 1, 0.018),
    8: (512, 4, 128, 256, 128, 1024, 3840, 4, 0.009),
    12: (768, 6, 128, 512, 128, 2048, 6480, 8, 0.006),
}


@pytest.mark.parametrize("depth, row", TABLE.items())
def test_a_depth_decides_all_sizes_and_rates(depth, row):
    recipe = speedrun_recipe(depth)
    model: Any = recipe.model
    optimizer = recipe.optimizer
    chosen = model.embed, model.heads, model.head_size, model.window, recipe.batch, recipe.seq, recipe.steps
    assert (*chosen, recipe.plan.microbatches, optimizer.learning_rate * optimizer.head_rate) == pytest.approx(row)
    assert model.layers == depth and model.mlp == 4 * model.embed
    assert optimizer.learning_rate == pytest.approx(0.01 if depth == 1 else 0.02)
    # The horizon is 20 bytes for each parameter of the matrices, counted on the model itself.
    shapes = eqx.filter_eval_shape(lambda: models.build(model, key=jax.random.key(0)))
    is_hidden = jax.tree.map(
        lambda mark, x: x.size if mark and not mark.table else 0,
        nn.matrices(shapes),
        eqx.filter(shapes, nn.is_trainable),
        is_leaf=lambda node: node is None or isinstance(node, nn.Matrix),
    )
    gates = sum(map(nn_size, nn.modules(shapes, nn.ValueEmbeddedAttention)))
    parameters = sum(jax.tree.leaves(is_hidden)) - gates
    assert parameters == 12 * depth * model.embed**2
    assert recipe.steps * recipe.batch * recipe.seq == pytest.approx(20 * parameters, rel=2e-3)
    assert find_recipe("speedrun", depth) == recipe and recipe != speedrun_recipe(depth + 2)
    assert f"{recipe.steps:,} steps of {recipe.batch} x {recipe.seq} tokens" in describe_speedrun(recipe)


def nn_size(layer):
    return layer.value_gate.weight.size


@pytest.mark.parametrize(
    "depth, nearest", [(0, "1 or 2"), (-3, "1 or 2"), (9, "8 or 10"), (11, "10 or 12"), (33, "30 or 32")]
)
def test_depths_that_do_not_fit_are_refused(depth, nearest):
    with pytest.raises(ValueError, match=rf"speedrun_recipe\(depth={depth}\): the depths are .*; take {nearest}\."):
        speedrun_recipe(depth)
    with pytest.raises(ValueError, match=rf"^--depth {depth}: "):
        find_recipe("speedrun", depth)


def test_only_the_recipe_speedrun_has_a_depth():
    with pytest.raises(ValueError, match="--depth 4 --recipe default: only the recipe speedrun has a depth"):
        find_recipe("default", 4)
    assert find_recipe("speedrun") == speedrun_recipe(2)


def test_a_change_of_a_field_is_in_the_description():
    recipe = dataclasses.replace(speedrun_recipe(4), steps=10)
    assert "10 steps of 32 x 512 tokens, 163,840 in all (0.0521 a parameter)" in describe_speedrun(recipe)


def test_rows_that_a_mesh_cannot_split_are_refused():
    recipe = speedrun_recipe(1)
    plan = setup.make_plan(recipe, jax.devices()[:1])
    shapes = eqx.filter_eval_shape(lambda: models.build(recipe.model, key=jax.random.key(0)))
    plan.check(shapes, rows=recipe.batch, seq=recipe.seq)
    split = dataclasses.replace(plan, mesh=make_mesh(fsdp=8, devices=jax.devices()[:8]))
    with pytest.raises(ValueError, match="4 rows do not fall into 8 x 1 equal pieces"):
        split.check(shapes, rows=recipe.batch, seq=recipe.seq)
