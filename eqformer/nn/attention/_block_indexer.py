"""Attention to blocks of keys that an indexer selects, for each query and key head."""

from collections.abc import Sequence
from typing import Any

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ...kernels import AttentionCall, causal, ChosenKeys, Mask, Operation, ReferenceAttention
from .._cache import KVCache
from .._contracts import MixerFacts
from .._dtype import at_least_float32
from .._linear import Linear, LinearMap
from .._module import Module
from .._norm import Norm
from .._tokens import answer_request, SharedValue, ShareRequest, Tokens, tokens_or_default, unwrap_request
from ._attention import Attention
from ._compressed_cache import VectorCache
from ._indexer import keep_selected, map_query_chunks
from ._rotary import Rotary
from ._scores import Scores


class BlockIndexer(Module):
    """The indexer of MiniMax-M3 (MiniMax 2026): for each key head, a query sees only its `top_k` best blocks of keys.

    A block holds the tokens at positions `n * block` to `(n + 1) * block - 1` of a document. There is a small query `q`
    for each key head, and all heads share the small keys `k`. A block's score for the query at `t` and key head `h` is
    the largest `q_th . k_s` over the keys of the block that the query may see. The `local` last blocks, including the
    query's own block, are always among the `top_k`. If scores are equal, the block of the lowest index is taken. The
    index of block `n` is `n` modulo the largest number of blocks that may hold tokens of one row. No gradient passes
    through the indexer, so training the indexer needs a loss of its own.
    """

    query: LinearMap
    query_norm: Norm
    key: LinearMap
    key_norm: Norm
    rotary: Rotary
    block: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)
    local: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        kv_heads: int,
        dim: int,
        block: int,
        top_k: int,
        local: int = 1,
        query_norm: Norm,
        key_norm: Norm,
        rotary: Rotary,
        chunk: int = 64,
        key: Key[Array, ""],
    ):
        """Initialize the maps; norms and rotary positions are passed as instances.

        Args:
            embed: Channels of the input.
            kv_heads: Key heads of the attention, each with a small query.
            dim: Channels of a small query or key, of which the first `rotary.dim` are rotated.
            block: Tokens of a block.
            top_k: Blocks that a query sees.
            local: Last blocks that a query always sees, among the `top_k`.
            query_norm: The norm of the small queries, over a dim `index_dim` of size `dim`.
            key_norm: The norm of the small keys, over the same dim.
            rotary: Rotary positions, whose frequencies must not depend on the length.
            chunk: Number of queries whose scores are in memory at a time.
            key: Random key for the weights.
        """
        if block < 1 or not 0 <= local <= top_k or top_k < 1 or chunk < 1:
            raise ValueError(
                f"BlockIndexer(block={block}, top_k={top_k}, local={local}, chunk={chunk}): a query sees at least one "
                "block of at least one token, and its local blocks are among these; give numbers of at least 1, and "
                "local from 0 to top_k."
            )
        if rotary.depends_on_length or rotary.dim > dim:
            raise ValueError(
                f"BlockIndexer(dim={dim}, rotary={rotary}): the first channels of small keys are rotated before the "
                "keys are cached; give a rotary of at most dim channels, whose scaling does not depend on the length."
            )
        query, small_key = jax.random.split(key)
        self.query = Linear("embed -> kv_heads index_dim", embed=embed, kv_heads=kv_heads, index_dim=dim, key=query)
        self.key = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=small_key)
        self.query_norm, self.key_norm, self.rotary = query_norm, key_norm, rotary
        self.block, self.top_k, self.local, self.chunk = block, top_k, local, chunk

    def index_keys(self, x: Float[Array, "*rows _ embed"], tokens: Tokens) -> Float[Array, "*batch seq index_dim"]:
        """Return the small keys of the tokens of `x`; the layer caches these keys."""
        return self.rotary(self.key_norm(self.key(x))[..., None, :], tokens.positions)[..., 0, :]

    def select_blocks(
        self,
        x: Float[Array, "*rows _ embed"],
        keys: Float[Array, "*batch kv_seq index_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
    ) -> "BlockSelection | None":
        """Return the `top_k` best blocks of each query and key head; None if all keys lie in `top_k` blocks or fewer.

        The scores of `chunk` queries are in memory at a time.

        Args:
            x: The input.
            keys: The small keys.
            mask: The keys that a query may see; other keys do not count for the scores of their blocks.
            tokens: The tokens of the queries.
            kv_tokens: The tokens of the keys.
        """
        # A row may begin in the middle of a block. Its keys may therefore lie in one block more than they would fill.
        # The index of a block is taken modulo this count, so a document's blocks share no index.
        count = -(-keys.shape[-2] // self.block) + 1
        if count <= self.top_k:
            return None
        query = self.rotary(self.query_norm(self.query(x)), tokens.positions)
        wide = at_least_float32(query.dtype)
        query, keys = (jax.lax.stop_gradient(array).astype(wide) for array in (query, keys))
        key_blocks = jnp.broadcast_to(kv_tokens.positions, keys.shape[:-1]) // self.block % count

        def best_blocks(tokens: Tokens, arrays: tuple[Array]) -> Int[Array, "*batch chunk kv_heads top_k"]:
            (query,) = arrays
            scores = jnp.einsum("...qhd,...kd->...hqk", query, keys)
            scores = jnp.where(mask(tokens, kv_tokens)[..., None, :, :], scores, -jnp.inf)
            block_scores = _max_by_block(scores, key_blocks, count)
            distances = (tokens.positions[..., None] // self.block - jnp.arange(count, dtype=jnp.int32)) % count
            is_local = (distances < self.local)[..., None, :, :] & (block_scores > -jnp.inf)
            return jnp.moveaxis(jax.lax.top_k(jnp.where(is_local, jnp.inf, block_scores), self.top_k)[1], -3, -2)

        blocks = map_query_chunks(best_blocks, tokens, query.shape[:-2], (query,), self.chunk)
        return BlockSelection(blocks, key_blocks, count, self.chunk)


def _max_by_block(
    scores: Float[Array, "*batch kv_heads seq kv_seq"], key_blocks: Int[Array, "*batch kv_seq"], count: int
) -> Float[Array, "*batch kv_heads seq blocks"]:
    """Return the largest score of each block's keys; minus infinity for blocks without visible keys."""

    def max_in_row(scores: Float[Array, "kv_seq pairs"], blocks: Int[Array, "kv_seq"]) -> Float[Array, "blocks pairs"]:
        return jax.ops.segment_max(scores, blocks, count)

    kv_seq, (*batch, heads, seq) = scores.shape[-1], scores.shape[:-1]
    rows = jnp.swapaxes(scores.reshape(-1, heads * seq, kv_seq), -2, -1)
    best = jax.vmap(max_in_row)(rows, key_blocks.reshape(-1, kv_seq))
    return jnp.swapaxes(best, -2, -1).reshape(*batch, heads, seq, count)


class BlockSelection(Operation[AttentionCall, Array]):
    """The attention to the blocks of keys that an indexer selected for each query and key head.

    A query sees a key of a selected block only if the mask shows it too.
    """

    blocks: Int[Array, "*batch seq kv_heads top_k"]
    """The indices of the selected blocks."""
    key_blocks: Int[Array, "*batch kv_seq"]
    """The index of each key's block."""
    count: int = eqx.field(static=True)
    """The number of different block indices."""
    chunk: int = eqx.field(static=True)
    """Number of queries whose scores are in memory at a time."""

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why the call cannot be computed, or None if it can."""
        if call.sinks is not None or call.bias is not None:
            return "attention to selected blocks has no sinks and no bias"
        return None

    def __call__(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Attend to the selected blocks, for `chunk` queries at a time, in memory linear in the row."""
        if (reason := self.supports(call)) is not None:
            raise ValueError(f"BlockSelection(call): {reason}; leave them out of the scores.")
        kv_heads = call.key.shape[-2]
        # A key head and its query heads become a row of their own, because each key head has its own visible keys.
        key, value = (jnp.moveaxis(x, -2, -3)[..., None, :] for x in (call.key, call.value))

        def attend_chunk(tokens: Tokens, arrays: tuple[Array, Array]) -> Float[Array, "*batch chunk heads v_dim"]:
            query, blocks = arrays
            is_selected = keep_selected(jnp.ones((*blocks.shape[:-1], self.count), bool), blocks)
            is_selected = jnp.moveaxis(is_selected, -2, -3)
            visible = jnp.take_along_axis(is_selected, self.key_blocks[..., None, None, :], -1)
            visible &= call.mask(tokens, call.key_tokens)[..., None, :, :]
            attended = ReferenceAttention()(
                AttentionCall(
                    einops.rearrange(
                        query, "... seq (kv_heads group) dim -> ... kv_heads seq group dim", kv_heads=kv_heads
                    ),
                    key,
                    value,
                    mask=ChosenKeys(visible),
                    tokens=tokens,
                    kv_tokens=Tokens(jnp.zeros(key.shape[:-2], jnp.int32)),  # not read: the mask holds the visible keys
                    scale=call.scale,
                    softcap=call.softcap,
                )
            )
            return einops.rearrange(attended, "... kv_heads seq group dim -> ... seq (kv_heads group) dim")

        tokens = Tokens(call.tokens.positions, call.tokens.segments)
        return map_query_chunks(attend_chunk, tokens, call.query.shape[:-2], (call.query, self.blocks), self.chunk)


class BlockIndexedCache(eqx.Module):
    """The cache of a `BlockIndexedAttention`, which consists of caches with slots."""

    attention: KVCache
    """Keys and values."""
    index: VectorCache
    """The indexer's small keys."""


class BlockIndexedAttention(Attention):
    """An `Attention` to the blocks of keys that a `BlockIndexer` selects for each key head (MiniMax-M3)."""

    indexer: BlockIndexer

    def __init__(
        self,
        indexer: BlockIndexer,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        scores: Scores | None = None,
        key: Key[Array, ""],
        **options: Any,
    ):
        """Initialize the projections.

        Args:
            indexer: Selects blocks, for as many key heads as the attention has.
            embed: Channels of the input and the output.
            heads: Heads of queries.
            head_dim: Channels of a head.
            kv_heads: Heads of keys and values, a divisor of `heads`; None: as many as `heads`.
            scores: The scale, temperature and softcap of the scores; None: the scale `head_dim^-0.5` alone.
            key: Random key for the weights.
            **options: Further arguments of `Attention`, except the mask, which is causal.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if (index_heads := indexer.query.output_shape[0]) != kv_heads:
            raise ValueError(
                f"BlockIndexedAttention(kv_heads={kv_heads}, indexer=...): the indexer selects blocks for "
                f"{index_heads} key heads; make it with kv_heads={kv_heads}."
            )
        if scores is not None and (scores.bias or scores.sinks is not None):
            raise ValueError(
                f"BlockIndexedAttention(scores={scores}): attention to selected blocks has no sinks and no bias; leave "
                "them out of the scores."
            )
        sizes = {"embed": embed, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}
        super().__init__(**sizes, scores=scores, mask=causal(), key=key, **options)
        self.indexer = indexer

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: BlockIndexedCache | ShareRequest | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], BlockIndexedCache | SharedValue | None]:
        """Attend among the tokens of `x` and, with a cache, to its tokens; the new tokens are stored in the cache."""
        is_shared, cache = unwrap_request(cache)
        tokens = kv_tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        index_keys, index_cache = self.indexer.index_keys(x, tokens), None
        if cache is not None:
            index_cache = cache.index.store(index_keys, tokens)
            index_keys, positions = index_cache.read(index_keys.dtype)
            kv_tokens = Tokens(positions)
        selection = self.indexer.select_blocks(x, index_keys, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)
        core = self.core if selection is None else selection
        attended, shared, kv_cache = self._attend(core, x, tokens, None if cache is None else cache.attention)
        if kv_cache is not None and index_cache is not None:
            cache = BlockIndexedCache(kv_cache, index_cache)
        return attended, answer_request(is_shared, shared, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> BlockIndexedCache:
        """Return an empty cache for rows of up to `capacity` tokens."""
        attention = super().init_cache(batch, capacity, dtype)
        (channels,) = self.indexer.key.output_shape
        return BlockIndexedCache(attention, VectorCache.empty(batch, capacity, channels, attention.keys.dtype.name))

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads, with the operations of attention to `top_k` full blocks.

        The scores of the indexer are not counted. Each query is compared with all earlier keys, so rows are not split.
        """
        heads, channels = self.query.output_shape
        selected = self.indexer.top_k * self.indexer.block
        return MixerFacts(True, operations=4 * selected * heads * channels)
