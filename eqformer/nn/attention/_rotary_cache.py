"""Rotary positions of cached keys: keys are rotated once, again when frequencies change, or whenever they are read."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from .._cache import capacity_of, index_layer, KVCache, update_layer
from .._dtype import dequantize_rows, quantize_rows
from .._tokens import document_lengths, Tokens
from ._rotary import PositionEncoding, Rotary


class Rotation(eqx.Module):
    """The position encoding of one call, applied before keys are cached or, if `on_read`, after they are read."""

    encoding: PositionEncoding | None
    """The encoding; None: queries and keys are not encoded."""
    tokens: Tokens
    """The tokens of the queries and of the new keys."""
    lengths: Int[Array, "*batch #seq"] | None = None
    """The lengths of the tokens' documents, if the encoding depends on them."""
    on_read: bool = eqx.field(static=True, default=False)
    """Whether the cache holds keys without positions, so that each call encodes all keys that it reads."""

    def before_cache(
        self, query: Float[Array, "*batch seq heads head_dim"], key: Float[Array, "*batch seq kv_heads head_dim"]
    ) -> tuple[Float[Array, "*batch seq heads head_dim"], Float[Array, "*batch seq kv_heads head_dim"]]:
        """Encode queries and new keys, unless keys are encoded when they are read."""
        if self.encoding is None or self.on_read:
            return query, key
        positions = self.tokens.positions
        return self.encoding.encode(query, key, positions, positions, self.lengths)

    def after_cache(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        kv_tokens: Tokens | None,
    ) -> tuple[Float[Array, "*batch seq heads head_dim"], Float[Array, "*batch kv_seq kv_heads head_dim"]]:
        """Encode queries and all keys read from the cache, if the cache holds keys without positions."""
        if self.encoding is None or not self.on_read or kv_tokens is None:
            return query, key
        lengths = document_lengths(self.tokens, kv_tokens)
        return self.encoding.encode(query, key, self.tokens.positions, kv_tokens.positions, lengths)


def start_rotation(
    encoding: PositionEncoding | None, tokens: Tokens, cache: KVCache | None
) -> tuple[Rotation, KVCache | None]:
    """Return the rotation of a call, and the cache with its keys rotated by the frequencies of the call.

    A row's frequencies may depend on its length after the call.

    - If frequencies do not depend on the length, or are the same for all lengths that fit in the cache, keys are
      rotated once, before they are cached.
    - If lengths share a few sets of frequencies (`Rotary.can_rerotate`), a row's cached keys are rotated again in the
      call whose tokens take the row to another set.
    - Otherwise further tokens may change the frequencies of earlier keys. So keys are cached without positions, and
      rotated when they are read.
    """
    encoding = None if encoding is None else encoding.for_tokens(tokens)
    if encoding is None or not encoding.depends_on_length:
        return Rotation(encoding, tokens), cache
    if cache is None:
        return Rotation(encoding, tokens, document_lengths(tokens)), None
    if cache.rotary_lengths is not None:
        assert isinstance(encoding, Rotary)
        cache, lengths = rerotate_cache(encoding, cache, tokens)
        return Rotation(encoding, tokens, lengths), cache
    if cache.rolling or encoding.changes_within(capacity_of(cache)):
        return Rotation(encoding, tokens, on_read=True), cache
    # All lengths that fit in the cache share the frequencies of the shortest length.
    return Rotation(encoding, tokens, jnp.zeros_like(tokens.positions[..., :1])), cache


class CachedKeys(NamedTuple):
    """The keys of a cache, and their scales if the keys have 8 bits."""

    keys: Num[Array, "*batch kv_heads kv_seq head_dim"]
    scales: Float[Array, "*batch kv_heads kv_seq"] | None


_BLOCK = 1024  # Maximum number of slots that are rotated again at once.


