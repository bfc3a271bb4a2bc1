"""Slots of past tokens, preallocated: of all tokens, or of a rolling window; who writes them and who sees them."""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from .._shapes import ArrayOrShape
from ..kernels import CACHE_WRITE, CacheWriteCall, rounded_slots
from ._dims import dims
from ._layer_cache import index_layer, LayerCache
from ._tokens import Tokens
from .quantization._kv_cache import dequantize_rows, quantize_rows


class SlotCache(LayerCache):
    """Memories of past tokens in slots. A token's slot is its position (modulo the capacity where `rolling`).

    Its arrays name their dim of slots `kv_seq`, so that slots may be split over devices. Rows may have different
    lengths: a slot's position says whether it is filled (-1: empty). A cache that is not rolling does not store tokens
    beyond its capacity, and `without_room` makes the output of attention NaN for them. A shard of a cache has those of
    its `capacity` slots that begin at `first`.

    Memories of 8 bits (`with_scales`) have a scale for each token, and head: they are rounded when they are stored, and
    what is seen of them is made of the rounded numbers, of the new tokens too.
    """

    if TYPE_CHECKING:  # an abstract variable would be taken for an argument of each constructor
        positions: Array = eqx.field(init=False)
        rolling: bool = eqx.field(init=False)
        first: Array | None = eqx.field(init=False)
        capacity: int | None = eqx.field(init=False)
    else:
        positions: eqx.AbstractVar[Int[Array, "*batch kv_seq"]]
        rolling: eqx.AbstractVar[bool]
        first: eqx.AbstractVar[Int[Array, "*batch"] | None]
        capacity: eqx.AbstractVar[int | None]

    @abc.abstractmethod
    def with_scales(self, dtype: str) -> "SlotCache":
        """An empty cache like this one, with memories of 8 bits."""


def empty_slots(batch: Sequence[int], capacity: int) -> Int[Array, "*batch kv_seq"]:
    """Positions of empty slots: -1."""
    return jnp.full((*batch, capacity), -1, jnp.int32)


def slots_for(reach: int, capacity: int) -> int:
    """Return the slots for `reach` tokens of at most `capacity`."""
    return min(capacity, rounded_slots(reach))


def is_position_array(x: ArrayOrShape) -> bool:
    """Whether an array of a cache holds positions or lengths of rows, and no memories, which may be integers too."""
    return x.dtype == jnp.int32


def in_memory(cache: PyTree, dtype: str) -> PyTree:
    """Empty caches like these with memories of 8 bits, but for what has no slots, such as a recurrence's state."""
    return jax.tree.map(lambda one: one.with_scales(dtype) if _has_slots(one) else one, cache, is_leaf=_has_slots)


def with_rollback(cache: PyTree, tokens: int) -> PyTree:
    """Empty caches like these whose windows keep `tokens` slots more: so many last tokens may be read anew, as others.

    Tokens that are read at positions that a cache holds already take their places, and queries see nothing behind their
    own position. But in a window that is just long enough, tokens that do not stay would have overwritten what is seen.
    """
    return jax.tree.map(lambda one: _widened(one, tokens) if _rolls(one) else one, cache, is_leaf=_has_slots)


def _rolls(node: object) -> bool:
    return isinstance(node, SlotCache) and node.rolling


def _widened(cache: SlotCache, slots: int) -> SlotCache:
    was = cache.positions.shape[-1]
    more = rounded_slots(was + slots) - was

    def widened(names: str, x: Array) -> Array:
        behind = [(0, more if name == "kv_seq" else 0) for name in names.split()]
        return jnp.pad(x, behind, constant_values=-1 if is_position_array(x) else 0)

    return jax.tree.map(widened, dims(cache), cache)


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
    slots = [capacity_of(one) for one in caches if _has_slots(one) and not one.rolling]
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
    beyond = tokens.positions >= capacity_of(cache)
    return jnp.where(_like(beyond, attended), jnp.nan, attended)


def _has_slots(node: object) -> bool:
    return isinstance(node, SlotCache)


def capacity_of(cache: SlotCache) -> int:
    """Slots of the whole cache."""
    return cache.positions.shape[-1] if cache.capacity is None else cache.capacity


def remembered(
    cache: SlotCache, memories: tuple, scales: tuple, new: tuple, tokens: Tokens, heads: int = 0
) -> tuple[tuple, tuple]:
    """What `_store` gives, of two memories that may have scales, which then stand behind them."""
    if scales[0] is None:
        return _store(memories, cache, new, tokens, heads)
    pairs = [quantize_rows(x, memory.dtype.name) for x, memory in zip(new, memories)]
    rounded, factors = zip(*pairs)
    stored, seen = _store((*memories, *scales), cache, (*rounded, *factors), tokens, heads)
    one, two = (dequantize_rows(seen[place], seen[place + 2], new[place].dtype) for place in (0, 1))
    return stored, (one, two, seen[-1])


def _store(old: tuple, cache: SlotCache, new: tuple, tokens: Tokens, heads: int = 0) -> tuple[tuple, tuple]:
    """The memories with the new tokens in their slots, and the memories that those tokens may see.

    Between the dims of rows and of slots the memories have `heads` dims of heads.
    """
    check_cached(tokens, cache)
    layer, capacity = cache.layer, capacity_of(cache)
    old_positions = index_layer(cache.positions, layer)
    first = None if cache.first is None else index_layer(cache.first, layer)
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
    stored = tuple(
        CACHE_WRITE(CacheWriteCall(memory, slots, x.astype(memory.dtype), layer, dim)) for memory, x, dim in pairs
    )
    if cache.rolling and seq > 1:
        # Earlier new tokens may see slots that later ones overwrite, so they attend to the old cache and to each other.
        # What the old one holds of the new positions, after a step back, is overwritten.
        begin = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max), axis=-1, keepdims=True)
        old_positions = jnp.where(old_positions < begin, old_positions, -1)
        # If the cache is split over devices, one device alone has the new tokens visible, so that they count once.
        if first is not None:
            positions = jnp.where(first[..., None] == 0, positions, -1)
        news = (*new, positions)
        pairs = zip((*(index_layer(memory, layer) for memory in old), old_positions), news, along)
        seen = tuple(jnp.concatenate([memory, x.astype(memory.dtype)], axis=dim) for memory, x, dim in pairs)
        return stored, seen
    return stored, tuple(index_layer(memory, layer) for memory in stored)


def _like(flags: Array, x: Array) -> Array:
    return jax.lax.expand_dims(flags, range(flags.ndim, x.ndim))
