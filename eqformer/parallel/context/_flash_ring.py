"""Ring attention by the kernels of accelerators, for rows in the order of `zigzag`.

A device holds an early and a late part of each row. Its queries see its own keys in the order of a causal mask. Of a
device that stands before it on the ring they see all early keys and no late ones; and to keys of a device behind it
only its late queries come after, and they see all of those. So no step needs another mask than these, and each of them
but the first is half of the whole.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ...kernels import (
    at_least_float32,
    AttentionCall,
    flash,
    flash_choice,
    FlashAttention,
    lowest,
    Mask,
    Op,
    Operation,
    RequiredKernel,
    TokenPositions,
    with_one_batch_dim,
)
from .._ring import Ring, shift
from .._shard_map import vary, vary_like


Held = tuple[Array, Array, TokenPositions]


class Steps(NamedTuple):
    """The kernels by which a device attends to its own piece, and to one whose keys are all past to the queries."""

    own: flash.FlashChoice
    past: flash.FlashChoice


def steps_of(core: Operation, devices: int, call: AttentionCall) -> Steps | None:
    """Return the kernels of `core` for both kinds of pieces, or None if there are none.

    Raises a `ValueError` where `core` requires a kernel that does not support the pieces.
    """
    reason = "over a ring it needs a causal mask without chunks, and rows known to be whole or in order"
    if _are_known_pieces(call, devices):
        own = _piece_of(call, "own")
        half = call.query.shape[-3] // 2
        past = _past_call(own, call.query, call.key[..., :half, :, :], call.value[..., :half, :, :])
        if isinstance(core, RequiredKernel):
            reason = core.kernel.supports(own) or core.kernel.supports(past)
            if reason is None:
                return Steps(core.flash_choice(), core.flash_choice())
        elif isinstance(core, Op):
            return _common_steps(core, own, past)
    if not isinstance(core, RequiredKernel):
        return None
    raise ValueError(
        f"{core} over {devices} devices of a ring cannot compute query {call.query.dtype}{list(call.query.shape)} "
        f"under {call.mask}: {reason}; pass kernels.ATTENTION, which takes blocks where it must, or method='heads', "
        "which gives it whole rows."
    )


def _are_known_pieces(call: AttentionCall, devices: int) -> bool:
    """Return whether a causal mask, in rows of known order, follows from the pieces' numbers alone."""
    tokens, mask = call.tokens, call.mask
    is_known = tokens.pieces == devices and tokens.whole_rows == devices * call.query.shape[-3]
    is_known = is_known and (tokens.segments is None or tokens.documents is not None)
    return is_known and isinstance(mask, Mask) and mask.is_causal and mask.chunk is None


def _common_steps(core: Op, own: AttentionCall, past: AttentionCall) -> Steps | None:
    """Return the kernels that an op chooses for both pieces."""
    of_own, of_past = (flash_choice(core.choose(call)) for call in (own, past))
    if of_own is None or of_past is None:
        return None
    kernels = tuple(pair for pair in of_own.by_platform if pair in of_past.by_platform)
    if not kernels and not isinstance(of_own.fallback, FlashAttention):
        return None
    return Steps(of_own._replace(by_platform=kernels), of_past._replace(by_platform=kernels))


def _piece_of(call: AttentionCall, piece: str) -> AttentionCall:
    mask = Mask(True, call.mask.window) if isinstance(call.mask, Mask) else call.mask
    return dataclasses.replace(call, mask=mask, piece=piece)


def _past_call(
    call: AttentionCall,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch kv_seq kv_heads head_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    tokens: TokenPositions | None = None,
    kv_tokens: TokenPositions | None = None,
) -> AttentionCall:
    """Return the call of queries that see all of these keys."""
    mask = Mask(False, call.mask.window) if isinstance(call.mask, Mask) else call.mask
    tokens = call.tokens if tokens is None else tokens
    return dataclasses.replace(
        call, query=query, key=key, value=value, mask=mask, tokens=tokens, kv_tokens=kv_tokens, sinks=None, piece="past"
    )


