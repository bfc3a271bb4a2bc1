"""Moments of 8 bits against a table of their values in float64 numpy, and against rounding to nearest."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put

from eqformer import models, training
from eqformer.parallel import make_mesh, Plan
from eqformer.planning import state_bytes
from eqformer.training.optimizer import _moments
from eqformer.training.optimizer._moments import decode_moment, encode_moment, is_codes


RATE = 1e-2
OPTIONS = {"adamw": {}, "muon": {}, "sgd": {"momentum": 0.9}}


def threshold_by_hand(number, column):
    """In whole numbers of Python: the fractions of multiples of two irrational numbers, as 32 bits have them."""
    walked = number * round(2**32 * (math.sqrt(5) - 1) / 2) + column * round(2**32 * 0.7548776662466927)
    return walked % 2**32 // 2**8 / 2**24


def by_hand(x, number):
    """What is kept of an array: a row at a time, from the list of all values that a row may have."""
    rows = np.float64(x).reshape(-1, x.shape[-1])
    return np.stack([row_by_hand(row, number) for row in rows]).reshape(x.shape)


def row_by_hand(row, number):
    largest, levels = np.abs(row).max(), 127 if (row < 0).any() else 255
    values = np.append(0.0, largest * np.exp2(-np.arange(levels)[::-1] / 8))
    if largest == 0:
        return row
    size = np.abs(row)
    low = np.minimum(np.searchsorted(values, size * (1 + 1e-12), side="right") - 1, levels - 1)
    share = (size - values[low]) / (values[low + 1] - values[low])
    thresholds = np.array([threshold_by_hand(number, column) for column in range(len(row))])
    goes_up = (share > thresholds) | ((levels == 255) & (low == 0) & (size > 0))
    return np.copysign(values[low + goes_up], row)


def samples(dtype: type = np.float64):
    """Rows of mixed signs, of squares over many octaves, of zeros, of one number, and of numbers far apart."""
    draw = np.random.default_rng(0)
    mixed, spread = draw.normal(size=(3, 40)), np.exp2(draw.uniform(-30, 4, size=(3, 40)))
    sparse = np.where(draw.random((2, 40)) < 0.3, mixed[:2], 0.0)
    far = np.stack([np.geomspace(1e-30, 1.0, 40), -np.geomspace(1e-30, 1.0, 40)])
    return np.concatenate([mixed, spread, sparse, np.zeros((1, 40)), np.full((1, 40), 3.7), far, mixed**2]).astype(
        dtype
    )


coded_and_back = jax.jit(lambda x, number: (codes := encode_moment(x, number), decode_moment(codes)))


@pytest.mark.quick
@pytest.mark.parametrize("number", [0, 1, 77, 2**31 - 1])
def test_codes_are_the_formula(number):
    with jax.enable_x64(True):
        x = samples()
        codes, found = coded_and_back(x, np.int32(number))
        found = np.asarray(found)
        np.testing.assert_allclose(found, by_hand(x, number), rtol=1e-12, atol=0)
        assert not np.allclose(found, by_hand(x, number + 1), rtol=1e-3)  # another threshold
    assert codes.levels.dtype == jnp.uint8 and codes.scale.shape == (*x.shape[:-1], 1)
    # Numbers in reach are off by less than the distance of two levels; squares in a row never become zero.
    near = np.abs(x) > np.abs(x).max(-1, keepdims=True) * 2**-15.7
    assert np.abs(found / np.where(near, x, 1) - 1)[near].max() < 2 ** (1 / 8) - 1
    positive = (x > 0) & (x >= 0).all(-1, keepdims=True)
    assert (found[positive] > 0).all() and (np.sign(found)[near] == np.sign(x)[near]).all()


def test_rounding_keeps_the_mean():
    """Over many steps each number is kept right on average, where the nearest level is off by up to 4 %."""
    x = jnp.asarray(samples(np.float32)[:6])
    decoded = jax.jit(jax.vmap(lambda number: decode_moment(encode_moment(x, number))))(jnp.arange(2000))
    off = np.abs(np.asarray(decoded, np.float64).mean(0) / np.asarray(x) - 1)
    near = np.abs(x) > np.abs(x).max(-1, keepdims=True) * 2**-15
    assert off[near].max() < 1e-3
    assert np.abs(np.asarray(decoded[0]) / np.asarray(x) - 1)[near].max() > 0.04


def fallen(b2, steps):
    """A row of means after steps in which only its first number sees gradients, of squares of 1."""
    start = np.append(1, np.exp2(-np.linspace(2, 3, 63))).astype(np.float32)[None]

    def step(number, codes):
        return encode_moment((b2 * decode_moment(codes)).at[:, 0].set(1.0), number)

    run = jax.jit(lambda x: decode_moment(jax.lax.fori_loop(1, steps + 1, step, encode_moment(x, jnp.int32(0)))))
    return float((np.asarray(run(start)) / start)[0, 1:].mean())


@pytest.mark.parametrize("b2", [0.98, *(pytest.param(b2, marks=pytest.mark.grid) for b2 in (0.96, 0.999))])
def test_a_mean_falls(b2, monkeypatch):
    """One that loses less than half of the distance of two levels in a step; rounded to the nearest, it stays."""
    steps = round(1.5 / (1 - b2))
    assert fallen(b2, steps) == pytest.approx(b2**steps, rel=0.15)
    monkeypatch.setattr(_moments, "_rounding_threshold", lambda _, row: jnp.full(row, 0.5, jnp.float32))
    assert fallen(b2, steps) > 0.9


@pytest.fixture
def small(filled):
    config = models.LlamaConfig(vocab=16, embed=32, layers=1, heads=2, kv_heads=2, mlp=32)
    return filled(lambda: models.build(config, key=jax.random.key(0)))


def is_coded_shape(x):
    """Rows of 32 numbers or more; the maps of attention's output have 16 channels of a head there."""
    return x.ndim > 1 and x.shape[-1] >= 32


