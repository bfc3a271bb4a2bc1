"""Cached keys of a `Rotary` that has one set of frequencies for short rows and another for long ones.

Keys stand in the cache turned, so that each step reads them as they are. In the step in which a row's length takes
another set, and in no other, its keys are turned from one to the other, where they lie.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from .._cache import index_layer, KVCache, update_layer
from .._tokens import document_lengths, Tokens
from ..quantization._kv_cache import dequantize_rows, quantize_rows
from ._rotary import Rotary


_BLOCK = 1024  # slots that are turned at once


class Keys(NamedTuple):
    """Keys of a cache; of 8 bits with their scales."""

    keys: Num[Array, "*batch kv_heads kv_seq head_dim"]
    scales: Float[Array, "*batch kv_heads kv_seq"] | None


def keys_turned(rotary: Rotary, cache: KVCache, tokens: Tokens) -> tuple[KVCache, Int[Array, "*batch 1"]]:
    """The cache with its keys turned by the frequencies that rows have with these tokens, and lengths of these.

    Rows of which all tokens are padding stay as they are.
    """
    assert cache.turned is not None and rotary.scaling is not None
    layer, was = cache.layer, index_layer(cache.turned, cache.layer)
    length = rotary.scaling.alike(jnp.max(document_lengths(tokens), axis=-1))
    now = jnp.where(jnp.any(tokens.positions >= 0, axis=-1), length, was)
    lengths = was, now
    held = Keys(cache.keys, cache.key_scales)
    keys, scales = _by_blocks(rotary, held, index_layer(cache.positions, layer), lengths, layer)
    turned = update_layer(cache.turned, now, layer)
    return dataclasses.replace(cache, keys=keys, key_scales=scales, turned=turned), now[..., None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_blocks(rotary: Rotary, held: Keys, positions: Array, lengths: tuple[Array, Array], layer: Array | None) -> Keys:
    """A loop over blocks of slots of the rows whose set changes: mostly over none."""
    (*_, heads, kv_seq, _), layers = held.keys.shape, 1 if layer is None else len(held.keys)
    whole = jax.tree.map(lambda x: x.reshape(layers, -1, heads, kv_seq, *x.shape[held.keys.ndim - 1 :]), held)
    places, was, now = positions.reshape(-1, kv_seq), lengths[0].reshape(-1), lengths[1].reshape(-1)
    size = next(size for size in range(min(kv_seq, _BLOCK), 0, -1) if kv_seq % size == 0)
    blocks, order = kv_seq // size, jnp.argsort(was == now, stable=True).astype(jnp.int32)

    def one(number: Array, whole: Keys) -> Keys:
        row, start, none = order[number // blocks], number % blocks * size, jnp.zeros((), jnp.int32)
        at = lambda x: (none if layer is None else layer, row, none, start, *[none] * (x.ndim - 4))
        cut = lambda x: jax.lax.dynamic_slice(x, at(x), (1, 1, heads, size, *x.shape[4:]))[0]
        its = jax.lax.dynamic_slice(places, (row, start), (1, size))
        new = _anew(rotary, jax.tree.map(cut, whole), its, (was[row, None, None], now[row, None, None]))
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y[None], at(x)), whole, new)

    turned = jax.lax.fori_loop(0, jnp.sum(was != now, dtype=jnp.int32) * blocks, one, whole)
    return jax.tree.map(lambda x, y: x.reshape(y.shape), turned, held)


@_by_blocks.defjvp
def _slope(rotary: Rotary, primals: tuple, tangents: tuple) -> tuple[Keys, Keys]:
    """The loop, of unknown length, has no derivative in reverse mode: those are of all rows at once."""

    def at_once(held: Keys, positions: Array, lengths: tuple[Array, Array], layer: Array | None) -> Keys:
        was, now = (x[..., None] for x in lengths)
        own = jax.tree.map(lambda x: index_layer(x, layer), held)
        new = _anew(rotary, own, positions, (was, now))
        stay = lambda x: jax.lax.expand_dims(lengths[0] == lengths[1], range(was.ndim - 1, x.ndim))
        return jax.tree.map(lambda x, y, all: update_layer(all, jnp.where(stay(x), x, y), layer), own, new, held)

    return jax.jvp(at_once, primals, tangents)


def _anew(rotary: Rotary, held: Keys, positions: Array, lengths: tuple[Array, Array]) -> Keys:
    keys = held.keys if held.scales is None else dequantize_rows(held.keys, held.scales, held.scales.dtype)
    turned = rotary.again(keys.swapaxes(-3, -2), positions, *lengths).swapaxes(-3, -2)
    return Keys(turned, None) if held.scales is None else Keys(*quantize_rows(turned, held.keys.dtype.name))
