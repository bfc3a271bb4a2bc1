"""Optimizers chosen by path: each parameter gets the updates of its own optimizer, and `describe` lists the choice."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haste import put
from nn_reference import random_module
from resumed_runs import run_and_restore
from same_bits import assert_same_bits

from eqformer import nn, training


RATE, DECAY, STEPS = 1e-2, 0.1, 3
PATHS = ("sublayers=sgd", "sublayers[0].layer.*.weight=muon", "head=adamw")
NEVER = {"adamw": "sgd", "sgd": "adamw", "muon": "adamw"}  # The controls: another optimizer for each.


def widen(model):
    return jax.tree.map(lambda x: put(x, np.float64) if eqx.is_inexact_array(x) else x, model)


def expected_name(path):
    """The optimizer that `PATHS` choose, spelled out."""
    if "sublayers[0].layer" in path and path.endswith(".weight"):
        return "muon"
    return "sgd" if "sublayers" in path else "adamw"


def optax_rule(name, marks):
    """Return the same rule by optax alone, for a fixed rate; `marks` has a `nn.Matrix` for each matrix."""
    mask = jax.tree.map(lambda mark: mark is not False, marks)
    decay = optax.add_decayed_weights(DECAY, lambda _: mask)
    if name == "sgd":
        return optax.chain(decay, optax.sgd(RATE))
    if name == "adamw":
        return optax.adamw(RATE, b1=0.9, b2=0.95, weight_decay=DECAY, mask=lambda _: mask)
    dims = lambda mark: optax.contrib.MuonDimensionNumbers(
        tuple(range(1 + mark.outputs, 1 + mark.outputs + mark.inputs)), tuple(range(1, 1 + mark.outputs))
    )
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    over = lambda function, updates: jax.tree.map(
        lambda x, mark: x if is_masked(x) else function(x, mark), updates, marks, is_leaf=is_masked
    )
    sizes = lambda x, mark: max(np.prod(x.shape[1 : 1 + mark.outputs]), np.prod(x.shape[1 + mark.outputs :]))
    scale = optax.stateless(lambda updates, _: over(lambda x, mark: x * 0.2 * np.sqrt(sizes(x, mark)), updates))
    matrices = optax.contrib.scale_by_muon(weight_dimension_numbers=lambda x: over(lambda _, mark: dims(mark), x))
    return optax.chain(matrices, scale, decay, optax.scale(-RATE))


def leaves_by_path(tree):
    return {nn.path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def test_each_parameter_is_updated_by_its_optimizer_alone(make_model):
    """Three steps in float64 equal `optax.partition` of optax's own rules; and each of these differs from others."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        model = widen(make_model(tied=False, layers=1))
        parameters, draw = training.trainable(model), np.random.default_rng(0)
        gradients = [jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape)), parameters) for _ in range(STEPS)]
        optimizer = training.optimizer("adamw", model, rate=RATE, weight_decay=DECAY, paths=PATHS)
        init, update = eqx.filter_jit(optimizer.init), eqx.filter_jit(optimizer.update)
        state, ours = init(model), parameters
        for gradient in gradients:
            ours, state = update(gradient, state, ours, jnp.asarray(RATE))

        marks = jax.tree.map(lambda x, mark: mark or False, parameters, nn.matrices(model))
        rules: dict[Any, Any] = {name: optax_rule(name, marks) for name in ("sgd", "adamw", "muon")}

        def by_optax(choose):
            labels = jax.tree_util.tree_map_with_path(lambda path, _: choose(nn.path_name(path)), parameters)
            rule, theirs = optax.partition(rules, lambda _: labels), parameters

            @jax.jit
            def step(gradient, state, theirs):
                updates, state = rule.update(gradient, state, theirs)
                return optax.apply_updates(theirs, updates), state

            state = jax.jit(rule.init)(parameters)
            for gradient in gradients:
                theirs, state = step(gradient, state, theirs)
            return leaves_by_path(theirs)

        theirs, others = by_optax(expected_name), by_optax(lambda path: NEVER[expected_name(path)])
        for path, value in leaves_by_path(ours).items():
            np.testing.assert_allclose(value, theirs[path], rtol=1e-10, atol=1e-12, err_msg=path)
            assert np.abs(value - others[path]).max() > 1e-3, path
        assert {expected_name(path) for path in theirs} == {"adamw", "sgd", "muon"}
    assert dict(optimizer.assignment) == {path: expected_name(path) for path in theirs}


@pytest.mark.grid
def test_a_chosen_part_has_the_memory_of_its_optimizer_and_resumes_bit_for_bit(make_model, make_batch, tmp_path):
    model = make_model(layers=1)
    optimizer = training.optimizer("muon", model, rate=RATE, paths=("sublayers[1]=sgd", "embedding=sgd"))
    moments = jax.tree.leaves(optimizer.map_state(lambda x: x.shape, optimizer.init(model), other=None))
    plain = training.optimizer("muon", model, rate=RATE)
    assert len(moments) < len(jax.tree.leaves(plain.map_state(lambda x: x.shape, plain.init(model), other=None)))
    batch = make_batch()
    step, state, again = run_and_restore(optimizer, model, batch, tmp_path, steps=3, saved=1)
    for _ in range(2):
        again, _ = step(again, batch, jax.random.key(0))
    assert_same_bits(again, state)


