"""The state-space recurrence of Mamba-2: a decaying matrix state per head, written by keys and read by queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...kernels import StateLayout
from ._chunks import decay_factors, einsum, read_before_write, split_chunks
from ._states import States


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
    to_chunks = lambda x: split_chunks(x.reshape(-1, *x.shape[len(batch) :]), size)
    # Tokens before the heads of a group: contractions over shared keys become matrix products without a transpose.
    query, key, grouped = (jnp.moveaxis(to_chunks(x), 3, 2) for x in (query, key, grouped))
    # The last chunk is padded with tokens of the last document, with value and log decay 0.
    chunk_documents = split_chunks(documents.reshape(-1, seq), size, mode="edge")
    by_group = lambda x: x.reshape(*x.shape[:2], groups, heads // groups, *x.shape[3:])
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
    """Compute one token: queries and keys have one row a group, values and decays one row a head."""
    decayed = state * jnp.exp(log_decay)[..., None]
    new_state = decayed + layout.expand_key(key) * layout.expand_value(value)
    if layout.by_products:
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
    the states. `jax.lax.scan` would allocate zeros for each of them. Only reverse mode is defined (no `jax.jvp`).
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
