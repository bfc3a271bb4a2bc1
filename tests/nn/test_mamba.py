"""Mamba-2 against loops in float64; documents, padding, caches and slices."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, linear, normal, random_module, replaced, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED, SEQ = 6, 7
SIZES: Any = dict(embed=EMBED, heads=4, kv_heads=2, head_dim=3, v_dim=5)
NET = random_module(nn.Mamba2Mixer, **SIZES, chunk=3, bias=True, step_limits=(0.2, 1.0), key=KEY)
X = normal(1, 2, SEQ, EMBED)
run = eqx.filter_jit(lambda net, x, tokens, cache=None: net(x, tokens, cache))


def silu(x):
    return x / (1 + np.exp(-x))


def literal(net, x, documents):
    """Convolve, bend, fade, take up and answer, gate and normalize, in float64, token by token."""

    scales = (1,) * 5 if net.multipliers is None else net.multipliers
    times = dict(zip(("gate", "value", "key", "query", "step"), scales, strict=True))

    def mixed(name):
        conv = getattr(net, f"{name}_conv")
        y, weight, found = times[name] * linear(x, getattr(net, name)), wide(conv.weight), []
        for place, tap in np.ndindex(x.shape[1], taps := weight.shape[-1]):
            found += [np.broadcast_to(wide(conv.bias), y[:, 0].shape).copy()] if tap == 0 else []
            source = place - taps + 1 + tap
            if source >= 0:
                is_same_document = documents[:, source] == documents[:, place]
                found[place] += is_same_document[:, None, None] * y[:, source] * weight[..., tap]
        return silu(np.stack(found, axis=1))

    query, key, value = map(mixed, ("query", "key", "value"))
    step = np.clip(np.log1p(np.exp(times["step"] * linear(x, net.step) + wide(net.step_bias))), *net.step_limits)
    output, group = np.zeros(value.shape), value.shape[2] // key.shape[2]
    for row, head in np.ndindex(len(x), value.shape[2]):
        memory = np.zeros((key.shape[-1], value.shape[-1]))
        for place in range(x.shape[1]):
            at = row, place, head
            memory = memory * (place > 0 and documents[row, place] == documents[row, place - 1])
            memory = memory * np.exp(-np.exp(wide(net.log_rate)[head]) * step[at])
            memory += np.outer(key[row, place, head // group], step[at] * value[at])
            output[at] = memory.T @ query[row, place, head // group] + wide(net.skip)[head] * value[at]
    gate = silu(times["gate"] * linear(x, net.gate))
    output *= 1 if net.norm_first else gate
    if net.norm is not None:
        groups = output.reshape(*output.shape[:2], -1, group * output.shape[-1])
        groups = groups / np.sqrt((groups**2).mean(axis=-1, keepdims=True) + net.norm.eps)
        output = groups.reshape(output.shape) * wide(net.scale)
    output *= gate if net.norm_first else 1
    return linear(output, net.output)


def test_it_is_its_loops():
    """Packed documents too, each of which is as it is alone."""
    places, segments = jnp.array([[0, 1, 2, 3, 0, 1, 2], [4, 5, 6, 4, 5, 6, 7]]), jnp.array([[5] * 4 + [8] * 3] * 2)
    segments = segments.at[1, 3].set(8)
    y, cache = run(NET, X, nn.Tokens(places, segments))
    expected = literal(NET, wide(X), np.array(segments))
    assert cache is None and close(y, expected, 1e-5)
    padded = jnp.where(jnp.arange(SEQ) < 3, jnp.arange(SEQ), -1)  # one program for all calls
    alone = run(NET, jnp.roll(X, 3, axis=1), nn.Tokens(jnp.stack([padded] * 2), jnp.zeros_like(segments)))[0][:, :3]
    assert close(y[0, 4:], alone[0], 1e-5) and not close(y[1, 4:], alone[1], 1e-2)
    crossed = eqx.tree_at(lambda n: n.value.weight, NET, NET.value.weight[jnp.array([0, 2, 1, 3])])
    for change in ("log_rate", "step_bias", "skip", "scale"):  # read as arguments: nothing is compiled anew
        other = replaced(NET, **{change: getattr(NET, change) + 0.5})
        assert not close(run(other, X, nn.Tokens(places, segments))[0], y, 1e-3), change
    assert not close(run(crossed, X, nn.Tokens(places, segments))[0], y, 1e-3)  # neighbours share a key head


SCALED: Any = {
    "multipliers": (0.5, 0.6, 0.7, 0.8, 0.9),
    "gate_norm": nn.GateNorm(before_gate=True),
    "output_bias": False,
}


@pytest.mark.by_default("norm1")
@pytest.mark.parametrize("norm", [{}, {"gate_norm": None}])
def test_each_map_has_its_multiplier_and_the_norm_may_come_before_the_gate(norm):
    net = random_module(nn.Mamba2Mixer, **SIZES, chunk=3, bias=True, **SCALED | norm, key=KEY)
    want = literal(net, wide(X), np.zeros((2, SEQ)))
    assert net.output.bias is None and net.gate.bias is not None and close(run(net, X, None)[0], want, 1e-5)
    for name, value in (("multipliers", (0.5, 0.6, 0.7, 0.9, 0.8)), ("gate_norm", nn.GateNorm())):
        options = SCALED | {name: value} | norm
        changed = random_module(nn.Mamba2Mixer, **SIZES, chunk=3, bias=True, **options, key=KEY)
        is_same = name == "gate_norm" and bool(norm)
        assert close(run(changed, X, None)[0], want, 1e-3) == is_same


def test_states_of_many_numbers_are_passed_on_less_often():
    """By default, and so they give what the loops give, of more tokens than a chunk; the control has two documents."""
    wanted = {(16, 16): 64, (64, 65): 128, (256, 64): 128, (256, 128): 256}
    nets = {
        sizes: random_module(
            nn.Mamba2Mixer, embed=EMBED, heads=2, kv_heads=1, head_dim=sizes[0], v_dim=sizes[1], key=KEY
        )
        for sizes in wanted
    }
    assert {sizes: net.chunk for sizes, net in nets.items()} == wanted
    x, net, documents = normal(1, 1, 130, EMBED), nets[64, 65], np.zeros((1, 130))
    found, expected = run(net, x, None)[0], literal(net, wide(x), documents)
    assert close(found, expected, 1e-5)
    documents[:, 120:] = 1
    assert not close(found, literal(net, wide(x), documents), 1e-3)


@pytest.mark.grid
@pytest.mark.parametrize("options", [{"kv_heads": 1}, {"gate_norm": None}, {"kv_heads": 4, "taps": 2}])
def test_so_it_is_of_one_group_without_a_norm_and_with_fewer_taps(options):
    net = random_module(nn.Mamba2Mixer, **SIZES | options, key=KEY)
    assert close(run(net, X, None)[0], literal(net, wide(X), np.zeros((2, SEQ))), 1e-5)
    assert close(run(net, X[1], None)[0], run(net, X, None)[0][1], 1e-6)


def test_padding_is_never_read():
    places = jnp.array([[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6]])
    total = lambda x: (lambda y: (jnp.sum(y[0, :4]), y))(NET(x, nn.Tokens(places))[0])
    found = jax.jit(jax.grad(total, has_aux=True))
    (gradient, y), (_, other) = found(X), found(X.at[0, 4:].set(9.0))
    assert np.array_equal(y[0, :4], other[0, :4]) and bool(jnp.isfinite(y).all())
    assert not np.any(gradient[0, 4:]) and np.any(gradient[0, 0])


@pytest.mark.grid
def test_slices_of_the_heads_give_partial_sums():
    total = lambda net: run(eqx.tree_at(lambda n: n.output.bias, net, None), X, None)[0]
    parts = [jax.tree.map(functools.partial(_cut, part), nn.dims(NET), NET) for part in range(2)]
    assert close(sum(map(total, parts)), total(NET), 1e-5)


def _cut(part, names, leaf):
    dims = names.split() if eqx.is_array(leaf) else []
    for dim in ("heads", "kv_heads"):
        if dim in dims:
            size = leaf.shape[dims.index(dim)] // 2
            leaf = jax.lax.slice_in_dim(leaf, part * size, (part + 1) * size, axis=dims.index(dim))
    return leaf


@pytest.mark.grid
def test_in_bfloat16_it_remembers_in_float32():
    half = nn.cast(NET, "bfloat16")
    y, cache = run(half, X.astype(jnp.bfloat16), nn.positions_like((2, SEQ)), half.init_cache((2,), 8, "bfloat16"))
    assert y.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32 and cache.keys.dtype == jnp.bfloat16
    assert close(y.astype(jnp.float32), run(NET, X, None)[0], 5e-2)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"heads=4, kv_heads=3\).*take one of \[1, 2, 4\]"):
        nn.Mamba2Mixer(**SIZES | {"kv_heads": 3}, key=KEY)
    with pytest.raises(ValueError, match=r"Mamba2Mixer\(chunk=0\)"):
        nn.Mamba2Mixer(**SIZES, chunk=0, key=KEY)
