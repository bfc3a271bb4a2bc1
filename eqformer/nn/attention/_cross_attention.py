"""Attention to keys and values from elsewhere: from another sequence (the source), or from an earlier layer.

Queries attend to the source alone, to the source and the row itself at once, or to keys that an earlier layer shares.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from ...kernels import attend_to_sources, ATTENTION, causal, FEW, full, Mask, OF_SOURCE, Operation
from .._cache import KVCache, mask_overflow, store_keys
from .._contracts import Attends, Mixer, MixerFacts
from .._linear import Linear, LinearMap
from .._norm import Norm
from .._tokens import document_lengths, SharedKV, SharedValue, Tokens, tokens_or_default
from ._attention import Attention
from ._rotary import Rotary
from ._scores import compute_attention, Scores


class CrossAttention(Mixer):
    """Attention of a sequence to the keys and values of another sequence, `tokens.source` (Vaswani et al. 2017).

    Each token sees every token of the source; in packed rows, it sees only tokens of its own segment. A call with a
    cache and a source stores the source's keys and values. Later calls without a source read these from the cache, so
    keys and values are computed once for a text. Head counts are read off the weights, so the module runs on a slice of
    its heads.
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap
    output: LinearMap
    scores: Scores
    mask: Mask
    core: Operation

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        source: int | None = None,
        bias: bool = False,
        output_std: float | None = None,
        scores: Scores | None = None,
        core: Operation | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the projections.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of queries.
            head_dim: Channels of a head.
            kv_heads: Heads of keys and values, a divisor of `heads`; None: as many as `heads`.
            source: Channels of the source's vectors; None: as many as `embed`.
            bias: Whether the four maps have biases.
            output_std: The standard deviation of the output's weights; None: as for the other weights.
            scores: The scale, softcap and other options of the scores; None: the scale `head_dim^-0.5` alone.
            core: The operation that computes the softmax; None: `kernels.ATTENTION`.
            key: Random key for the weights.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"CrossAttention(heads={heads}, kv_heads={kv_heads}): kv_heads must divide heads.")
        keys = jax.random.split(key, 4)
        q_sizes = {"embed": embed, "heads": heads, "head_dim": head_dim}
        kv_sizes = {"source": embed if source is None else source, "kv_heads": kv_heads, "head_dim": head_dim}
        self.query = Linear("embed -> heads head_dim", bias=bias, key=keys[0], **q_sizes)
        self.key = Linear("source -> kv_heads head_dim", bias=bias, key=keys[1], **kv_sizes)
        self.value = Linear("source -> kv_heads head_dim", bias=bias, key=keys[2], **kv_sizes)
        self.output = Linear("heads head_dim -> embed", bias=bias, std=output_std, key=keys[3], **q_sizes)
        self.scores = Scores() if scores is None else scores
        self.mask = full()
        self.core = ATTENTION if core is None else core

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: KVCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], KVCache | None]:
        """Attend to the source of the tokens or, if they have none, to the source in the cache."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        key, value, kv_tokens, cache = read_source("CrossAttention", self._project_source, tokens, cache, x.dtype)
        call = self.scores.call(self.query(x), key, value, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)
        attended = compute_attention(self.core, call, cache if tokens.source is None else None)
        return self.output(attended), cache

    def _project_source(
        self, vectors: Float[Array, "*batch _ source"]
    ) -> tuple[Float[Array, "*rows kv_seq kv_heads head_dim"], Float[Array, "*rows kv_seq kv_heads head_dim"]]:
        return self.key(vectors), self.value(vectors)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> KVCache:
        """Return an empty cache for sources of up to `capacity` tokens."""
        return KVCache.empty(batch, capacity, self.key.output_shape, self.value.output_shape, dtype)

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads, and that the core reads another sequence."""
        shapes = ((linear.output_shape,) for linear in (self.query, self.key, self.value, self.query))
        return MixerFacts(True, Attends(self.mask, *shapes, needs=("source", *self.scores.options)))


