"""Attention to blocks of keys that an indexer selects, for each query and key head."""

from typing import Any

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ...kernels import AttentionCall, ChosenKeys, Mask, Operation, ReferenceAttention
from .._contracts import MixerFacts
from .._linear import Linear
from .._norm import Norm
from .._tokens import Tokens
from ._indexed_attention import IndexedAttention
from ._indexer import IndexQueries, InputIndexer, keep_selected, map_query_chunks
from ._rotary import Rotary


class BlockIndexer(InputIndexer):
    """The indexer of MiniMax-M3 (MiniMax 2026): for each key head, a query sees only its `top_k` best blocks of keys.

    A block holds the tokens at positions `n * block` to `(n + 1) * block - 1` of a document. There is a small query `q`
    for each key head, and all heads share the small keys `k`. A block's score for the query at `t` and key head `h` is
    the largest `q_th . k_s` over the keys of the block that the query may see. The `local` last blocks, including the
    query's own block, are always among the `top_k`. Blocks are numbered modulo the largest number of blocks that may
    hold tokens of one row, and if scores are equal, the block of the lowest number is taken. No gradient passes through
    the indexer, so training the indexer needs a loss of its own.
    """

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

    def index_keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq index_dim"]:
        """Return the small keys of the tokens of `x`; the layer caches these keys."""
        return self.rotary(self.key_norm(self.key(x))[..., None, :], tokens.positions)[..., 0, :]

    def select_keys(
        self,
        queries: IndexQueries,
        keys: Float[Array, "*batch kv_seq index_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
    ) -> "BlockSelection | None":
        """Return the `top_k` best blocks of each query and key head; None if all keys lie in `top_k` blocks or fewer.

        The scores of `chunk` queries are in memory at a time.

        Args:
            queries: The small queries.
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
        query, keys = queries.query, jax.lax.stop_gradient(keys).astype(queries.query.dtype)
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
        if call.sinks is not None or call.has_bias:
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


class BlockIndexedAttention(IndexedAttention):
    """An `IndexedAttention` whose `BlockIndexer` selects blocks of keys for each key head (MiniMax-M3)."""

    indexer: BlockIndexer

    def __init__(self, indexer: BlockIndexer, *, embed: int, heads: int, key: Key[Array, ""], **options: Any):
        """Initialize the projections.

        Args:
            indexer: Selects blocks, for as many key heads as the attention has.
            embed: Channels of the input and the output.
            heads: Heads of queries.
            key: Random key for the weights.
            **options: Further arguments of `Attention`, except the mask, which is causal.
        """
        super().__init__(indexer, embed=embed, heads=heads, key=key, **options)
        kv_heads, (index_heads, _) = self.key.output_shape[0], indexer.query.output_shape
        if index_heads != kv_heads:
            raise ValueError(
                f"BlockIndexedAttention(kv_heads={kv_heads}, indexer=...): the indexer selects blocks for "
                f"{index_heads} key heads; make it with kv_heads={kv_heads}."
            )

    def _check_scores(self) -> None:
        """Raise a `ValueError` for scores that attention to selected blocks cannot compute."""
        if self.scores.has_bias or self.scores.sinks is not None:
            raise ValueError(
                f"BlockIndexedAttention(scores={self.scores}): attention to selected blocks has no sinks and no bias; "
                "leave them out of the scores."
            )

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads, with the operations of attention to `top_k` full blocks.

        The scores of the indexer are not counted. Each query is compared with all earlier keys, so rows are not split.
        """
        heads, channels = self.query.output_shape
        selected = self.indexer.top_k * self.indexer.block
        return MixerFacts(True, operations=4 * selected * heads * channels)
