"""The gated delta net against loops in float64; its documents, padding, caches, slices."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import close, convolved, linear, normal, random_module, replaced, rms, sigmoid, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED, SEQ = 6, 7
SIZES: dict[str, Any] = dict(embed=EMBED, heads=4, kv_heads=2, head_dim=3, v_dim=5)
NET = random_module(nn.GatedDeltaNet, **SIZES, chunk=3, key=KEY)
X = normal(1, 2, SEQ, EMBED)
run = eqx.filter_jit(lambda net, x, tokens, cache=None: net(x, tokens, cache))


def literal(net, x):
    """Convolve, bend, normalize, remember and answer, of rows of one document, in float64, by loops."""
    mixed = lambda part, conv: convolved(conv, linear(x, part))
    unit = lambda y: y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6)
    query, key = unit(mixed(net.query, net.query_conv)), unit(mixed(net.key, net.key_conv))
    value, rate = mixed(net.value, net.value_conv), net.largest_rate * sigmoid(linear(x, net.rate))
    decay = -np.exp(wide(net.log_rate)) * np.log1p(np.exp(linear(x, net.decay) + wide(net.decay_bias)))
    output, group = np.zeros(value.shape), value.shape[2] // key.shape[2]
    for row, head in np.ndindex(len(x), value.shape[2]):
        memory = np.zeros((key.shape[-1], value.shape[-1]))
        for place in range(x.shape[1]):
            k, q = key[row, place, head // group], query[row, place, head // group] / np.sqrt(key.shape[-1])
            memory = memory * np.exp(decay[row, place, head])
            memory += rate[row, place, head] * np.outer(k, value[row, place, head] - memory.T @ k)
            output[row, place, head] = memory.T @ q
    gate = linear(x, net.gate)
    return linear(rms(output, net.norm) * gate * sigmoid(gate), net.output)


def test_it_is_its_loops():
    y, cache = run(NET, X, None)
    assert cache is None and close(y, literal(NET, wide(X)), 1e-5)
    crossed = eqx.tree_at(lambda n: n.value.weight, NET, NET.value.weight[jnp.array([0, 2, 1, 3])])
    assert not close(run(crossed, X, None)[0], y, 1e-3)  # neighbouring heads share a key head
    for change in ("log_rate", "decay_bias"):
        other = replaced(NET, **{change: getattr(NET, change) + 0.5})
        assert not close(run(other, X, None)[0], y, 1e-3), change


def test_rates_may_reach_2():
    net = random_module(nn.GatedDeltaNet, **SIZES, chunk=3, largest_rate=2.0, key=KEY)
    y, _ = run(net, X, None)
    assert close(y, literal(net, wide(X)), 1e-5) and not close(y, literal(NET, wide(X)), 1e-3)


@pytest.mark.grid
def test_leading_dims_and_chunks_change_nothing():
    y, _ = run(NET, X, None)
    assert close(run(NET, X[1], None)[0], y[1], 1e-6) and close(run(NET, X[:, None], None)[0][:, 0], y, 1e-6)
    assert close(run(replaced(NET, chunk=64), X, None)[0], y, 1e-5)


def test_packed_documents_are_as_separate_ones():
    places, segments = jnp.array([[0, 1, 2, 3, 0, 1, -1]]), jnp.array([[5, 5, 5, 5, 8, 8, 9]])
    x = X[:1]
    apart = np.concatenate([run(NET, x[:, :4], None)[0], run(NET, x[:, 4:6], None)[0]], axis=1)
    for tokens in (nn.Tokens(places, segments), nn.Tokens(places)):
        assert close(run(NET, x, tokens)[0][:, :6], apart, 1e-5)
    # Parts of documents, whose first positions are not 0, are distinguished by their segments.
    parts = nn.Tokens(jnp.array([[3, 4, 5, 6, 3, 4, -1]]), segments)
    assert close(run(NET, x, parts)[0][:, :6], apart, 1e-5)
    assert not close(run(NET, x, None)[0][:, :6], apart, 1e-2)


def test_padding_is_never_read():
    places = jnp.array([[0, 1, 2, 3, -1, -1, -1]])
    y, other = (run(NET, x, nn.Tokens(places))[0] for x in (X[:1], X[:1].at[:, 4:].set(9.0)))
    assert np.array_equal(y[:, :4], other[:, :4]) and bool(jnp.isfinite(y).all())
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(NET(x, nn.Tokens(places))[0][:, :4])))(X[:1])
    assert not np.any(gradient[:, 4:]) and np.any(gradient[:, 0])


def test_a_cache_is_of_one_size_and_exact():
    few, many = NET.init_cache((2,), 8, "bfloat16"), NET.init_cache((2,), 4096)
    assert [x.shape for x in jax.tree.leaves(few)] == [x.shape for x in jax.tree.leaves(many)]
    assert few.state.dtype == jnp.float32 and few.keys.dtype == jnp.bfloat16


@pytest.mark.grid
def test_what_a_cache_cannot_go_on_from_is_nan_and_a_new_document_is_not():
    token = lambda place: nn.Tokens(jnp.full((2, 1), place, jnp.int32))
    _, cache = run(NET, X[:, :3], nn.Tokens(jnp.array([[0, 1, 2], [0, 1, -1]])), NET.init_cache((2,), 8))
    assert cache.lengths.tolist() == [3, 2]
    y, spoilt = run(NET, X[:, 3:4], token(3), cache)
    assert bool(jnp.isfinite(y[0]).all()) and bool(jnp.isnan(y[1]).all())
    for x, places in ((X[:, :1], [[0]]), (X[:, :2], [[0, 1]])):
        fresh, _ = run(NET, x, nn.Tokens(jnp.tile(jnp.array(places), (2, 1))), spoilt)
        assert close(fresh, run(NET, x, None)[0], 1e-5)
    with pytest.raises(ValueError, match="a row of a cache keeps one document"):
        run(NET, X[:, :1], nn.Tokens(jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 1), jnp.int32)), cache)
    with pytest.raises(ValueError, match="only the caller knows how far"):
        run(NET, X[:, :1], None, cache)


def test_slices_of_the_heads_give_partial_sums():
    total = 0
    for part in range(2):
        total = total + run(jax.tree.map(functools.partial(_cut, part), nn.dims(NET), NET), X, None)[0]
    assert close(total, run(NET, X, None)[0], 1e-5)


def _cut(part, names, leaf):
    dims = names.split() if eqx.is_array(leaf) else []
    for dim in ("heads", "kv_heads"):
        if dim in dims:
            size = leaf.shape[dims.index(dim)] // 2
            leaf = put(np.take(np.asarray(leaf), np.arange(part * size, (part + 1) * size), axis=dims.index(dim)))
    return leaf


def test_in_bfloat16_it_remembers_in_float32():
    half = nn.cast(NET, "bfloat16")
    y, cache = run(half, X.astype(jnp.bfloat16), nn.positions_like((2, SEQ)), half.init_cache((2,), 8, "bfloat16"))
    assert y.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32
    assert close(y.astype(jnp.float32), run(NET, X, None)[0], 5e-2)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"heads=4, kv_heads=3\).*take one of \[1, 2, 4\]"):
        nn.GatedDeltaNet(**dict(SIZES, kv_heads=3), key=KEY)
    with pytest.raises(ValueError, match=r"GatedDeltaNet\(chunk=0\)"):
        nn.GatedDeltaNet(**SIZES, chunk=0, key=KEY)
