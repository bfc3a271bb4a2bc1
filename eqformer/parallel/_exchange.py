"""Choices sent to their experts' devices and back, in as many rounds as it takes until each has had a place."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from . import _exchange_padded as padded, _exchange_ragged as ragged
from ._axes import EXPERT
from ._expert_method import Exchange
from ._vary import vary_like


FURTHER_ROUNDS = "further rounds of choices"  # the scope of loops that even loads do not enter


def exchanged(
    experts: nn.Experts,
    x: Float[Array, "tokens embed"],
    choices: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    exchange: Exchange,
    *,
    weighs_inputs: bool,
) -> Float[Array, "tokens embed"]:
    """What all devices' experts add to this device's tokens; exact, whatever the load.

    A round has `factor` times the room that even loads need: a device for what all send it or, padded, each pair of
    devices. So there is one round, but for uneven loads: all choices for one of `n` devices take `n / factor`. Further
    rounds are a loop, and its backward pass is one, which computes each round again: gradients are summed over them in
    float32 at least, and nothing of them is kept. There is no second derivative and no forward mode.

    Args:
        experts: Those of this device.
        x: Its tokens.
        choices: The experts of all devices that each of them has chosen; -1 adds nothing.
        weights: Those of the choices.
        exchange: By which all-to-alls they are sent, and with how much room.
        weighs_inputs: Whether tokens are weighted, and not what experts give.
    """
    way = ragged if exchange.is_ragged else padded
    room = exchange.room(choices.size, jax.lax.axis_size(EXPERT))
    queues = way.queues_of(choices, len(experts), room)
    moving, fixed = eqx.partition(experts, nn.is_trainable)
    codes, static = eqx.partition(fixed, eqx.is_array)
    # Typed alike, so that the transposes of these sum what no round sums.
    moving, x, codes, weights = vary_like((moving, x, codes, weights), moving, x, codes, choices, weights)
    one = lambda codes, queues, number, moving, *given: way.one_round(
        eqx.combine(moving, codes, static), room, queues, number, *given
    )
    given = _rounds(one)(codes, queues, moving, x, weights if weighs_inputs else None)
    return nn.dispatch.combine(given, jnp.ones_like(weights) if weighs_inputs else weights)


def _rounds(one: Callable[..., Array]) -> Callable[..., Float[Array, "tokens top_k embed"]]:
    """What each choice gives, a round at a time: `one(codes, queues, number, *given)`, differentiable by `given`.

    A round gives zeros for the choices of all others.
    """

    def all_of(first: PyTree, queues: Any, more: Callable[[Array, PyTree], PyTree]) -> PyTree:
        is_left, step = lambda carry: carry[0] < queues.rounds, lambda carry: (carry[0] + 1, more(*carry))
        with jax.named_scope(FURTHER_ROUNDS):
            return jax.lax.while_loop(is_left, step, (jnp.ones((), jnp.int32), first))[1]

    def further(first: Array, codes: PyTree, queues: Any, *given: PyTree) -> Array:
        def more(number: Array, total: Array) -> Array:
            found = one(codes, queues, number, *given)
            return jnp.where(found == 0, total, found)  # a choice is of one round, so nothing is added up

        return all_of(first, queues, more)

    @jax.custom_vjp
    def run(codes: PyTree, queues: Any, *given: PyTree) -> Array:
        return further(one(codes, queues, 0, *given), codes, queues, *given)

    def forward(codes: PyTree, queues: Any, *given: PyTree) -> tuple[Array, Any]:
        first, back = jax.vjp(functools.partial(one, codes, queues, 0), *given)
        return further(first, codes, queues, *given), (back, codes, queues, given)

    def backward(saved: Any, gradient: Array) -> tuple[PyTree, ...]:
        back, codes, queues, given = saved
        wide = lambda x: x.astype(nn.at_least_float32(x.dtype))

        def more(number: Array, total: PyTree) -> PyTree:
            found = jax.vjp(functools.partial(one, codes, queues, number), *given)[1](gradient)
            return jax.tree.map(lambda total, x: total + wide(x), total, found)

        total = all_of(jax.tree.map(wide, back(gradient)), queues, more)
        return None, None, *jax.tree.map(lambda total, x: total.astype(x.dtype), total, given)

    run.defvjp(forward, backward)
    return run
