"""The gated short convolution against loops in float64: outputs, gradients, documents, caches and slices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, linear, normal, random_module, wide

from eqformer import nn


KEY, EMBED, SEQ = jax.random.key(0), 6, 7
CONV = random_module(nn.GatedShortConv, embed=EMBED, mlp=4, taps=3, bias=True, key=KEY)
X = normal(1, 2, SEQ, EMBED)
PLACES = np.array([[0, 1, 2, 3, 0, 1, -1], [0, 0, 1, 2, 3, 4, 5]], np.int32)
PACKED = nn.Tokens(jnp.asarray(PLACES))
run = eqx.filter_jit(lambda conv, x, tokens, cache=None: conv(x, tokens, cache))
slope = eqx.filter_jit(eqx.filter_grad(lambda conv, x: jnp.sum(conv(x, PACKED)[0] * WEIGHTS)))
WEIGHTS = normal(2, 2, SEQ, EMBED).at[0, 6].set(0)


def literal(conv, x, positions):
    """A token's output by a loop over its own document's last tokens."""
    given, taps = linear(x, conv.input_gate) * linear(x, conv.value), conv.conv.weight.shape[-1]
    mixed = np.zeros(given.shape) + wide(conv.conv.bias)
    for row, place, back in np.ndindex(*x.shape[:2], taps):
        if back <= positions[row, place]:  # of a document's tokens, which stand in order, so many come before this one
            mixed[row, place] += wide(conv.conv.weight)[:, taps - 1 - back] * given[row, place - back]
    return linear(linear(x, conv.output_gate) * mixed, conv.output)


def test_it_is_its_loops_within_documents():
    y, cache = run(CONV, X, PACKED)
    real = PLACES >= 0
    assert cache is None and close(y[real], literal(CONV, wide(X), PLACES)[real])
    assert not close(run(CONV, X, None)[0][0, 4:6], y[0, 4:6], 1e-2)  # without documents it reads across
    apart = np.concatenate([run(CONV, X[:1, :4], None)[0], run(CONV, X[:1, 4:6], None)[0]], axis=1)
    assert close(y[:1, :6], apart)
    parts = nn.Tokens(jnp.array([[3, 4, 5, 6, 3, 4, -1]]), jnp.array([[5, 5, 5, 5, 8, 8, 9]]))
    assert close(run(CONV, X[:1], parts)[0][:, :6], apart)  # parts of documents are known by their segments


def test_its_gradients_are_its_loops():
    """Of each array, along a direction, the difference of two sums in float64."""
    total = lambda leaves: np.sum(literal(jax.tree.unflatten(structure, leaves), wide(X), PLACES) * wide(WEIGHTS))
    leaves, structure = jax.tree.flatten(CONV)
    wides = list(map(wide, leaves))
    for number, gradient in enumerate(jax.tree.leaves(slope(CONV, X))):
        direction = np.random.default_rng(number).normal(size=gradient.shape)
        moved = lambda by, at=number, along=direction: [*wides[:at], wides[at] + by * along, *wides[at + 1 :]]
        want = (total(moved(1e-4)) - total(moved(-1e-4))) / 2e-4
        assert abs(np.sum(wide(gradient) * direction) - want) < 1e-5 * max(1, abs(want)), number
        assert abs(np.sum(wide(gradient) * direction[..., ::-1]) - want) > 1e-3, number


def test_a_cache_is_of_one_size_and_what_it_cannot_go_on_from_is_nan():
    few, many = CONV.init_cache((2,), 8), CONV.init_cache((2,), 4096, "bfloat16")
    assert few.inputs.shape == many.inputs.shape == (2, 2, 4) and many.inputs.dtype == jnp.bfloat16
    _, cache = run(CONV, X[:, :3], nn.Tokens(jnp.array([[0, 1, 2], [0, 1, -1]])), few)
    assert cache.lengths.tolist() == [3, 2]
    y, spoilt = run(CONV, X[:, 3:4], nn.Tokens(jnp.full((2, 1), 3)), cache)
    assert bool(jnp.isfinite(y[0]).all()) and bool(jnp.isnan(y[1]).all())
    fresh, _ = run(CONV, X[:, :1], nn.Tokens(jnp.zeros((2, 1), jnp.int32)), spoilt)
    assert close(fresh, run(CONV, X[:, :1], None)[0])
    with pytest.raises(ValueError, match="a row of a cache keeps one document"):
        CONV(X[:, :1], nn.Tokens(jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 1), jnp.int32)), cache)


def test_slices_of_its_channels_give_partial_sums():
    names, bias = nn.dims(CONV), CONV.output.bias
    total = 0
    for part in (slice(0, 2), slice(2, 4)):
        cut = lambda names, leaf, part=part: leaf[tuple(part if n == "mlp" else slice(None) for n in names.split())]
        total = total + run(jax.tree.map(cut, names, CONV), X, None)[0] - bias
    assert close(total + bias, run(CONV, X, None)[0])
