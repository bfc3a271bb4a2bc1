"""Gated delta nets: recurrent mixers whose matrix state is corrected by each token, with decays per head or channel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._cache import RecurrentCache
from .._contracts import Mixer, MixerFacts
from .._linear import Linear, LinearMap
from .._mlp import silu
from .._module import float32_field
from .._norm import RMSNorm
from .._tokens import Tokens, tokens_or_default
from ._convolution import CausalConv, check_sizes, draw_step_bias, init_recurrent_cache, normalize, RecurrentInputs
from ._delta_rule import delta_rule


class GatedDeltaNet(Mixer):
    """Gated delta net of Yang, Kautz and Hatamizadeh (2024, arXiv:2412.06464), as in Qwen3-Next.

    Queries, keys and values pass through short convolutions and silu (or another `activation`); queries and keys are
    normalized to length 1. Each of `heads` has a matrix state that follows the `delta_rule`: the state decays by
    `exp(-exp(log_rate) softplus(decay(x) + decay_bias))` and is corrected at the rate `sigmoid(rate(x))`, times
    `largest_rate`. The output is normalized within each head and multiplied by `silu(gate(x))`, or by another
    `gate_activation`. There are `kv_heads` heads of queries and as many heads of keys; each serves `heads / kv_heads`
    heads of values. There are no positions: tokens must be in reading order, with padding at the end of a row, and a
    document starts at position 0 or at a new segment. Head counts are read off the weights.
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
    largest_rate: float = eqx.field(static=True)
    gate_activation: Callable[[Array], Array] = eqx.field(static=True)

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
        largest_rate: float = 1.0,
        gate_activation: Callable[[Array], Array] = silu,
        key: Key[Array, ""],
    ):
        """Initialize the weights; for a zero input the decay is `exp(-a softplus(1))` with `a` from U(0.01, 16).

        Args:
            embed: Channels of the input and the output.
            heads: Heads of values.
            kv_heads: Heads of queries and of keys; must divide `heads`.
            head_dim: Channels of a query and a key.
            v_dim: Channels of a value.
            taps: Tokens that the short convolutions read.
            chunk: Tokens that are computed together.
            eps: Added to the mean square in the norm of the output.
            output_std: Standard deviation of the output projection's weights; None: as for the other projections.
            activation: Applied after the convolutions.
            largest_rate: A factor of the rates; with 2, a correction may change the sign of the state (Grazzi et al.
                2024, arXiv:2411.12537).
            gate_activation: Applied to the gates of the output.
            key: Random key for the weights.
        """
        check_sizes("GatedDeltaNet", heads=heads, kv_heads=kv_heads, chunk=chunk)
        keys = jax.random.split(key, 11)
        project = functools.partial(Linear, embed=embed)
        to_keys = functools.partial(project, "embed -> kv_heads head_dim", kv_heads=kv_heads, head_dim=head_dim)
        to_values = functools.partial(project, "embed -> heads v_dim", heads=heads, v_dim=v_dim)
        self.query, self.key = to_keys(key=keys[0]), to_keys(key=keys[1])
        self.value, self.gate = to_values(key=keys[2]), to_values(key=keys[3])
        self.rate = project("embed -> heads", heads=heads, key=keys[4])
        self.decay = project("embed -> heads", heads=heads, key=keys[5])
        convolve_keys = functools.partial(
            CausalConv, "kv_heads head_dim", kv_heads=kv_heads, head_dim=head_dim, taps=taps
        )
        self.query_conv, self.key_conv = convolve_keys(key=keys[6]), convolve_keys(key=keys[7])
        self.value_conv = CausalConv("heads v_dim", taps=taps, heads=heads, v_dim=v_dim, key=keys[8])
        self.log_rate = jnp.log(jax.random.uniform(keys[9], (heads,), jnp.float32, 0.01, 16.0))
        self.decay_bias = jnp.ones(heads, jnp.float32)
        self.norm = RMSNorm("v_dim", v_dim=v_dim, eps=eps)
        merge_heads = functools.partial(Linear, "heads v_dim -> embed", heads=heads, v_dim=v_dim, embed=embed)
        self.output = merge_heads(std=output_std, key=keys[10])
        self.chunk, self.activation, self.largest_rate = chunk, activation, largest_rate
        self.gate_activation = gate_activation

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: RecurrentCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], RecurrentCache | None]:
        """Mix tokens in order; a cache supplies the state before `x`, and the returned cache includes `x`."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        projections = self.query(x), self.key(x), self.value(x)
        convs = self.query_conv, self.key_conv, self.value_conv
        recurrent = RecurrentInputs(projections, convs, tokens, cache, self.activation)
        query, key, value = recurrent.convolve()
        state_dtype, is_real = query.dtype, recurrent.is_real[..., None]
        query, key = normalize(query) * key.shape[-1] ** -0.5, normalize(key)
        step = jax.nn.softplus(self.decay(x).astype(state_dtype) + self.decay_bias.astype(state_dtype))
        log_decay = jnp.where(is_real, -jnp.exp(self.log_rate.astype(state_dtype)) * step, 0)
        rate = jnp.where(is_real, jax.nn.sigmoid(self.rate(x)).astype(state_dtype), 0)
        rate = rate if self.largest_rate == 1 else rate * self.largest_rate
        states = recurrent.initial_states(key, value)
        mixed, new_states = delta_rule(
            query, key, value, rate, log_decay, recurrent.documents, states, chunk=self.chunk
        )
        mixed = self.norm(mixed.astype(x.dtype))
        gated = mixed.astype(state_dtype) * self.gate_activation(self.gate(x).astype(state_dtype))
        return self.output(gated.astype(x.dtype)), recurrent.update_cache(new_states)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> RecurrentCache:
        """Return an empty cache; its size does not depend on `capacity`."""
        return init_recurrent_cache(batch, dtype, self.key, self.value, self.key_conv)

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads; each token reads the state twice and updates it once."""
        heads, v_dim = self.value.output_shape
        return MixerFacts(True, operations=3 * 2 * heads * v_dim * self.query.sizes["head_dim"])


