"""The gated delta rule: each head has a matrix state, which decays, and in which each token corrects its key's
value."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...kernels import StateLayout
from ._recurrence import (
    decay_factors,
    einsum,
    join_chunks,
    mask_in_layer,
    read_before_write,
    same_document,
    split_chunks,
    States,
)


def delta_rule(
    query: Float[Array, "*batch seq kv_heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq heads v_dim"],
    rate: Float[Array, "*batch seq heads"],
    log_decay: Float[Array, "..."],
    documents: Int[Array, "*batch seq"],
    states: States,
    *,
    chunk: int,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
    """Return each token's output `S_t^T q_t` and the final states (arXiv:2412.06464, eq. 10).

    `S_t = e^g_t S_(t-1) + rate_t k_t (v_t - e^g_t S_(t-1)^T k_t)^T` with `g = log_decay`: the value that the state
    holds for a key moves towards the token's value (Yang, Kautz and Hatamizadeh 2024). `log_decay` is per head, `*batch
    seq heads`, or per channel of the keys, `*batch seq heads head_dim` (Kimi team 2025, arXiv:2510.26692). The state is
    zero at the start of each document after the first; a token with rate and log decay 0 changes nothing.

    A single token is one step. Longer rows are computed in chunks, by `chunk x chunk` matrix products (section 3.3 of
    the paper), so time and memory grow with `seq * chunk`. Each key and query serves `heads / kv_heads` neighbouring
    heads. All arrays have one dtype.
    """
    log_decay = log_decay[..., None] if log_decay.ndim == rate.ndim else log_decay
    if query.shape[-3] == 1:
        return _single_token(query, key, value, rate, log_decay, states)
    copies = value.shape[-2] // key.shape[-2]
    query, key = (jnp.repeat(x, copies, axis=-2) for x in (query, key))
    batch, seq = query.shape[:-3], query.shape[-3]
    per_head = log_decay.shape[-1] == 1
    size = min(chunk, seq if per_head else seq + -seq % PAIR_BLOCK)
    to_chunks = lambda x: jnp.swapaxes(split_chunks(x.reshape(-1, *x.shape[len(batch) :]), size), 2, 3)
    query, key, value, rate, log_decay = map(to_chunks, (query, key, value, rate, log_decay))
    # The last chunk is padded with tokens of the last document, with rate and log decay 0.
    chunk_documents = split_chunks(documents.reshape(-1, seq), size, mode="edge")
    if per_head:
        token_to_token, *state_factors = decay_factors(log_decay[..., 0], chunk_documents)
        state_to_token, token_to_end, state_to_end = (x[..., None] for x in state_factors)
        decayed_scores = lambda left, right: einsum("nbhid,nbhjd->nbhij", left, right) * token_to_token
    else:
        decayed_scores, state_to_token, token_to_end, state_to_end = channel_decay(log_decay, chunk_documents)
    rated_key = rate[..., None] * key
    # Within a chunk, each token's correction depends on the corrections before it: a unit lower triangular system.
    system = mask_in_layer(jnp.tri(size, k=-1, dtype=bool), decayed_scores(rated_key, key), rate)
    new_values, read_keys = _solve_unit_lower(system, rate[..., None] * value, rated_key * state_to_token)
    scores = decayed_scores(query, key)
    state = states.initial(value.dtype)
    initial = state.reshape(-1, *state.shape[len(batch) :])
    output, last = scan_chunks(
        initial, state_to_end, new_values, read_keys, scores, query * state_to_token, key * token_to_end
    )
    return join_chunks(output, batch, seq), states.update(last.reshape(state.shape))


def _single_token(
    query: Array, key: Array, value: Array, rate: Array, log_decay: Array, states: States
) -> tuple[Array, Array]:
    """Compute one token of each row, with all heads in one group."""
    copies = value.shape[-2] // key.shape[-2]
    if copies > 1:
        # A gather: compiling `jnp.repeat` of heads took half a minute a layer on some platforms.
        key_head = jnp.arange(value.shape[-2]) // copies
        query, key = query[..., key_head, :], key[..., key_head, :]
    return states.step_token(_step, query, key, value, rate[..., None], log_decay)


def _step(
    layout: StateLayout, query: Array, key: Array, value: Array, rate: Array, log_decay: Array, state: Array
) -> tuple[Array, Array]:
    decayed = state * layout.expand_key(jnp.exp(log_decay))
    stored, read = layout.read(key, decayed), layout.read(query, decayed)
    correction = rate * (value - stored)
    output = read + jnp.sum(query * key, axis=-1, keepdims=True) * correction
    return output, decayed + layout.expand_key(key) * layout.expand_value(correction)


def _solve_unit_lower(
    system: Float[Array, "n b h chunk chunk"], *sides: Float[Array, "n b h chunk _"]
) -> tuple[Array, ...]:
    """Solve `x + system x = side` for each side; `system` is strictly lower triangular.

    Matrix products alone take a tenth of LAPACK's time. LAPACK's batched solver also waits for the thread pool that
    simulated CPU devices use, and deadlocks when all of them wait.
    """
    inverse, zero = _invert_unit_lower(jax.lax.stop_gradient(system)), jnp.zeros_like(system, shape=())

    def apply_system(xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x + _matmul_exact(system, x) for x in xs)

    def solve(_: object, sides: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(_matmul_exact(inverse, side) for side in sides)

    def solve_transposed(_: object, sides: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(_matmul_exact(inverse.mT, side) for side in sides)

    # The zero makes the sides vary over the same mesh axes as the solutions, under `shard_map`.
    varying_sides = tuple(side + zero for side in sides)
    return jax.lax.custom_linear_solve(apply_system, varying_sides, solve, solve_transposed)


def _invert_unit_lower(system: Float[Array, "*n chunk chunk"]) -> Float[Array, "*n chunk chunk"]:
    """Return `(I + system)^-1` by inverting diagonal blocks of 1, 2, 4, ... rows.

    Two neighbouring blocks with inverses `X` and `Y`, and with `A` below the first block, give `-Y A X` below it. The
    result is as exact as substitution; a series in powers of `system` is less exact where keys are alike.
    """
    size, rows = system.shape[-1], 2
    inverse = jnp.eye(size, dtype=system.dtype) - _below_diagonal_blocks(system, 1)
    while rows < size:
        inverse -= _matmul_exact(inverse, _matmul_exact(_below_diagonal_blocks(system, rows), inverse))
        rows *= 2
    return inverse


def _below_diagonal_blocks(system: Float[Array, "*n chunk chunk"], rows: int) -> Float[Array, "*n chunk chunk"]:
    """For each pair of neighbouring diagonal blocks of `rows` rows, keep the block below the first; zero all else."""
    block = jnp.arange(system.shape[-1]) // rows
    return mask_in_layer((block[:, None] % 2 == 1) & (block[:, None] - 1 == block), system, system)


def _matmul_exact(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision="highest")


# Decay per channel.

PAIR_BLOCK = 8
"""Tokens of a block whose decayed scores are computed pair by pair; scores between blocks are matrix products."""


def channel_decay(
    log_decay: Float[Array, "n batch heads chunk head_dim"], documents: Int[Array, "n batch chunk"]
) -> tuple[Callable[[Array, Array], Array], Array, Array, Array]:
    """Return a function for decayed scores, and the decay factors of a chunk for each channel.

    The factors are, in order: initial state to token, token to chunk end, initial state to chunk end. Scores and
    factors across a document boundary are zero.
    """
    total = jnp.cumsum(log_decay, axis=-2)
    visible, continues = same_document(documents)
    state_to_token = mask_in_layer(continues[..., None], jnp.exp(total), total)
    token_to_end = mask_in_layer(visible[..., -1, :, None], jnp.exp(total[..., -1:, :] - total), total)
    # Rematerialised in the backward pass: the blocks are much larger than their operands.
    pairs = jax.checkpoint(_decayed_pairs, prevent_cse=False)

    def decayed_scores(left: Array, right: Array) -> Array:
        return mask_in_layer(visible, pairs(left, right, total), total)

    return decayed_scores, state_to_token, token_to_end, state_to_token[..., -1, :]


def _decayed_pairs(
    left: Float[Array, "*n chunk head_dim"],
    right: Float[Array, "*n chunk head_dim"],
    total: Float[Array, "*n chunk head_dim"],
) -> Float[Array, "*n chunk chunk"]:
    """Return `sum_d left_id right_jd e^(total_id - total_jd)` for `j <= i`; other entries are undefined.

    Every exponent is at most 0. For tokens in different blocks the exponent is split at the start of the later block,
    so the sum becomes a matrix product; within a block it is computed pair by pair.
    """
    chunk, head_dim = left.shape[-2:]
    size = math.gcd(chunk, PAIR_BLOCK)

    def to_blocks(x: Array) -> Array:
        return x.reshape(*x.shape[:-2], chunk // size, size, head_dim)

    block = jnp.arange(chunk // size, dtype=jnp.int32)
    in_earlier_block = (jnp.arange(chunk, dtype=jnp.int32) // size < block[:, None])[..., None]
    block_start = to_blocks(total)[..., :1, :]
    late = to_blocks(left) * jnp.exp(to_blocks(total) - block_start)
    gap = mask_in_layer(in_earlier_block, block_start - total[..., None, :, :], total)
    early = mask_in_layer(in_earlier_block, right[..., None, :, :] * jnp.exp(gap), total)
    between_blocks = einsum("...bid,...bjd->...bij", late, early).reshape(*left.shape[:-1], chunk)
    is_earlier = jnp.tril(jnp.ones((size, size), bool))[..., None]
    gap = mask_in_layer(is_earlier, to_blocks(total)[..., :, None, :] - to_blocks(total)[..., None, :, :], total)
    pairs = to_blocks(left)[..., :, None, :] * to_blocks(right)[..., None, :, :] * jnp.exp(gap)
    within_block = jnp.sum(pairs, axis=-1)
    same_block = (block[:, None] == block).astype(within_block.dtype)
    return between_blocks + jnp.einsum("...bij,bc->...bicj", within_block, same_block).reshape(between_blocks.shape)


# The scan over chunks.

Arrays = tuple[Array, ...]


def scan_chunks(
    initial: Float[Array, "batch heads head_dim v_dim"],
    state_to_end: Float[Array, "n batch heads *head_dim"],
    new_values: Float[Array, "n batch heads chunk v_dim"],
    read_keys: Float[Array, "n batch heads chunk head_dim"],
    scores: Float[Array, "n batch heads chunk chunk"],
    queries: Float[Array, "n batch heads chunk head_dim"],
    stored_keys: Float[Array, "n batch heads chunk head_dim"],
) -> tuple[Float[Array, "n batch heads chunk v_dim"], Float[Array, "batch heads head_dim v_dim"]]:
    """Return the outputs of all chunks and the last state of a recurrence over chunks.

    With `S_0 = initial`, the corrections of chunk `n` are `c_n = new_values_n - read_keys_n S_n`, its outputs
    `queries_n S_n + scores_n c_n`, and the next state `S_(n+1) = state_to_end_n S_n + stored_keys_n^T c_n`.

    For gradients the states of all chunks are kept, and outputs are products over all chunks at once. The corrections
    `c` overwrite `new_values`, and the gradients of states and corrections overwrite the gradients that come from the
    outputs; `jax.lax.scan` would allocate zeros for each gradient. Only reverse mode is defined (no `jax.jvp`).
    """
    # Adding a zero that depends on `new_values` makes the carry vary over the mesh axes of later states (`shard_map`).
    zero = jnp.zeros_like(new_values, shape=())
    return _scan_chunks(initial + zero, state_to_end, new_values, read_keys, scores, queries, stored_keys)


@jax.custom_vjp
def _scan_chunks(
    initial: Array,
    state_to_end: Array,
    new_values: Array,
    read_keys: Array,
    scores: Array,
    queries: Array,
    stored_keys: Array,
) -> tuple[Array, Array]:
    def advance(state: Array, chunk: Arrays) -> tuple[Array, Array]:
        state_to_end, new_values, read_keys, scores, queries, stored_keys = chunk
        corrections = new_values - einsum("bhid,bhdv->bhiv", read_keys, state)
        output = einsum("bhid,bhdv->bhiv", queries, state) + einsum("bhij,bhjv->bhiv", scores, corrections)
        return state * state_to_end[..., None] + einsum("bhjd,bhjv->bhdv", stored_keys, corrections), output

    chunks = (state_to_end, new_values, read_keys, scores, queries, stored_keys)
    last, outputs = jax.lax.scan(advance, initial, chunks)
    return outputs, last


def _scan_chunks_forward(
    initial: Array,
    state_to_end: Array,
    new_values: Array,
    read_keys: Array,
    scores: Array,
    queries: Array,
    stored_keys: Array,
) -> tuple[tuple[Array, Array], Arrays]:
    def advance(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, states, corrections = carry
        state, correction = read_before_write(state, corrections[n])
        correction -= einsum("bhid,bhdv->bhiv", read_keys[n], state)
        later = state * state_to_end[n][..., None] + einsum("bhjd,bhjv->bhdv", stored_keys[n], correction)
        return later, states.at[n].set(state), corrections.at[n].set(correction)

    # The barrier ties the zero to this layer: JAX would otherwise fill the buffer once, before the scan over layers.
    zero, new_values = jax.lax.optimization_barrier((jnp.zeros_like(new_values, shape=()), new_values))
    states = jnp.broadcast_to(zero, (len(state_to_end), *initial.shape))
    last, states, corrections = jax.lax.fori_loop(0, len(state_to_end), advance, (initial, states, new_values))
    outputs = einsum("nbhid,nbhdv->nbhiv", queries, states) + einsum("nbhij,nbhjv->nbhiv", scores, corrections)
    return (outputs, last), (state_to_end, states, corrections, read_keys, scores, queries, stored_keys)


def _scan_chunks_backward(residuals: Arrays, grads: tuple[Array, Array]) -> Arrays:
    state_to_end, states, corrections, read_keys, scores, queries, stored_keys = residuals
    output_grads, last_grad = grads

    def retreat(i: Array, carry: Arrays) -> Arrays:
        later_grad, decay_grads, state_grads, correction_grads = carry
        n = len(state_to_end) - 1 - i
        later_grad, own_grad, correction_grad = read_before_write(later_grad, state_grads[n], correction_grads[n])
        correction_grad += einsum("bhjd,bhdv->bhjv", stored_keys[n], later_grad)
        decay_grads = decay_grads.at[n].set(_sum_to_decay(later_grad * states[n], state_to_end))
        earlier_grad = later_grad * state_to_end[n][..., None] + own_grad
        earlier_grad -= einsum("bhid,bhiv->bhdv", read_keys[n], correction_grad)
        return (
            earlier_grad,
            decay_grads,
            state_grads.at[n].set(later_grad),
            correction_grads.at[n].set(correction_grad),
        )

    correction_grads = einsum("nbhij,nbhiv->nbhjv", scores, output_grads)
    state_grads = einsum("nbhid,nbhiv->nbhdv", queries, output_grads)
    carry = last_grad, jnp.zeros_like(state_to_end), state_grads, correction_grads
    initial_grad, decay_grads, later_grads, correction_grads = jax.lax.fori_loop(0, len(state_to_end), retreat, carry)
    read_key_grads = -einsum("nbhiv,nbhdv->nbhid", correction_grads, states)
    score_grads = einsum("nbhiv,nbhjv->nbhij", output_grads, corrections)
    query_grads = einsum("nbhiv,nbhdv->nbhid", output_grads, states)
    stored_key_grads = einsum("nbhjv,nbhdv->nbhjd", corrections, later_grads)
    return initial_grad, decay_grads, correction_grads, read_key_grads, score_grads, query_grads, stored_key_grads


_scan_chunks.defvjp(_scan_chunks_forward, _scan_chunks_backward)


def _sum_to_decay(x: Array, decay: Array) -> Array:
    """Sum over values and, if the decay is per head, over the keys' channels."""
    return jnp.sum(x, axis=(-2, -1), keepdims=True)[..., 0] if decay.shape[-1] == 1 else jnp.sum(x, axis=-1)