def flash_ring_attend(steps: Steps, ring: Ring, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
    """Return the attention of this device's queries to the keys of all devices, as `ring_attend` computes it."""
    merged = with_one_batch_dim(_piece_of(call, "own"))
    output = _ring(steps, ring, vary(vary_like(merged, merged), (ring.axis,)))
    return output.reshape(*call.query.shape[:-1], call.value.shape[-1])


def _results(steps: Steps, ring: Ring, call: AttentionCall) -> tuple[Array, Array]:
    def combine(result: tuple[Array, Array], held: Held, turn: Any) -> tuple[Array, Array]:
        output, logsum = result
        part, part_logsum = _past(steps.past, ring, turn, call, held)
        share = jax.nn.sigmoid(part_logsum - logsum).swapaxes(1, 2)[..., None]
        return output + share * (part.astype(output.dtype) - output), jnp.logaddexp(logsum, part_logsum)

    def step(carry: tuple, turn: Array) -> tuple[tuple, None]:
        result, held = carry
        following = _send(ring, held)  # on its way while this device computes
        return (combine(result, held, turn), following), None

    held = call.key, call.value, call.tokens
    following = _send(ring, held) if ring.devices > 1 else held
    output, logsum = flash.forward(steps.own, flash.without_sinks(call))
    result = output.astype(at_least_float32(output.dtype)), logsum
    if ring.devices > 1:
        turns = jnp.arange(1, ring.devices - 1, dtype=jnp.int32)
        (result, held), _ = jax.lax.scan(step, (result, following), turns)
        result = combine(result, held, ring.devices - 1)
    return flash.add_sinks(result[0].astype(call.query.dtype), result[1], call.sinks)


_ring = jax.custom_vjp(lambda *given: _results(*given)[0], nondiff_argnums=(0, 1))


def _ring_forward(steps: Steps, ring: Ring, call: AttentionCall):
    output, logsum = (checkpoint_name(x, "attended") for x in _results(steps, ring, call))  # for remat policies
    return output, (call, output, logsum)


def _ring_backward(steps: Steps, ring: Ring, residuals: tuple, output_grad: Array):
    call, output, logsum = residuals
    results = output, logsum, output_grad
    wide = at_least_float32(call.query.dtype)

    def parts(held: Held, turn: Any) -> tuple[Array, tuple[Array, ...]]:
        query_grad, *held_grads = _past_grads(steps.past, ring, turn, call, held, results)
        return query_grad.astype(wide), tuple(held_grads)

    def step(carry: tuple, turn: Array) -> tuple[tuple, None]:
        held, query_grad, held_grads = carry
        following, arrived = _send(ring, held), _send(ring, held_grads)
        more, held_grads = parts(held, turn)
        return (following, query_grad + more, jax.tree.map(jnp.add, arrived, held_grads)), None

    held, size = (call.key, call.value, call.tokens), ring.devices
    following = _send(ring, held) if size > 1 else held
    query_grad, *own_grads = flash.backward(steps.own, flash.without_sinks(call), *results)
    query_grad = query_grad.astype(wide)
    if size > 1:
        # The gradients of a piece are sent one step behind it, and reach their owner with the last step.
        no_grads = vary_like(jax.tree.map(jnp.zeros_like, tuple(own_grads)), own_grads)
        if size > 2:
            held, following = following, _send(ring, following)
            more, no_grads = parts(held, 1)
            turns = jnp.arange(2, size - 1, dtype=jnp.int32)
            (following, query_grad, no_grads), _ = jax.lax.scan(step, (following, query_grad + more, no_grads), turns)
            no_grads = _send(ring, no_grads)
        more, held_grads = parts(following, size - 1)
        query_grad = query_grad + more
        home = _send(ring, jax.tree.map(jnp.add, no_grads, held_grads))
        own_grads = jax.tree.map(jnp.add, tuple(own_grads), home)
    gradients = query_grad.astype(call.query.dtype), *own_grads, flash.sinks_grad(call.sinks, *results)
    return (flash.call_gradient(call, *gradients),)


_ring.defvjp(_ring_forward, _ring_backward)


def _past(kernels: flash.FlashChoice, ring: Ring, turn: Any, call: AttentionCall, held: Held) -> tuple[Array, Array]:
    """Return the output and sums of a device's queries over the piece that reaches it at a turn."""

    def of_early_keys() -> tuple[Array, Array]:
        key, value, kv_tokens = _halves(held)[0]
        return flash.forward(kernels, _past_call(call, call.query, key, value, call.tokens, kv_tokens))

    def by_late_queries() -> tuple[Array, Array]:
        _, (late, late_tokens) = _halves((call.query, call.tokens))
        key, value, kv_tokens = held
        output, logsum = flash.forward(kernels, _past_call(call, late, key, value, late_tokens, kv_tokens))
        unseen = jnp.full_like(logsum, lowest(logsum.dtype))
        return _behind(jnp.zeros_like(output), output, 1), _behind(unseen, logsum, 2)

    return _of_turn(ring, turn, of_early_keys, by_late_queries)


def _past_grads(
    kernels: flash.FlashChoice,
    ring: Ring,
    turn: Any,
    call: AttentionCall,
    held: Held,
    results: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, and of the keys and values that reach the device at a turn."""

    def of_early_keys() -> tuple[Array, Array, Array]:
        key, value, kv_tokens = _halves(held)[0]
        past = _past_call(call, call.query, key, value, call.tokens, kv_tokens)
        query_grad, *early_grads = flash.backward(kernels, past, *results)
        key_grad, value_grad = (_behind(x, jnp.zeros_like(x), 1) for x in early_grads)
        return query_grad, key_grad, value_grad

    def by_late_queries() -> tuple[Array, Array, Array]:
        output, logsum, output_grad = results
        _, (late, late_tokens, output, output_grad) = _halves((call.query, call.tokens, output, output_grad))
        logsum = jnp.split(logsum, 2, axis=2)[1]
        key, value, kv_tokens = held
        past = _past_call(call, late, key, value, late_tokens, kv_tokens)
        query_grad, key_grad, value_grad = flash.backward(kernels, past, output, logsum, output_grad)
        return _behind(jnp.zeros_like(query_grad), query_grad, 1), key_grad, value_grad

    return _of_turn(ring, turn, of_early_keys, by_late_queries)


def _of_turn(ring: Ring, turn: Any, of_early_keys: Callable[[], Any], by_late_queries: Callable[[], Any]) -> Any:
    """Run the first function for pieces of devices before this one, and the second for the others."""
    return jax.lax.cond(jax.lax.axis_index(ring.axis) >= turn, of_early_keys, by_late_queries)


def _halves(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Return the early and the late half of arrays `batch seq ...`."""
    half = lambda x: x.shape[1] // 2
    return jax.tree.map(lambda x: x[:, : half(x)], tree), jax.tree.map(lambda x: x[:, half(x) :], tree)


def _behind(early: Array, late: Array, dim: int) -> Array:
    return jnp.concatenate([vary_like(early, late), vary_like(late, early)], axis=dim)


def _send(ring: Ring, tree: PyTree) -> PyTree:
    return shift(tree, ring.axis, name=ring.name)
