"""A gated delta net whose memory decays channel by channel."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._activation import silu
from .._cache import RecurrentCache
from .._contracts import Mixer, MixerFacts
from .._dims import float32_at_least
from .._linear import Linear
from .._linear_map import LinearMap
from .._norm import RMSNorm
from .._tokens import Tokens, tokens_or_default
from ._conv import CausalConv
from ._delta_rule import delta_rule
from ._reading import check_sizes, empty_cache, Reading, step_bias, unit


class ChannelDeltaNet(Mixer):
    """Kimi Delta Attention (Kimi team 2025, arXiv:2510.26692), called like an attention.

    It is a `GatedDeltaNet` with as many heads of queries and keys as of values, in which each channel of a head's keys
    decays by `exp(-exp(log_rate) softplus(decay_up(decay_down(x)) + decay_bias))`, and whose outputs are multiplied by
    `sigmoid(gate_up(gate_down(x)))` after their norm.
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap
    rate: LinearMap
    decay_down: LinearMap
    decay_up: LinearMap
    gate_down: LinearMap
    gate_up: LinearMap
    query_conv: CausalConv
    key_conv: CausalConv
    value_conv: CausalConv
    log_rate: Float[Array, "heads"]
    norm: RMSNorm
    output: LinearMap
    chunk: int = eqx.field(static=True)
    activation: Callable[[Array], Array] = eqx.field(static=True)
    decay_bias: Float[Array, "heads head_dim"] = float32_at_least()

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        v_dim: int | None = None,
        rank: int | None = None,
        taps: int = 4,
        chunk: int = 64,
        eps: float = 1e-5,
        output_std: float | None = None,
        activation: Callable[[Array], Array] = silu,
        key: Key[Array, ""],
    ):
        """Draw the maps; where the input says nothing, decays are `exp(-a s)`, `a` from 1 to 16, `s` from 0.001 to 0.1.

        Args:
            embed: Channels of the input and the output.
            heads: Heads.
            head_dim: Channels of a query and a key.
            v_dim: Channels of a value; None: as many.
            rank: Channels between the two maps of decays, and of gates; None: `head_dim`.
            taps: Tokens that the short convolutions see.
            chunk: Tokens that are computed together; a multiple of 8 takes the fewest operations.
            eps: What the output's norm adds to the mean of squares.
            output_std: The deviation of the last map's weights; None: as the others'.
            activation: What follows the convolutions.
            key: For the weights.
        """
        check_sizes("ChannelDeltaNet", heads=heads, kv_heads=heads, chunk=chunk)
        keys = jax.random.split(key, 14)
        v_dim, rank = head_dim if v_dim is None else v_dim, head_dim if rank is None else rank
        of_keys: dict[str, Any] = {"heads": heads, "head_dim": head_dim}
        of_values: dict[str, Any] = {"heads": heads, "v_dim": v_dim}
        self.query = Linear("embed -> heads head_dim", embed=embed, **of_keys, key=keys[0])
        self.key = Linear("embed -> heads head_dim", embed=embed, **of_keys, key=keys[1])
        self.value = Linear("embed -> heads v_dim", embed=embed, **of_values, key=keys[2])
        self.rate = Linear("embed -> heads", embed=embed, heads=heads, key=keys[3])
        self.decay_down = Linear("embed -> rank", embed=embed, rank=rank, key=keys[4])
        self.decay_up = Linear("rank -> heads head_dim", rank=rank, **of_keys, key=keys[5])
        self.gate_down = Linear("embed -> rank", embed=embed, rank=rank, key=keys[6])
        self.gate_up = Linear("rank -> heads v_dim", rank=rank, **of_values, key=keys[7])
        self.query_conv = CausalConv("heads head_dim", taps=taps, **of_keys, key=keys[8])
        self.key_conv = CausalConv("heads head_dim", taps=taps, **of_keys, key=keys[9])
        self.value_conv = CausalConv("heads v_dim", taps=taps, **of_values, key=keys[10])
        self.log_rate = jnp.log(jax.random.uniform(keys[11], (heads,), jnp.float32, 1.0, 16.0))
        self.decay_bias = step_bias((heads, head_dim), keys[12])
        self.norm = RMSNorm("v_dim", v_dim=v_dim, eps=eps)
        self.output = Linear("heads v_dim -> embed", embed=embed, **of_values, std=output_std, key=keys[13])
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
        steps = jax.nn.softplus(self.decay_up(self.decay_down(x)).astype(exact) + self.decay_bias.astype(exact))
        decay = jnp.where(is_real[..., None], -jnp.exp(self.log_rate.astype(exact))[:, None] * steps, 0)
        rate = jnp.where(is_real, jax.nn.sigmoid(self.rate(x)).astype(exact), 0)
        states = reading.states(key, value)
        attended, after = delta_rule(query, key, value, rate, decay, reading.documents, states, chunk=self.chunk)
        gate = jax.nn.sigmoid(self.gate_up(self.gate_down(x)).astype(exact))
        return self.output((self.norm(attended) * gate).astype(x.dtype)), reading.cache_after(inputs, after)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> RecurrentCache:
        """An empty cache; `capacity` does not matter."""
        return empty_cache(batch, dtype, self.key, self.value, self.key_conv)

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads; its state is read by the key, corrected, and read by the query."""
        heads, v_dim = self.value.output_shape
        return MixerFacts(True, operations=3 * 2 * heads * v_dim * self.key.sizes["head_dim"])
