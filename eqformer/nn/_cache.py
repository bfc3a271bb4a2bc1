"""Caches of past tokens, preallocated: keys and values, latents, or the state of a recurrence."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num, PyTree

from .._array_checks import checked, checked_fields
from .._shapes import ArrayOrShape
from ..kernels import CACHE_WRITE, CacheWriteCall, rounded_slots
from ._dims import dims
from ._dtype import float_dtype
from ._tokens import Tokens
from .quantization._kv_cache import dequantize_rows, quantize_rows


class LayerCache(eqx.Module):
    """A cache that a layer of a stack is given whole, all layers', with its own number as `layer`.

    The layer reads and writes where its part lies: a slice would be copied out and back in each step.
    """

    if TYPE_CHECKING:  # an abstract variable would be taken for an argument of each constructor
        layer: Array | None = eqx.field(init=False)
    else:
        layer: eqx.AbstractVar[Int[Array, ""] | None]


def index_layer(memory: Array, layer: Int[Array, ""] | None) -> Array:
    """Of an array of a stack's cache the part of a layer, or all where there is no dim of layers."""
    return memory if layer is None else jax.lax.dynamic_index_in_dim(memory, layer, 0, keepdims=False)


def update_layer(memory: Array, part: Array, layer: Int[Array, ""] | None) -> Array:
    """An array of a stack's cache with another part of a layer, or this alone where there is no dim of layers."""
    return part if layer is None else jax.lax.dynamic_update_index_in_dim(memory, part, layer, 0)


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


