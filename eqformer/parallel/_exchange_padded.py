"""A round of an exchange by all-to-alls of equally many slots for each pair of devices, for platforms without ragged
ones: XLA for CPUs has none."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from .. import nn
from . import _send as send
from ._axes import EXPERT
from ._vary import vary


class Queues(NamedTuple):
    """Each device has a queue of choices for every device of the axis, of which a round takes the next few."""

    choices: Int[Array, "tokens top_k"]
    turn: Int[Array, "tokens top_k"]
    """Each choice's round."""
    place: Int[Array, "tokens top_k"]
    """Its slot in that round, of those for its device."""
    rounds: Int[Array, ""]
    """How many it takes until all queues of all devices of the axis are empty."""


def queues_of(choices: Int[Array, "tokens top_k"], experts: int, count: int) -> Queues:
    """The queues of this device's choices, with `count` slots a round and so many `experts` a device."""
    rank = nn.dispatch.rank_of_choice(jnp.where(choices < 0, -1, choices // experts), jax.lax.axis_size(EXPERT))
    most = jnp.max(jnp.where(choices < 0, -1, rank), initial=-1) // count + 1
    # Of the devices that exchange, none must leave the loop before another.
    return Queues(choices, rank // count, rank % count, send.pmax("rounds of choices", vary(most, [EXPERT]), EXPERT))


def one_round(
    experts: nn.Experts,
    count: int,
    queues: Queues,
    number: int | Array,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top_k"] | None,
) -> Float[Array, "tokens top_k embed"]:
    """What the choices of a round give, of tokens times their weights, if any; zeros for all others."""
    choices = queues.choices
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
