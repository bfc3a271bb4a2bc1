"""Sparse attention over pools: each query sees the tokens of its best pools, and of its own unfinished pool."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ...kernels import Mask, TokenPositions
from .._dtype import at_least_float32
from .._linear import Linear, LinearMap
from .._norm import LayerNorm, Norm
from .._tokens import Tokens
from ._indexer import (
    best_indices,
    IndexQueries,
    InputIndexer,
    keep_selected,
    KeyIndexer,
    map_query_chunks,
    SelectedKeys,
)
from ._rotary import Rotary
from ._token_blocks import completes_block, find_block_tokens, find_ends, take_block_rows


class PooledIndexer(KeyIndexer):
    """The indexer of GLM-5.3-Flash (GLM team 2026): each query sees the tokens of its `top_k` best pools of keys.

    Each document is divided into pools of `pool_size` tokens: pool `n` holds the tokens at positions `n * pool_size` to
    `(n + 1) * pool_size - 1`. A query may select a pool if the query sees the pool's last token. A query that is not
    the last token of its own pool also sees the earlier tokens of that pool.

    A pool's score is `sum_h w_h relu(q_h . k)`, up to a constant factor, over the heads `h`. The small queries `q` and
    the weights `w` are the query token's, as in an `Indexer`. `k` is the pool's mean key: a weighted mean of the small
    keys (index keys) of the pool's tokens. Each channel has its own weights: the softmax of `gate(x) + bias` over the
    pool's tokens, where `bias` depends on the token's place in the pool. If a row begins within a pool, the mean is
    over the tokens in the row. If pools have equal scores, the first of them is selected.

    The indexer has no rotary positions. No gradient passes through the indexer, so training it needs a loss of its own.
    """

    query: LinearMap
    key: LinearMap
    key_norm: LayerNorm
    gate: LinearMap
    weight: LinearMap
    bias: Float[Array, "pool_size index_dim"]
    top_k: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        q_latent: int,
        heads: int,
        dim: int,
        pool_size: int,
        top_k: int,
        chunk: int = 64,
        norm_eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        """Initialize the maps randomly, and the bias with zeros.

        Args:
            embed: Channels of the input.
            q_latent: Channels of the queries' latent.
            heads: The number of small heads.
            dim: Channels of a small head.
            pool_size: Tokens of a pool.
            top_k: Pools that a query selects.
            chunk: Number of queries whose scores are in memory at a time.
            norm_eps: The number that the norm of the small keys adds to their variance.
            key: The key of the weights.
        """
        if pool_size < 1 or top_k < 1:
            raise ValueError(
                f"PooledIndexer(pool_size={pool_size}, top_k={top_k}): a pool has at least 1 token (pool_size), and a "
                "query selects at least 1 pool (top_k); give numbers of at least 1."
            )
        keys = jax.random.split(key, 4)
        self.query = Linear(
            "q_latent -> index_heads index_dim", q_latent=q_latent, index_heads=heads, index_dim=dim, key=keys[0]
        )
        self.key = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=keys[1])
        self.gate = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=keys[2])
        self.weight = Linear("embed -> index_heads", embed=embed, index_heads=heads, key=keys[3])
        self.key_norm = LayerNorm("index_dim", index_dim=dim, eps=norm_eps)
        self.bias = jnp.zeros((pool_size, dim), jnp.float32)
        self.top_k, self.chunk = top_k, chunk

    @property
    def key_channels(self) -> int:
        """The channels of a small key and of its gate together."""
        return 2 * self.bias.shape[-1]

    def index_keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq _"]:
        """Return each token's small key and its gate, concatenated along the channels; the cache keeps both."""
        return jnp.concatenate([self.key_norm(self.key(x)), self.gate(x)], -1)

    def index_queries(
        self, x: Float[Array, "*batch _ embed"], latent: Float[Array, "*batch seq q_latent"], tokens: Tokens
    ) -> IndexQueries:
        """Return the small queries, computed from the queries' latent, and their weights, computed from `x`."""
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
        """Return the `top_k` best pools of each query; None if the row can have no more than `top_k` pools.

        A query selects among the pools whose last token it sees. If there are fewer than `top_k` such pools, the
        remaining selections are pools that the mask of the attention hides. The scores of `chunk` queries are in memory
        at a time.

        Args:
            queries: The small queries.
            keys: The small keys and their gates, concatenated.
            mask: The keys that a query may see.
            tokens: The tokens of the queries.
            kv_tokens: The tokens of the keys. The tokens of each document must be in the order of their positions.
        """
        sizes = {"pool_size": self.bias.shape[0], "top_k": self.top_k, "chunk": self.chunk}
        return _select_pools(queries, keys, self._average, mask=mask, tokens=tokens, kv_tokens=kv_tokens, **sizes)

    def _average(
        self,
        keys: Float[Array, "*batch kv_seq _"],
        kv_tokens: Tokens,
        ends: Int[Array, "*batch pools"],
        pools: Tokens,
    ) -> Float[Array, "*batch pools index_dim"]:
        """Return each pool's mean key, the weighted mean of its tokens' small keys; zeros for a pool without tokens.

        `ends` has the index in the row of each pool's last token, and `pools` has this token's position and document.
        """
        rows, _, is_known = find_block_tokens(kv_tokens, ends, pools.positions, self.bias.shape[0])
        small_keys, gates = jnp.split(take_block_rows(keys, rows), 2, axis=-1)
        is_known, bias = is_known[..., None], jax.lax.stop_gradient(self.bias).astype(keys.dtype)
        weights = jax.nn.softmax(jnp.where(is_known, gates + bias, jnp.finfo(keys.dtype).min), axis=-2)
        return jnp.sum(jnp.where(is_known, weights * small_keys, 0), axis=-2)


