"""Caches of past tokens, preallocated: keys and values, latents, or the state of a recurrence."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num, PyTree

from .._annotation_checks import checked, checked_fields
from .._shapes import ArrayOrShape
from ..kernels import CACHE_WRITE, CacheWriteCall, round_up_slots
from ._dtype import dequantize_rows, float_dtype, quantize_rows
from ._module import dims, map_modules, running_call
from ._tokens import Tokens


class LayerCache(eqx.Module):
    """A cache whose arrays hold all layers of a stack; the stack passes it to each layer with the layer's index,
    `layer`.

    The layer reads and writes its part in place. If each layer got a slice, the slice would be copied out and back in
    each step.
    """

    if TYPE_CHECKING:  # Type checkers take an abstract variable for an argument of each constructor.
        layer: Array | None = eqx.field(init=False)
    else:
        layer: eqx.AbstractVar[Int[Array, ""] | None]


def index_layer(memory: Array, layer: Int[Array, ""] | None) -> Array:
    """Return one layer's part of a stack's cache array `memory`, or the array itself if `layer` is None."""
    return memory if layer is None else jax.lax.dynamic_index_in_dim(memory, layer, 0, keepdims=False)


def update_layer(memory: Array, part: Array, layer: Int[Array, ""] | None) -> Array:
    """Return a stack's cache array with one layer's part replaced, or the new part itself if `layer` is None."""
    return part if layer is None else jax.lax.dynamic_update_index_in_dim(memory, part, layer, 0)


class SlotCache(LayerCache):
    """A cache with a slot for each past token. A token's slot is its position (modulo the capacity if `rolling`).

    Its arrays name their dim of slots `kv_seq`, so that slots may be split over devices. Rows may have different
    lengths: a slot's position is -1 if the slot is empty. A cache that is not rolling does not store tokens beyond its
    capacity, and `mask_overflow` makes the output of attention NaN for them. A shard of a cache holds some of the
    `capacity` slots of the whole cache, from slot `first` on.

    An 8-bit cache (`with_scales`) has a scale for each token and head. Keys and values are rounded when they are
    stored, and attention reads the rounded keys and values, even of the new tokens.
    """

    if TYPE_CHECKING:  # Type checkers take an abstract variable for an argument of each constructor.
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
        """Return an empty cache like this one in an 8-bit dtype, with scales."""

    @property
    def longest_row(self) -> int | None:
        """The length in tokens of the longest row that fits; None for a rolling cache, which serves rows of any
        length."""
        return None if self.rolling else capacity_of(self)


def empty_slots(batch: Sequence[int], capacity: int) -> Int[Array, "*batch kv_seq"]:
    """Return the positions of empty slots: -1."""
    return jnp.full((*batch, capacity), -1, jnp.int32)


def slots_for(reach: int, capacity: int) -> int:
    """Return the number of slots for a window of `reach` tokens, at most `capacity`."""
    return min(capacity, round_up_slots(reach))


def is_position_array(x: ArrayOrShape) -> bool:
    """Return whether a cache array holds positions or lengths of rows (int32), not cached values (8-bit integers)."""
    return x.dtype == jnp.int32


def quantize_caches(cache: PyTree, dtype: str) -> PyTree:
    """Return empty caches like these in an 8-bit dtype; caches without slots (recurrent states) stay unchanged."""
    return map_slot_caches(lambda slots: slots.with_scales(dtype), cache)


def with_rollback(cache: PyTree, tokens: int) -> PyTree:
    """Return empty caches like these in which the last `tokens` tokens can be replaced; windows get more slots.

    A new token overwrites a rejected token at the same position, and queries see nothing after their own position. But
    in a window without spare slots, rejected tokens would have overwritten older tokens that are still visible.
    """
    return map_slot_caches(lambda slots: _add_slots(slots, tokens) if slots.rolling else slots, cache)


def restore_states(previous: PyTree, current: PyTree) -> PyTree:
    """Return a cache with the slots of `current`, and with everything else (recurrent states) from `previous`.

    Tokens that are read again overwrite their slots, so slots need no restoring.
    """

    def choose(old: PyTree, new: PyTree) -> PyTree:
        return new if _has_slots(new) else old

    return jax.tree.map(choose, previous, current, is_leaf=_has_slots)


def can_roll_back(cache: PyTree) -> bool:
    """Return whether the cache has only slots, and no recurrent state.

    Such a cache can be rolled back, because a token that is read again overwrites its slot.
    """
    return all(_has_slots(node) for node in jax.tree.leaves(cache, is_leaf=_has_slots))


def map_slot_caches(change: Callable[["SlotCache"], PyTree], cache: PyTree) -> PyTree:
    """Replace each cache with slots by `change(cache)`; caches without slots (recurrent states) stay unchanged."""
    return map_modules(change, cache, SlotCache)


def _add_slots(cache: SlotCache, slots: int) -> SlotCache:
    size = cache.positions.shape[-1]
    added = round_up_slots(size + slots) - size

    def pad_slots(names: str, x: Array) -> Array:
        padding = [(0, added if name == "kv_seq" else 0) for name in names.split()]
        return jnp.pad(x, padding, constant_values=-1 if is_position_array(x) else 0)

    return jax.tree.map(pad_slots, dims(cache), cache)


def check_one_document(tokens: Tokens) -> None:
    """Raise a `ValueError` for tokens of packed rows, because a row of a cache keeps one document."""
    if tokens.segments is not None:
        raise ValueError(
            "cache.update(tokens): a row of a cache keeps one document, but the tokens have segments; pass "
            "Tokens(positions) without segments, with each document in a row of its own."
        )


def check_cached(tokens: Tokens, cache: PyTree) -> None:
    """Raise a `ValueError` for packed rows and, outside of a trace, for positions beyond a cache's capacity.

    While a program is traced, positions are not known; the outputs of such tokens are then NaN (`mask_overflow`).
    """
    check_one_document(tokens)
    positions = tokens.positions
    if isinstance(positions, Tracer) or not getattr(positions, "is_fully_addressable", True):
        return
    last = int(np.max(np.asarray(positions), initial=-1))
    caches = jax.tree.leaves(cache, is_leaf=_has_slots)
    lengths = [node.longest_row for node in caches if _has_slots(node)]
    capacities = [length for length in lengths if length is not None]
    if capacities and last >= min(capacities):
        raise ValueError(
            f"{running_call()}(tokens, cache): tokens.positions of shape {positions.shape} reach position {last}, but "
            f"kv_seq of the cache is {min(capacities)}, for the positions 0 to {min(capacities) - 1}; make the cache "
            f"by init_cache(..., capacity) with a capacity of at least {last + 1}."
        )


def mask_overflow(
    attended: Float[Array, "*batch seq heads v_dim"], tokens: Tokens, cache: SlotCache | None
) -> Float[Array, "*batch seq heads v_dim"]:
    """Return the output of attention with NaN for tokens beyond the cache's capacity, which are not stored."""
    if cache is None or (longest := cache.longest_row) is None:
        return attended
    beyond = tokens.positions >= longest
    return jnp.where(_expand_to(beyond, attended), jnp.nan, attended)


