"""Selection of keys for sparse attention: small heads score every key, and each query sees only the best keys."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from ...kernels import (
    AttentionCall,
    ChosenKeys,
    join_blocks,
    Mask,
    Operation,
    ReferenceAttention,
    split_blocks,
    TokenPositions,
)
from .._dtype import at_least_float32
from .._linear import Linear, LinearMap
from .._module import Module
from .._norm import LayerNorm, Norm
from .._tokens import Tokens
from ._rotary import Rotary
from ._scores import multiply_temperature, QueryTemperature


class IndexQueries(NamedTuple):
    """The small queries of an indexer, and the weight of each of its heads."""

    query: Float[Array, "*batch seq index_heads index_dim"]
    weight: Float[Array, "*batch seq index_heads"]


class SelectedKeys(Operation[AttentionCall, Array]):
    """The keys that an indexer selected for each query, to be used by its layer and by later layers.

    A query sees a selected key only if the mask shows it too.
    """

    choices: Int[Array, "*batch seq top_k"]
    """The indices of the keys, or of the pools of keys, that each query selected."""
    chunk: int = eqx.field(static=True)
    """Number of queries whose scores are in memory at a time."""

    @abc.abstractmethod
    def keep(
        self,
        visible: Bool[Array, "*batch chunk kv_seq"],
        choices: Int[Array, "*batch chunk top_k"],
        tokens: Tokens,
        kv_tokens: TokenPositions,
    ) -> Bool[Array, "*batch chunk kv_seq"]:
        """Return which keys are visible and selected, for some of the queries and their choices."""

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why the call cannot be computed, or None if it can."""
        if call.softcap is not None or call.has_bias:
            return "attention to selected keys has no softcap and no bias"
        return None

    def __call__(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Attend to the selected keys, for `chunk` queries at a time, in memory linear in the row."""
        if (reason := self.supports(call)) is not None:
            raise ValueError(f"{type(self).__name__}(call): {reason}; leave them out of the scores.")

        def attend_chunk(tokens: Tokens, chunk: tuple[Array, Array]) -> Float[Array, "*batch chunk heads v_dim"]:
            query, choices = chunk
            visible = self.keep(call.mask(tokens, call.key_tokens), choices, tokens, call.key_tokens)
            return ReferenceAttention()(
                AttentionCall(
                    query,
                    call.key,
                    call.value,
                    mask=ChosenKeys(visible),
                    tokens=tokens,
                    kv_tokens=call.key_tokens,
                    scale=call.scale,
                    sinks=call.sinks,
                )
            )

        shape = call.query.shape[:-2]
        tokens = Tokens(call.tokens.positions, call.tokens.segments)
        return map_query_chunks(attend_chunk, tokens, shape, (call.query, self.choices), self.chunk)


class KeyIndexer(Module):
    """The base class of indexers, which select the keys of each query of a `LatentAttention` or an `IndexedAttention`.

    No gradient passes through an indexer.
    """

    @property
    def reads_latent(self) -> bool:
        """Whether `index_queries` reads the queries' latent, so that the attention must have one."""
        return True

    @property
    def projects_derived(self) -> bool:
        """Whether a projection reads not the layer's input but a function of it, such as the normalized input."""
        return False

    @property
    @abc.abstractmethod
    def key_channels(self) -> int:
        """The channels that `index_keys` returns for each token."""

    @abc.abstractmethod
    def index_keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq _"]:
        """Return the channels by which the keys of the tokens of `x` are scored; the layer caches these channels."""

    @abc.abstractmethod
    def index_queries(
        self, x: Float[Array, "*batch _ embed"], latent: Float[Array, "*batch seq q_latent"], tokens: Tokens
    ) -> IndexQueries:
        """Return the small queries, from the input and the queries' latent."""

    @abc.abstractmethod
    def select_keys(
        self,
        queries: IndexQueries,
        keys: Float[Array, "*batch kv_seq _"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
    ) -> SelectedKeys | None:
        """Return the keys that each query selects among the keys that `mask` shows; None: each query sees all of them.

        Args:
            queries: The small queries.
            keys: The channels that `index_keys` returned for each key.
            mask: The keys from which a query may select.
            tokens: The tokens of the queries.
            kv_tokens: The tokens of the keys.
        """


class InputIndexer(KeyIndexer):
    """An indexer whose small queries and keys both come from the layer's input; all heads have weight 1."""

    query: LinearMap
    query_norm: Norm
    key: LinearMap
    key_norm: Norm
    rotary: Rotary

    @property
    def reads_latent(self) -> bool:
        """False: small queries come from the input."""
        return False

    @property
    def key_channels(self) -> int:
        """The channels of a small key."""
        return self.key.output_shape[0]

    def index_queries(
        self, x: Float[Array, "*batch _ embed"], latent: Float[Array, "*batch seq q_latent"], tokens: Tokens
    ) -> IndexQueries:
        """Return the small queries of each token of `x`, with weights of 1; `latent` is not used."""
        query = self.rotary(self.query_norm(self.query(x)), tokens.positions)
        query = jax.lax.stop_gradient(query).astype(at_least_float32(query.dtype))
        return IndexQueries(query, jnp.ones_like(query, shape=query.shape[:-1]))


class Indexer(KeyIndexer):
    """The lightning indexer of DeepSeek-V3.2 (DeepSeek-AI 2025, eq. 1): each query sees only its `top_k` best keys.

    The score of the key at `s` for the query at `t` is `sum_h w_th relu(q_th . k_s)`. The small queries `q` are
    computed from the queries' latent or, without `q_latent`, from the input (Mistral Large 4). The small keys `k` and
    the weights `w` are computed from the input. If scores are equal, the first key is taken. No gradient passes through
    the indexer, so training the indexer needs a loss of its own.
    """

    query_norm: Norm | None
    query: LinearMap
    key: LinearMap
    key_norm: LayerNorm
    weight: LinearMap
    rotary: Rotary | None
    temperature: QueryTemperature | None
    top_k: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)
    rotates_last: bool = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        q_latent: int | None,
        heads: int,
        dim: int,
        top_k: int,
        rotary: Rotary | None,
        query_norm: Norm | None = None,
        temperature: QueryTemperature | None = None,
        chunk: int = 64,
        rotates_last: bool = False,
        norm_eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        """Initialize the maps.

        Args:
            embed: Channels of the input.
            q_latent: Channels of the queries' latent; None: small queries come from the input.
            heads: Small heads.
            dim: Channels of a small head, of which the first `rotary.dim` are rotated.
            top_k: Keys that a query sees.
            rotary: Rotary positions, whose frequencies must not depend on the length; None: no channels are rotated.
            query_norm: A norm of the input of the small queries' map, which is the queries' latent or `x`.
            temperature: A factor of the small queries by their positions and heads.
            chunk: Number of queries whose scores are in memory at a time.
            rotates_last: Whether the last `rotary.dim` channels are rotated, instead of the first (Hy4).
            norm_eps: Added to the variance of the small keys.
            key: Random key for the weights.
        """
        if (rotary is not None and rotary.depends_on_length) or top_k < 1:
            raise ValueError(
                f"Indexer(top_k={top_k}, rotary={rotary}): a query sees at least one key, and keys are rotated before "
                "they are cached; give top_k >= 1 and a rotary whose scaling does not depend on the length."
            )
        keys = jax.random.split(key, 3)
        source, size = ("embed", embed) if q_latent is None else ("q_latent", q_latent)
        sizes: dict[str, Any] = {source: size, "index_heads": heads, "index_dim": dim}
        self.query = Linear(f"{source} -> index_heads index_dim", key=keys[0], **sizes)
        self.key = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=keys[1])
        self.key_norm = LayerNorm("index_dim", index_dim=dim, eps=norm_eps)
        self.weight = Linear("embed -> index_heads", embed=embed, index_heads=heads, key=keys[2])
        self.query_norm, self.rotary, self.temperature = query_norm, rotary, temperature
        self.top_k, self.chunk, self.rotates_last = top_k, chunk, rotates_last

    @property
    def reads_latent(self) -> bool:
        """Whether small queries come from the queries' latent."""
        return "q_latent" in self.query.inputs

    @property
    def projects_derived(self) -> bool:
        """Whether small queries come from a norm of the input."""
        return self.query_norm is not None and not self.reads_latent

    @property
    def key_channels(self) -> int:
        """The channels of a small key."""
        return self.key.output_shape[0]

    def index_keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq index_dim"]:
        """Return the small keys of the tokens of `x`; the layer caches these keys."""
        return self._rotate(self.key_norm(self.key(x))[..., None, :], tokens)[..., 0, :]

    def _rotate(
        self, x: Float[Array, "*batch seq heads index_dim"], tokens: Tokens
    ) -> Float[Array, "*batch seq heads index_dim"]:
        if self.rotary is None:
            return x
        # The order of channels does not change scores, if it is the same in queries and keys.
        x = jnp.roll(x, self.rotary.dim, -1) if self.rotates_last else x
        return self.rotary.for_tokens(tokens)(x, tokens.positions)

    def index_queries(
        self, x: Float[Array, "*batch _ embed"], latent: Float[Array, "*batch seq q_latent"], tokens: Tokens
    ) -> IndexQueries:
        """Return the small queries, from the input and the queries' latent."""
        dtype = at_least_float32(x.dtype)
        source = latent if self.reads_latent else x
        source = source if self.query_norm is None else self.query_norm(source)
        query = multiply_temperature(self.temperature, self._rotate(self.query(source), tokens), tokens)
        weight = self.weight(x)
        return IndexQueries(*(jax.lax.stop_gradient(array).astype(dtype) for array in (query, weight)))

    def select_keys(
        self,
        queries: IndexQueries,
        keys: Float[Array, "*batch kv_seq index_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
    ) -> "KeySelection | None":
        """Return each query's `top_k` best keys among the keys that `mask` shows; None if there are only `top_k` keys.

        The scores of `chunk` queries are in memory at a time.

        Args:
            queries: The small queries.
            keys: The small keys.
            mask: The keys from which a query may select.
            tokens: The tokens of the queries.
            kv_tokens: The tokens of the keys.
        """
        if keys.shape[-2] <= self.top_k:
            return None
        keys = jax.lax.stop_gradient(keys).astype(queries.query.dtype)

        def best_keys(tokens: Tokens, queries: IndexQueries) -> Int[Array, "*batch chunk top_k"]:
            return best_indices(queries, keys, mask(tokens, kv_tokens), self.top_k)

        shape = queries.weight.shape[:-1]
        indices = map_query_chunks(best_keys, tokens, shape, queries, self.chunk)
        return KeySelection(choices=indices, chunk=self.chunk)


def best_indices(
    queries: IndexQueries,
    keys: Float[Array, "*batch kv_seq index_dim"],
    visible: Bool[Array, "*batch seq kv_seq"],
    top_k: int,
) -> Int[Array, "*batch seq top_k"]:
    """Return the indices of each query's `top_k` keys of the highest scores among the visible keys."""
    heads, dim = queries.query.shape[-2:]
    dots = jax.nn.relu(jnp.einsum("...qhd,...kd->...qhk", queries.query, keys) * dim**-0.5)
    scores = jnp.einsum("...qh,...qhk->...qk", queries.weight * heads**-0.5, dots)
    return jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), top_k)[1]