class MeanPoolIndexer(InputIndexer):
    """The indexer of Qwen4-Exp (Qwen team 2026): each query sees the tokens of its `top_k` best pools of keys.

    Pools, and the pools that a query may select, are as in a `PooledIndexer`. A pool's score is `sum_h relu(q_h . k)`,
    up to a constant factor, over the heads `h`. The small queries `q` are the query token's. `k` is the norm of the
    mean of the small keys of the pool's tokens, rotated by the position of the pool's first token. If a row begins
    within a pool, the mean is over the tokens in the row. If pools have equal scores, the first of them is selected.

    No gradient passes through the indexer, so training it needs a loss of its own.
    """

    pool_size: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        dim: int,
        pool_size: int,
        top_k: int,
        query_norm: Norm,
        key_norm: Norm,
        rotary: Rotary,
        chunk: int = 64,
        key: Key[Array, ""],
    ):
        """Initialize the maps; norms and rotary positions are passed as instances.

        Args:
            embed: Channels of the input.
            heads: The number of small heads.
            dim: Channels of a small query or key, of which the first `rotary.dim` are rotated.
            pool_size: Tokens of a pool.
            top_k: Pools that a query selects.
            query_norm: The norm of the small queries, over a dim `index_dim` of size `dim`.
            key_norm: The norm of the mean keys, over the same dim.
            rotary: Rotary positions, whose frequencies must not depend on the length.
            chunk: Number of queries whose scores are in memory at a time.
            key: Random key for the weights.
        """
        if pool_size < 1 or top_k < 1:
            raise ValueError(
                f"MeanPoolIndexer(pool_size={pool_size}, top_k={top_k}): a pool has at least 1 token (pool_size), and "
                "a query selects at least 1 pool (top_k); give numbers of at least 1."
            )
        if rotary.depends_on_length or rotary.dim > dim:
            raise ValueError(
                f"MeanPoolIndexer(dim={dim}, rotary={rotary}): the first channels of small queries and mean keys are "
                "rotated; give a rotary of at most dim channels, whose scaling does not depend on the length."
            )
        query, small_key = jax.random.split(key)
        self.query = Linear("embed -> index_heads index_dim", embed=embed, index_heads=heads, index_dim=dim, key=query)
        self.key = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=small_key)
        self.query_norm, self.key_norm, self.rotary = query_norm, key_norm, rotary
        self.pool_size, self.top_k, self.chunk = pool_size, top_k, chunk

    def index_keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq index_dim"]:
        """Return the small keys of the tokens of `x`, without norm and rotation; the layer caches these keys."""
        return self.key(x)

    def select_keys(
        self,
        queries: IndexQueries,
        keys: Float[Array, "*batch kv_seq index_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
    ) -> "PoolSelection | None":
        """Return the `top_k` best pools of each query, as `PooledIndexer.select_keys` does.

        Args:
            queries: The small queries.
            keys: The small keys.
            mask: The keys that a query may see.
            tokens: The tokens of the queries.
            kv_tokens: The tokens of the keys. The tokens of each document must be in the order of their positions.
        """
        sizes = {"pool_size": self.pool_size, "top_k": self.top_k, "chunk": self.chunk}
        return _select_pools(queries, keys, self._average, mask=mask, tokens=tokens, kv_tokens=kv_tokens, **sizes)

    def _average(
        self,
        keys: Float[Array, "*batch kv_seq index_dim"],
        kv_tokens: Tokens,
        ends: Int[Array, "*batch pools"],
        pools: Tokens,
    ) -> Float[Array, "*batch pools index_dim"]:
        """Return each pool's rotated mean key; `ends` and `pools` are as in `PooledIndexer`."""
        rows, _, is_known = find_block_tokens(kv_tokens, ends, pools.positions, self.pool_size)
        is_known = is_known[..., None]
        total = jnp.sum(jnp.where(is_known, take_block_rows(keys, rows), 0), axis=-2)
        mean = total / jnp.maximum(jnp.sum(is_known, axis=-2), 1).astype(keys.dtype)
        starts = jnp.maximum(pools.positions - (self.pool_size - 1), 0)
        rotated = self.rotary(self.key_norm(mean)[..., None, :], starts)[..., 0, :]
        return jax.lax.stop_gradient(rotated)


def _select_pools(
    queries: IndexQueries,
    keys: Float[Array, "*batch kv_seq _"],
    average: Callable[[Array, Tokens, Array, Tokens], Array],
    *,
    pool_size: int,
    top_k: int,
    chunk: int,
    mask: Mask,
    tokens: Tokens,
    kv_tokens: Tokens,
) -> "PoolSelection | None":
    """Return the `top_k` best pools of each query; None if the row can have no more than `top_k` pools.

    Args:
        queries: The small queries.
        keys: The cached channels of each token.
        average: Returns the key of each pool from the cached channels, the tokens of the keys, the index in the row of
            each pool's last token, and this token's position and document.
        pool_size: Tokens of a pool.
        top_k: Pools that a query selects.
        chunk: Number of queries whose scores are in memory at a time.
        mask: The keys that a query may see.
        tokens: The tokens of the queries.
        kv_tokens: The tokens of the keys.
    """
    longest = jnp.iinfo(jnp.int32).max
    if mask.reach(longest) < longest:
        raise ValueError(
            f"select_keys(mask={mask}): an indexer of pools needs a mask that shows all earlier tokens of the "
            "document; give a mask without a window and without chunks."
        )
    shape = keys.shape[:-1]
    positions, segments = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), (kv_tokens.positions, kv_tokens.segments))
    kv_tokens = Tokens(positions, segments)
    ends, end_positions = find_ends(kv_tokens, pool_size)
    count = ends.shape[-1]
    if count <= top_k:
        return None
    end_segments = None if segments is None else jnp.take_along_axis(segments, ends, axis=-1)
    pools = Tokens(end_positions, end_segments)
    pool_keys = average(jax.lax.stop_gradient(keys).astype(queries.query.dtype), kv_tokens, ends, pools)

    def best_pools(tokens: Tokens, queries: IndexQueries) -> Int[Array, "*batch chunk top_k"]:
        return best_indices(queries, pool_keys, mask(tokens, pools), top_k)

    best = map_query_chunks(best_pools, tokens, queries.weight.shape[:-1], queries, chunk)
    key_pools = _index_pools(kv_tokens, pools, pool_size)
    return PoolSelection(best, chunk, key_pools, pool_size, count)


