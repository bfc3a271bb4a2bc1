"""Sparse attention over pools: each query sees the tokens of its best pools, and of its own unfinished pool."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ...kernels import Mask, TokenPositions
from .._dtype import at_least_float32
from .._linear import Linear, LinearMap
from .._norm import LayerNorm
from .._tokens import Tokens
from ._indexer import best_indices, IndexQueries, keep_selected, KeyIndexer, map_query_chunks, SelectedKeys
from ._token_blocks import completes_block, find_block_tokens, find_ends, take_block_rows


class PooledIndexer(KeyIndexer):
    """The indexer of GLM-5.3-Flash (GLM team 2026): each query sees the tokens of its `top_k` best pools of keys.

    A pool holds the `rate` tokens at positions `n * rate` to `(n + 1) * rate - 1` of a document. A query may select a
    pool if it sees the pool's last token. While its own pool is unfinished, it also sees the tokens of that pool. A
    pool is scored as a key is by an `Indexer`: `sum_h w_h relu(q_h . k)`, up to a constant factor, where `k` is the
    weighted mean of the small keys (index keys) of the pool's tokens. Each channel has its own weights: the softmax of
    `gate(x) + bias` over the pool's tokens, where `bias` depends on the place in the pool. The indexer has no rotary
    positions. If scores are equal, the first pool is taken. If a row begins within a pool, the mean is that of the
    tokens that are in the row. No gradient passes through the indexer, so it would need a loss of its own in training.
    """

    query: LinearMap
    key: LinearMap
    key_norm: LayerNorm
    gate: LinearMap
    weight: LinearMap
    bias: Float[Array, "rate index_dim"]
    top_k: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        q_latent: int,
        heads: int,
        dim: int,
        rate: int,
        top_k: int,
        chunk: int = 64,
        norm_eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        """Initialize the maps; the bias begins at zero.

        Args:
            embed: Channels of the input.
            q_latent: Channels of the queries' latent.
            heads: Small heads.
            dim: Channels of a small head.
            rate: Tokens of a pool.
            top_k: The number of pools that a query selects.
            chunk: Queries whose scores are in memory at a time.
            norm_eps: Added to the variance of the small keys.
            key: For the weights.
        """
        if rate < 1 or top_k < 1:
            raise ValueError(
                f"PooledIndexer(rate={rate}, top_k={top_k}): a query sees at least one pool of at least one token; "
                "give numbers of at least 1."
            )
        keys = jax.random.split(key, 4)
        self.query = Linear(
            "q_latent -> index_heads index_dim", q_latent=q_latent, index_heads=heads, index_dim=dim, key=keys[0]
        )
        self.key = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=keys[1])
        self.gate = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=keys[2])
        self.weight = Linear("embed -> index_heads", embed=embed, index_heads=heads, key=keys[3])
        self.key_norm = LayerNorm("index_dim", index_dim=dim, eps=norm_eps)
        self.bias = jnp.zeros((rate, dim), jnp.float32)
        self.top_k, self.chunk = top_k, chunk

    @property
    def key_channels(self) -> int:
        """The channels of a small key and of its gate."""
        return 2 * self.bias.shape[-1]

    def index_keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq _"]:
        """Return each token's small key and gate, joined along the channels; both are cached."""
        return jnp.concatenate([self.key_norm(self.key(x)), self.gate(x)], -1)

    def index_queries(
        self, x: Float[Array, "*batch _ embed"], latent: Float[Array, "*batch seq q_latent"], tokens: Tokens
    ) -> IndexQueries:
        """Return the small queries, from the input and the queries' latent."""
        dtype = at_least_float32(x.dtype)
        arrays = self.query(latent), self.weight(x)
        return IndexQueries(*(jax.lax.stop_gradient(array).astype(dtype) for array in arrays))

    def select_keys(
        self,
        queries: IndexQueries,
        keys: Float[Array, "*batch kv_seq _"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
    ) -> "PoolSelection | None":
        """Return the `top_k` best pools of each query; None if the row has room for at most `top_k` pools.

        Pools whose last token `mask` shows come first. If it shows fewer, others are chosen too, but the mask hides
        their tokens.

        The scores of `chunk` queries are in memory at a time.

        Args:
            queries: The small queries.
            keys: The small keys and their gates.
            mask: The keys that a query may see.
            tokens: The tokens of the queries.
            kv_tokens: The tokens of the keys; those of a document are in the order of their positions.
        """
        longest = jnp.iinfo(jnp.int32).max
        if mask.reach(longest) < longest:
            raise ValueError(
                f"PooledIndexer.select_keys(mask={mask}): a query selects among the pools of all earlier tokens; give "
                "a mask without a window and without chunks."
            )
        shape, rate = keys.shape[:-1], self.bias.shape[0]
        positions, segments = jax.tree.map(
            lambda x: jnp.broadcast_to(x, shape), (kv_tokens.positions, kv_tokens.segments)
        )
        kv_tokens = Tokens(positions, segments)
        ends, end_positions = find_ends(kv_tokens, rate)
        count = ends.shape[-1]
        if count <= self.top_k:
            return None
        end_segments = None if segments is None else jnp.take_along_axis(segments, ends, axis=-1)
        pools = Tokens(end_positions, end_segments)
        pool_keys = self._average(jax.lax.stop_gradient(keys).astype(queries.query.dtype), kv_tokens, ends, pools)

        def best_pools(tokens: Tokens, queries: IndexQueries) -> Int[Array, "*batch chunk top_k"]:
            return best_indices(queries, pool_keys, mask(tokens, pools), self.top_k)

        best = map_query_chunks(best_pools, tokens, queries.weight.shape[:-1], queries, self.chunk)
        key_pools = _number_pools(kv_tokens, pools, rate)
        return PoolSelection(pools=best, key_pools=key_pools, rate=rate, count=count, chunk=self.chunk)

    def _average(
        self,
        keys: Float[Array, "*batch kv_seq _"],
        kv_tokens: Tokens,
        ends: Int[Array, "*batch pools"],
        pools: Tokens,
    ) -> Float[Array, "*batch pools index_dim"]:
        """Return the weighted mean of the small keys of each pool; zeros for pools without tokens."""
        rows, _, is_known = find_block_tokens(kv_tokens, ends, pools.positions, self.bias.shape[0])
        small_keys, gates = jnp.split(take_block_rows(keys, rows), 2, axis=-1)
        is_known, bias = is_known[..., None], jax.lax.stop_gradient(self.bias).astype(keys.dtype)
        weights = jax.nn.softmax(jnp.where(is_known, gates + bias, jnp.finfo(keys.dtype).min), axis=-2)
        return jnp.sum(jnp.where(is_known, weights * small_keys, 0), axis=-2)


def _number_pools(kv_tokens: Tokens, pools: Tokens, rate: int) -> Int[Array, "*batch kv_seq"]:
    """Return the index in `pools` of each token's pool; `pools`' length if the pool is not complete in the row."""
    positions, count = kv_tokens.positions, pools.positions.shape[-1]
    completes = completes_block(positions, rate).astype(jnp.int32)
    # Count the pools that end before a token. The pool of that index is its own, if document and block are the same.
    number = jnp.minimum(jnp.cumsum(completes, axis=-1) - completes, count - 1)
    ends = jnp.take_along_axis(pools.positions, number, axis=-1)
    is_own = (positions >= 0) & (ends >= 0) & (ends // rate == positions // rate)
    if kv_tokens.segments is not None and pools.segments is not None:
        is_own &= jnp.take_along_axis(pools.segments, number, axis=-1) == kv_tokens.segments
    return jnp.where(is_own, number, count)


class PoolSelection(SelectedKeys):
    """The pools of keys that a `PooledIndexer` selected for each query."""

    pools: Int[Array, "*batch seq top_k"]
    """The numbers of the selected pools."""
    key_pools: Int[Array, "*batch kv_seq"]
    """The number of each key's pool; `count` if that pool is not complete in the row."""
    rate: int = eqx.field(static=True)
    """Tokens of a pool."""
    count: int = eqx.field(static=True)
    """The largest number of pools that the row can have."""
    chunk: int = eqx.field(static=True)
    """Queries whose scores are in memory at a time."""

    @property
    def choices(self) -> Int[Array, "*batch seq top_k"]:
        """The numbers of the selected pools."""
        return self.pools

    def keep(
        self,
        visible: Bool[Array, "*batch chunk kv_seq"],
        choices: Int[Array, "*batch chunk top_k"],
        tokens: Tokens,
        kv_tokens: TokenPositions,
    ) -> Bool[Array, "*batch chunk kv_seq"]:
        """Return which keys are visible, and in a selected pool or in their query's own, incomplete pool."""
        is_selected = keep_selected(jnp.ones((*choices.shape[:-1], self.count + 1), bool), choices)
        is_selected = jnp.take_along_axis(is_selected, self.key_pools[..., None, :], axis=-1)
        query, key = tokens.positions[..., None], kv_tokens.positions[..., None, :]
        is_own = (query // self.rate == key // self.rate) & ((query + 1) % self.rate != 0)
        return visible & (is_selected | is_own)