def keep_selected(
    visible: Bool[Array, "*batch seq kv_seq"], indices: Int[Array, "*batch seq top_k"]
) -> Bool[Array, "*batch seq kv_seq"]:
    """Return which keys are visible and at one of the query's `indices`."""
    return visible & jnp.put_along_axis(jnp.zeros_like(visible), indices, True, -1, inplace=False)


class KeySelection(SelectedKeys):
    """The keys that an `Indexer` selected for each query; `choices` has the indices of the keys in their array."""

    def keep(
        self,
        visible: Bool[Array, "*batch chunk kv_seq"],
        choices: Int[Array, "*batch chunk top_k"],
        tokens: Tokens,
        kv_tokens: TokenPositions,
    ) -> Bool[Array, "*batch chunk kv_seq"]:
        """Return which keys are visible and at one of their query's indices."""
        return keep_selected(visible, choices)


Arrays = TypeVar("Arrays", bound=tuple[Array, ...])


def map_query_chunks(
    function: Callable[[Tokens, Arrays], Array], tokens: Tokens, shape: tuple[int, ...], arrays: Arrays, size: int
) -> Shaped[Array, "..."]:
    """Apply `function(tokens, arrays)` to `size` tokens at a time; the first dims of all arrays are `shape`."""
    axis, seq = len(shape) - 1, shape[-1]
    positions = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), (tokens.positions, tokens.segments))
    if seq <= size:
        return function(Tokens(*positions), arrays)

    chunks = jax.tree.map(lambda x: split_blocks(x, axis, size), (positions, arrays))
    # The backward pass recomputes each chunk, because the scores of all chunks would be a matrix of the whole row.
    results = jax.lax.map(jax.checkpoint(lambda chunk: function(Tokens(*chunk[0]), chunk[1])), chunks)
    return join_blocks(results, axis, seq)
