"""Ring attention: rows are split over the devices of an axis, and keys and values pass round a ring of the devices.

The attention to a piece of keys is computed by blocks, for any mask and order of tokens, or by kernels of accelerators,
for rows in the order of `zigzag`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from .. import kernels
from ..kernels import AttentionCall, blockwise, flash, TokenPositions
from ._ring import Ring, shift
from ._shard_map import vary, vary_like


Results = TypeVar("Results")


def _send_on(ring: Ring, tree: PyTree) -> PyTree:
    """Send arrays to the next device of the ring, and return the arrays of the previous device."""
    return shift(tree, ring.axis, name=ring.name)


# Attention by blocks.


def ring_attend(
    settings: blockwise.BlockwiseSettings,
    ring: Ring,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads v_dim"],
    tokens: TokenPositions,
    alibi_slopes: Float[Array, "heads"] | None = None,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*batch seq heads"]]:
    """Return output and logsumexp of the attention to the keys of all devices (Liu et al., arXiv:2310.01889).

    The results equal the results of `blockwise.attend` for unsplit rows. Each device attends to one piece while the
    next piece arrives, and combines the results of pieces by their logsumexps. Received pieces are not saved. In the
    backward pass, keys and values pass round the ring again, and each device recomputes probabilities from the total
    logsumexp. The gradients of a piece pass round the ring too, and reach the piece's device with the last step. For n
    devices, a device sends n-1 pieces in each pass and, in the backward pass, n-1 gradients of pieces, in the dtypes of
    the arrays.
    """
    arrays = blockwise.group_heads(query, key, value, tokens, None)
    arrays = *arrays[:4], blockwise.group_slopes(alibi_slopes, key.shape[-2])
    output, logsum = _block_ring(settings, ring, *vary(vary_like(arrays, arrays), (ring.axis,)))
    batch = query.shape[:-3]
    return blockwise.ungroup_heads(output, batch), blockwise.ungroup_heads(logsum[..., None], batch)[..., 0]


def _block_ring_primal(
    settings: blockwise.BlockwiseSettings,
    ring: Ring,
    query: Array,
    key: Array,
    value: Array,
    positions: TokenPositions,
    slopes: Array | None,
) -> tuple[Array, Array]:
    def attend_piece(result: tuple[Array, Array], piece: tuple) -> tuple[Array, Array]:
        (output, logsum), (key, value, kv_positions) = result, piece
        arrays = query, key, value, positions, kv_positions, slopes
        piece_output, piece_logsum = blockwise.attend_forward(settings, *arrays)
        share = jax.nn.sigmoid(piece_logsum - logsum)[..., None]
        return output + share * (piece_output.astype(output.dtype) - output), jnp.logaddexp(logsum, piece_logsum)

    def step(carry: tuple, _) -> tuple[tuple, None]:
        result, piece = carry
        next_piece = _send_on(ring, piece)  # While the pieces are sent, each device attends to the piece that it has.
        return (attend_piece(result, piece), next_piece), None

    piece = key, value, positions
    zero = jnp.zeros_like(query, kernels.at_least_float32(query.dtype), shape=())
    rows = query.shape[:-1]
    empty = jnp.full((*rows, value.shape[-1]), zero), jnp.full(rows, zero + kernels.lowest(zero.dtype))
    (result, piece), _ = jax.lax.scan(step, (empty, piece), length=ring.devices - 1)
    output, logsum = attend_piece(result, piece)
    return output.astype(query.dtype), logsum


_block_ring = jax.custom_vjp(_block_ring_primal, nondiff_argnums=(0, 1))


def _block_ring_forward(
    settings: blockwise.BlockwiseSettings,
    ring: Ring,
    query: Array,
    key: Array,
    value: Array,
    positions: TokenPositions,
    slopes: Array | None,
):
    results = _block_ring(settings, ring, query, key, value, positions, slopes)
    output, logsum = (checkpoint_name(x, "attended") for x in results)  # Remat policies save this name.
    return (output, logsum), (query, key, value, positions, slopes, output, logsum)


def _block_ring_backward(
    settings: blockwise.BlockwiseSettings, ring: Ring, residuals: tuple, gradients: tuple[Array, Array]
):
    query, key, value, positions, slopes, output, logsum = residuals
    sum_dtype = kernels.at_least_float32(query.dtype)

    def piece_gradients(piece: tuple) -> tuple[Array, tuple[Array, ...]]:
        query_grad, *piece_grads = blockwise.attend_backward(
            settings, (query, *piece[:2], positions, piece[2], slopes, output, logsum), gradients
        )
        return query_grad.astype(sum_dtype), tuple(piece_grads)

    def step(carry: tuple, _) -> tuple[tuple, None]:
        piece, query_grad, piece_grads = carry
        next_piece, arrived_grads = _send_on(ring, piece), _send_on(ring, piece_grads)
        query_grad_part, piece_grads = piece_gradients(piece)
        return (next_piece, query_grad + query_grad_part, jax.tree.map(jnp.add, arrived_grads, piece_grads)), None

    # The device attends to its own piece first, while the next piece arrives. The gradients of a piece are sent one
    # step after the piece, so that they overlap with the computation too. They reach their device with the last step.
    piece, size = (key, value, positions), ring.devices
    if size == 1:
        query_grad, local_grads = piece_gradients(piece)
        return query_grad.astype(query.dtype), *local_grads, None, None
    next_piece = _send_on(ring, piece)
    query_grad, local_grads = piece_gradients(piece)
    piece, arrived_grads = next_piece, None
    if size > 2:
        next_piece = _send_on(ring, piece)
        query_grad_part, piece_grads = piece_gradients(piece)
        carry, _ = jax.lax.scan(step, (next_piece, query_grad + query_grad_part, piece_grads), length=size - 3)
        piece, query_grad, piece_grads = carry
        arrived_grads = _send_on(ring, piece_grads)
    query_grad_part, piece_grads = piece_gradients(piece)
    piece_grads = piece_grads if arrived_grads is None else jax.tree.map(jnp.add, arrived_grads, piece_grads)
    returned_grads = jax.tree.map(jnp.add, local_grads, _send_on(ring, piece_grads))
    return (query_grad + query_grad_part).astype(query.dtype), *returned_grads, None, None


_block_ring.defvjp(_block_ring_forward, _block_ring_backward)


# Attention by kernels, for causal masks and rows in the order of `zigzag`. A device holds an early and a late part of
# each row. Its queries attend to its own keys under a causal mask. If keys come from an earlier device, all queries see
# the early half of the keys, and no query sees the late half. If keys come from a later device, the late queries see
# all keys, and the early queries see none. So a step needs a causal mask or no mask, and each step after the first
# computes half of the scores.

KeyValuePiece = tuple[Array, Array, TokenPositions]


class RingKernels(NamedTuple):
    """Kernels for the pieces of keys that a device attends to."""

    local: flash.FlashChoice
    """Kernel for the device's own piece, under a causal mask."""
    past: flash.FlashChoice
    """Kernel for keys that are all before the queries, without a causal mask."""


