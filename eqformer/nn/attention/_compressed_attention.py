"""Attention to a window of recent tokens, and to compressed keys of all complete blocks of earlier tokens."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ...kernels import AttentionCall, causal, ChosenKeys, join_blocks, ReferenceAttention, sliding_window, split_blocks
from .._cache import check_cached, mask_overflow
from .._contracts import Mixer, MixerFacts
from .._dtype import at_least_float32, float_dtype
from .._linear import Linear, LinearMap
from .._module import ensemble, float32_field, Module
from .._norm import Norm, RMSNorm
from .._tokens import Tokens, tokens_or_default
from ._compressed_cache import CompressedCache, CompressorCache, VectorCache
from ._indexer import best_indices, IndexQueries, keep_selected
from ._rotary import Rotary
from ._token_blocks import find_block_tokens, find_ends, take_block_rows


class KeySet(NamedTuple):
    """Keys, which are values too, and their tokens; the token of a compressed key is the last token of its block."""

    vectors: Float[Array, "*batch kv_seq channels"]
    tokens: Tokens


class KeyCompressor(Module):
    """One key for each block of `block_size` tokens (DeepSeek-V4, DeepSeek-AI 2026, sections 2.3.1 and 2.3.2).

    A block holds the tokens at positions `n * block_size` to `(n + 1) * block_size - 1` of a document. Its key is the
    normalized weighted mean of its tokens' values, rotated to the block's first position. Each channel has its own
    weights: a softmax over the tokens of `gate(x) + bias`, where `bias` depends on the place in the block. With two
    `series`, blocks overlap: a mean is over the first series of values of the previous block, and over the second
    series of values of the block itself. A block has a key from its last token on. If a row begins within a document,
    means leave out the tokens before the row.
    """

    value: LinearMap
    gate: LinearMap
    norm: Norm
    rotary: Rotary
    bias: Float[Array, "block_size series entry_dim"] = float32_field()

    def __init__(
        self,
        *,
        embed: int,
        dim: int,
        block_size: int,
        series: int = 1,
        rotary: Rotary,
        norm_eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        """Initialize the maps; the bias begins at zero.

        Args:
            embed: Channels of the input.
            dim: Channels of a key, of which the last `rotary.dim` are rotated.
            block_size: Tokens of a block.
            series: Blocks over which a mean is taken, each with values and gates of its own.
            rotary: Rotary positions, whose frequencies must not depend on the length.
            norm_eps: Added to the mean square in the norm.
            key: Random key for the weights.
        """
        if block_size < 1 or series < 1 or rotary.depends_on_length:
            raise ValueError(
                f"KeyCompressor(block_size={block_size}, series={series}, rotary={rotary}): a mean is over at least "
                "one token, and keys are rotated before they are cached; give numbers of at least 1, and a rotary "
                "whose scaling does not depend on the length."
            )
        value, gate = jax.random.split(key)
        sizes = {"embed": embed, "series": series, "entry_dim": dim}
        self.value = Linear("embed -> series entry_dim", bias=False, key=value, **sizes)
        self.gate = Linear("embed -> series entry_dim", bias=False, key=gate, **sizes)
        self.bias = jnp.zeros((block_size, series, dim), jnp.float32)
        self.norm, self.rotary = RMSNorm("entry_dim", entry_dim=dim, eps=norm_eps), rotary

    def __call__(
        self, x: Float[Array, "*rows _ embed"], tokens: Tokens, cache: CompressorCache | None
    ) -> tuple[KeySet, CompressorCache | None]:
        """Return the keys of all complete blocks, and the cache with the tokens of `x`.

        Without a cache, these are the blocks in `x`, whose rows may hold several documents.
        """
        # Under a plan `x` may have only some tokens of each row, and the maps return all of them.
        products, block_size = jnp.stack([self.value(x), self.gate(x)], axis=-3), self.bias.shape[0]
        if cache is not None:
            products = cache.gathered.round(products)
        ends, positions = find_ends(tokens, block_size)
        gathered, is_known = self._gather_blocks(products, tokens, ends, positions, cache)
        vectors = self.norm(self._average(gathered, is_known).astype(x.dtype))
        vectors = rotate_last(self.rotary, vectors[..., None, :], positions + 1 - block_size)[..., 0, :]
        if cache is None:
            segments = None if tokens.segments is None else jnp.take_along_axis(tokens.segments, ends, axis=-1)
            return KeySet(vectors, Tokens(positions, segments)), None
        blocks = Tokens(jnp.where(positions >= 0, positions // block_size, -1))
        flat_products = products.reshape(*products.shape[:-3], -1)
        cache = CompressorCache(cache.gathered.store(flat_products, tokens), cache.entries.store(vectors, blocks))
        vectors, stored_blocks = cache.entries.read(vectors.dtype)
        return KeySet(vectors, Tokens(jnp.where(stored_blocks >= 0, (stored_blocks + 1) * block_size - 1, -1))), cache

    def _gather_blocks(
        self,
        products: Float[Array, "*batch seq 2 series entry_dim"],
        tokens: Tokens,
        ends: Int[Array, "*batch blocks"],
        end_positions: Int[Array, "*batch blocks"],
        cache: CompressorCache | None,
    ) -> tuple[Float[Array, "*batch blocks width 2 entry_dim"], Bool[Array, "*batch blocks width"]]:
        """Return values and gates of the `series * block_size` tokens up to each end, and whether a token is known."""
        block_size, series, dim = self.bias.shape
        rows, positions, in_call = find_block_tokens(tokens, ends, end_positions, series * block_size)

        def take_series(memory: Array, rows: Array) -> Array:
            """Return each series' values and gates at its own rows, with tokens of all series in one dim."""
            rows_by_series = [rows[..., index * block_size : (index + 1) * block_size] for index in range(series)]
            taken = [take_block_rows(memory[..., index, :], rows) for index, rows in enumerate(rows_by_series)]
            return jnp.concatenate(taken, axis=-3)

        gathered = take_series(products, rows)
        if cache is None:
            return gathered, in_call
        old, old_positions = cache.gathered.read(products.dtype)
        slots = positions % old.shape[-2]
        is_cached = (positions >= 0) & (take_block_rows(old_positions, slots) == positions)
        old = take_series(old.reshape(*old.shape[:-1], 2, series, dim), slots)
        return jnp.where(in_call[..., None, None], gathered, old), in_call | is_cached

    def _average(
        self, gathered: Float[Array, "*batch blocks width 2 entry_dim"], is_known: Bool[Array, "*batch blocks width"]
    ) -> Float[Array, "*batch blocks entry_dim"]:
        """Return the weighted means of known tokens, in float32 at least; zeros for blocks without known tokens."""
        wide, is_known = at_least_float32(gathered.dtype), is_known[..., None]
        bias = jnp.swapaxes(self.bias, 0, 1).reshape(-1, self.bias.shape[-1]).astype(wide)
        values, gates = (gathered[..., part, :].astype(wide) for part in (0, 1))
        # Blocks without known tokens have finite logits, so that their gradients are zeros.
        weights = jax.nn.softmax(jnp.where(is_known, gates + bias, jnp.finfo(wide).min), axis=-2)
        return jnp.sum(jnp.where(is_known, weights * values, 0), axis=-2)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str) -> CompressorCache:
        """Return an empty cache for rows of up to `capacity` tokens."""
        block_size, series, dim = self.bias.shape
        # Values and gates stay exact in 8-bit caches, because a rounded gate would change all channels' weights.
        gathered = VectorCache.empty(batch, capacity, 2 * series * dim, dtype, reach=series * block_size, is_exact=True)
        return CompressorCache(gathered, VectorCache.empty(batch, capacity, dim, dtype, tokens_per_slot=block_size))