def rerotate_cache(rotary: Rotary, cache: KVCache, tokens: Tokens) -> tuple[KVCache, Int[Array, "*batch 1"]]:
    """Rotate the cached keys of each row whose set of frequencies changes with the new tokens.

    Return the new cache and, for each row, the length that stands for the row's set of frequencies
    (`RotaryScaling.representative_length`). A row without new tokens keeps its length. Most calls change no row's
    frequencies, and write no keys.
    """
    assert cache.rotary_lengths is not None and rotary.scaling is not None
    layer, old_lengths = cache.layer, index_layer(cache.rotary_lengths, cache.layer)
    lengths = rotary.scaling.representative_length(jnp.max(document_lengths(tokens), axis=-1))
    new_lengths = jnp.where(jnp.any(tokens.positions >= 0, axis=-1), lengths, old_lengths)
    cached = CachedKeys(cache.keys, cache.key_scales)
    positions = index_layer(cache.positions, layer)
    keys, scales = _rerotate_by_blocks(rotary, cached, positions, (old_lengths, new_lengths), layer)
    rotary_lengths = update_layer(cache.rotary_lengths, new_lengths, layer)
    cache = dataclasses.replace(cache, keys=keys, key_scales=scales, rotary_lengths=rotary_lengths)
    return cache, new_lengths[..., None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rerotate_by_blocks(
    rotary: Rotary,
    cached: CachedKeys,
    positions: Int[Array, "*batch kv_seq"],
    lengths: tuple[Int[Array, "*batch"], Int[Array, "*batch"]],
    layer: Int[Array, ""] | None,
) -> CachedKeys:
    """Rotate the keys of rows whose old and new lengths differ, block by block; most calls have no such rows."""
    (*_, heads, kv_seq, _), layers = cached.keys.shape, 1 if layer is None else len(cached.keys)
    flat = jax.tree.map(lambda x: x.reshape(layers, -1, heads, kv_seq, *x.shape[cached.keys.ndim - 1 :]), cached)
    flat_positions = positions.reshape(-1, kv_seq)
    old_lengths, new_lengths = lengths[0].reshape(-1), lengths[1].reshape(-1)
    size = max(size for size in range(1, min(kv_seq, _BLOCK) + 1) if kv_seq % size == 0)
    # The order puts the rows to rotate first.
    blocks, row_order = kv_seq // size, jnp.argsort(old_lengths == new_lengths, stable=True).astype(jnp.int32)

    def rerotate_block(index: Int[Array, ""], flat: CachedKeys) -> CachedKeys:
        row, start, zero = row_order[index // blocks], index % blocks * size, jnp.zeros((), jnp.int32)

        def index_of(x: Array) -> tuple[Array | int, ...]:
            return (zero if layer is None else layer, row, zero, start, *[zero] * (x.ndim - 4))

        def take_block(x: Array) -> Array:
            return jax.lax.dynamic_slice(x, index_of(x), (1, 1, heads, size, *x.shape[4:]))[0]

        block_positions = jax.lax.dynamic_slice(flat_positions, (row, start), (1, size))
        block = jax.tree.map(take_block, flat)
        block_lengths = old_lengths[row, None, None], new_lengths[row, None, None]
        rerotated = _rerotate(rotary, block, block_positions, block_lengths)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y[None], index_of(x)), flat, rerotated)

    changed_rows = jnp.sum(old_lengths != new_lengths, dtype=jnp.int32)
    rerotated = jax.lax.fori_loop(0, changed_rows * blocks, rerotate_block, flat)
    return jax.tree.map(lambda x, y: x.reshape(y.shape), rerotated, cached)


@_rerotate_by_blocks.defjvp
def _rerotate_jvp(rotary: Rotary, primals: tuple, tangents: tuple) -> tuple[CachedKeys, CachedKeys]:
    """Differentiate a rotation of all rows at once, because a loop of unknown length has no reverse-mode derivative."""

    def rerotate_rows(
        cached: CachedKeys,
        positions: Int[Array, "*batch kv_seq"],
        lengths: tuple[Int[Array, "*batch"], Int[Array, "*batch"]],
        layer: Int[Array, ""] | None,
    ) -> CachedKeys:
        old_lengths, new_lengths = (x[..., None] for x in lengths)
        keys_of_layer = jax.tree.map(lambda x: index_layer(x, layer), cached)
        rerotated = _rerotate(rotary, keys_of_layer, positions, (old_lengths, new_lengths))

        def replace_changed(old: Array, new: Array, all_layers: Array) -> Array:
            is_unchanged = jax.lax.expand_dims(lengths[0] == lengths[1], range(old_lengths.ndim - 1, old.ndim))
            return update_layer(all_layers, jnp.where(is_unchanged, old, new), layer)

        return jax.tree.map(replace_changed, keys_of_layer, rerotated, cached)

    return jax.jvp(rerotate_rows, primals, tangents)


def _rerotate(
    rotary: Rotary,
    cached: CachedKeys,
    positions: Int[Array, "*batch kv_seq"],
    lengths: tuple[Int[Array, "*batch 1"], Int[Array, "*batch 1"]],
) -> CachedKeys:
    """Rotate cached keys from the frequencies of `lengths[0]` to the frequencies of `lengths[1]`; requantize 8-bit
    keys."""
    keys, scales = cached
    keys = keys if scales is None else dequantize_rows(keys, scales, scales.dtype)
    rerotated = rotary.rerotate(keys.swapaxes(-3, -2), positions, *lengths).swapaxes(-3, -2)
    if scales is None:
        return CachedKeys(rerotated, None)
    return CachedKeys(*quantize_rows(rerotated, cached.keys.dtype.name))