class ChannelDeltaNet(Mixer):
    """Kimi Delta Attention: a gated delta net with one decay for each channel of the keys (arXiv:2510.26692).

    It differs from `GatedDeltaNet` in three points: queries, keys and values have the same number of heads; each
    channel of a head's keys decays by `exp(-exp(log_rate) softplus(decay_up(decay_down(x)) + decay_bias))`; and the
    normalized output is multiplied by `sigmoid(gate_up(gate_down(x)))`. With `rank=0`, decays and gates have one
    projection instead of two. With a `lowest_log_decay`, which is negative, a channel decays by `exp(lowest_log_decay
    sigmoid(exp(log_rate) (decay_up(...) + decay_bias)))` (GLM-5.3, Ling 3).
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap
    rate: LinearMap
    decay_down: LinearMap | None
    decay_up: LinearMap
    gate_down: LinearMap | None
    gate_up: LinearMap
    query_conv: CausalConv
    key_conv: CausalConv
    value_conv: CausalConv
    log_rate: Float[Array, "heads"]
    norm: RMSNorm
    output: LinearMap
    chunk: int = eqx.field(static=True)
    activation: Callable[[Array], Array] = eqx.field(static=True)
    lowest_log_decay: float | None = eqx.field(static=True)
    decay_bias: Float[Array, "heads head_dim"] = float32_field()

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        v_dim: int | None = None,
        rank: int | None = None,
        gate_rank: int | None = None,
        lowest_log_decay: float | None = None,
        taps: int = 4,
        chunk: int = 64,
        eps: float = 1e-5,
        output_std: float | None = None,
        activation: Callable[[Array], Array] = silu,
        key: Key[Array, ""],
    ):
        """Initialize the weights; for a zero input decays are `exp(-a s)`, `a` from 1 to 16, `s` from 0.001 to 0.1.

        Args:
            embed: Channels of the input and the output.
            heads: Heads.
            head_dim: Channels of a query and a key.
            v_dim: Channels of a value; None: `head_dim`.
            rank: Channels between the two projections of the decay, and of the gate; None: `head_dim`; 0: each has one
                projection.
            gate_rank: The `rank` of the gate alone, which may be 0 (Kimi K3); None: `rank`.
            lowest_log_decay: The lower bound of the logarithm of a decay; None: there is none.
            taps: Tokens that the short convolutions read.
            chunk: Tokens that are computed together; multiples of 8 need the fewest operations.
            eps: Added to the mean square in the norm of the output.
            output_std: Standard deviation of the output projection's weights; None: as for the other projections.
            activation: Applied after the convolutions.
            key: Random key for the weights.
        """
        check_sizes("ChannelDeltaNet", heads=heads, kv_heads=heads, chunk=chunk)
        if lowest_log_decay is not None and not lowest_log_decay < 0:
            raise ValueError(
                f"ChannelDeltaNet(lowest_log_decay={lowest_log_decay}): states would grow; give a negative number."
            )
        keys = jax.random.split(key, 14)
        v_dim, rank = head_dim if v_dim is None else v_dim, head_dim if rank is None else rank
        to_keys = functools.partial(Linear, "embed -> heads head_dim", embed=embed, heads=heads, head_dim=head_dim)
        gate_rank = rank if gate_rank is None else gate_rank
        self.query, self.key = to_keys(key=keys[0]), to_keys(key=keys[1])
        self.value = Linear("embed -> heads v_dim", embed=embed, heads=heads, v_dim=v_dim, key=keys[2])
        self.rate = Linear("embed -> heads", embed=embed, heads=heads, key=keys[3])

        def through_rank(
            rank: int, outputs: str, down: Key[Array, ""], up: Key[Array, ""], **sizes: int
        ) -> tuple[Linear | None, Linear]:
            if not rank:
                return None, Linear(f"embed -> heads {outputs}", embed=embed, heads=heads, bias=False, key=up, **sizes)
            to_rank = Linear("embed -> rank", embed=embed, rank=rank, key=down)
            return to_rank, Linear(f"rank -> heads {outputs}", rank=rank, heads=heads, bias=False, key=up, **sizes)

        self.decay_down, self.decay_up = through_rank(rank, "head_dim", keys[4], keys[5], head_dim=head_dim)
        self.gate_down, self.gate_up = through_rank(gate_rank, "v_dim", keys[6], keys[7], v_dim=v_dim)
        convolve_keys = functools.partial(CausalConv, "heads head_dim", heads=heads, head_dim=head_dim, taps=taps)
        self.query_conv, self.key_conv = convolve_keys(key=keys[8]), convolve_keys(key=keys[9])
        self.value_conv = CausalConv("heads v_dim", taps=taps, heads=heads, v_dim=v_dim, key=keys[10])
        self.log_rate = jnp.log(jax.random.uniform(keys[11], (heads,), jnp.float32, 1.0, 16.0))
        self.decay_bias = draw_step_bias((heads, head_dim), keys[12])
        self.norm = RMSNorm("v_dim", v_dim=v_dim, eps=eps)
        merge_heads = functools.partial(Linear, "heads v_dim -> embed", heads=heads, v_dim=v_dim, embed=embed)
        self.output = merge_heads(std=output_std, key=keys[13])
        self.chunk, self.activation, self.lowest_log_decay = chunk, activation, lowest_log_decay

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: RecurrentCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], RecurrentCache | None]:
        """Mix tokens in order; a cache supplies the state before `x`, and the returned cache includes `x`."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        projections = self.query(x), self.key(x), self.value(x)
        convs = self.query_conv, self.key_conv, self.value_conv
        recurrent = RecurrentInputs(projections, convs, tokens, cache, self.activation)
        query, key, value = recurrent.convolve()
        state_dtype, is_real = query.dtype, recurrent.is_real[..., None]
        query, key = normalize(query) * key.shape[-1] ** -0.5, normalize(key)
        log_decay = jnp.where(is_real[..., None], self._log_decay(x, state_dtype), 0)
        rate = jnp.where(is_real, jax.nn.sigmoid(self.rate(x)).astype(state_dtype), 0)
        states = recurrent.initial_states(key, value)
        mixed, new_states = delta_rule(
            query, key, value, rate, log_decay, recurrent.documents, states, chunk=self.chunk
        )
        gate = jax.nn.sigmoid(self.gate_up(x if self.gate_down is None else self.gate_down(x)).astype(state_dtype))
        return self.output((self.norm(mixed) * gate).astype(x.dtype)), recurrent.update_cache(new_states)

    def _log_decay(self, x: Float[Array, "*batch seq embed"], dtype: Any) -> Float[Array, "*batch seq heads head_dim"]:
        """Return the logarithm of each channel's decay."""
        source = x if self.decay_down is None else self.decay_down(x)
        shifted = self.decay_up(source).astype(dtype) + self.decay_bias.astype(dtype)
        rate = jnp.exp(self.log_rate.astype(dtype))[:, None]
        if self.lowest_log_decay is None:
            return -rate * jax.nn.softplus(shifted)
        return self.lowest_log_decay * jax.nn.sigmoid(rate * shifted)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> RecurrentCache:
        """Return an empty cache; its size does not depend on `capacity`."""
        return init_recurrent_cache(batch, dtype, self.key, self.value, self.key_conv)

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads; each token reads the state twice and updates it once."""
        heads, v_dim = self.value.output_shape
        return MixerFacts(True, operations=3 * 2 * heads * v_dim * self.key.sizes["head_dim"])
