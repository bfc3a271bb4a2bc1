"""Caches of past tokens, preallocated: keys and values, or latents; of all tokens, or of a rolling window."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from ._tokens import Tokens


class SlotCache(eqx.Module):
    """Memories of past tokens in slots. A token's slot is its position (modulo the capacity where `rolling`).

    Its arrays name their dim of slots `kv_seq`, so that slots may be split over devices. Rows may have different
    lengths: a slot's position says whether it is filled (-1: empty). A cache that is not rolling does not store tokens
    beyond its capacity, and `without_room` makes the output of attention NaN for them. A shard of a cache has those of
    its `capacity` slots that begin at `first`.

    A stack's cache has a dim of layers in front. Each layer is given the whole of it with its own `layer`, and writes
    its new tokens where they belong: a slice of it would be copied out and back for a few tokens.
    """

    if TYPE_CHECKING:  # an abstract variable would be taken for an argument of each constructor
        positions: Array = eqx.field(init=False)
        rolling: bool = eqx.field(init=False)
        first: Array | None = eqx.field(init=False)
        capacity: int | None = eqx.field(init=False)
        layer: Array | None = eqx.field(init=False)
    else:
        positions: eqx.AbstractVar[Int[Array, "*batch kv_seq"]]
        rolling: eqx.AbstractVar[bool]
        first: eqx.AbstractVar[Int[Array, "*batch"] | None]
        capacity: eqx.AbstractVar[int | None]
        layer: eqx.AbstractVar[Int[Array, ""] | None]


class KVCache(SlotCache):
    """Keys and values of past tokens, those of a head side by side, so that products of heads read them in place."""

    keys: Float[Array, "*batch kv_heads kv_seq head_dim"]
    """The keys, rotated."""
    values: Float[Array, "*batch kv_heads kv_seq v_dim"]
    """The values."""
    positions: Int[Array, "*batch kv_seq"]
    """The position in each slot; -1: it is empty."""
    rolling: bool = eqx.field(static=True, default=False)
    """Whether new tokens take the slots of the oldest."""
    first: Int[Array, "*batch"] | None = None
    """Of a shard, its first slot; None: the cache is whole."""
    capacity: int | None = eqx.field(static=True, default=None)
    """Of a shard, the slots of the whole cache."""
    layer: Int[Array, ""] | None = None
    """Of a stack's cache, the layer that reads and writes; None: there is no dim of layers."""

    def update(
        self,
        keys: Float[Array, "*batch seq kv_heads head_dim"],
        values: Float[Array, "*batch seq kv_heads v_dim"],
        tokens: Tokens,
    ) -> tuple[
        "KVCache", Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens
    ]:
        """Store new tokens; return the cache and all keys and values, with their tokens, that the new ones may see."""
        new = (_swapped(keys), _swapped(values))
        (k, v, positions), seen = _store((self.keys, self.values), self, new, tokens, heads=1)
        kept = dataclasses.replace(self, keys=k, values=v, positions=positions)
        return kept, _swapped(seen[0]), _swapped(seen[1]), Tokens(seen[2])


class LatentCache(SlotCache):
    """Compressed keys and values of past tokens and their rotated keys (MLA's two caches)."""

    latents: Float[Array, "*batch kv_seq latent"]
    """The latents of keys and values."""
    rotary_keys: Float[Array, "*batch kv_seq rope_dim"]
    """The rotated keys, which all heads share."""
    positions: Int[Array, "*batch kv_seq"]
    """The position in each slot; -1: it is empty."""
    rolling: bool = eqx.field(static=True, default=False)
    """Whether new tokens take the slots of the oldest."""
    first: Int[Array, "*batch"] | None = None
    """Of a shard, its first slot; None: the cache is whole."""
    capacity: int | None = eqx.field(static=True, default=None)
    """Of a shard, the slots of the whole cache."""
    layer: Int[Array, ""] | None = None
    """Of a stack's cache, the layer that reads and writes; None: there is no dim of layers."""

    def update(
        self,
        latents: Float[Array, "*batch seq latent"],
        rotary_keys: Float[Array, "*batch seq rope_dim"],
        tokens: Tokens,
    ) -> tuple["LatentCache", Float[Array, "*batch all latent"], Float[Array, "*batch all rope_dim"], Tokens]:
        """Store new tokens; return the cache and all that the new ones may see."""
        new = (latents, rotary_keys)
        (c, r, positions), seen = _store((self.latents, self.rotary_keys), self, new, tokens)
        kept = dataclasses.replace(self, latents=c, rotary_keys=r, positions=positions)
        return kept, seen[0], seen[1], Tokens(seen[2])


class DeltaCache(eqx.Module):
    """The cache of a gated delta net, whose size does not depend on the length of its rows.

    `state` is the recurrent state, in float32 at least; `queries`, `keys` and `values` are those of the last tokens,
    before the convolutions; `lengths` is the position of each row's next token.
    """

    state: Float[Array, "*batch heads head_dim v_dim"]
    queries: Float[Array, "*batch kept kv_heads head_dim"]
    keys: Float[Array, "*batch kept kv_heads head_dim"]
    values: Float[Array, "*batch kept heads v_dim"]
    lengths: Int[Array, "*batch"]


def empty_slots(batch: Sequence[int], capacity: int) -> Int[Array, "*batch kv_seq"]:
    """Positions of empty slots: -1."""
    return jnp.full((*batch, capacity), -1, jnp.int32)


