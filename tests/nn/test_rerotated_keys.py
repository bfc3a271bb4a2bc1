"""Cached keys of rows that outgrow one set of rotary frequencies are rotated again once, in these rows only."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module

from eqformer import nn
from eqformer.nn.attention import _rotary_cache
from eqformer.nn.attention._rotary_cache import _rerotate_by_blocks, _rerotate_jvp, CachedKeys
from eqformer.parallel import filter_shard_map, make_mesh


SHORT = 5  # tokens, up to which rows have the first set
SCALING = nn.LongRopeScaling((1.0, 1.2), (2.0, 5.0), SHORT, 4.0)
ROTARY = nn.Rotary(4, 100.0, scaling=SCALING)
SIZES: dict[str, Any] = {"embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 6, "rotary": ROTARY}
NET = random_module(nn.Attention, **SIZES, key=jax.random.key(0))
CALLS = [(3, 2), (1, 1), (1, 0), (1, 1), (2, 1), (0, 1), (1, 1)]  # tokens of each of two rows; the rest is padding


def read(cache: Any, spoil: Any = lambda cache: cache) -> tuple[list[tuple[jax.Array, jax.Array]], list[Any]]:
    """Of each call real tokens' outputs beside those of whole rows of as many tokens, and sets beside what is due."""
    x, done, pairs, sets = normal(1, 2, 9, 6), np.zeros(2, int), [], []
    step = eqx.filter_jit(lambda x, places, cache: NET(x, nn.Tokens(places), cache))
    whole = eqx.filter_jit(lambda places: NET(x, nn.Tokens(places))[0])
    for counts in CALLS:
        width = max(counts)
        given, places = np.zeros((2, width, 6), np.float32), np.full((2, width), -1)
        for row, count in enumerate(counts):
            places[row, :count] = done[row] + np.arange(count)
            given[row, :count] = x[row, done[row] : done[row] + count]
        y, cache = step(jnp.asarray(given), jnp.asarray(places), spoil(cache))
        done += counts
        wanted = whole(jnp.asarray(np.where(np.arange(9) < done[:, None], np.arange(9), -1)))
        pairs += [
            (y[row, :count], wanted[row, done[row] - count : done[row]]) for row, count in enumerate(counts) if count
        ]
        sets.append((cache.rotary_lengths.tolist(), [SHORT + 1 if count > SHORT else 0 for count in done]))
    assert done.tolist() == [9, 7]
    return pairs, sets


@pytest.mark.grid
def test_rows_are_as_without_a_cache_whatever_set_they_have():
    pairs, sets = read(NET.init_cache((2,), 10))
    assert all(close(*pair) for pair in pairs) and all(found == due for found, due in sets)
    assert not all(close(*pair, 1e-3) for pair in read(NET.init_cache((2,), 10), frozen)[0])


def frozen(cache: Any) -> Any:
    """The control: keys that stay as they were, as if they had the set that their row now takes."""
    return dataclasses.replace(cache, rotary_lengths=jnp.where(cache.positions.max(-1) >= SHORT - 1, SHORT + 1, 0))


@pytest.mark.grid
def test_keys_of_8_bits_too():
    cache = NET.init_cache((2,), 10).with_scales("int8")
    assert cache.keys.dtype == jnp.int8 and all(close(*pair, 0.03) for pair in read(cache)[0])
    assert not all(close(*pair, 0.03) for pair in read(cache, frozen)[0])


def dynamic():
    rotary = nn.Rotary(4, 100.0, scaling=nn.DynamicScaling(4.0, SHORT))
    return random_module(nn.Attention, **SIZES | {"rotary": rotary}, key=jax.random.key(0))