class MergedAttention(Mixer):
    """Attention whose softmax runs over the row's own keys and the keys of `tokens.source` together (T5Gemma 2).

    The same maps and norms compute the keys and values of the row and of the source. The source's keys are not rotated.
    Each token sees all of the source's keys; in packed rows, it sees only keys of its own segment. `mask` limits only
    the row's keys. The cache is a pair of caches, the row's and the source's. A call with a source fills the source's
    cache; later calls without a source read it. Head counts are read off the weights, so the module runs on a slice of
    its heads.
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap
    output: LinearMap
    query_norm: Norm | None
    key_norm: Norm | None
    rotary: Rotary | None
    scores: Scores
    mask: Mask
    core: Operation

    def __init__(self, attention: Attention):
        """Take the parts of an `Attention`; raise a `ValueError` for parts that are not supported here."""
        rotary, scores = attention.rotary, attention.scores
        has_other_encoding = rotary is not None and (not isinstance(rotary, Rotary) or rotary.depends_on_length)
        unsupported = {
            "value_norm": attention.value_norm is not None,
            "temperature": scores.temperature is not None,
            "gate": attention.gate is not None,
            "sinks": scores.sinks is not None,
            "keys as values": attention.value is None,
            "score bias": scores.has_bias,
            "a rotary with norms after it or with frequencies that depend on the length": has_other_encoding,
        }
        if attention.value is None or any(unsupported.values()):
            names = " and ".join(name for name, is_set in unsupported.items() if is_set)
            raise ValueError(f"MergedAttention(Attention): {names} cannot be merged; build the Attention without them.")
        self.query, self.key, self.value = attention.query, attention.key, attention.value
        self.output = attention.output
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.rotary = rotary if isinstance(rotary, Rotary) else None
        self.scores, self.core = scores, attention.core
        self.mask = dataclasses.replace(attention.mask, source=True)

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: tuple[KVCache, KVCache] | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], tuple[KVCache, KVCache] | None]:
        """Attend to the source and to the tokens of `x` or, with a cache, to all tokens of the row."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        row_cache, source_cache = (None, None) if cache is None else cache
        query, key, value = self.query(x), self._normalize_keys(self.key(x)), self.value(x)
        query = query if self.query_norm is None else self.query_norm(query)
        if self.rotary is not None:
            query, key = self.rotary(query, tokens.positions), self.rotary(key, tokens.positions)
        row_cache, key, value, row_tokens = store_keys(row_cache, key, value, tokens)
        source_key, source_value, source_tokens, source_cache = read_source(
            "MergedAttention", self._project_source, tokens, source_cache, x.dtype
        )
        kv_tokens = _join_tokens(source_tokens, tokens if row_tokens is None else row_tokens, x.shape[:-2])
        if row_cache is not None and x.shape[-2] <= FEW and self.core.decode_op(has_codes=True):
            # With few queries, concatenate scores instead of keys: both caches are then read in place.
            sources = (source_key, source_value), (key, value)
            visible, scale = self.mask(tokens, kv_tokens), self.scores.scale_of(query.shape[-1])
            attended = attend_to_sources(query, sources, visible, scale=scale, softcap=self.scores.softcap)
        else:
            keys, values = jnp.concatenate([source_key, key], -3), jnp.concatenate([source_value, value], -3)
            attended = self.core(
                self.scores.call(query, keys, values, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)
            )
        output = self.output(mask_overflow(attended, tokens, row_cache))
        return output, None if row_cache is None or source_cache is None else (row_cache, source_cache)

    def _normalize_keys(
        self, key: Float[Array, "*batch _ kv_heads head_dim"]
    ) -> Float[Array, "*batch _ kv_heads head_dim"]:
        return key if self.key_norm is None else self.key_norm(key)

    def _project_source(
        self, vectors: Float[Array, "*batch kv_seq embed"]
    ) -> tuple[Float[Array, "*batch kv_seq kv_heads head_dim"], Float[Array, "*batch kv_seq kv_heads head_dim"]]:
        return self._normalize_keys(self.key.of_other(vectors)), self.value.of_other(vectors)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> tuple[KVCache, KVCache]:
        """Return empty caches for rows and for sources of up to `capacity` tokens.

        The row's cache is a rolling buffer if the mask lets a query see fewer than `capacity` tokens.
        """
        self.mask.check_cached("MergedAttention")
        shapes = self.key.output_shape, self.value.output_shape
        row_cache = KVCache.empty(batch, capacity, *shapes, dtype, reach=self.mask.reach(capacity))
        return row_cache, KVCache.empty(batch, capacity, *shapes, dtype)

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads, and that the core reads another sequence.

        The operations are the projections of keys and values of a source that is as long as the row.
        """
        shapes = ((linear.output_shape,) for linear in (self.query, self.key, self.value, self.query))
        operations = sum(2 * math.prod(linear.sizes.values()) for linear in (self.key, self.value))
        return MixerFacts(True, Attends(self.mask, *shapes, needs=("source", *self.scores.options)), operations)


def read_source(
    call: str,
    project: Callable[[Array], tuple[Array, Array]],
    tokens: Tokens,
    cache: KVCache | None,
    dtype: jnp.dtype,
) -> tuple[
    Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens, KVCache | None
]:
    """Return the source's keys, values and tokens, and the cache that stores them.

    Without a source, the keys, values and tokens come from the cache.

    Args:
        call: The name of the caller, for errors.
        project: Returns keys and values of a source's vectors.
        tokens: The tokens of the queries, with their source.
        cache: The cache of the source's keys and values.
        dtype: The dtype of keys and values.

    Raises:
        ValueError: Without a source and a cache, and for a cache with too few slots for the source.
    """
    if tokens.source is None:
        if cache is None:
            raise ValueError(
                f"{call}: there is neither a source nor a cache that holds a source; pass nn.Tokens(positions, "
                "source=nn.Source(...)), or nn.with_source(tokens, source)."
            )
        key, value, source_tokens = cache.read(dtype)
        return key.astype(dtype), value.astype(dtype), source_tokens, cache
    vectors, source_tokens = tokens.source.vectors(call), tokens.source.tokens
    key, value = project(vectors)
    if cache is not None:
        if vectors.shape[-2] > (slots := cache.positions.shape[-1]):
            raise ValueError(
                f"{call}: the source has {vectors.shape[-2]} tokens, but the cache that must hold its keys has the "
                f"capacity {slots}; make the cache by init_cache(..., capacity) with a capacity of at least "
                f"{vectors.shape[-2]}."
            )
        cache, key, value, source_tokens = cache.update(key, value, source_tokens)
    return key.astype(dtype), value.astype(dtype), source_tokens, cache


def _join_tokens(source: Tokens, row: Tokens, batch: tuple[int, ...]) -> Tokens:
    """Concatenate the tokens of the source's keys, all at position `OF_SOURCE`, and the tokens of the row."""
    if row.segments is not None and source.segments is None:
        raise ValueError(
            "MergedAttention: the row has segments and its source has none; give nn.Source(values, "
            "nn.Tokens(positions, segments)), with the segment of the row that reads each token of the source."
        )

    def concatenate(*parts: Int[Array, "*batch _"]) -> Int[Array, "*batch kv_seq"]:
        return jnp.concatenate([jnp.broadcast_to(part, (*batch, part.shape[-1])) for part in parts], axis=-1)

    segments = None
    if row.segments is not None and source.segments is not None:
        segments = concatenate(source.segments, row.segments)
    source_positions = jnp.where(source.positions >= 0, OF_SOURCE, -1)
    return Tokens(concatenate(source_positions, row.positions), segments)


