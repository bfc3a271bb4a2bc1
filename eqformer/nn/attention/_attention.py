"""Softmax attention: multi-head, multi-query and grouped-query as corners of one module."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ...kernels import ATTENTION, AttentionCall, causal, Mask, Operation
from .._cache import capacity_of, KVCache, mask_overflow
from .._contracts import Attends, Mixer, MixerFacts
from .._cross_layer import SharedKV, SharedValue, ShareRequest
from .._dtype import multiply_float32
from .._linear import Linear, LinearMap
from .._norm import Norm
from .._tokens import document_lengths, Tokens, tokens_or_default
from ._reader import attend
from ._rotary import Rotary
from ._temperature import LogTemperature
from ._turned_keys import keys_turned


class Attention(Mixer):
    """Attention of `heads` queries over `kv_heads` keys and values (Vaswani 2017; Shazeer 2019; Ainslie et al. 2023).

    `kv_heads == heads` is multi-head, `kv_heads == 1` multi-query, and what lies between grouped-query attention: query
    head `h` reads key head `h // (heads / kv_heads)`. The order is project, normalise queries and keys, rotate (with
    `norms_rotated` the other way round), sharpen queries by their `temperature`, attend, gate, project back. Head
    counts are read off the weights, so the module runs on a slice of its heads.
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap | None
    output: LinearMap
    query_norm: Norm | None
    key_norm: Norm | None
    value_norm: Norm | None
    rotary: Rotary | None
    temperature: LogTemperature | None
    gate: LinearMap | None
    sinks: Float[Array, "heads"] | None
    mask: Mask
    core: Operation
    scale: float = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)
    norms_rotated: bool = eqx.field(static=True)
    score_bias: bool = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        output_std: float | None = None,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
        value_norm: Norm | None = None,
        keys_as_values: bool = False,
        norms_rotated: bool = False,
        rotary: Rotary | None = None,
        temperature: LogTemperature | None = None,
        gate: bool = False,
        sinks: bool = False,
        mask: Mask | None = None,
        core: Operation | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        score_bias: bool = False,
        key: Key[Array, ""],
    ):
        """Draw the projections; parts that are modules (norms, rotary, temperature, mask, core) are passed built.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of queries.
            head_dim: Channels of a head.
            kv_heads: Heads of keys and values, a divisor of `heads`; None: as many.
            bias: Whether queries, keys, values and gates have biases.
            output_bias: Whether the output has one; None: as `bias`.
            output_std: The deviation of the output's weights; None: as the others'.
            query_norm: A norm of the queries.
            key_norm: A norm of the keys.
            value_norm: A norm of the values.
            keys_as_values: Whether values are what the map of the keys gives, before any norm (Gemma 4).
            norms_rotated: Whether queries and keys are normalised after their rotation (Hunyuan), not before it.
            rotary: Rotary positions of queries and keys.
            temperature: What sharpens queries of late positions.
            gate: Whether each head's output is multiplied by a sigmoid of the input.
            sinks: Whether each head has a learned logit in its softmax, which takes weight and gives nothing.
            mask: Which keys a query may see; None: `causal()`.
            core: How the attention is computed; None: `kernels.ATTENTION`, the platform's own kernel or a loop over
                blocks, in memory linear in the sequence, with one derivative, in reverse mode. For others (`jax.jvp`,
                Hessians) pass `kernels.DotProductAttention()`.
            scale: What the scores are multiplied by; None: `head_dim^-0.5`.
            softcap: The bound of the scores, `softcap * tanh(scores / softcap)` (Gemma 2).
            score_bias: Whether the model's `ScoreBias` is added to the scores.
            key: For the weights.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(
                f"Attention(heads={heads}, kv_heads={kv_heads}): each key head serves equally many queries, so "
                f"kv_heads must divide heads; take one of {[n for n in range(1, heads + 1) if heads % n == 0]}."
            )
        keys = jax.random.split(key, 5)
        sizes = {"embed": embed, "head_dim": head_dim}
        self.query = Linear("embed -> heads head_dim", heads=heads, bias=bias, key=keys[0], **sizes)
        self.key = Linear("embed -> kv_heads head_dim", kv_heads=kv_heads, bias=bias, key=keys[1], **sizes)
        self.value = None
        if not keys_as_values:
            self.value = Linear("embed -> kv_heads head_dim", kv_heads=kv_heads, bias=bias, key=keys[2], **sizes)
        output_bias = bias if output_bias is None else output_bias
        self.output = Linear(
            "heads head_dim -> embed", heads=heads, bias=output_bias, std=output_std, key=keys[3], **sizes
        )
        self.query_norm, self.key_norm, self.value_norm = query_norm, key_norm, value_norm
        self.rotary, self.temperature = rotary, temperature
        self.gate = Linear("embed -> heads head_dim", heads=heads, bias=bias, key=keys[4], **sizes) if gate else None
        self.sinks = jnp.zeros(heads, jnp.float32) if sinks else None
        self.mask = causal() if mask is None else mask
        self.core = ATTENTION if core is None else core
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap, self.norms_rotated, self.score_bias = softcap, norms_rotated, score_bias

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: KVCache | ShareRequest | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], KVCache | SharedValue | None]:
        """Attend among the tokens of `x` and, with a cache, to those stored in it; the new ones are stored too."""
        leaves = isinstance(cache, ShareRequest)
        cache = cache.cache if isinstance(cache, ShareRequest) else cache
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        query, key = self.query(x), self.key(x)
        value = key if self.value is None else self.value(x)
        value = value if self.value_norm is None else self.value_norm(value)
        if not self.norms_rotated:
            query, key = self._normed(query, key)
        cache, lengths, late = self._frequencies(tokens, cache)
        if self.rotary is not None and not late:
            query, key = (self.rotary(y, tokens.positions, lengths) for y in (query, key))
        if self.norms_rotated and not late:
            query, key = self._normed(query, key)
        kv_tokens = None
        if cache is not None:
            cache, key, value, kv_tokens = cache.update(key, value, tokens)
            key, value = key.astype(x.dtype), value.astype(x.dtype)
        if self.rotary is not None and kv_tokens is not None and late:
            lengths = document_lengths(tokens, kv_tokens)
            query = self.rotary(query, tokens.positions, lengths)
            key = self.rotary(key, kv_tokens.positions, lengths)
            query, key = self._normed(query, key) if self.norms_rotated else (query, key)
        if self.temperature is not None:
            factor = self.temperature(tokens.positions, query.dtype)[..., None, None]
            query = multiply_float32(query, factor)
        call = AttentionCall(
            query,
            key,
            value,
            mask=self.mask,
            tokens=tokens,
            kv_tokens=kv_tokens,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            bias=_bias(tokens, kv_tokens) if self.score_bias else None,
        )
        # A single token sees only what is stored.
        attended = attend(self.core, call, None if late or x.shape[-2] > 1 else cache)
        if cache is not None:
            attended = mask_overflow(attended, tokens, cache)
        if self.gate is not None:
            attended = attended * jax.nn.sigmoid(self.gate(x))
        if not leaves:
            return self.output(attended), cache
        seen = SharedKV(key, value, None if kv_tokens is None else kv_tokens.positions)
        return self.output(attended), SharedValue(seen, cache)

    def _frequencies(
        self, tokens: Tokens, cache: KVCache | None
    ) -> tuple[KVCache | None, Int[Array, "*batch #seq"] | None, bool]:
        """The cache with keys of the rows' frequencies, lengths that have these, and whether keys are cached unrotated.

        They are where each further token may change the frequencies, and are rotated when they are read.
        """
        if self.rotary is None or not self.rotary.depends_on_length:
            return cache, None, False
        if cache is None:
            return None, document_lengths(tokens), False
        if cache.turned is not None:
            return *keys_turned(self.rotary, cache, tokens), False
        if cache.rolling or self.rotary.changes_within(capacity_of(cache)):
            return cache, None, True
        return cache, jnp.zeros_like(tokens.positions[..., :1]), False  # those of all lengths that have room

    @property
    def _values(self) -> LinearMap:
        """The map that gives the values."""
        return self.key if self.value is None else self.value

    def _normed(
        self, query: Float[Array, "*batch seq heads head_dim"], key: Float[Array, "*batch kv_seq kv_heads head_dim"]
    ) -> tuple[Float[Array, "*batch seq heads head_dim"], Float[Array, "*batch kv_seq kv_heads head_dim"]]:
        query = query if self.query_norm is None else self.query_norm(query)
        return query, key if self.key_norm is None else self.key_norm(key)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> KVCache:
        """An empty cache for rows of up to `capacity` tokens; if the mask sees fewer, it is so long only, and rolls."""
        self.mask.check_cached("Attention")
        shapes, reach = (self.key.output_shape, self._values.output_shape), self.mask.reach(capacity)
        cache = KVCache.empty(batch, capacity, *shapes, dtype, reach=reach)
        scaling = None if self.rotary is None or self.norms_rotated else self.rotary.scaling
        if scaling is None or not scaling.has_sets or not scaling.changes_within(capacity):
            return cache
        return dataclasses.replace(cache, turned=jnp.zeros(tuple(batch), jnp.int32))

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads, and its core attends for pieces of rows."""
        query, key, value = (self.query.output_shape,), (self.key.output_shape,), (self._values.output_shape,)
        output = ((query[0][0], value[0][1]),)
        needs = {"softcap": self.softcap is not None, "sinks": self.sinks is not None, "bias": self.score_bias}
        needed = tuple(name for name, is_needed in needs.items() if is_needed)
        return MixerFacts(True, Attends(self.mask, query, key, value, output, needed))


def _bias(tokens: Tokens, kv_tokens: Tokens | None) -> Float[Array, "*batch heads seq kv_seq"]:
    if tokens.score_bias is None:
        raise ValueError(
            "Attention(score_bias=True): the tokens have no score_bias; build the model with "
            "nn.Transformer(score_bias=...), or pass nn.Tokens(positions, score_bias=...)."
        )
    return tokens.score_bias(tokens, tokens if kv_tokens is None else kv_tokens)