def choose_ring_kernels(core: kernels.Operation, devices: int, call: AttentionCall) -> RingKernels | None:
    """Return the kernels of `core` for own and for past keys, or None if `core` does not have both.

    Raises a `ValueError` if `core` requires a kernel that does not support the keys.
    """
    reason = "over a ring it needs a causal mask without chunks, and rows of one text or of documents in order"
    if _are_known_pieces(call, devices):
        local = _piece_call(call, "own")
        half = call.query.shape[-3] // 2
        past = _past_call(local, call.query, call.key[..., :half, :, :], call.value[..., :half, :, :])
        if isinstance(core, kernels.RequiredKernel):
            reason = core.kernel.supports(local) or core.kernel.supports(past)
            if reason is None:
                return RingKernels(core.flash_choice(), core.flash_choice())
        elif isinstance(core, kernels.Op):
            return _common_kernels(core, local, past)
    if not isinstance(core, kernels.RequiredKernel):
        return None
    raise ValueError(
        f"{core} over {devices} devices of a ring cannot compute query {call.query.dtype}{list(call.query.shape)} "
        f"under {call.mask}: {reason}; pass kernels.ATTENTION, which computes by blocks if necessary, or "
        "method='heads', which gives the core whole rows."
    )


def _are_known_pieces(call: AttentionCall, devices: int) -> bool:
    """Return whether the mask is causal and the order of tokens is known from the index of each piece."""
    tokens, mask = call.tokens, call.mask
    is_known = tokens.pieces == devices and tokens.whole_rows == devices * call.query.shape[-3]
    is_known = is_known and (tokens.segments is None or tokens.documents is not None)
    return is_known and mask.is_causal and mask.chunk is None


def _common_kernels(core: kernels.Op, local: AttentionCall, past: AttentionCall) -> RingKernels | None:
    """Return the kernels of an op on the platforms for which the op has kernels for own and for past keys."""
    local_choice, past_choice = (kernels.flash_choice(core.choose(call)) for call in (local, past))
    if local_choice is None or past_choice is None:
        return None
    pairs = tuple(pair for pair in local_choice.by_platform if pair in past_choice.by_platform)
    if not pairs and not isinstance(local_choice.fallback, kernels.FlashAttention):
        return None
    return RingKernels(local_choice._replace(by_platform=pairs), past_choice._replace(by_platform=pairs))