def rotate_last(
    rotary: Rotary, x: Float[Array, "*batch seq heads channels"], positions: Int[Array, "*batch seq"]
) -> Float[Array, "*batch seq heads channels"]:
    """Rotate the last `rotary.dim` channels of `x`, by frequencies that do not depend on the length."""
    passing, rotated = x[..., : -rotary.dim], x[..., -rotary.dim :]
    any_length = jnp.zeros((*positions.shape[:-1], 1), jnp.int32)  # The frequencies do not depend on it.
    return jnp.concatenate([passing, rotary(rotated, positions, any_length)], axis=-1)


class EntryIndexer(Module):
    """An indexer of compressed keys: each query sees only its `top_k` best keys (DeepSeek-V4, section 2.3.1).

    The score of a key is `sum_h w_h relu(q_h . k)`, as in an `Indexer`. The small keys `k` are compressed too, by a
    `KeyCompressor` of `index_dim` channels. No gradient passes through the indexer.
    """

    compressor: KeyCompressor
    query: LinearMap
    weight: LinearMap
    top_k: int = eqx.field(static=True)

    def __init__(
        self, compressor: KeyCompressor, *, embed: int, q_latent: int, heads: int, top_k: int, key: Key[Array, ""]
    ):
        """Initialize the maps.

        Args:
            compressor: Makes a small key for each block whose compressed key may be selected.
            embed: Channels of the input.
            q_latent: Channels of the queries' latent.
            heads: Small heads.
            top_k: Compressed keys that a query sees.
            key: Random key for the weights.
        """
        if top_k < 1:
            raise ValueError(f"EntryIndexer(top_k={top_k}): a query sees at least one compressed key.")
        query, weight = jax.random.split(key)
        dim = compressor.bias.shape[-1]
        self.query = Linear(
            "q_latent -> index_heads index_dim", q_latent=q_latent, index_heads=heads, index_dim=dim, key=query
        )
        self.weight = Linear("embed -> index_heads", embed=embed, index_heads=heads, key=weight)
        self.compressor, self.top_k = compressor, top_k

    def index_queries(
        self, x: Float[Array, "*rows _ embed"], latent: Float[Array, "*batch seq q_latent"], tokens: Tokens
    ) -> IndexQueries:
        """Return the small queries, from the input and the queries' latent."""
        query, weight = rotate_last(self.compressor.rotary, self.query(latent), tokens.positions), self.weight(x)
        wide = at_least_float32(x.dtype)
        return IndexQueries(*(jax.lax.stop_gradient(array).astype(wide) for array in (query, weight)))


