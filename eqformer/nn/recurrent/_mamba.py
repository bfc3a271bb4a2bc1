"""Mamba-2 in the place of attention: a memory of fixed size that fades and takes up each token."""

import math
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
from ._reading import check_sizes, empty_cache, Reading, step_bias
from ._state_space import state_space


class Mamba2Mixer(Mixer):
    """The mixer of Dao and Gu (2024, arXiv:2405.21060), called like an attention; in brackets the paper's letters.

    Values (`x`), keys (`B`) and queries (`C`) go through short convolutions and silu (or another `activation`). Each of
    `heads` has a matrix that fades by `exp(-exp(log_rate) dt)` and takes up the token's key and `dt` times its value,
    where `dt` is `softplus(step(x) + step_bias)` within `step_limits`; the query reads it (see `state_space`), and
    `skip` (`D`) times the value is added. This is multiplied by `silu(gate(x))` (`z`) and then, where there is a
    `norm`, divided by the root of its mean square over all heads of one key head, and multiplied by `scale`; with
    `norm_first` these two come before the product with the gate. `kv_heads` count the heads of keys and of queries
    (groups), of which each serves `heads / kv_heads` heads of values; `head_dim` are their channels (`N`, the size of
    the state), `v_dim` those of a value (`P`). There are no positions: tokens come in reading order, any padding last
    in a row of a call, and a document begins at position 0 or with another segment. Head counts are read off the
    weights.
    """

    gate: LinearMap
    value: LinearMap
    key: LinearMap
    query: LinearMap
    step: LinearMap
    value_conv: CausalConv
    key_conv: CausalConv
    query_conv: CausalConv
    log_rate: Float[Array, "heads"]
    step_bias: Float[Array, "heads"]
    skip: Float[Array, "heads"]
    norm: RMSNorm | None
    scale: Float[Array, "heads v_dim"] | None
    output: LinearMap
    step_limits: tuple[float, float] = eqx.field(static=True)
    multipliers: tuple[float, float, float, float, float] | None = eqx.field(static=True)
    norm_first: bool = eqx.field(static=True)
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
        key: Key[Array, ""],
        taps: int = 4,
        chunk: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        step_limits: tuple[float, float] = (0.0, float("inf")),
        output_bias: bool | None = None,
        multipliers: tuple[float, float, float, float, float] | None = None,
        norm_eps: float | None = 1e-5,
        norm_first: bool = False,
        output_std: float | None = None,
        activation: Callable[[Array], Array] = silu,
    ):
        """Draw the maps; where the input says nothing, steps are from 0.001 to 0.1 and rates 1, 2, 3 and so on.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of values.
            kv_heads: Heads of keys and of queries, a divisor of `heads`.
            head_dim: Channels of a key and a query.
            v_dim: Channels of a value.
            key: For the weights.
            taps: Tokens that the short convolutions see.
            chunk: Tokens that are computed together; None: the least power of two whose square, the scores of a chunk,
                is not below `head_dim * v_dim`, the numbers of a state; and 64 at least.
            bias: Whether the maps have biases.
            output_bias: Whether the last map has one; None: as `bias`.
            multipliers: What the results of the maps from the stream are multiplied by: of gates, values, keys, queries
                and steps (Falcon-H1); None: nothing.
            conv_bias: Whether the convolutions have.
            step_limits: The least and the greatest `dt`.
            norm_eps: What the output's norm adds to the mean of squares; None: there is no norm.
            norm_first: Whether the norm comes before the gate.
            output_std: The deviation of the last map's weights; None: as the others'.
            activation: What follows the convolutions.
        """
        if chunk is None:
            chunk = max(64, 1 << math.isqrt(max(head_dim * v_dim - 1, 0)).bit_length())
        check_sizes("Mamba2Mixer", heads=heads, kv_heads=kv_heads, chunk=chunk)
        keys = jax.random.split(key, 10)
        few: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim}
        many: dict[str, Any] = {"heads": heads, "v_dim": v_dim}
        given: dict[str, Any] = {"embed": embed, "bias": bias}
        conv: dict[str, Any] = {"taps": taps, "bias": conv_bias}
        self.gate = Linear("embed -> heads v_dim", **given, **many, key=keys[0])
        self.value = Linear("embed -> heads v_dim", **given, **many, key=keys[1])
        self.key = Linear("embed -> kv_heads head_dim", **given, **few, key=keys[2])
        self.query = Linear("embed -> kv_heads head_dim", **given, **few, key=keys[3])
        self.step = Linear("embed -> heads", **given, heads=heads, key=keys[4])
        self.value_conv = CausalConv("heads v_dim", **conv, **many, key=keys[5])
        self.key_conv = CausalConv("kv_heads head_dim", **conv, **few, key=keys[6])
        self.query_conv = CausalConv("kv_heads head_dim", **conv, **few, key=keys[7])
        self.log_rate = jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32))
        self.step_bias = step_bias((heads,), keys[8])
        self.skip = jnp.ones(heads, jnp.float32)
        # Over all heads a norm may be split; that of a group, of which each device has the whole, never is.
        dims = "heads v_dim" if kv_heads == 1 else "group v_dim"
        sizes: dict[str, Any] = {dims.split()[0]: heads // kv_heads, "v_dim": v_dim}
        self.norm = None if norm_eps is None else RMSNorm(dims, eps=norm_eps, scale=False, **sizes)
        self.scale = None if norm_eps is None else jnp.ones((heads, v_dim), jnp.float32)
        output_bias = bias if output_bias is None else output_bias
        back: dict[str, Any] = {"embed": embed, "bias": output_bias, "std": output_std}
        self.output = Linear("heads v_dim -> embed", **back, **many, key=keys[9])
        self.activation = activation
        self.step_limits, self.chunk, self.multipliers, self.norm_first = step_limits, chunk, multipliers, norm_first

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: RecurrentCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], RecurrentCache | None]:
        """Read the tokens of `x` in turn, after those that a cache remembers; it then remembers these too."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        maps = self.gate, self.value, self.key, self.query, self.step
        found = [one(x) for one in maps]
        if self.multipliers is not None:
            found = [y * times for y, times in zip(found, self.multipliers, strict=True)]
        gate, value, key, query, step = found
        inputs = query, key, value
        # Of all tokens, where `x` are some of them.
        reading = Reading(
            (self.query_conv, self.key_conv, self.value_conv), tokens, inputs[0].shape[:-2], cache, self.activation
        )
        query, key, value = reading.convolved(inputs)
        exact = value.dtype
        step = jax.nn.softplus(step.astype(exact) + self.step_bias.astype(exact))
        step = jnp.where(reading.is_real[..., None], jnp.clip(step, *self.step_limits), 0)
        decay, taken = -jnp.exp(self.log_rate.astype(exact)) * step, value * step[..., None]
        states = reading.states(key, value)
        answer, after = state_space(query, key, taken, decay, reading.documents, states, chunk=self.chunk)
        answer = answer + value * self.skip.astype(exact)[:, None]
        answer = self._normed(answer, key.shape[-2]) if self.norm_first else answer
        answer = answer * jax.nn.silu(gate.astype(exact))
        answer = answer if self.norm_first else self._normed(answer, key.shape[-2])
        return self.output(answer.astype(x.dtype)), reading.cache_after(inputs, after)

    def _normed(self, y: Float[Array, "*batch seq heads v_dim"], groups: int) -> Float[Array, "*batch seq heads v_dim"]:
        if self.norm is None or self.scale is None:
            return y
        apart = y.reshape(*y.shape[:-2], groups, -1, y.shape[-1])
        return self.norm(apart).reshape(y.shape) * self.scale.astype(y.dtype)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> RecurrentCache:
        """An empty cache; `capacity` does not matter."""
        return empty_cache(batch, dtype, self.key, self.value, self.key_conv)

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads, of whole groups where these are normed each by itself."""
        heads, v_dim = self.value.output_shape
        is_of_groups = self.norm is not None and "group" in self.norm.reduced
        operations = 2 * 2 * heads * v_dim * self.key.sizes["head_dim"]
        return MixerFacts(True, operations=operations, shares_kv_heads=not is_of_groups)
