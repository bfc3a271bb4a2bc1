"""Choices sent to their experts' devices and back, in as many rounds as it takes until each has had a slot."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from . import _send as send
from ._axes import EXPERT
from ._vary import vary, vary_like


FURTHER_ROUNDS = "further rounds of choices"  # the scope of loops that even loads do not enter


class _Queues(NamedTuple):
    """Each device has a queue of choices for every device of the axis, of which a round takes the next few."""

    choices: Int[Array, "tokens top_k"]
    turn: Int[Array, "tokens top_k"]
    """Each choice's round."""
    place: Int[Array, "tokens top_k"]
    """Its slot in that round, of those for its device."""
    rounds: Int[Array, ""]
    """How many it takes until all queues of all devices of the axis are empty."""


def exchanged(
    experts: nn.Experts,
    x: Float[Array, "tokens embed"],
    choices: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    factor: float,
    *,
    weighs_inputs: bool,
) -> Float[Array, "tokens embed"]:
    """What all devices' experts add to this device's tokens; exact, whatever the load.

    In a round each pair of devices has `factor` times the slots that even loads need. So there is one round, but for
    uneven loads: all choices for one of `n` devices take `n / factor`. Further rounds are a loop, and its backward pass
    is one, which computes each round again: gradients are summed over them in float32 at least, and nothing of them is
    kept. There is no second derivative and no forward mode.

    Args:
        experts: Those of this device.
        x: Its tokens.
        choices: The experts of all devices that each of them has chosen; -1 adds nothing.
        weights: Those of the choices.
        factor: Slots, relative to an even load.
        weighs_inputs: Whether tokens are weighted, and not what experts give.
    """
    devices = jax.lax.axis_size(EXPERT)
    count = nn.dispatch.slots_of(factor, choices.size, devices)
    rank = nn.dispatch.rank_of_choice(jnp.where(choices < 0, -1, choices // len(experts)), devices)
    most = jnp.max(jnp.where(choices < 0, -1, rank), initial=-1) // count + 1
    # Of the devices that exchange, none must leave the loop before another.
    queues = _Queues(choices, rank // count, rank % count, send.pmax("rounds of choices", vary(most, [EXPERT]), EXPERT))
    moving, fixed = eqx.partition(experts, nn.is_trainable)
    codes, static = eqx.partition(fixed, eqx.is_array)
    # Typed alike, so that the transposes of these sum what no round sums.
    moving, x, codes, weights = vary_like((moving, x, codes, weights), moving, x, codes, choices, weights)
    one = functools.partial(_round, static, count)
    given = _rounds(one)(codes, queues, moving, x, weights if weighs_inputs else None)
    return nn.dispatch.combine(given, jnp.ones_like(weights) if weighs_inputs else weights)


def _rounds(one: Callable[..., Array]) -> Callable[..., Float[Array, "tokens top_k embed"]]:
    """What each choice gives, a round at a time: `one(codes, queues, number, *given)`, differentiable by `given`."""

    def all_of(first: PyTree, queues: _Queues, more: Callable[[Array, PyTree], PyTree]) -> PyTree:
        is_left, step = lambda carry: carry[0] < queues.rounds, lambda carry: (carry[0] + 1, more(*carry))
        with jax.named_scope(FURTHER_ROUNDS):
            return jax.lax.while_loop(is_left, step, (jnp.ones((), jnp.int32), first))[1]

    def further(first: Array, codes: PyTree, queues: _Queues, *given: PyTree) -> Array:
        is_own = lambda number: (queues.turn == number)[..., None]
        more = lambda number, total: jnp.where(is_own(number), one(codes, queues, number, *given), total)
        return all_of(first, queues, more)

    @jax.custom_vjp
    def run(codes: PyTree, queues: _Queues, *given: PyTree) -> Array:
        return further(one(codes, queues, 0, *given), codes, queues, *given)

    def forward(codes: PyTree, queues: _Queues, *given: PyTree) -> tuple[Array, Any]:
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


def _round(
    static: PyTree,
    count: int,
    codes: PyTree,
    queues: _Queues,
    number: int | Array,
    moving: PyTree,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top_k"] | None,
) -> Float[Array, "tokens top_k embed"]:
    """What the choices of a round give, of tokens times their weights, if any; zeros for all others."""
    experts, choices = eqx.combine(moving, codes, static), queues.choices
    is_own = (choices >= 0) & (queues.turn == number)
    slot = jnp.where(is_own, choices // len(experts) * count + queues.place, -1)
    choice = nn.dispatch.choice_of_slot(slot, jax.lax.axis_size(EXPERT) * count)
    sent = nn.dispatch.take_some_rows(x, choice // choices.shape[-1], slot)
    if weights is not None:
        sent = nn.dispatch.scaled(sent, nn.dispatch.weight_of_slot(slot, weights, len(choice)))
    expert = jnp.where(choice < 0, -1, choices.reshape(-1)[jnp.maximum(choice, 0)] % len(experts))
    to_experts = lambda array: send.all_to_all("choices to experts", array, EXPERT, 0, 0)
    order, place, sizes = nn.dispatch.by_expert(to_experts(expert)[:, None], len(experts))
    rows, even = nn.dispatch.take_rows(to_experts(sent), order, place[:, None]), min(choices.size, len(choice))
    y = experts.sorted_rows(rows, sizes, even=even // len(experts))
    back = nn.dispatch.take_rows(y, place, order[:, None])
    back = checkpoint_name(send.all_to_all("choices from experts", back, EXPERT, 0, 0), "product")
    given = nn.dispatch.take_some_rows(back, slot.reshape(-1), choice[:, None])
    return given.reshape(*choices.shape, x.shape[-1])
