"""A recurrence in the place of attention: a memory of fixed size that each token corrects."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._activation import silu
from .._cache import RecurrentCache
from .._contracts import Mixer, MixerFacts
from .._linear import Linear
from .._linear_map import LinearMap
from .._norm import RMSNorm
from .._tokens import Tokens, tokens_or_default
from ._conv import CausalConv
from ._delta_rule import delta_rule
from ._reading import check_sizes, empty_cache, Reading, unit


class GatedDeltaNet(Mixer):
    """The mixer of Yang, Kautz and Hatamizadeh (2024, arXiv:2412.06464), as in Qwen3-Next; called like an attention.

    Queries, keys and values go through short convolutions and silu (or another `activation`); queries and keys get
    length 1. Each of `heads` has a matrix that the `delta_rule` changes: it decays by `exp(-exp(log_rate)
    softplus(decay(x) + decay_bias))` and is corrected at the rate `sigmoid(rate(x))`. Its outputs are normalised within
    each head and multiplied by `silu(gate(x))`. `kv_heads` count the heads of queries and of keys, of which each serves
    `heads / kv_heads` heads of values. There are no positions: tokens come in reading order, any padding last in a row
    of a call, and a document begins at position 0 or with another segment. Head counts are read off the weights.
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
    activation: Callable[[Array], Array] = eqx.field(static=True)

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
        activation: Callable[[Array], Array] = silu,
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
            activation: What follows the convolutions.
            key: For the weights.
        """
        check_sizes("GatedDeltaNet", heads=heads, kv_heads=kv_heads, chunk=chunk)
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
        self.chunk, self.activation = chunk, activation

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: RecurrentCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], RecurrentCache | None]:
        """Read the tokens of `x` in turn, after those that a cache remembers; it then remembers these too."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        inputs = self.query(x), self.key(x), self.value(x)
        # Of all tokens, where `x` are some of them.
        reading = Reading(
            (self.query_conv, self.key_conv, self.value_conv), tokens, inputs[0].shape[:-2], cache, self.activation
        )
        query, key, value = reading.convolved(inputs)
        exact, is_real = query.dtype, reading.is_real[..., None]
        query, key = unit(query) * key.shape[-1] ** -0.5, unit(key)
        decay = jax.nn.softplus(self.decay(x).astype(exact) + self.decay_bias.astype(exact))
        decay = jnp.where(is_real, -jnp.exp(self.log_rate.astype(exact)) * decay, 0)
        rate = jnp.where(is_real, jax.nn.sigmoid(self.rate(x)).astype(exact), 0)
        states = reading.states(key, value)
        attended, after = delta_rule(query, key, value, rate, decay, reading.documents, states, chunk=self.chunk)
        attended = self.norm(attended.astype(x.dtype))
        gated = attended.astype(exact) * jax.nn.silu(self.gate(x).astype(exact))
        return self.output(gated.astype(x.dtype)), reading.cache_after(inputs, after)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> RecurrentCache:
        """An empty cache; `capacity` does not matter."""
        return empty_cache(batch, dtype, self.key, self.value, self.key_conv)

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads; its state is read by the key, corrected, and read by the query."""
        heads, v_dim = self.value.output_shape
        return MixerFacts(True, operations=3 * 2 * heads * v_dim * self.query.sizes["head_dim"])
