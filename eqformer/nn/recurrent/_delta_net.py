"""A recurrence in the place of attention: a memory of fixed size that each token corrects."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._cache import DeltaCache
from .._contracts import Mixer, MixerFacts
from .._documents import documents_of
from .._dtype import at_least_float32, float_dtype
from .._linear import Linear
from .._linear_map import LinearMap
from .._norm import RMSNorm
from .._slots import check_one_document
from .._tokens import Tokens, tokens_or_default
from ._conv import CausalConv
from ._delta_rule import delta_rule


class GatedDeltaNet(Mixer):
    """The mixer of Yang, Kautz and Hatamizadeh (2024, arXiv:2412.06464), as in Qwen3-Next; called like an attention.

    Queries, keys and values go through short convolutions and silu; queries and keys get length 1. Each of `heads` has
    a matrix that the `delta_rule` changes: it decays by `exp(-exp(log_rate) softplus(decay(x) + decay_bias))` and is
    corrected at the rate `sigmoid(rate(x))`. Its outputs are normalised within each head and multiplied by
    `silu(gate(x))`. `kv_heads` count the heads of queries and of keys, of which each serves `heads / kv_heads` heads of
    values. There are no positions: tokens come in reading order, any padding last in a row of a call, and a document
    begins at position 0 or with another segment. Head counts are read off the weights.
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap
    gate: LinearMap
    rate: LinearMap
    decay: LinearMap
    query_conv: CausalConv
    key_conv: CausalConv
    value_conv: CausalConv
    log_rate: Float[Array, "heads"]
    decay_bias: Float[Array, "heads"]
    norm: RMSNorm
    output: LinearMap
    chunk: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int,
        taps: int = 4,
        chunk: int = 64,
        eps: float = 1e-6,
        output_std: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the maps, and decays of `exp(-a softplus(1))` with `a` from U(0.01, 16) where the input says nothing.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of values.
            kv_heads: Heads of queries and of keys, a divisor of `heads`.
            head_dim: Channels of a query and a key.
            v_dim: Channels of a value.
            taps: Tokens that the short convolutions see.
            chunk: Tokens that are computed together.
            eps: What the output's norm adds to the mean of squares.
            output_std: The deviation of the last map's weights; None: as the others'.
            key: For the weights.
        """
        if heads % kv_heads:
            raise ValueError(
                f"GatedDeltaNet(heads={heads}, kv_heads={kv_heads}): each key head serves equally many values, so "
                f"kv_heads must divide heads; take one of {[n for n in range(1, heads + 1) if heads % n == 0]}."
            )
        if chunk < 1:
            raise ValueError(f"GatedDeltaNet(chunk={chunk}): chunk counts tokens and must be at least 1.")
        keys = jax.random.split(key, 11)
        few: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim}
        many: dict[str, Any] = {"heads": heads, "v_dim": v_dim}
        self.query = Linear("embed -> kv_heads head_dim", embed=embed, **few, key=keys[0])
        self.key = Linear("embed -> kv_heads head_dim", embed=embed, **few, key=keys[1])
        self.value = Linear("embed -> heads v_dim", embed=embed, **many, key=keys[2])
        self.gate = Linear("embed -> heads v_dim", embed=embed, **many, key=keys[3])
        self.rate = Linear("embed -> heads", embed=embed, heads=heads, key=keys[4])
        self.decay = Linear("embed -> heads", embed=embed, heads=heads, key=keys[5])
        self.query_conv = CausalConv("kv_heads head_dim", taps=taps, **few, key=keys[6])
        self.key_conv = CausalConv("kv_heads head_dim", taps=taps, **few, key=keys[7])
        self.value_conv = CausalConv("heads v_dim", taps=taps, **many, key=keys[8])
        self.log_rate = jnp.log(jax.random.uniform(keys[9], (heads,), jnp.float32, 0.01, 16.0))
        self.decay_bias = jnp.ones(heads, jnp.float32)
        self.norm = RMSNorm("v_dim", v_dim=v_dim, eps=eps)
        self.output = Linear("heads v_dim -> embed", embed=embed, **many, std=output_std, key=keys[10])
        self.chunk = chunk

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: DeltaCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], DeltaCache | None]:
        """Read the tokens of `x` in turn, after those that a cache remembers; it then remembers these too."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        inputs = self.query(x), self.key(x), self.value(x)
        shape = inputs[0].shape[:-2]  # of all tokens, where `x` are some of them
        is_real = jnp.broadcast_to(tokens.positions >= 0, shape)
        documents = documents_of(tokens, shape)
        inputs = tuple(jnp.where(is_real[..., None, None], y, 0) for y in inputs)
        convs = self.query_conv, self.key_conv, self.value_conv
        before = (None,) * 3 if cache is None else (cache.queries, cache.keys, cache.values)
        triples = zip(convs, inputs, before, strict=True)
        query, key, value = (jax.nn.silu(conv(y, documents, past)) for conv, y, past in triples)
        exact = query.dtype
        copies = value.shape[-2] // key.shape[-2]
        query, key = (jnp.repeat(_unit(y), copies, axis=-2) for y in (query, key))
        query = query * key.shape[-1] ** -0.5
        decay = jax.nn.softplus(self.decay(x).astype(exact) + self.decay_bias.astype(exact))
        decay = jnp.where(is_real[..., None], -jnp.exp(self.log_rate.astype(exact)) * decay, 0)
        rate = jnp.where(is_real[..., None], jax.nn.sigmoid(self.rate(x)).astype(exact), 0)
        state = self._state(key, value, cache, documents, tokens)
        attended, state = delta_rule(query, key, value, rate, decay, documents, state, chunk=self.chunk)
        if cache is not None:
            count = jnp.sum(is_real, axis=-1, dtype=jnp.int32)
            triples = zip(convs, inputs, (cache.queries, cache.keys, cache.values), strict=True)
            queries, keys, values = (conv.after(y, documents, was, count) for conv, y, was in triples)
            last = jnp.max(jnp.broadcast_to(tokens.positions, shape), axis=-1).astype(jnp.int32) + 1
            lengths = jnp.where(count > 0, last, cache.lengths)
            cache = DeltaCache(state.astype(cache.state.dtype), queries, keys, values, lengths)
        attended = self.norm(attended.astype(x.dtype))
        gated = attended.astype(exact) * jax.nn.silu(self.gate(x).astype(exact))
        return self.output(gated.astype(x.dtype)), cache

    def _state(
        self,
        key: Float[Array, "*batch seq heads head_dim"],
        value: Float[Array, "*batch seq heads v_dim"],
        cache: DeltaCache | None,
        documents: Int[Array, "*batch seq"],
        tokens: Tokens,
    ) -> Float[Array, "*batch heads head_dim v_dim"]:
        """What the first token finds: zeros, or what the cache has; NaN for a row whose tokens are not the next."""
        batch, (heads, head_dim) = key.shape[:-3], key.shape[-2:]
        if cache is None:
            return jnp.zeros_like(value, shape=(*batch, heads, head_dim, value.shape[-1]))
        check_one_document(tokens)
        first = jnp.broadcast_to(tokens.positions, documents.shape)[..., 0]
        is_next, begins = (first < 0) | (first == cache.lengths), documents[..., 0] > 0
        state = jnp.where(is_next[..., None, None, None], cache.state.astype(value.dtype), jnp.nan)
        return jnp.where(begins[..., None, None, None], 0, state)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> DeltaCache:
        """An empty cache; `capacity` does not matter."""
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        kv_heads, head_dim = self.key.output_shape
        heads, v_dim = self.value.output_shape
        kept = (*batch, self.key_conv.weight.shape[-1] - 1)
        few, many = jnp.zeros((*kept, kv_heads, head_dim), dtype), jnp.zeros((*kept, heads, v_dim), dtype)
        state = jnp.zeros((*batch, heads, head_dim, v_dim), at_least_float32(jnp.dtype(dtype)))
        return DeltaCache(state, few, few, many, jnp.zeros(tuple(batch), jnp.int32))

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads; its state is read by the key, corrected, and read by the query."""
        heads, v_dim = self.value.output_shape
        return MixerFacts(True, operations=3 * 2 * heads * v_dim * self.query.sizes["head_dim"])


def _unit(x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """Vectors divided by their length, which a small number keeps from being zero."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