def _index_pools(kv_tokens: Tokens, pools: Tokens, pool_size: int) -> Int[Array, "*batch kv_seq"]:
    """Return the index in `pools` of each token's pool; the length of `pools` if the row lacks the pool's last token.

    `pools` has the position and the document of each pool's last token, in the order of the row.
    """
    positions, count = kv_tokens.positions, pools.positions.shape[-1]
    completes = completes_block(positions, pool_size).astype(jnp.int32)
    # The number of pools that end before a token is the index of the first pool that ends at the token or later.
    # That pool holds the token if both are in the same document and in the same range of `pool_size` positions.
    pool = jnp.minimum(jnp.cumsum(completes, axis=-1) - completes, count - 1)
    ends = jnp.take_along_axis(pools.positions, pool, axis=-1)
    holds_token = (positions >= 0) & (ends >= 0) & (ends // pool_size == positions // pool_size)
    if kv_tokens.segments is not None and pools.segments is not None:
        holds_token &= jnp.take_along_axis(pools.segments, pool, axis=-1) == kv_tokens.segments
    return jnp.where(holds_token, pool, count)


class PoolSelection(SelectedKeys):
    """The pools of keys that a `PooledIndexer` or a `MeanPoolIndexer` selected for each query.

    `choices` has the indices of the selected pools, counted in the order of the row.
    """

    key_pools: Int[Array, "*batch kv_seq"]
    """The index of each key's pool; `count` if the row lacks the pool's last token."""
    pool_size: int = eqx.field(static=True)
    """Tokens of a pool."""
    count: int = eqx.field(static=True)
    """The largest number of pools that the row can have."""

    def keep(
        self,
        visible: Bool[Array, "*batch chunk kv_seq"],
        choices: Int[Array, "*batch chunk top_k"],
        tokens: Tokens,
        kv_tokens: TokenPositions,
    ) -> Bool[Array, "*batch chunk kv_seq"]:
        """Return which of the `visible` keys a query sees: keys of its selected pools and of its own unfinished pool.

        A query's own pool is unfinished if the query is not the pool's last token.
        """
        is_selected = keep_selected(jnp.ones((*choices.shape[:-1], self.count + 1), bool), choices)
        is_selected = jnp.take_along_axis(is_selected, self.key_pools[..., None, :], axis=-1)
        query, key = tokens.positions[..., None], kv_tokens.positions[..., None, :]
        is_unfinished = (query + 1) % self.pool_size != 0
        shares_pool = query // self.pool_size == key // self.pool_size
        return visible & (is_selected | (shares_pool & is_unfinished))