@pytest.mark.grid
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_moments_are_kept_in_8_bits_and_used_as_floats(name, small):
    """Three steps beside the same rule whose state is rounded by hand after each; the control's is not."""
    with jax.enable_x64(True):
        model = jax.tree.map(lambda x: put(x, np.float64) if eqx.is_inexact_array(x) else x, small)
        rule, plain = (
            training.optimizer(name, model, rate=RATE, moments=m, **OPTIONS[name]) for m in ("8bit", "float32")
        )
        parameters = training.trainable(model)
        shapes = {x.shape for x in jax.tree.leaves(parameters) if is_coded_shape(x)}
        rounded = lambda state, number: jax.tree.map(
            lambda x: jnp.asarray(by_hand(x, number)) if x.shape in shapes else x, state
        )
        step, by_floats = (eqx.filter_jit(each.update) for each in (rule, plain))
        state, floats = (eqx.filter_jit(each.init)(model) for each in (rule, plain))
        hands = rounded(floats, 0)
        ours = theirs = others = parameters
        for number in range(1, 4):
            wave = lambda x, n=number: np.cos(n * np.arange(x.size, dtype=x.dtype)).reshape(x.shape) + np.asarray(x)
            gradients = jax.tree.map(wave, parameters)
            ours, state = step(gradients, state, ours, jnp.float32(RATE))
            theirs, hands = by_floats(gradients, hands, theirs, jnp.float32(RATE))
            hands = rounded(hands, number)
            others, floats = by_floats(gradients, floats, others, jnp.float32(RATE))
        coded = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_codes) if is_codes(leaf)]
        assert len(coded) == sum(x.shape in shapes for x in jax.tree.leaves(hands)) and state.coded == 3
        distance = lambda a, b: float(np.abs(np.subtract(a, b)).max())
        off = lambda one, other: max(map(distance, *map(jax.tree.leaves, (one, other))))
        assert off(ours, theirs) < 1e-12 and off(ours, others) > 1e-4, (off(ours, theirs), off(ours, others))


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.grid), pytest.param(3, marks=pytest.mark.grid)])
def test_8_bits_are_counted_where_a_plan_keeps_them(zero, small):
    """By hand: a byte a number and four a row, of both moments; vectors and short rows stay in float32."""
    model, plan = small, Plan(make_mesh(fsdp=2, devices=jax.devices()[:2]), zero=zero, smallest=1)
    rules = [training.optimizer("adamw", model, rate=RATE, moments=moments) for moments in ("float32", "8bit")]
    states = [training.PlannedState(lambda: model, rule, plan) for rule in rules]
    wide, narrow = (state_bytes(each)["optimizer state"] for each in states)
    leaves = jax.tree.leaves(training.trainable(model))
    of_leaf = lambda x: x.size + 4 * x.size // x.shape[-1] if is_coded_shape(x) else 4 * x.size
    counters = 8  # of the steps, and of how often the state was coded
    assert narrow[1] == 2 * sum(map(of_leaf, leaves)) + counters and narrow[1] < 0.4 * wide[1]
    held = jax.tree.leaves(states[1].init().optimizer_state)
    assert narrow[0] == sum(x.addressable_shards[0].data.nbytes for x in held if isinstance(x, jax.Array))
    assert narrow[0] < (1.01 if zero == 0 else 0.6) * narrow[1]