class IndexedKeys(NamedTuple):
    """The small queries and keys by which each query selects `top_k` compressed keys."""

    queries: IndexQueries
    keys: Float[Array, "*batch blocks index_dim"]
    top_k: int


class CompressedAttention(Mixer):
    """DeepSeek-V4's attention (DeepSeek-AI 2026, section 2.3): a window of tokens, and compressed keys of blocks.

    One head of keys, which are values too, serves all query heads. A query sees the keys of the last `window` tokens,
    its own included. With a `compressor`, it also sees the compressed keys of all blocks that are complete at its
    position; with an `indexer`, only the best of these compressed keys. Keys of both kinds share one softmax with a
    sink for each head. The last channels of queries and keys are rotated, and the last channels of the output are
    rotated back by the query's position, so that an output depends on distances only. There are `groups` groups of
    `group_heads` heads; each group has a map to `group_rank` channels, and the output is a map of all groups' channels.
    The dim `heads` counts groups, and plans split it. Tokens of a document must be in reading order.
    """

    query_down: LinearMap
    query_latent_norm: Norm
    query: LinearMap
    query_norm: Norm
    key: LinearMap
    key_norm: Norm
    output: LinearMap
    sinks: Float[Array, "heads group_heads"]
    rotary: Rotary
    compressor: KeyCompressor | None
    indexer: EntryIndexer | None
    window: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)
    group_down: LinearMap = ensemble("heads")

    def __init__(
        self,
        *,
        embed: int,
        groups: int,
        group_heads: int,
        head_dim: int,
        q_latent: int,
        group_rank: int,
        window: int,
        rotary: Rotary,
        compressor: KeyCompressor | None = None,
        indexer: EntryIndexer | None = None,
        norm_eps: float = 1e-6,
        output_std: float | None = None,
        chunk: int = 64,
        key: Key[Array, ""],
    ):
        """Initialize the maps; the sinks begin at zero.

        Args:
            embed: Channels of the input and the output.
            groups: Groups of heads.
            group_heads: Heads of a group.
            head_dim: Channels of a query and of a key, of which the last `rotary.dim` are rotated.
            q_latent: Channels of the queries' latent.
            group_rank: Channels of a group between the two maps of the output.
            window: Recent tokens that a query sees, its own included.
            rotary: Rotary positions, whose frequencies must not depend on the length.
            compressor: Makes the compressed keys, of `head_dim` channels; None: the layer attends to the window alone.
            indexer: Selects compressed keys of the compressor's blocks; None: a query sees all of them.
            norm_eps: Added to the mean square in all norms.
            output_std: The standard deviation of the output's weights; None: as for the other weights.
            chunk: Number of queries whose scores are in memory at a time.
            key: Random key for the weights.
        """
        if window < 1 or chunk < 1 or rotary.depends_on_length:
            raise ValueError(
                f"CompressedAttention(window={window}, chunk={chunk}, rotary={rotary}): a query sees its own token, "
                "and keys are rotated before they are cached; give a window and a chunk of at least 1, and a rotary "
                "whose scaling does not depend on the length."
            )
        if compressor is not None and compressor.bias.shape[-1] != head_dim:
            raise ValueError(
                f"CompressedAttention(head_dim={head_dim}, compressor=...): the compressor's keys have "
                f"{compressor.bias.shape[-1]} channels; make it with dim={head_dim}."
            )
        if indexer is not None and (compressor is None or indexer.compressor.bias.shape[0] != compressor.bias.shape[0]):
            raise ValueError(
                "CompressedAttention(indexer=...): an indexer selects compressed keys by small keys of the same "
                "blocks; give a compressor with the same block_size as the indexer's."
            )
        keys = jax.random.split(key, 5)
        heads = {"heads": groups, "group_heads": group_heads, "head_dim": head_dim}
        self.query_down = Linear("embed -> q_latent", embed=embed, q_latent=q_latent, key=keys[0])
        self.query_latent_norm = RMSNorm("q_latent", q_latent=q_latent, eps=norm_eps)
        self.query = Linear(
            "q_latent -> heads group_heads head_dim", bias=False, q_latent=q_latent, key=keys[1], **heads
        )
        self.query_norm = RMSNorm("head_dim", head_dim=head_dim, eps=norm_eps, scale=False)
        self.key = Linear("embed -> head_dim", embed=embed, head_dim=head_dim, key=keys[2])
        self.key_norm = RMSNorm("head_dim", head_dim=head_dim, eps=norm_eps)

        def group_map(key: Key[Array, ""]) -> Linear:
            sizes = {"group_heads": group_heads, "head_dim": head_dim, "group_rank": group_rank}
            return Linear("group_heads head_dim -> group_rank", bias=False, key=key, **sizes)

        self.group_down = eqx.filter_vmap(group_map)(jax.random.split(keys[3], groups))
        self.output = Linear(
            "heads group_rank -> embed", heads=groups, group_rank=group_rank, embed=embed, std=output_std, key=keys[4]
        )
        self.sinks = jnp.zeros((groups, group_heads), jnp.float32)
        self.rotary, self.compressor, self.indexer = rotary, compressor, indexer
        self.window, self.chunk = window, chunk

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: CompressedCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], CompressedCache | None]:
        """Attend among the tokens of `x` and, with a cache, to its tokens; the new tokens are stored in the cache."""
        # Every map reads `x` itself: under a plan, `x` may have only some tokens of each row, and the maps gather them.
        latent, keys = self.query_latent_norm(self.query_down(x)), self.key_norm(self.key(x))
        tokens = _tokens_of_rows(tokens_or_default(tokens, x.shape[:-1], cache), keys.shape[:-1])
        if cache is not None:
            check_cached(tokens, cache)
        query = self.query_norm(self.query(latent))
        by_group, by_head = query.shape, (*query.shape[:-3], -1, query.shape[-1])
        query = rotate_last(self.rotary, query.reshape(by_head), tokens.positions)
        keys = rotate_last(self.rotary, keys[..., None, :], tokens.positions)[..., 0, :]
        entries, index, cache = self._compress(x, latent, tokens, cache)
        past = None
        if cache is not None:
            keys, past = cache.window.round(keys), _read_past(cache.window, tokens, keys.dtype)
            cache = dataclasses.replace(cache, window=cache.window.store(keys, tokens))
        attended = self._attend(query, KeySet(keys, tokens), past, entries, index)
        for slots in jax.tree.leaves(cache, is_leaf=lambda node: isinstance(node, VectorCache)):
            attended = mask_overflow(attended, tokens, slots)
        backwards = dataclasses.replace(self.rotary, reverse=not self.rotary.reverse)
        attended = rotate_last(backwards, attended, tokens.positions).reshape(by_group)
        return self.output(_map_groups(self.group_down, attended)), cache

    def _compress(
        self,
        x: Float[Array, "*rows _ embed"],
        latent: Float[Array, "*batch seq q_latent"],
        tokens: Tokens,
        cache: CompressedCache | None,
    ) -> tuple[KeySet | None, IndexedKeys | None, CompressedCache | None]:
        """Return the compressed keys, the indexer's queries and keys (None: a query sees all keys), and the cache."""
        if self.compressor is None:
            return None, None, cache
        entries, compressor_cache = self.compressor(x, tokens, None if cache is None else cache.compressor)
        index = index_cache = None
        if self.indexer is not None:
            small, index_cache = self.indexer.compressor(x, tokens, None if cache is None else cache.index)
            if small.vectors.shape[-2] > self.indexer.top_k:
                queries = self.indexer.index_queries(x, latent, tokens)
                small_keys = jax.lax.stop_gradient(small.vectors).astype(queries.query.dtype)
                index = IndexedKeys(queries, small_keys, self.indexer.top_k)
        if cache is not None:
            cache = dataclasses.replace(cache, compressor=compressor_cache, index=index_cache)
        return entries, index, cache

    def _attend(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        new: KeySet,
        past: KeySet | None,
        entries: KeySet | None,
        index: IndexedKeys | None,
    ) -> Float[Array, "*batch seq heads head_dim"]:
        """Attend to the window of new and past keys and to compressed keys, for `chunk` queries at a time."""
        *batch, seq, _, _ = query.shape
        axis, size, before = len(batch), min(self.chunk, seq), min(self.window, seq) - 1
        # A chunk's window of new keys: the `before` keys in front of the chunk, and the chunk's own keys.
        padding = [(0, 0)] * axis + [(before, -seq % size)]
        positions, segments = new.tokens.positions, new.tokens.segments
        padded = KeySet(
            jnp.pad(new.vectors, [*padding, (0, 0)]),
            Tokens(
                jnp.pad(positions, padding, constant_values=-1),
                None if segments is None else jnp.pad(segments, padding),
            ),
        )

        def attend_chunk(
            start: Int[Array, ""] | int, queries: tuple[Array, Tokens, IndexQueries | None]
        ) -> Float[Array, "*batch chunk heads head_dim"]:
            query, tokens, index_queries = queries

            def slice_rows(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, start, before + size, axis)

            recent = jax.tree.map(slice_rows, padded)
            in_window = sliding_window(self.window)
            key_sets = [(keys.vectors, in_window(tokens, keys.tokens)) for keys in (past, recent) if keys is not None]
            if entries is not None:
                visible = causal()(tokens, entries.tokens)
                if index is not None and index_queries is not None:
                    visible = keep_selected(visible, best_indices(index_queries, index.keys, visible, index.top_k))
                key_sets.append((entries.vectors, visible))
            vectors, masks = zip(*key_sets)
            keys, visible = jnp.concatenate(vectors, -2)[..., None, :], jnp.concatenate(masks, -1)
            return ReferenceAttention()(
                AttentionCall(
                    query,
                    keys,
                    keys,
                    mask=ChosenKeys(visible),
                    tokens=tokens,
                    kv_tokens=Tokens(jnp.zeros(keys.shape[:-2], jnp.int32)),  # not read: the mask has the visible keys
                    scale=query.shape[-1] ** -0.5,
                    sinks=self.sinks.reshape(-1),
                )
            )

        queries = query, new.tokens, None if index is None else index.queries
        if seq <= size:
            return attend_chunk(0, queries)
        chunks = jax.tree.map(lambda x: split_blocks(x, axis, size), queries)
        starts = jnp.arange(-(-seq // size), dtype=jnp.int32) * size
        # The backward pass recomputes each chunk, because the scores of all chunks would be a matrix of the whole row.
        attended = jax.lax.map(jax.checkpoint(lambda chunk: attend_chunk(*chunk)), (starts, chunks))
        return join_blocks(attended, axis, seq)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> CompressedCache:
        """Return an empty cache for rows of up to `capacity` tokens.

        A rolling buffer holds the keys of a window of tokens. The compressor of the layer and the compressor of its
        indexer each have a cache with a compressed key for each block, and with values and gates of the last tokens.
        """
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        (channels,) = self.key.output_shape
        index = None if self.indexer is None else self.indexer.compressor
        return CompressedCache(
            VectorCache.empty(batch, capacity, channels, dtype, reach=self.window),
            *(part if part is None else part.init_cache(batch, capacity, dtype) for part in (self.compressor, index)),
        )

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the groups, with the operations of attention to a full window."""
        heads, group_heads, channels = self.query.output_shape
        return MixerFacts(True, operations=4 * self.window * heads * group_heads * channels)


def _tokens_of_rows(tokens: Tokens, shape: tuple[int, ...]) -> Tokens:
    """Return the positions and segments of the tokens, with the dims of `shape`."""
    positions, segments = tokens.positions, tokens.segments
    segments = None if segments is None else jnp.broadcast_to(segments, shape)
    return Tokens(jnp.broadcast_to(positions, shape), segments)


def _read_past(window: VectorCache, tokens: Tokens, dtype: jnp.dtype) -> KeySet:
    """Return the cached keys of positions before these tokens; later keys in the cache were left by a rollback."""
    vectors, positions = window.read(dtype)
    new = jnp.where(tokens.positions >= 0, tokens.positions, jnp.iinfo(jnp.int32).max)
    first = jnp.min(new, axis=-1, keepdims=True)
    return KeySet(vectors, Tokens(jnp.where(positions < first, positions, -1)))


def _map_groups(
    maps: LinearMap, attended: Float[Array, "*batch seq heads group_heads head_dim"]
) -> Float[Array, "*batch seq heads group_rank"]:
    """Apply the map of each group to its heads."""

    def map_group(group_map: LinearMap, x: Array) -> Array:
        return group_map(x)

    return eqx.filter_vmap(map_group, in_axes=(eqx.if_array(0), -3), out_axes=-2)(maps, attended)