def _has_slots(node: object) -> TypeGuard[SlotCache]:
    return isinstance(node, SlotCache)


def capacity_of(cache: SlotCache) -> int:
    """Return the number of slots of the whole cache."""
    return cache.positions.shape[-1] if cache.capacity is None else cache.capacity


def store_tokens(
    cache: SlotCache, memories: tuple, scales: tuple, new: tuple, tokens: Tokens, heads: int = 0
) -> tuple[tuple, tuple]:
    """Store new tokens in the cache; return the arrays to store, and the arrays that queries of these tokens read.

    `memories` are two arrays of the cache, such as its keys and values, and `new` are the same two arrays for the new
    tokens. `scales` are the scales of the memories in an 8-bit cache, and None in other caches. The arrays to store are
    the updated memories, then the updated scales if there are any, then the updated positions. The arrays to read are
    the two memories, dequantized, and the positions, for all tokens that the new tokens may see. All arrays except the
    positions have `heads` dims of heads between the dims of rows and of slots.
    """
    if scales[0] is None:
        return store_slots(memories, cache, new, tokens, heads)
    pairs = [quantize_rows(x, memory.dtype.name) for x, memory in zip(new, memories)]
    rounded, factors = zip(*pairs)
    stored, visible = store_slots((*memories, *scales), cache, (*rounded, *factors), tokens, heads)
    first, second = (dequantize_rows(visible[i], visible[i + 2], new[i].dtype) for i in (0, 1))
    return stored, (first, second, visible[-1])


