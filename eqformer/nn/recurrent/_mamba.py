"""Mamba-2: a recurrent mixer whose matrix state decays and takes up each token."""

import dataclasses
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
from .._linear import Linear, LinearMap
from .._norm import RMSNorm
from .._tokens import Tokens, tokens_or_default
from ._convolution import CausalConv
from ._recurrent_inputs import check_sizes, draw_step_bias, init_recurrent_cache, RecurrentInputs
from ._state_space import state_space


@dataclasses.dataclass(frozen=True)
class GateNorm:
    """The norm of a `Mamba2Mixer`'s output, over the value heads of one key head."""

    eps: float = 1e-5
    """Added to the mean square."""
    before_gate: bool = False
    """Whether the norm comes before the multiplication by the gate."""


class Mamba2Mixer(Mixer):
    """Mamba-2 mixer of Dao and Gu (2024, arXiv:2405.21060); the paper's letters stand in brackets.

    It has the interface of an attention layer. Values (`x`), keys (`B`) and queries (`C`) pass through short
    convolutions and silu (or another `activation`). Each of `heads` has a matrix state that decays by
    `exp(-exp(log_rate) dt)` and adds the outer product of the key and `dt` times the value, with
    `dt = softplus(step(x) + step_bias)` clipped to `step_limits`. The query reads the state (see `state_space`), and
    `skip` (`D`) times the value is added. The output is multiplied by `silu(gate(x))` (`z`); then the `norm`, if there
    is one, divides by the root mean square over the heads of one key head and multiplies by `scale`. A `GateNorm`
    may also come before the gate.

    `kv_heads` counts the heads of keys and of queries (groups); each serves `heads / kv_heads` heads of values.
    `head_dim` counts their channels (`N`, the state size), `v_dim` those of a value (`P`). There are no positions:
    tokens must be in reading order, with padding at the end of a row, and a document starts at position 0 or at a new
    segment. Head counts are read off the weights.
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
        gate_norm: GateNorm | None = GateNorm(),
        output_std: float | None = None,
        activation: Callable[[Array], Array] = silu,
    ):
        """Draw the weights; for a zero input steps are from 0.001 to 0.1, and rates are 1, 2, 3 and so on.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of values.
            kv_heads: Heads of keys and of queries; must divide `heads`.
            head_dim: Channels of a key and a query.
            v_dim: Channels of a value.
            key: For the weights.
            taps: Tokens that the short convolutions read.
            chunk: Tokens that are computed together; None: the smallest power of two, at least 64, for which a chunk's
                scores (`chunk * chunk`) are no fewer than the numbers of a state (`head_dim * v_dim`).
            bias: Whether the projections have biases.
            output_bias: Whether the output projection has a bias; None: as `bias`.
            multipliers: Factors for the results of the projections: gate, value, key, query and step (Falcon-H1).
            conv_bias: Whether the convolutions have biases.
            step_limits: The least and the greatest `dt`.
            gate_norm: The norm of the output; None: no norm.
            output_std: Standard deviation of the output projection's weights; None: as for the other projections.
            activation: Applied after the convolutions.
        """
        if chunk is None:
            chunk = max(64, 1 << math.isqrt(max(head_dim * v_dim - 1, 0)).bit_length())
        check_sizes("Mamba2Mixer", heads=heads, kv_heads=kv_heads, chunk=chunk)
        keys = jax.random.split(key, 10)
        key_dims: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim}
        value_dims: dict[str, Any] = {"heads": heads, "v_dim": v_dim}
        input_options: dict[str, Any] = {"embed": embed, "bias": bias}
        conv_options: dict[str, Any] = {"taps": taps, "bias": conv_bias}
        self.gate = Linear("embed -> heads v_dim", **input_options, **value_dims, key=keys[0])
        self.value = Linear("embed -> heads v_dim", **input_options, **value_dims, key=keys[1])
        self.key = Linear("embed -> kv_heads head_dim", **input_options, **key_dims, key=keys[2])
        self.query = Linear("embed -> kv_heads head_dim", **input_options, **key_dims, key=keys[3])
        self.step = Linear("embed -> heads", **input_options, heads=heads, key=keys[4])
        self.value_conv = CausalConv("heads v_dim", **conv_options, **value_dims, key=keys[5])
        self.key_conv = CausalConv("kv_heads head_dim", **conv_options, **key_dims, key=keys[6])
        self.query_conv = CausalConv("kv_heads head_dim", **conv_options, **key_dims, key=keys[7])
        self.log_rate = jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32))
        self.step_bias = draw_step_bias((heads,), keys[8])
        self.skip = jnp.ones(heads, jnp.float32)
        # A norm over all heads may be sharded by heads; with several groups each device holds whole groups.
        dims = "heads v_dim" if kv_heads == 1 else "group v_dim"
        sizes: dict[str, Any] = {dims.split()[0]: heads // kv_heads, "v_dim": v_dim}
        self.norm = None if gate_norm is None else RMSNorm(dims, eps=gate_norm.eps, scale=False, **sizes)
        self.scale = None if gate_norm is None else jnp.ones((heads, v_dim), jnp.float32)
        self.norm_first = gate_norm is not None and gate_norm.before_gate
        output_bias = bias if output_bias is None else output_bias
        output_options: dict[str, Any] = {"embed": embed, "bias": output_bias, "std": output_std}
        self.output = Linear("heads v_dim -> embed", **output_options, **value_dims, key=keys[9])
        self.activation = activation
        self.step_limits, self.chunk, self.multipliers = step_limits, chunk, multipliers

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: RecurrentCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], RecurrentCache | None]:
        """Mix tokens in order; a cache supplies the state before `x`, and the returned cache includes `x`."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        projected = [project(x) for project in (self.gate, self.value, self.key, self.query, self.step)]
        if self.multipliers is not None:
            projected = [y * factor for y, factor in zip(projected, self.multipliers, strict=True)]
        gate, value, key, query, step = projected
        convs = self.query_conv, self.key_conv, self.value_conv
        recurrent = RecurrentInputs((query, key, value), convs, tokens, cache, self.activation)
        query, key, value = recurrent.convolve()
        state_dtype = value.dtype
        step = jax.nn.softplus(step.astype(state_dtype) + self.step_bias.astype(state_dtype))
        step = jnp.where(recurrent.is_real[..., None], jnp.clip(step, *self.step_limits), 0)
        log_decay, stepped_value = -jnp.exp(self.log_rate.astype(state_dtype)) * step, value * step[..., None]
        states = recurrent.initial_states(key, value)
        mixed, new_states = state_space(
            query, key, stepped_value, log_decay, recurrent.documents, states, chunk=self.chunk
        )
        mixed = mixed + value * self.skip.astype(state_dtype)[:, None]
        mixed = self._normalize(mixed, key.shape[-2]) if self.norm_first else mixed
        mixed = mixed * jax.nn.silu(gate.astype(state_dtype))
        mixed = mixed if self.norm_first else self._normalize(mixed, key.shape[-2])
        return self.output(mixed.astype(x.dtype)), recurrent.update_cache(new_states)

    def _normalize(
        self, y: Float[Array, "*batch seq heads v_dim"], groups: int
    ) -> Float[Array, "*batch seq heads v_dim"]:
        if self.norm is None or self.scale is None:
            return y
        by_group = y.reshape(*y.shape[:-2], groups, -1, y.shape[-1])
        return self.norm(by_group).reshape(y.shape) * self.scale.astype(y.dtype)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> RecurrentCache:
        """Return an empty cache; its size does not depend on `capacity`."""
        return init_recurrent_cache(batch, dtype, self.key, self.value, self.key_conv)

    def facts(self) -> MixerFacts:
        """State that a slice of the heads runs alone, or a slice of whole groups where each group has its own norm."""
        heads, v_dim = self.value.output_shape
        norm_per_group = self.norm is not None and "group" in self.norm.reduced
        operations = 2 * 2 * heads * v_dim * self.key.sizes["head_dim"]
        return MixerFacts(True, operations=operations, shares_kv_heads=not norm_per_group)