def check_one_document(tokens: Tokens) -> None:
    """Raise a `ValueError` for tokens of packed rows, of which no cache keeps more than one document."""
    if tokens.segments is not None:
        raise ValueError(
            "cache.update(tokens): a cache keeps one document a row, but the tokens have segments; pass "
            "Tokens(positions) without them, and a row of its own for each document."
        )


def check_cached(tokens: Tokens, cache: PyTree) -> None:
    """Raise a `ValueError` for packed rows and, outside of a trace, for positions beyond a cache that does not roll.

    While a program is traced, positions are not known; the outputs of such tokens are then NaN (`without_room`).
    """
    check_one_document(tokens)
    positions = tokens.positions
    if isinstance(positions, Tracer) or not getattr(positions, "is_fully_addressable", True):
        return
    last = int(np.max(np.asarray(positions), initial=-1))
    caches = jax.tree.leaves(cache, is_leaf=_has_slots)
    slots = [_capacity(one) for one in caches if _has_slots(one) and not one.rolling]
    if slots and last >= min(slots):
        raise ValueError(
            f"a call on tokens up to position {last} has a cache of capacity {min(slots)}, which holds the positions 0 "
            f"to {min(slots) - 1}; make it by init_cache(..., capacity) with a capacity of at least {last + 1}."
        )


def without_room(
    attended: Float[Array, "*batch seq heads v_dim"], tokens: Tokens, cache: SlotCache
) -> Float[Array, "*batch seq heads v_dim"]:
    """The output of attention, with NaN for tokens beyond the cache's capacity, which could not be stored."""
    if cache.rolling:
        return attended
    beyond = tokens.positions >= _capacity(cache)
    return jnp.where(_like(beyond, attended), jnp.nan, attended)


def _has_slots(node: object) -> bool:
    return isinstance(node, SlotCache)


def _capacity(cache: SlotCache) -> int:
    return cache.positions.shape[-1] if cache.capacity is None else cache.capacity


def _store(old: tuple, cache: SlotCache, new: tuple, tokens: Tokens, heads: int = 0) -> tuple[tuple, tuple]:
    """The memories with the new tokens in their slots, and the memories that those tokens may see.

    Between the dims of rows and of slots the memories have `heads` dims of heads.
    """
    check_cached(tokens, cache)
    layer, capacity = cache.layer, _capacity(cache)
    old_positions = _of_layer(cache.positions, layer)
    first = None if cache.first is None else _of_layer(cache.first, layer)
    size, seq = old_positions.shape[-1], tokens.positions.shape[-1]
    positions = tokens.positions.astype(jnp.int32)
    if cache.rolling:
        # Only the last `capacity` new tokens of a row are stored, so that no slot is written twice in one call.
        last = jnp.max(positions, axis=-1, keepdims=True)
        kept = (positions >= 0) & (positions > last - capacity)
    else:
        kept = (positions >= 0) & (positions < capacity)
    slots = positions % capacity
    if first is not None:
        slots = slots - first[..., None]
        kept = kept & (slots >= 0) & (slots < size)
    slots = jnp.where(kept, slots, size)
    along = [slots.ndim - 1 + heads] * len(old) + [slots.ndim - 1]
    pairs = zip((*old, cache.positions), (*new, positions), along)
    stored = tuple(_write(memory, slots, x.astype(memory.dtype), dim, layer) for memory, x, dim in pairs)
    if cache.rolling and seq > 1:
        # Earlier new tokens may see slots that later ones overwrite, so they attend to the old cache and to each other.
        # What the old one holds of the new positions, after a step back, is overwritten.
        begin = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max), axis=-1, keepdims=True)
        old_positions = jnp.where(old_positions < begin, old_positions, -1)
        # If the cache is split over devices, one device alone has the new tokens visible, so that they count once.
        if first is not None:
            positions = jnp.where(first[..., None] == 0, positions, -1)
        news = (*new, positions)
        pairs = zip((*(_of_layer(memory, layer) for memory in old), old_positions), news, along)
        seen = tuple(jnp.concatenate([memory, x.astype(memory.dtype)], axis=dim) for memory, x, dim in pairs)
        return stored, seen
    return stored, tuple(_of_layer(memory, layer) for memory in stored)


def _write(memory: Array, slots: Int[Array, "*batch seq"], new: Array, dim: int, layer: Int[Array, ""] | None) -> Array:
    """`memory[row, slot] = new` for each row, or each row's heads; slots, its `dim`, at the capacity are dropped."""
    outer, seq = new.shape[:dim], slots.shape[-1]
    rows = math.prod(outer)  # not -1, which is ambiguous if a dim is 0: latents without rotary keys
    layers = 1 if layer is None else memory.shape[0]
    flat = memory.reshape((layers * rows, *memory.shape[dim + (layer is not None) :]))
    # Rows and slots are the first dims of what is written, as GPUs write in place.
    of_heads = jnp.broadcast_to(jax.lax.expand_dims(slots, range(slots.ndim - 1, dim)), (*outer, seq))
    row = jnp.arange(rows)[:, None] + (0 if layer is None else layer * rows)
    written = flat.at[row, of_heads.reshape(rows, seq)].set(new.reshape((rows, *new.shape[dim:])), mode="drop")
    return written.reshape(memory.shape)


def _of_layer(memory: Array, layer: Int[Array, ""] | None) -> Array:
    return memory if layer is None else jax.lax.dynamic_index_in_dim(memory, layer, 0, keepdims=False)


def _swapped(x: Array) -> Array:
    """Heads before tokens, or tokens before heads."""
    return x.swapaxes(-3, -2)


def _like(flags: Array, x: Array) -> Array:
    return jax.lax.expand_dims(flags, range(flags.ndim, x.ndim))