@pytest.mark.grid
@pytest.mark.parametrize(("made", "capacity"), [(lambda: NET, SHORT), (dynamic, SHORT), (dynamic, SHORT + 1)])
def test_caches_too_short_for_another_set_have_none(made, capacity):
    net, x, places = made(), normal(2, 2, SHORT, 6), jnp.arange(SHORT)[None].repeat(2, 0)
    cache = net.init_cache((2,), capacity)
    assert cache.rotary_lengths is None
    first, cache = net(x[:, :3], nn.Tokens(places[:, :3]), cache)
    second, cache = net(x[:, 3:], nn.Tokens(places[:, 3:]), cache)
    assert close(jnp.concatenate([first, second], axis=1), net(x, nn.Tokens(places))[0])
    keys = jnp.swapaxes(cache.keys[:, :, :SHORT], 1, 2)
    assert close(keys, net.key(x)) == (capacity > SHORT)  # unrotated where each token may change them


def blocks(layers: int | None = 2, rows: int = 4) -> tuple[Any, ...]:
    lead = (rows,) if layers is None else (layers, rows)
    cached = CachedKeys(normal(3, *lead, 2, 8, 6), None)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (rows, 8))
    lengths = jnp.zeros(rows, jnp.int32), jnp.where(jnp.arange(rows) % 2 == 1, SHORT + 1, 0).astype(jnp.int32)
    return cached, positions, lengths, None if layers is None else jnp.asarray(1)


@pytest.mark.by_default("None")
@pytest.mark.parametrize("layers", [None, 2])
def test_blocks_of_rows_that_change_are_rerotated_in_place(layers, monkeypatch):
    monkeypatch.setattr(_rotary_cache, "_BLOCK", 3)  # two slots
    cache_arguments = blocks(layers)
    by_blocks = jax.jit(functools.partial(_rerotate_by_blocks, ROTARY))(*cache_arguments)
    tangents = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), cache_arguments[1:])
    at_once, _ = _rerotate_jvp(ROTARY, cache_arguments, (cache_arguments[0], *tangents))
    assert close(by_blocks.keys, at_once.keys, 1e-6)
    same = np.asarray(by_blocks.keys == cache_arguments[0].keys)
    same = same if layers is None else same[1]
    assert layers is None or bool((by_blocks.keys[0] == cache_arguments[0].keys[0]).all())
    assert same[0::2].all() and not same[1::2, :, 1:, :4].any() and same[..., 4:].all()  # the last two channels pass


def test_devices_rerotate_their_own_rows(monkeypatch):
    """Each as many as it has: loops of unequal lengths."""
    monkeypatch.setattr(_rotary_cache, "_BLOCK", 2)
    cached, positions, lengths, _ = blocks(None, 4)
    lengths = lengths[0], jnp.asarray([0, 0, SHORT + 1, SHORT + 1], jnp.int32)
    mesh, split = make_mesh(fsdp=2, devices=jax.devices()[:2]), jax.sharding.PartitionSpec("fsdp")
    run = lambda cached, positions, lengths: _rerotate_by_blocks(ROTARY, cached, positions, lengths, None)
    spread = filter_shard_map(run, mesh, (split, split, split), split)
    spread_keys, keys = (eqx.filter_jit(call)(cached, positions, lengths).keys for call in (spread, run))
    assert close(spread_keys, keys, 1e-6)


@pytest.mark.grid
def test_gradients_are_those_of_whole_rows():
    x, places = normal(4, 1, 7, 6), jnp.arange(7)[None]

    def cached(x: jax.Array) -> jax.Array:
        _, cache = NET(x[:, :4], nn.Tokens(places[:, :4]), NET.init_cache((1,), 8))
        y, cache = NET(x[:, 4:], nn.Tokens(places[:, 4:]), cache)
        return jnp.sum(jnp.sin(y))

    def whole(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(NET(x, nn.Tokens(places))[0][:, 4:]))

    own, wanted = jax.jit(jax.grad(cached))(x), jax.jit(jax.grad(whole))(x)
    assert close(own, wanted) and not close(own * 1.01, wanted, 1e-4)
