"""Mamba-2: a recurrent mixer whose matrix state decays and adds an outer product for each token, and its recurrence."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ...kernels import StateLayout
from .._cache import RecurrentCache
from .._contracts import Mixer, MixerFacts
from .._linear import Linear, LinearMap
from .._mlp import silu
from .._norm import RMSNorm
from .._tokens import Tokens, tokens_or_default
from ._convolution import CausalConv, check_sizes, draw_step_bias, init_recurrent_cache, RecurrentInputs
from ._recurrence import decay_factors, einsum, read_before_write, split_chunks, States


@dataclasses.dataclass(frozen=True)
class GateNorm:
    """The norm of a `Mamba2Mixer`'s output, over the value heads of one key head."""

    eps: float = 1e-5
    """Added to the mean square."""
    before_gate: bool = False
    """Whether the norm comes before the multiplication by the gate."""


class Mamba2Mixer(Mixer):
    """Mamba-2 mixer of Dao and Gu (2024, arXiv:2405.21060); the paper's letters stand in brackets.

    Values (`x`), keys (`B`) and queries (`C`) pass through short convolutions and silu (or another `activation`). Each
    of `heads` has a matrix state that decays by `exp(-exp(log_rate) dt)`. The outer product of the key and `dt` times
    the value is added to the state, with `dt = softplus(step(x) + step_bias)` clipped to `step_limits`. The query reads
    the state (see `state_space`), and `skip` (`D`) times the value is added. The output is multiplied by
    `silu(gate(x))` (`z`); then the `norm`, if there is one, divides by the root mean square over the heads of one key
    head and multiplies by `scale`. A `GateNorm` may also come before the gate.

    There are `kv_heads` heads of keys and as many heads of queries (groups); each serves `heads / kv_heads` heads of
    values. `head_dim` counts the channels of a key and of a query (`N`, the state size), and `v_dim` the channels of a
    value (`P`). There are no positions: tokens must be in reading order, with padding at the end of a row, and a
    document starts at position 0 or at a new segment. Head counts are read off the weights.
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
        """Initialize the weights; for a zero input steps are from 0.001 to 0.1, and rates are 1, 2, 3 and so on.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of values.
            kv_heads: Heads of keys and of queries; must divide `heads`.
            head_dim: Channels of a key and a query.
            v_dim: Channels of a value.
            key: Random key for the weights.
            taps: Tokens that the short convolutions read.
            chunk: Tokens that are computed together; None: the smallest power of two, at least 64, for which a chunk's
                scores (`chunk * chunk`) are no fewer than the entries of a state (`head_dim * v_dim`).
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
        project = functools.partial(Linear, embed=embed, bias=bias)
        to_values = functools.partial(project, "embed -> heads v_dim", heads=heads, v_dim=v_dim)
        to_keys = functools.partial(project, "embed -> kv_heads head_dim", kv_heads=kv_heads, head_dim=head_dim)
        self.gate, self.value = to_values(key=keys[0]), to_values(key=keys[1])
        self.key, self.query = to_keys(key=keys[2]), to_keys(key=keys[3])
        self.step = project("embed -> heads", heads=heads, key=keys[4])
        convolve = functools.partial(CausalConv, taps=taps, bias=conv_bias)
        self.value_conv = convolve("heads v_dim", heads=heads, v_dim=v_dim, key=keys[5])
        convolve_keys = functools.partial(convolve, "kv_heads head_dim", kv_heads=kv_heads, head_dim=head_dim)
        self.key_conv, self.query_conv = convolve_keys(key=keys[6]), convolve_keys(key=keys[7])
        self.log_rate = jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32))
        self.step_bias = draw_step_bias((heads,), keys[8])
        self.skip = jnp.ones(heads, jnp.float32)
        # A norm over all heads may be sharded by heads; with several groups each device holds whole groups.
        if gate_norm is None:
            self.norm = None
        elif kv_heads == 1:
            self.norm = RMSNorm("heads v_dim", eps=gate_norm.eps, scale=False, heads=heads, v_dim=v_dim)
        else:
            self.norm = RMSNorm("group v_dim", eps=gate_norm.eps, scale=False, group=heads // kv_heads, v_dim=v_dim)
        self.scale = None if gate_norm is None else jnp.ones((heads, v_dim), jnp.float32)
        self.norm_first = gate_norm is not None and gate_norm.before_gate
        output_bias = bias if output_bias is None else output_bias
        merge_heads = functools.partial(Linear, "heads v_dim -> embed", heads=heads, v_dim=v_dim, embed=embed)
        self.output = merge_heads(bias=output_bias, std=output_std, key=keys[9])
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
        """Declare that a device can run a slice of the heads, or of whole groups if each group has its own norm."""
        heads, v_dim = self.value.output_shape
        norm_per_group = self.norm is not None and "group" in self.norm.reduced
        operations = 2 * 2 * heads * v_dim * self.key.sizes["head_dim"]
        return MixerFacts(True, operations=operations, shares_kv_heads=not norm_per_group)


def state_space(
    query: Float[Array, "*batch seq kv_heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq heads v_dim"],
    log_decay: Float[Array, "*batch seq heads"],
    documents: Int[Array, "*batch seq"],
    states: States,
    *,
    chunk: int,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
    """Return each token's output `S_t^T q_t` and the final states, with `S_t = e^log_decay_t S_(t-1) + k_t v_t^T`.

    Whole rows are computed in chunks (Dao and Gu 2024, arXiv:2405.21060, section 6): attention with decayed scores
    within a chunk, the state from chunk to chunk. Time and memory grow with `seq * chunk`. Each key and query serves
    `heads / kv_heads` neighbouring heads. The state is zero at the start of each further document; a token with value
    and log decay 0 changes nothing. A single token is one step. All arrays have one dtype.
    """
    batch, seq, groups = key.shape[:-3], key.shape[-3], key.shape[-2]
    heads, v_dim = value.shape[-2:]
    grouped = value.reshape(*value.shape[:-2], groups, heads // groups, v_dim)
    if seq == 1:
        group_decay = log_decay.reshape(*grouped.shape[:-1], 1)
        token = (jnp.squeeze(x, -4) for x in (query[..., None, :], key[..., None, :], grouped, group_decay))
        output, memory = states.step_token(_step, *token)
        return output.reshape(value.shape), memory
    size = min(chunk, seq)

    def to_chunks(x: Array) -> Array:
        return split_chunks(x.reshape(-1, *x.shape[len(batch) :]), size)

    def by_group(x: Array) -> Array:
        return x.reshape(*x.shape[:2], groups, heads // groups, *x.shape[3:])

    # The dim of tokens comes before the heads of a group, so that contractions over shared keys become matrix products
    # without a transpose.
    query, key, grouped = (jnp.moveaxis(to_chunks(x), 3, 2) for x in (query, key, grouped))
    # The last chunk is padded with tokens of the last document, with value and log decay 0.
    chunk_documents = split_chunks(documents.reshape(-1, seq), size, mode="edge")
    factors = decay_factors(jnp.moveaxis(to_chunks(log_decay), 2, -1), chunk_documents)
    token_to_token, state_to_token, token_to_end, state_to_end = map(by_group, factors)
    scores = einsum("nbgid,nbgjd->nbgij", query, key)[..., None, :, :] * token_to_token
    output = einsum("nbgrij,nbgjrv->nbgirv", scores, grouped)
    chunk_states = einsum("nbgjd,nbgjrv->nbgrvd", key, grouped * token_to_end.mT[..., None])
    state = states.initial(value.dtype)
    initial = by_group(state.mT.reshape(1, -1, *state.mT.shape[len(batch) :]))[0]
    states_before, last = scan_chunk_states(initial, state_to_end, chunk_states)
    output += einsum("nbgid,nbgrvd->nbgirv", query, states_before) * state_to_token.mT[..., None]
    output = jnp.moveaxis(output, (0, 2), (1, 3)).reshape(*batch, -1, heads, v_dim)
    memory = states.update(last.reshape(state.mT.shape).mT)
    return jax.lax.slice_in_dim(output, 0, seq, axis=len(batch)), memory


def _step(
    layout: StateLayout, query: Array, key: Array, value: Array, log_decay: Array, state: Array
) -> tuple[Array, Array]:
    """Compute the step of one token. Queries and keys have one row per group, values and decays one row per head."""
    decayed = state * jnp.exp(log_decay)[..., None]
    new_state = decayed + layout.expand_key(key) * layout.expand_value(value)
    if layout.by_matmul:
        return layout.read(query, new_state), new_state
    # Read the decayed state and add the token's own part: accelerators then read and write the state once.
    return layout.read(query, decayed) + jnp.sum(query * key, axis=-1, keepdims=True) * value, new_state


def scan_chunk_states(
    initial: Float[Array, "batch groups copies v_dim head_dim"],
    decay: Float[Array, "n batch groups copies"],
    added: Float[Array, "n batch groups copies v_dim head_dim"],
) -> tuple[Float[Array, "n batch groups copies v_dim head_dim"], Float[Array, "batch groups copies v_dim head_dim"]]:
    """Return the state before each chunk and the last state of `S_(n+1) = decay_n S_n + added_n`, `S_0 = initial`.

    The states overwrite the buffer of `added`; in the backward pass the gradients of `added` overwrite the gradients of
    the states. `jax.lax.scan` would allocate zeros for these arrays. Only reverse mode is defined (no `jax.jvp`).
    """
    # Adding a zero that depends on `added` makes all operands vary over the same mesh axes under `shard_map`.
    zero = jnp.zeros_like(added, shape=())
    return _scan_chunk_states(initial + zero, decay + zero, added)


@jax.custom_vjp
def _scan_chunk_states(initial: Array, decay: Array, added: Array) -> tuple[Array, Array]:
    def advance(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, states = carry
        state, added_here = read_before_write(state, states[n])
        return state * decay[n][..., None, None] + added_here, states.at[n].set(state)

    last, states_before = jax.lax.fori_loop(0, len(added), advance, (initial, added))
    return states_before, last


def _scan_forward(initial: Array, decay: Array, added: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    states_before, last = _scan_chunk_states(initial, decay, added)
    return (states_before, last), (decay, states_before)


def _scan_backward(residuals: tuple[Array, Array], grads: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    decay, states_before = residuals

    def retreat(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        later_grad, decay_grad, state_grads = carry
        n = len(decay) - 1 - i
        later_grad, own_grad = read_before_write(later_grad, state_grads[n])
        decay_grad = decay_grad.at[n].set(jnp.sum(later_grad * states_before[n], axis=(3, 4)))
        return later_grad * decay[n][..., None, None] + own_grad, decay_grad, state_grads.at[n].set(later_grad)

    states_grad, last_grad = grads
    return jax.lax.fori_loop(0, len(decay), retreat, (last_grad, jnp.zeros_like(decay), states_grad))


_scan_chunk_states.defvjp(_scan_forward, _scan_backward)