# Attention to the keys and values of an earlier layer.


class CrossLayerAttention(Mixer):
    """Attention whose keys and values an earlier layer shares (Brandon et al. 2024, arXiv:2405.12981).

    The layer has queries and an output of its own, and no cache. Use it in `Residual(reads=name)`, which calls it with
    the `SharedValue` of that name in place of a cache. Give it the mask and the rotary positions of the `Attention`
    whose keys it reads. `kv_heads`, the number of key heads of the whole layer, is used only for costs, because calls
    read the number of heads from the shared keys.
    """

    query: LinearMap
    output: LinearMap
    query_norm: Norm | None
    rotary: Rotary | None
    scores: Scores
    mask: Mask
    core: Operation
    kv_heads: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int,
        bias: bool = False,
        output_std: float | None = None,
        query_norm: Norm | None = None,
        rotary: Rotary | None = None,
        scores: Scores | None = None,
        mask: Mask | None = None,
        core: Operation | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the projections; norms, rotary positions, scores, mask and core are passed as instances.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of queries, a multiple of `kv_heads`.
            head_dim: Channels of a head.
            kv_heads: Heads of the keys and values that are read.
            bias: Whether queries and the output have biases.
            output_std: The standard deviation of the output's weights; None: as for the queries' weights.
            query_norm: The norm of the queries.
            rotary: The rotary positions of queries; shared keys are rotated already.
            scores: The scale, softcap and other options of the scores; None: the scale `head_dim^-0.5` alone.
            mask: The keys that a query may see; None: `causal()`.
            core: The operation that computes the softmax; None: `kernels.ATTENTION`.
            key: Random key for the weights.
        """
        if heads % kv_heads:
            raise ValueError(
                f"CrossLayerAttention(heads={heads}, kv_heads={kv_heads}): each key head serves equally many query "
                "heads, so kv_heads must divide heads."
            )
        query_key, output_key = jax.random.split(key)
        sizes = {"embed": embed, "heads": heads, "head_dim": head_dim}
        self.query = Linear("embed -> heads head_dim", bias=bias, key=query_key, **sizes)
        self.output = Linear("heads head_dim -> embed", bias=bias, std=output_std, key=output_key, **sizes)
        self.query_norm, self.rotary = query_norm, rotary
        self.scores = Scores() if scores is None else scores
        self.mask = causal() if mask is None else mask
        self.core = ATTENTION if core is None else core
        self.kv_heads = kv_heads

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: SharedValue | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], SharedValue]:
        """Attend to the keys and values that the earlier layer shares."""
        shared = None if cache is None else cache.value
        if cache is None or not isinstance(shared, SharedKV):
            raise ValueError(
                "CrossLayerAttention(x): the layer reads keys of an earlier layer; use it in Residual(reads=), after "
                "an Attention in Residual(shares=)."
            )
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        kv_tokens = None if shared.positions is None else Tokens(shared.positions)
        query = self.query(x)
        query = query if self.query_norm is None else self.query_norm(query)
        if self.rotary is not None:
            lengths = document_lengths(tokens, kv_tokens) if self.rotary.depends_on_length else None
            query = self.rotary(query, tokens.positions, lengths)
        call = self.scores.call(query, shared.keys, shared.values, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)
        return self.output(self.core(call)), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return None: another layer's cache has the keys."""
        return None

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads, and that the core may run on pieces of rows."""
        query, output_sizes = self.query.output_shape, self.output.sizes
        key, output = (self.kv_heads, query[1]), (output_sizes["heads"], output_sizes["head_dim"])
        return MixerFacts(True, Attends(self.mask, (query,), (key,), (key,), (output,), self.scores.options))
