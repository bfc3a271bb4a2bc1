"""The caches of `CompressedAttention`: vectors of recent tokens, and compressed keys of blocks of tokens."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from ..._annotation_checks import checked, checked_fields
from .._cache import capacity_of, empty_slots, index_layer, SlotCache, slots_for, store_slots, zeros_with_scales
from .._dtype import dequantize_rows, quantize_rows
from .._tokens import Tokens


@checked_fields
class VectorCache(SlotCache):
    """Cache with one vector per slot, for a token or for a block of `tokens_per_slot` tokens.

    The slot of a block is the block's index in its document, and `positions` then holds indices of blocks.
    """

    vectors: Num[Array, "*batch kv_seq latent"]
    """The vectors."""
    positions: Int[Array, "*batch kv_seq"]
    """The position of the token, or the index of the block, in each slot; -1 for an empty slot."""
    rolling: bool = eqx.field(static=True, default=False)
    """Whether new tokens take the slots of the oldest tokens."""
    first: Int[Array, "*batch"] | None = None
    """The first slot of a shard; None: the cache is whole."""
    capacity: int | None = eqx.field(static=True, default=None)
    """The number of slots of the whole cache, set on a shard."""
    layer: Int[Array, ""] | None = None
    """The index of the layer that reads and writes a stack's cache; None: there is no dim of layers."""
    tokens_per_slot: int = eqx.field(static=True, default=1)
    """The number of tokens that a slot's vector stands for."""
    is_exact: bool = eqx.field(static=True, default=False)
    """Whether the vectors are never rounded to 8 bits."""
    scales: Float[Array, "*batch kv_seq"] | None = None
    """Scales of 8-bit vectors."""

    @classmethod
    def empty(
        cls,
        batch: Sequence[int],
        capacity: int,
        channels: int,
        dtype: str,
        *,
        reach: int | None = None,
        tokens_per_slot: int = 1,
        is_exact: bool = False,
    ) -> "VectorCache":
        """Return an empty cache.

        Args:
            batch: Sizes of the batch dims.
            capacity: Maximum number of tokens of a row.
            channels: Channels of a vector.
            dtype: Float dtype of the vectors.
            reach: Number of last tokens that are read. If it is less than `capacity`, the cache is a rolling buffer.
                None: all tokens.
            tokens_per_slot: The number of tokens that a slot's vector stands for.
            is_exact: Whether the vectors are never rounded to 8 bits.
        """
        size = -(-capacity // tokens_per_slot) if reach is None else slots_for(reach, capacity)
        return cls(
            vectors=jnp.zeros((*batch, size, channels), dtype),
            positions=empty_slots(batch, size),
            rolling=reach is not None and size < capacity,
            tokens_per_slot=tokens_per_slot,
            is_exact=is_exact,
        )

    @property
    def longest_row(self) -> int | None:
        """The length in tokens of the longest row that fits; None for a rolling cache, which serves rows of any
        length."""
        return None if self.rolling else capacity_of(self) * self.tokens_per_slot

    def with_scales(self, dtype: str) -> "VectorCache":
        """Return an empty cache like this one, with 8-bit vectors and their scales, unless it `is_exact`."""
        if self.is_exact:
            return self
        vectors, scales = zeros_with_scales(self.vectors, dtype)
        return dataclasses.replace(self, vectors=vectors, scales=scales)

    def round(self, vectors: Float[Array, "*batch seq latent"]) -> Float[Array, "*batch seq latent"]:
        """Return vectors as they would be read after they are stored, in their own dtype."""
        if self.scales is None:
            return vectors.astype(self.vectors.dtype).astype(vectors.dtype)
        return dequantize_rows(*quantize_rows(vectors, self.vectors.dtype.name), vectors.dtype)

    def read(self, dtype: jnp.dtype) -> tuple[Float[Array, "*batch kv_seq latent"], Int[Array, "*batch kv_seq"]]:
        """Return all vectors in the cache, in `dtype`, and their positions."""
        vectors, positions = (index_layer(x, self.layer) for x in (self.vectors, self.positions))
        if self.scales is None:
            return vectors.astype(dtype), positions
        return dequantize_rows(vectors, index_layer(self.scales, self.layer), dtype), positions

    @checked
    def store(self, vectors: Float[Array, "*batch seq latent"], tokens: Tokens) -> "VectorCache":
        """Return the cache with new vectors in the slots of the tokens' positions; padding is not stored."""
        if self.scales is None:
            (new_vectors, positions), _ = store_slots((self.vectors,), self, (vectors,), tokens)
            return dataclasses.replace(self, vectors=new_vectors, positions=positions)
        rounded = quantize_rows(vectors, self.vectors.dtype.name)
        (new_vectors, scales, positions), _ = store_slots((self.vectors, self.scales), self, rounded, tokens)
        return dataclasses.replace(self, vectors=new_vectors, scales=scales, positions=positions)


class CompressorCache(eqx.Module):
    """The cache of a `KeyCompressor`."""

    gathered: VectorCache
    """Values and gates of the last tokens, whose blocks may not be complete yet."""
    entries: VectorCache
    """The keys of complete blocks."""


class CompressedCache(eqx.Module):
    """The cache of a `CompressedAttention`, which consists of caches with slots."""

    window: VectorCache
    """The keys of the last tokens."""
    compressor: CompressorCache | None
    """The cache of the layer's compressor."""
    index: CompressorCache | None
    """The cache of the indexer's compressor."""