def test_options_reach_the_optimizers_that_have_them():
    model = random_module(nn.GatedMLP, embed=4, mlp=8, key=jax.random.key(0))
    make = lambda **options: training.optimizer("adamw", model, rate=RATE, paths=("up.weight=normuon",), **options)
    parameters = training.trainable(model)
    gradients = jax.tree.map(lambda x: put(np.cos(np.arange(x.size)).reshape(x.shape), x.dtype), parameters)
    moved = {}
    for name, options in {"rms": {}, "spectral": {"update_size": "spectral"}}.items():
        optimizer = make(**options)
        init, update = eqx.filter_jit(optimizer.init), eqx.filter_jit(optimizer.update)
        moved[name] = leaves_by_path(update(gradients, init(model), parameters, jnp.float32(RATE))[0])
    changed = [path for path in moved["rms"] if np.any(moved["rms"][path] != moved["spectral"][path])]
    assert changed == ["up.weight"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        make(beta=3)
    recipe = training.Optimization(paths=("up.weight=muon",), update_size="spectral")
    assert dict(recipe.optimizer(model, recipe.phases(10)).assignment) == dict(
        training.optimizer("adamw", model, rate=RATE, paths=("up.weight=muon",)).assignment
    )


@pytest.mark.quick
def test_what_is_chosen_is_told_in_a_line_for_each_optimizer(make_model):
    model = make_model(layers=1)
    assert training.optimizer("adamw", model, rate=RATE).describe(model) == [
        f"adamw trains 15 arrays of {sum(x.size for x in jax.tree.leaves(training.trainable(model))):,} parameters: "
        "all trained parameters"
    ]
    optimizer = training.optimizer("muon", model, rate=RATE, paths=("embedding=sgd",))
    shapes = eqx.filter_eval_shape(lambda: model)
    lines = dict(line.split(" trains ") for line in optimizer.describe(shapes))
    assert list(lines) == ["sgd", "muon", "adamw"]
    assert lines["sgd"].endswith(": embedding")
    assert lines["muon"].endswith(
        "stacks[0].blocks.sublayers[0].layer.{query,key,value,output}.weight, stacks[0].blocks.sublayers[1].layer"
    )
    assert training.Optimizer(optax.lion(1.0), training.constant(1e-3)).describe(model) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    "paths, words",
    [
        (["sublayer=adamw"], r"paths='sublayer=adamw'\): no .* such a path; the nearest are sublayers\[[01]\], "),
        (["query.bias=muon"], r"muon takes hidden matrices only, and .*query.bias is a vector; take adamw or sgd"),
        (["query=muon"], r"query.bias is a vector; choose stacks\[0\].blocks.sublayers\[0\].layer.query.weight, for"),
        (["embedding=normuon"], r"normuon takes hidden matrices only, and embedding.weight is a table"),
        (
            ["embedding=adam"],
            r"NAME is adamw, schedule-free-adamw, muon, normuon, soap, sgd; the nearest name is adamw",
        ),
        (["up=schedule-free-adamw"], r"schedule-free-adamw averages all weights; pass schedule-free-adamw as"),
        (["embedding"], r"paths='embedding'\): give PATTERN=NAME"),
        (
            ["up=sgd", "sublayers=adamw"],
            r"paths='up=sgd'\): later choices take all parameters that this choice matches",
        ),
    ],
)
def test_choices_that_cannot_work_are_refused(paths, words, make_model):
    with pytest.raises(ValueError, match=words):
        training.optimizer("muon", make_model(layers=1), rate=RATE, paths=paths)


def updates(model, name, **options):
    """The updates of the second of two steps at random gradients, by the parameters' paths."""
    optimizer = training.optimizer(name, model, rate=1.0, weight_decay=0.0, **options)
    draw = np.random.default_rng(0)
    step = eqx.filter_jit(lambda gradients, state: optimizer.transform.update(gradients, state, gradients))
    result, state = None, eqx.filter_jit(optimizer.init)(model)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            gradients = jax.tree.map(lambda x: put(draw.normal(size=x.shape), np.float32), training.trainable(model))
            result, state = step(gradients, state)
    return leaves_by_path(result)


def test_a_table_that_a_path_gives_to_adamw_has_its_numbers_and_not_those_of_soaps_adamw():
    table = eqx.nn.Embedding(5, 3, key=jax.random.key(0))
    plain, chosen = updates(table, "adamw"), updates(table, "soap", paths=["weight=adamw"])
    np.testing.assert_array_equal(chosen["weight"], plain["weight"])
    assert np.abs(updates(table, "soap")["weight"] - plain["weight"]).max() > 0.01  # The control: b1 is 0.95 there.


def test_the_decay_of_rows_does_not_reach_muon():
    """Muon with a decay of rows would be NorMuon."""
    keys = jax.random.split(jax.random.key(0))
    maps = {name: eqx.nn.Linear(3, 4, use_bias=False, key=key) for name, key in zip("ab", keys, strict=True)}
    paths = ["['a']=muon", "['b']=normuon"]
    get = lambda **options: updates(maps, "adamw", paths=paths, **options)
    fast, slow = get(row_decay=0.5), get(row_decay=0.9)
    (of_muon, of_normuon) = sorted(fast)
    np.testing.assert_array_equal(fast[of_muon], slow[of_muon])
    assert np.abs(fast[of_normuon] - slow[of_normuon]).max() > 0 and dict(
        training.optimizer("adamw", maps, rate=1.0, paths=paths).assignment
    ) == {of_muon: "muon", of_normuon: "normuon"}