def _piece_call(call: AttentionCall, piece: str) -> AttentionCall:
    """Return the call for this device's own keys, under a causal mask."""
    return dataclasses.replace(call, mask=_piece_mask(call, is_causal=True), piece=piece)


def _piece_mask(call: AttentionCall, *, is_causal: bool) -> kernels.Mask | kernels.ChosenKeys:
    """Return the mask within a piece of keys: of a `Mask` only the window is kept, `ChosenKeys` are unchanged."""
    return kernels.Mask(is_causal, call.mask.window) if isinstance(call.mask, kernels.Mask) else call.mask


def _past_call(
    call: AttentionCall,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch kv_seq kv_heads head_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    tokens: TokenPositions | None = None,
    kv_tokens: TokenPositions | None = None,
) -> AttentionCall:
    """Return the call for queries that see all given keys."""
    mask = _piece_mask(call, is_causal=False)
    tokens = call.tokens if tokens is None else tokens
    return dataclasses.replace(
        call, query=query, key=key, value=value, mask=mask, tokens=tokens, kv_tokens=kv_tokens, sinks=None, piece="past"
    )


def flash_ring_attend(choices: RingKernels, ring: Ring, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
    """Return the attention of this device's queries to the keys of all devices; like `ring_attend`, but by kernels."""
    merged = kernels.with_one_batch_dim(_piece_call(call, "own"))
    output = _flash_ring(choices, ring, vary(vary_like(merged, merged), (ring.axis,)))
    return output.reshape(*call.query.shape[:-1], call.value.shape[-1])


def _flash_forward(choices: RingKernels, ring: Ring, call: AttentionCall) -> tuple[Array, Array]:
    """Return output and logsumexp of the attention to the keys of all devices."""

    def combine_piece(
        result: tuple[Array, Array], piece: KeyValuePiece, step_number: int | Array
    ) -> tuple[Array, Array]:
        output, logsum = result
        piece_output, piece_logsum = _attend_past(choices.past, ring, step_number, call, piece)
        share = jax.nn.sigmoid(piece_logsum - logsum).swapaxes(1, 2)[..., None]
        return output + share * (piece_output.astype(output.dtype) - output), jnp.logaddexp(logsum, piece_logsum)

    def step(carry: tuple, step_number: Array) -> tuple[tuple, None]:
        result, piece = carry
        next_piece = _send_on(ring, piece)  # While the pieces are sent, each device attends to the piece that it has.
        return (combine_piece(result, piece, step_number), next_piece), None

    piece = call.key, call.value, call.tokens
    next_piece = _send_on(ring, piece) if ring.devices > 1 else piece
    output, logsum = flash.forward(choices.local, flash.without_sinks(call))
    result = output.astype(kernels.at_least_float32(output.dtype)), logsum
    if ring.devices > 1:
        step_numbers = jnp.arange(1, ring.devices - 1, dtype=jnp.int32)
        (result, piece), _ = jax.lax.scan(step, (result, next_piece), step_numbers)
        result = combine_piece(result, piece, ring.devices - 1)
    return flash.add_sinks(result[0].astype(call.query.dtype), result[1], call.sinks)


def _flash_ring_primal(choices: RingKernels, ring: Ring, call: AttentionCall) -> Array:
    return _flash_forward(choices, ring, call)[0]


_flash_ring = jax.custom_vjp(_flash_ring_primal, nondiff_argnums=(0, 1))


def _flash_ring_forward(choices: RingKernels, ring: Ring, call: AttentionCall):
    output, logsum = (checkpoint_name(x, "attended") for x in _flash_forward(choices, ring, call))
    return output, (call, output, logsum)


def _flash_ring_backward(choices: RingKernels, ring: Ring, residuals: tuple, output_grad: Array):
    call, output, logsum = residuals
    results = output, logsum, output_grad
    sum_dtype = kernels.at_least_float32(call.query.dtype)

    def piece_gradients(piece: KeyValuePiece, step_number: int | Array) -> tuple[Array, tuple[Array, ...]]:
        query_grad, *piece_grads = _attend_past_grads(choices.past, ring, step_number, call, piece, results)
        return query_grad.astype(sum_dtype), tuple(piece_grads)

    def step(carry: tuple, step_number: Array) -> tuple[tuple, None]:
        piece, query_grad, piece_grads = carry
        next_piece, arrived_grads = _send_on(ring, piece), _send_on(ring, piece_grads)
        query_grad_part, piece_grads = piece_gradients(piece, step_number)
        return (next_piece, query_grad + query_grad_part, jax.tree.map(jnp.add, arrived_grads, piece_grads)), None

    piece, size = (call.key, call.value, call.tokens), ring.devices
    next_piece = _send_on(ring, piece) if size > 1 else piece
    query_grad, *local_grads = flash.backward(choices.local, flash.without_sinks(call), *results)
    query_grad = query_grad.astype(sum_dtype)
    if size > 1:
        # The gradients of a piece are sent one step behind the piece, and reach their owner with the last step.
        arriving_grads = vary_like(jax.tree.map(jnp.zeros_like, tuple(local_grads)), local_grads)
        if size > 2:
            piece, next_piece = next_piece, _send_on(ring, next_piece)
            query_grad_part, arriving_grads = piece_gradients(piece, 1)
            step_numbers = jnp.arange(2, size - 1, dtype=jnp.int32)
            (next_piece, query_grad, arriving_grads), _ = jax.lax.scan(
                step, (next_piece, query_grad + query_grad_part, arriving_grads), step_numbers
            )
            arriving_grads = _send_on(ring, arriving_grads)
        query_grad_part, piece_grads = piece_gradients(next_piece, size - 1)
        query_grad = query_grad + query_grad_part
        returned_grads = _send_on(ring, jax.tree.map(jnp.add, arriving_grads, piece_grads))
        local_grads = jax.tree.map(jnp.add, tuple(local_grads), returned_grads)
    gradients = query_grad.astype(call.query.dtype), *local_grads, flash.sinks_grad(call.sinks, *results)
    return (flash.call_gradient(call, *gradients),)


_flash_ring.defvjp(_flash_ring_forward, _flash_ring_backward)


def _attend_past(
    choice: flash.FlashChoice, ring: Ring, step_number: int | Array, call: AttentionCall, piece: KeyValuePiece
) -> tuple[Array, Array]:
    """Return output and logsumexp of this device's queries for the piece that arrives in a step of the ring."""

    def see_early_keys() -> tuple[Array, Array]:
        key, value, kv_tokens = _halves(piece)[0]
        return flash.forward(choice, _past_call(call, call.query, key, value, call.tokens, kv_tokens))

    def see_by_late_queries() -> tuple[Array, Array]:
        _, (late, late_tokens) = _halves((call.query, call.tokens))
        key, value, kv_tokens = piece
        output, logsum = flash.forward(choice, _past_call(call, late, key, value, late_tokens, kv_tokens))
        unseen = jnp.full_like(logsum, kernels.lowest(logsum.dtype))
        return _concatenate(jnp.zeros_like(output), output, 1), _concatenate(unseen, logsum, 2)

    return _branch_on_step(ring, step_number, see_early_keys, see_by_late_queries)


def _attend_past_grads(
    choice: flash.FlashChoice,
    ring: Ring,
    step_number: int | Array,
    call: AttentionCall,
    piece: KeyValuePiece,
    results: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """Return the gradients of the queries, and of the keys and values of the piece that arrives in a step."""

    def see_early_keys() -> tuple[Array, Array, Array]:
        key, value, kv_tokens = _halves(piece)[0]
        past = _past_call(call, call.query, key, value, call.tokens, kv_tokens)
        query_grad, *early_grads = flash.backward(choice, past, *results)
        key_grad, value_grad = (_concatenate(x, jnp.zeros_like(x), 1) for x in early_grads)
        return query_grad, key_grad, value_grad

    def see_by_late_queries() -> tuple[Array, Array, Array]:
        output, logsum, output_grad = results
        _, (late, late_tokens, output, output_grad) = _halves((call.query, call.tokens, output, output_grad))
        logsum = jnp.split(logsum, 2, axis=2)[1]
        key, value, kv_tokens = piece
        past = _past_call(call, late, key, value, late_tokens, kv_tokens)
        query_grad, key_grad, value_grad = flash.backward(choice, past, output, logsum, output_grad)
        return _concatenate(jnp.zeros_like(query_grad), query_grad, 1), key_grad, value_grad

    return _branch_on_step(ring, step_number, see_early_keys, see_by_late_queries)


def _branch_on_step(
    ring: Ring,
    step_number: int | Array,
    see_early_keys: Callable[[], Results],
    see_by_late_queries: Callable[[], Results],
) -> Results:
    """Call `see_early_keys` if the piece of this step comes from an earlier device, else `see_by_late_queries`.

    In step `s`, a device has the piece of the device `s` places before it on the ring.
    """
    return jax.lax.cond(jax.lax.axis_index(ring.axis) >= step_number, see_early_keys, see_by_late_queries)


def _halves(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Return the early and the late half of arrays `batch seq ...`."""
    leaves, structure = jax.tree.flatten(tree)
    early = [x[:, : x.shape[1] // 2] for x in leaves]
    late = [x[:, x.shape[1] // 2 :] for x in leaves]
    return structure.unflatten(early), structure.unflatten(late)


def _concatenate(early: Array, late: Array, dim: int) -> Array:
    return jnp.concatenate([vary_like(early, late), vary_like(late, early)], axis=dim)
