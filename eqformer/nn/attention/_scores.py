"""Attention scores: their scale, temperature, softcap, bias and sinks, and the call that weighs values by them."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from ... import kernels
from .._cache import KVCache
from .._contracts import ScoreBias
from .._dtype import at_least_float32, multiply_float32
from .._module import Module, named_by
from .._tokens import Tokens


class QueryTemperature(Module):
    """A factor of queries by their position, and possibly by their head."""

    @abc.abstractmethod
    def factors(self, positions: Int[Array, "*batch seq"], dtype: jax.typing.DTypeLike) -> Float[Array, "*batch seq _"]:
        """Return a factor for each token's query and each head (or all heads), in `dtype` but at least float32."""


class LogTemperature(QueryTemperature):
    """A factor of queries that grows with their position, `1 + strength * log(1 + floor((position + offset) / every))`.

    Over longer rows, a softmax spreads its weight over more keys. Scores that grow with the logarithm of the number of
    keys keep the weight on the same keys (Nakanishi 2025, arXiv:2501.19399). Below position `every - offset` the factor
    is 1. Llama 4 has `offset=1`, Ministral 3 `offset=0`.
    """

    every: int = eqx.field(static=True)
    strength: float = eqx.field(static=True)
    offset: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        if self.every < 1:
            raise ValueError(f"LogTemperature(every={self.every}): every counts tokens and must be at least 1.")

    def factors(self, positions: Int[Array, "*batch seq"], dtype: jax.typing.DTypeLike) -> Float[Array, "*batch seq 1"]:
        """Return the factor of each token's query, the same for all heads; padding has the factor of position 0."""
        steps = ((jnp.maximum(positions, 0) + self.offset) // self.every)[..., None]
        return 1 + self.strength * jnp.log1p(steps.astype(at_least_float32(jnp.dtype(dtype))))


class HeadLogTemperature(QueryTemperature):
    """A learned factor of the queries of each head, `scale * log(1 + position) + bias` (Mistral Large 4).

    The factor is 1 at the beginning of training. `LogTemperature` has the same growth for all heads, and no parameters.
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    scale: Float[Array, "..."] = named_by("dims")
    bias: Float[Array, "..."] = named_by("dims")

    def __init__(self, heads: int, dim: str = "heads"):
        """Initialize scale 0 and bias 1 for each head; `dim` names the dim of heads, `"index_heads"` in an indexer."""
        self.dims = (dim,)
        self.scale, self.bias = jnp.zeros(heads, jnp.float32), jnp.ones(heads, jnp.float32)

    def factors(self, positions: Int[Array, "*batch seq"], dtype: jax.typing.DTypeLike) -> Float[Array, "*batch seq _"]:
        """Return a factor for each token's query and each head; padding has the factors of position 0."""
        wide = at_least_float32(jnp.dtype(dtype))
        growth = jnp.log1p(jnp.maximum(positions, 0).astype(wide))
        return self.scale.astype(wide) * growth[..., None] + self.bias.astype(wide)


def multiply_temperature(
    temperature: QueryTemperature | None, query: Float[Array, "*batch seq heads head_dim"], tokens: Tokens
) -> Float[Array, "*batch seq heads head_dim"]:
    """Multiply queries by the factors of their positions and heads; None changes nothing."""
    if temperature is None:
        return query
    return multiply_float32(query, temperature.factors(tokens.positions, query.dtype)[..., None])


class ALiBi(Module):
    """Attention with linear biases: `-slope * |query position - key position|` is added to each score.

    Head `h` (from 1) of `2^n` heads has the slope `scale * 2^(-max_bias * h / 2^n)`. If the number of heads is between
    `2^n` and `2^(n+1)`, the slopes of `2^n` heads come first, then the first, third, fifth, ... slope of `2^(n+1)`
    heads (Press, Smith and Lewis 2021, arXiv:2108.12409).

    The module holds the number of each head, so that on a slice of the heads, heads keep their slopes. The slopes are
    computed from these numbers in each call. So they are never trained, and not rounded with the model's weights.
    """

    numbers: Int[Array, "heads"]
    """The number of each head, from 0."""
    heads: int = eqx.field(static=True)
    """The number of heads of the whole model."""
    max_bias: float = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(self, *, heads: int, max_bias: float = 8.0, scale: float = 1.0):
        """Number the heads.

        Args:
            heads: Heads of queries.
            max_bias: The negative exponent of two of the smallest slope (MPT's `alibi_bias_max`).
            scale: A factor of all slopes.
        """
        if heads < 1:
            raise ValueError(f"ALiBi(heads={heads}): give the number of the attention's query heads, at least 1.")
        self.numbers = jnp.arange(heads, dtype=jnp.int32)
        self.heads, self.max_bias, self.scale = heads, max_bias, scale

    def slopes(self, dtype: jax.typing.DTypeLike) -> Float[Array, "heads"]:
        """Return the slope of each head that this module holds, in `dtype` but at least float32."""
        power = 2 ** (self.heads.bit_length() - 1)
        exponents = [*range(2, 2 * power + 1, 2), *range(1, 2 * power, 2)][: self.heads]
        table = self.scale * 2.0 ** (-self.max_bias * np.array(exponents) / (2 * power))
        return jnp.asarray(table, at_least_float32(jnp.dtype(dtype)))[self.numbers]


class Scores(Module):
    """The scores of an attention, `softcap(scale * temperature * query . key) + bias`; a softmax follows."""

    scale: float | None = eqx.field(static=True, default=None)
    """The factor of the scores; None: the number of channels of a query to the power -0.5."""
    temperature: QueryTemperature | None = None
    """A factor of each query by its position, and possibly by its head; None: 1."""
    softcap: float | None = eqx.field(static=True, default=None)
    """The bound of the scores, `softcap * tanh(scores / softcap)` (Gemma 2); None: no bound."""
    bias: bool = eqx.field(static=True, default=False)
    """Whether the model's `ScoreBias` is added."""
    sinks: Float[Array, "heads"] | None = None
    """A learned score of each head that joins the softmax and is then dropped (gpt-oss); None: no sinks."""
    alibi: ALiBi | None = None
    """A bias of each head that is linear in the distance of query and key; None: no such bias."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options among `softcap`, `sinks`, `bias` and `alibi_slopes` that the core must compute."""
        is_set = {"softcap": self.softcap is not None, "sinks": self.sinks is not None, "bias": self.bias}
        is_set |= {"alibi_slopes": self.alibi is not None}
        return tuple(name for name, value in is_set.items() if value)

    @property
    def has_bias(self) -> bool:
        """Whether terms are added to the scores: the model's `ScoreBias`, or `alibi`."""
        return self.bias or self.alibi is not None

    def scale_of(self, channels: int) -> float:
        """Return the factor of scores, for queries with this number of channels."""
        return channels**-0.5 if self.scale is None else self.scale

    def apply_temperature(
        self, query: Float[Array, "*batch seq heads head_dim"], tokens: Tokens
    ) -> Float[Array, "*batch seq heads head_dim"]:
        """Multiply queries by their temperature, if there is one."""
        return multiply_temperature(self.temperature, query, tokens)

    def call(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
        mask: kernels.Mask,
        tokens: Tokens,
        kv_tokens: Tokens | None = None,
    ) -> kernels.AttentionCall:
        """Return the `AttentionCall` of these queries, keys and values with the options of the scores.

        Args:
            query: The queries, before their temperature.
            key: The keys.
            value: The values.
            mask: The keys that a query may see.
            tokens: The tokens of the queries.
            kv_tokens: The tokens of the keys; None: the tokens of the queries.
        """
        return kernels.AttentionCall(
            self.apply_temperature(query, tokens),
            key,
            value,
            mask=mask,
            tokens=tokens,
            kv_tokens=kv_tokens,
            scale=self.scale_of(query.shape[-1]),
            softcap=self.softcap,
            sinks=self.sinks,
            bias=_bias_of(tokens, kv_tokens) if self.bias else None,
            alibi_slopes=None if self.alibi is None else self.alibi.slopes(query.dtype),
        )


def _bias_of(tokens: Tokens, kv_tokens: Tokens | None) -> Float[Array, "*batch heads seq kv_seq"]:
    if tokens.score_bias is None:
        raise ValueError(
            "Scores(bias=True): the tokens have no score_bias; build the model with nn.Transformer(score_bias=...), or "
            "pass nn.Tokens(positions, score_bias=...)."
        )
    return tokens.score_bias(tokens, tokens if kv_tokens is None else kv_tokens)


def compute_attention(
    core: kernels.Operation, call: kernels.AttentionCall, cache: KVCache | None
) -> Float[Array, "*batch seq heads v_dim"]:
    """Compute the call by `core`, or by a kernel for decoding if a single query of each row reads a whole cache.

    `cache` stores all keys and values of the call; None if there is no cache. A kernel for decoding reads the cache as
    it is stored; for a cache of 8 bits, it multiplies scores and probabilities by the scales, instead of keys and
    values. A core of another package always computes the call itself.
    """
    if cache is None or call.query.shape[-3] > 1:
        return core(call)
    if (decode := core.decode_op(has_codes=cache.key_scales is not None)) is None:
        return core(call)
    key, value, key_scales, value_scales = call.key, call.value, None, None
    if cache.key_scales is not None:
        key, value, key_scales, value_scales = cache.read_quantized()
    return decode(
        kernels.DecodeCall(
            call.query,
            key,
            value,
            key_scales=key_scales,
            value_scales=value_scales,
            visible=call.mask(call.tokens, call.key_tokens),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            bias=call.total_bias,
            stored=kernels.StoredArrays(
                cache.layer, cache.keys, cache.values, key_scales=cache.key_scales, value_scales=cache.value_scales
            ),
        )
    )


class RelativeBias(ScoreBias):
    """A learned bias for each head and range of distances (T5: Raffel et al. 2020, arXiv:1910.10683).

    Half of the ranges of one direction hold one distance each. The other ranges grow by a constant factor; the last one
    begins at the distance `farthest` or before it, and holds all longer distances. With `both_ways`, half of all ranges
    are for keys up to the query's own token, and half are for later keys. Otherwise all ranges are for keys up to the
    query's own token, and later keys have the range of distance 0.
    """

    weight: Float[Array, "ranges heads"]
    farthest: int = eqx.field(static=True)
    both_ways: bool = eqx.field(static=True)

    def __init__(
        self,
        *,
        ranges: int = 32,
        heads: int,
        farthest: int = 128,
        both_ways: bool = False,
        std: float = 0.02,
        key: Key[Array, ""],
    ):
        """Initialize the table.

        Args:
            ranges: Ranges of distances, of both directions together.
            heads: Heads of queries.
            farthest: The distance from which on all distances share one range.
            both_ways: Whether later keys have ranges of their own, as in an encoder.
            std: The standard deviation of the table.
            key: Random key for the weights.
        """
        one_way = ranges // 2 if both_ways else ranges
        if one_way < 2 or farthest <= one_way // 2:
            raise ValueError(
                f"RelativeBias(ranges={ranges}, farthest={farthest}, both_ways={both_ways}): a direction has {one_way} "
                f"ranges, half of them of one distance each; give it at least 2, and farthest above {one_way // 2}."
            )
        self.weight = std * jax.random.normal(key, (ranges, heads), jnp.float32)
        self.farthest, self.both_ways = farthest, both_ways

    def __call__(self, queries: Tokens, keys: Tokens) -> Float[Array, "*batch heads seq kv_seq"]:
        """Return the bias of each query and key, in float32 at least."""
        query_positions, key_positions = queries.positions, keys.positions
        if queries is keys and queries.are_whole_rows:
            # All rows have the same positions, except for padding, which no query sees.
            query_positions = key_positions = jnp.arange(query_positions.shape[-1], dtype=jnp.int32)
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        table = self.weight.astype(at_least_float32(self.weight.dtype))
        return jnp.moveaxis(table[self._range_of(distance)], -1, -3)

    def _range_of(self, distance: Int[Array, "*batch seq kv_seq"]) -> Int[Array, "*batch seq kv_seq"]:
        one_way = self.weight.shape[0] // (2 if self.both_ways else 1)
        ranges = jnp.asarray(distance_ranges(one_way, self.farthest))
        if not self.both_ways:
            return ranges[jnp.clip(distance, 0, self.farthest)]
        return ranges[jnp.minimum(jnp.abs(distance), self.farthest)] + jnp.where(distance < 0, one_way, 0)


def distance_ranges(count: int, farthest: int) -> Int[np.ndarray, "distances"]:
    """Return the range of each distance `d` up to `farthest`, for `count` ranges of one direction.

    Below `exact = count // 2` the range is `d`, otherwise `exact + floor((count - exact) log(d / exact) / log(farthest
    / exact))`. It is computed in integers, so that no rounding of a logarithm moves a distance to the next range.
    """
    exact = count // 2
    growing = count - exact

    def range_of(distance: int) -> int:
        if distance < exact:
            return distance
        steps = (distance**growing * exact**step >= exact**growing * farthest**step for step in range(1, growing))
        return exact + sum(steps)

    return np.array([range_of(distance) for distance in range(farthest + 1)], np.int32)