@checked_fields
class KVCache(SlotCache):
    """Keys and values of past tokens, those of a head side by side, so that products of heads read them in place."""

    keys: Num[Array, "*batch kv_heads kv_seq head_dim"]
    """The keys, rotated."""
    values: Num[Array, "*batch kv_heads kv_seq v_dim"]
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
    key_scales: Float[Array, "*batch kv_heads kv_seq"] | None = None
    """What keys of 8 bits are multiplied by."""
    value_scales: Float[Array, "*batch kv_heads kv_seq"] | None = None
    """What values of 8 bits are multiplied by."""
    turned: Int[Array, "*batch"] | None = None
    """Of each row, a length by whose frequencies its keys are rotated, where a row may get others; see `nn.Rotary`."""

    @classmethod
    def empty(
        cls,
        batch: Sequence[int],
        capacity: int,
        keys: Sequence[int],
        values: Sequence[int],
        dtype: str,
        *,
        reach: int | None = None,
    ) -> "KVCache":
        """An empty cache.

        Args:
            batch: Its dims of rows.
            capacity: Up to how many tokens a row may have.
            keys: Heads of keys, and channels of each.
            values: The same of values.
            dtype: Of both, a float.
            reach: How many tokens are kept, or a few more; fewer than `capacity` roll.
        """
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        size = capacity if reach is None else slots_for(reach, capacity)
        slots = lambda heads, width: jnp.zeros((*batch, heads, size, width), dtype)
        return cls(
            keys=slots(*keys), values=slots(*values), positions=empty_slots(batch, size), rolling=size < capacity
        )

    def with_scales(self, dtype: str) -> "KVCache":
        """An empty cache like this one, with keys and values of 8 bits."""
        (keys, key_scales), (values, value_scales) = (_emptied(x, dtype) for x in (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)

    def scaled(self) -> dict[str, Array]:
        """What is read of all slots, of 8 bits: keys and values as they are stored, and what they are to be times."""
        own = lambda x: index_layer(x, self.layer)
        return {
            "key": _swapped(own(self.keys)),
            "value": _swapped(own(self.values)),
            "key_scales": own(self.key_scales).swapaxes(-2, -1),
            "value_scales": own(self.value_scales).swapaxes(-2, -1),
        }

    def stored(
        self, dtype: jnp.dtype
    ) -> tuple[Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens]:
        """All keys and values that it holds, and their tokens."""
        own = lambda x: index_layer(x, self.layer)
        memories = (self.keys, self.key_scales), (self.values, self.value_scales)
        keys, values = (
            own(rows) if scales is None else dequantize_rows(own(rows), own(scales), dtype) for rows, scales in memories
        )
        return _swapped(keys), _swapped(values), Tokens(own(self.positions))

    @checked
    def update(
        self,
        keys: Float[Array, "*batch seq kv_heads head_dim"],
        values: Float[Array, "*batch seq kv_heads v_dim"],
        tokens: Tokens,
    ) -> tuple[
        "KVCache", Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens
    ]:
        """Store new tokens; return the cache and all keys and values, with their tokens, that the new ones may see."""
        new, scales = (_swapped(keys), _swapped(values)), (self.key_scales, self.value_scales)
        (k, v, *more, positions), seen = remembered(self, (self.keys, self.values), scales, new, tokens, heads=1)
        kept = dataclasses.replace(self, keys=k, values=v, positions=positions)
        if more:
            kept = dataclasses.replace(kept, key_scales=more[0], value_scales=more[1])
        return kept, _swapped(seen[0]), _swapped(seen[1]), Tokens(seen[2])


@checked_fields
class LatentCache(SlotCache):
    """Compressed keys and values of past tokens and their rotated keys (MLA's two caches)."""

    latents: Num[Array, "*batch kv_seq latent"]
    """The latents of keys and values."""
    rotary_keys: Num[Array, "*batch kv_seq rope_dim"]
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
    latent_scales: Float[Array, "*batch kv_seq"] | None = None
    """What latents of 8 bits are multiplied by."""
    rotary_scales: Float[Array, "*batch kv_seq"] | None = None
    """What rotated keys of 8 bits are multiplied by."""

    def with_scales(self, dtype: str) -> "LatentCache":
        """An empty cache like this one, with latents and rotated keys of 8 bits."""
        (latents, scales), (rotated, others) = (_emptied(x, dtype) for x in (self.latents, self.rotary_keys))
        return dataclasses.replace(
            self, latents=latents, rotary_keys=rotated, latent_scales=scales, rotary_scales=others
        )

    def scaled(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Of all slots, of 8 bits: latents as they are stored and what they are to be times; rotated keys likewise."""
        own = lambda x: index_layer(x, self.layer)
        return (own(self.latents), own(self.latent_scales)), (own(self.rotary_keys), own(self.rotary_scales))

    @checked
    def update(
        self,
        latents: Float[Array, "*batch seq latent"],
        rotary_keys: Float[Array, "*batch seq rope_dim"],
        tokens: Tokens,
    ) -> tuple["LatentCache", Float[Array, "*batch all latent"], Float[Array, "*batch all rope_dim"], Tokens]:
        """Store new tokens; return the cache and all that the new ones may see."""
        new, scales = (latents, rotary_keys), (self.latent_scales, self.rotary_scales)
        (c, r, *more, positions), seen = remembered(self, (self.latents, self.rotary_keys), scales, new, tokens)
        kept = dataclasses.replace(self, latents=c, rotary_keys=r, positions=positions)
        if more:
            kept = dataclasses.replace(kept, latent_scales=more[0], rotary_scales=more[1])
        return kept, seen[0], seen[1], Tokens(seen[2])


@checked_fields
class RecurrentCache(LayerCache):
    """The cache of a gated delta net or a Mamba-2, whose size does not depend on the length of its rows."""

    state: Float[Array, "*batch heads head_dim v_dim"]
    """The recurrent state, in float32 at least."""
    queries: Float[Array, "*batch kept kv_heads head_dim"]
    """Queries of the last tokens, before their convolution."""
    keys: Float[Array, "*batch kept kv_heads head_dim"]
    """Keys of the last tokens, before theirs."""
    values: Float[Array, "*batch kept heads v_dim"]
    """Values of the last tokens, before theirs."""
    lengths: Int[Array, "*batch"]
    """The position of each row's next token."""
    layer: Int[Array, ""] | None = None
    """Of a stack's cache, the layer that reads and writes; None: there is no dim of layers."""


@checked_fields
class ConvCache(eqx.Module):
    """The cache of a short convolution, whose size does not depend on the length of its rows.

    `inputs` is what the convolution was given for the last tokens; `lengths` is the position of each row's next token.
    """

    inputs: Float[Array, "*batch kept mlp"]
    lengths: Int[Array, "*batch"]


def _emptied(x: Num[Array, "*dims row"], dtype: str) -> tuple[Num[Array, "*dims row"], Float[Array, "*dims"]]:
    return jnp.zeros(x.shape, dtype), jnp.zeros(x.shape[:-1], jnp.float32)


def _swapped(x: Array) -> Array:
    """Heads before tokens, or tokens before heads."""
    return x.swapaxes(-3, -2)
