"""The delta net with a decay per channel, against loops in float64; documents, slices, and refused sizes."""

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


KEY, EMBED, SEQ = jax.random.key(0), 6, 7
SIZES: dict[str, Any] = dict(embed=EMBED, heads=4, head_dim=3, v_dim=5, rank=2)
NET = random_module(nn.ChannelDeltaNet, **SIZES, chunk=8, key=KEY)
X = normal(1, 2, SEQ, EMBED)
run = eqx.filter_jit(lambda net, x, tokens: net(x, tokens)[0])


def literal(net, x):
    """Rows of one document, one token and head after another."""
    mixed = lambda part, conv: convolved(conv, linear(x, part))
    unit = lambda y: y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6)
    query, key = unit(mixed(net.query, net.query_conv)), unit(mixed(net.key, net.key_conv))
    value, rate = mixed(net.value, net.value_conv), sigmoid(linear(x, net.rate))
    from_rank = lambda down, up: linear(x if down is None else linear(x, down), up)
    shifted, speed = from_rank(net.decay_down, net.decay_up) + wide(net.decay_bias), np.exp(wide(net.log_rate))[:, None]
    bound, output = net.lowest_log_decay, np.zeros(value.shape)
    decay = -speed * np.log1p(np.exp(shifted)) if bound is None else bound * sigmoid(speed * shifted)
    for row, head in np.ndindex(len(x), value.shape[2]):
        memory = np.zeros((key.shape[-1], value.shape[-1]))
        for place in range(x.shape[1]):
            at = row, place, head
            memory = memory * np.exp(decay[at])[:, None]
            memory += rate[at] * np.outer(key[at], value[at] - memory.T @ key[at])
            output[at] = memory.T @ query[at] / np.sqrt(key.shape[-1])
    return linear(rms(output, net.norm) * sigmoid(from_rank(net.gate_down, net.gate_up)), net.output)


def test_it_is_its_loops_within_documents():
    whole = run(NET, X, nn.positions_like((2, SEQ)))
    assert close(whole, literal(NET, wide(X)), 1e-5)
    for change in ("log_rate", "decay_bias"):
        other = replaced(NET, **{change: getattr(NET, change).at[..., 1].add(0.5)})
        assert not close(literal(other, wide(X)), whole, 1e-3), change
    packed = nn.Tokens(jnp.array([[0, 1, 2, 3, 0, 1, -1], [0, 1, 2, 3, 4, 5, 6]]))
    y = run(NET, X, packed)
    apart = np.concatenate([literal(NET, wide(X[:1, :4])), literal(NET, wide(X[:1, 4:6]))], axis=1)
    assert close(y[:1, :6], apart, 1e-5) and close(y[1], whole[1], 1e-5) and bool(jnp.isfinite(y).all())


def test_decays_may_have_a_bound_and_one_projection():
    net = random_module(nn.ChannelDeltaNet, **SIZES | {"rank": 0}, lowest_log_decay=-0.7, chunk=8, key=KEY)
    assert net.decay_down is None and net.gate_down is None
    y = run(net, X, nn.positions_like((2, SEQ)))
    assert close(y, literal(net, wide(X)), 1e-5)
    for bound in (None, -0.8):
        assert not close(y, literal(replaced(net, lowest_log_decay=bound), wide(X)), 1e-3), bound
    gated = random_module(nn.ChannelDeltaNet, **SIZES, gate_rank=0, chunk=8, key=KEY)  # of the gate alone
    assert gated.decay_down is not None and gated.gate_down is None
    assert close(run(gated, X, nn.positions_like((2, SEQ))), literal(gated, wide(X)), 1e-5)


def test_slices_of_the_heads_give_partial_sums():
    def cut(part, names, leaf):
        dims = names.split()
        places = [2 * part, 2 * part + 1]
        return put(np.take(np.asarray(leaf), places, axis=dims.index("heads"))) if "heads" in dims else leaf

    halves = [jax.tree.map(functools.partial(cut, part), nn.dims(NET), NET) for part in range(2)]
    whole = run(NET, X, nn.positions_like((2, SEQ)))
    assert close(sum(run(half, X, nn.positions_like((2, SEQ))) for half in halves), whole, 1e-5)


def test_a_bound_that_is_not_negative_is_refused():
    with pytest.raises(ValueError, match=r"ChannelDeltaNet\(lowest_log_decay=0.5\): states would grow"):
        nn.ChannelDeltaNet(**SIZES, lowest_log_decay=0.5, key=KEY)


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"ChannelDeltaNet\(chunk=0\)"):
        nn.ChannelDeltaNet(**SIZES, chunk=0, key=KEY)