def store_slots(old: tuple, cache: SlotCache, new: tuple, tokens: Tokens, heads: int = 0) -> tuple[tuple, tuple]:
    """Return the arrays with the new tokens in their slots, and the arrays that the new tokens may see.

    The arrays have `heads` dims of heads between the dims of rows and of slots.
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
        is_stored = (positions >= 0) & (positions > last - capacity)
    else:
        is_stored = (positions >= 0) & (positions < capacity)
    slots = positions % capacity
    if first is not None:
        slots = slots - first[..., None]
        is_stored = is_stored & (slots >= 0) & (slots < size)
    slots = jnp.where(is_stored, slots, size)
    slot_dims = [slots.ndim - 1 + heads] * len(old) + [slots.ndim - 1]
    pairs = zip((*old, cache.positions), (*new, positions), slot_dims)
    stored = tuple(
        CACHE_WRITE(CacheWriteCall(memory, slots, x.astype(memory.dtype), layer, dim)) for memory, x, dim in pairs
    )
    if cache.rolling and seq > 1:
        # A new token may see slots that later new tokens overwrite, so new tokens attend to the old cache and to each
        # other. After a rollback, the old cache holds rejected tokens at the new positions; these are hidden.
        begin = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max), axis=-1, keepdims=True)
        old_positions = jnp.where(old_positions < begin, old_positions, -1)
        # If the cache is split over devices, the new tokens are visible on only one device, so that they count once.
        if first is not None:
            positions = jnp.where(first[..., None] == 0, positions, -1)
        new_arrays = (*new, positions)
        pairs = zip((*(index_layer(memory, layer) for memory in old), old_positions), new_arrays, slot_dims)
        visible = tuple(jnp.concatenate([memory, x.astype(memory.dtype)], axis=dim) for memory, x, dim in pairs)
        return stored, visible
    return stored, tuple(index_layer(memory, layer) for memory in stored)


def _expand_to(flags: Array, x: Array) -> Array:
    return jax.lax.expand_dims(flags, range(flags.ndim, x.ndim))


@checked_fields
class KVCache(SlotCache):
    """Keys and values of past tokens, with each head's tokens contiguous, so that products read them in place."""

    keys: Num[Array, "*batch kv_heads kv_seq head_dim"]
    """The keys, rotated."""
    values: Num[Array, "*batch kv_heads kv_seq v_dim"]
    """The values."""
    positions: Int[Array, "*batch kv_seq"]
    """The position of the token in each slot; -1 for an empty slot."""
    rolling: bool = eqx.field(static=True, default=False)
    """Whether new tokens take the slots of the oldest tokens."""
    first: Int[Array, "*batch"] | None = None
    """The first slot of a shard; None: the cache is whole."""
    capacity: int | None = eqx.field(static=True, default=None)
    """The number of slots of the whole cache, set on a shard."""
    layer: Int[Array, ""] | None = None
    """The index of the layer that reads and writes a stack's cache; None: there is no dim of layers."""
    key_scales: Float[Array, "*batch kv_heads kv_seq"] | None = None
    """Scales of 8-bit keys."""
    value_scales: Float[Array, "*batch kv_heads kv_seq"] | None = None
    """Scales of 8-bit values."""
    rotary_lengths: Int[Array, "*batch"] | None = None
    """For each row, the document length whose rotary frequencies its keys have; None: keys are never rotated again."""

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
        """Return an empty cache.

        Args:
            batch: Sizes of the batch dims.
            capacity: Maximum number of tokens of a row.
            keys: Heads of keys, and channels of a head.
            values: Heads of values, and channels of a head.
            dtype: Float dtype of keys and values.
            reach: Number of tokens that the mask lets a query see, or a few more. If this is less than `capacity`, the
                cache is a rolling window. None: all tokens.
        """
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        size = capacity if reach is None else slots_for(reach, capacity)
        (heads, width), (value_heads, value_width) = keys, values
        return cls(
            keys=jnp.zeros((*batch, heads, size, width), dtype),
            values=jnp.zeros((*batch, value_heads, size, value_width), dtype),
            positions=empty_slots(batch, size),
            rolling=size < capacity,
        )

    def with_scales(self, dtype: str) -> "KVCache":
        """Return an empty cache like this one, with 8-bit keys and values and their scales."""
        (keys, key_scales), (values, value_scales) = (zeros_with_scales(x, dtype) for x in (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)

    def read_quantized(self) -> tuple[Array, Array, Array, Array]:
        """Return the 8-bit keys and values of all slots as stored, then their scales, all with tokens before heads."""
        assert self.key_scales is not None and self.value_scales is not None
        return (
            _swap_heads_and_tokens(index_layer(self.keys, self.layer)),
            _swap_heads_and_tokens(index_layer(self.values, self.layer)),
            index_layer(self.key_scales, self.layer).swapaxes(-2, -1),
            index_layer(self.value_scales, self.layer).swapaxes(-2, -1),
        )

    def read(
        self, dtype: jnp.dtype
    ) -> tuple[Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens]:
        """Return all keys and values in the cache, in `dtype`, and their tokens."""
        select_layer = functools.partial(index_layer, layer=self.layer)
        arrays_and_scales = (self.keys, self.key_scales), (self.values, self.value_scales)
        keys, values = (
            select_layer(rows) if scales is None else dequantize_rows(select_layer(rows), select_layer(scales), dtype)
            for rows, scales in arrays_and_scales
        )
        return _swap_heads_and_tokens(keys), _swap_heads_and_tokens(values), Tokens(select_layer(self.positions))

    @checked
    def update(
        self,
        keys: Float[Array, "*batch seq kv_heads head_dim"],
        values: Float[Array, "*batch seq kv_heads v_dim"],
        tokens: Tokens,
    ) -> tuple[
        "KVCache", Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens
    ]:
        """Store new tokens; return the cache, and all keys and values that the new tokens may see, with their
        tokens."""
        new, scales = (
            (_swap_heads_and_tokens(keys), _swap_heads_and_tokens(values)),
            (self.key_scales, self.value_scales),
        )
        (new_keys, new_values, *new_scales, positions), visible = store_tokens(
            self, (self.keys, self.values), scales, new, tokens, heads=1
        )
        new_cache = dataclasses.replace(self, keys=new_keys, values=new_values, positions=positions)
        if new_scales:
            new_cache = dataclasses.replace(new_cache, key_scales=new_scales[0], value_scales=new_scales[1])
        return new_cache, _swap_heads_and_tokens(visible[0]), _swap_heads_and_tokens(visible[1]), Tokens(visible[2])


def store_keys(
    cache: KVCache | None,
    keys: Float[Array, "*batch seq kv_heads head_dim"],
    values: Float[Array, "*batch seq kv_heads v_dim"],
    tokens: Tokens,
) -> tuple[
    KVCache | None,
    Float[Array, "*batch all kv_heads head_dim"],
    Float[Array, "*batch all kv_heads v_dim"],
    Tokens | None,
]:
    """Store new tokens; return the cache, and all keys and values that the new tokens may see, with their tokens.

    Without a cache, return None, the new keys and values, and None for their tokens.
    """
    if cache is None:
        return None, keys, values, None
    cache, all_keys, all_values, kv_tokens = cache.update(keys, values, tokens)
    return cache, all_keys.astype(keys.dtype), all_values.astype(values.dtype), kv_tokens


@checked_fields
class LatentCache(SlotCache):
    """Latents and rotated keys of past tokens, for multi-head latent attention; the latents are compressed keys and
    values."""

    latents: Num[Array, "*batch kv_seq latent"]
    """The latents of keys and values."""
    rotary_keys: Num[Array, "*batch kv_seq rope_dim"]
    """The rotated keys, which all heads share."""
    positions: Int[Array, "*batch kv_seq"]
    """The position of the token in each slot; -1 for an empty slot."""
    rolling: bool = eqx.field(static=True, default=False)
    """Whether new tokens take the slots of the oldest tokens."""
    first: Int[Array, "*batch"] | None = None
    """The first slot of a shard; None: the cache is whole."""
    capacity: int | None = eqx.field(static=True, default=None)
    """The number of slots of the whole cache, set on a shard."""
    layer: Int[Array, ""] | None = None
    """The index of the layer that reads and writes a stack's cache; None: there is no dim of layers."""
    latent_scales: Float[Array, "*batch kv_seq"] | None = None
    """Scales of 8-bit latents."""
    rotary_scales: Float[Array, "*batch kv_seq"] | None = None
    """Scales of 8-bit rotated keys."""

    def with_scales(self, dtype: str) -> "LatentCache":
        """Return an empty cache like this one, with 8-bit latents and rotated keys and their scales."""
        (latents, latent_scales), (rotary_keys, rotary_scales) = (
            zeros_with_scales(x, dtype) for x in (self.latents, self.rotary_keys)
        )
        return dataclasses.replace(
            self,
            latents=latents,
            rotary_keys=rotary_keys,
            latent_scales=latent_scales,
            rotary_scales=rotary_scales,
        )

    def read_quantized(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Return the stored 8-bit latents of all slots with their scales, and the rotated keys with their scales."""
        assert self.latent_scales is not None and self.rotary_scales is not None
        select_layer = functools.partial(index_layer, layer=self.layer)
        return (select_layer(self.latents), select_layer(self.latent_scales)), (
            select_layer(self.rotary_keys),
            select_layer(self.rotary_scales),
        )

    @checked
    def update(
        self,
        latents: Float[Array, "*batch seq latent"],
        rotary_keys: Float[Array, "*batch seq rope_dim"],
        tokens: Tokens,
    ) -> tuple["LatentCache", Float[Array, "*batch all latent"], Float[Array, "*batch all rope_dim"], Tokens]:
        """Store new tokens; return the cache, and all latents and rotated keys that they may see, with their tokens."""
        new, scales = (latents, rotary_keys), (self.latent_scales, self.rotary_scales)
        (new_latents, new_keys, *new_scales, positions), visible = store_tokens(
            self, (self.latents, self.rotary_keys), scales, new, tokens
        )
        new_cache = dataclasses.replace(self, latents=new_latents, rotary_keys=new_keys, positions=positions)
        if new_scales:
            new_cache = dataclasses.replace(new_cache, latent_scales=new_scales[0], rotary_scales=new_scales[1])
        return new_cache, visible[0], visible[1], Tokens(visible[2])


@checked_fields
class RecurrentCache(LayerCache):
    """The cache of a gated delta net or a Mamba-2, whose size does not depend on the length of its rows."""

    state: Float[Array, "*batch heads head_dim v_dim"]
    """The recurrent state, in float32 at least."""
    queries: Float[Array, "*batch kept kv_heads head_dim"]
    """Queries of the last tokens, before their convolution."""
    keys: Float[Array, "*batch kept kv_heads head_dim"]
    """Keys of the last tokens, before their convolution."""
    values: Float[Array, "*batch kept heads v_dim"]
    """Values of the last tokens, before their convolution."""
    lengths: Int[Array, "*batch"]
    """The position of each row's next token."""
    layer: Int[Array, ""] | None = None
    """The index of the layer that reads and writes a stack's cache; None: there is no dim of layers."""


@checked_fields
class ConvCache(eqx.Module):
    """The cache of a short convolution, whose size does not depend on the length of its rows.

    `inputs` are the convolution's inputs of the last tokens; `lengths` is the position of each row's next token.
    """

    inputs: Float[Array, "*batch kept mlp"]
    lengths: Int[Array, "*batch"]


def zeros_with_scales(x: Num[Array, "*dims row"], dtype: str) -> tuple[Num[Array, "*dims row"], Float[Array, "*dims"]]:
    """Return zeros of an 8-bit dtype in the shape of `x`, and a scale of zero for each row."""
    return jnp.zeros(x.shape, dtype), jnp.zeros(x.shape[:-1], jnp.float32)


def _swap_heads_and_tokens(x: Array) -> Array:
    """Swap the dims of heads and tokens."""
    return x.swapaxes(-3, -2)
