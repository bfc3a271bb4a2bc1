"""A round of an exchange by ragged all-to-alls, which send the rows that there are and nothing else.

A device sorts its choices by expert, and what it is sent is laid by expert too, so that nothing is sorted where it
arrives: from each device comes a run of rows for each expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from .. import nn
from . import _send as send
from ._axes import EXPERT
from ._send import Runs


class Queues(NamedTuple):
    """Each device has a queue of the choices of all for its experts, by expert and then by who chose.

    A round takes as many of them as there is room for.
    """

    order: Int[Array, "choices"]
    """This device's choices sorted by expert."""
    place: Int[Array, "tokens top_k"]
    """Where each of them is in that order."""
    counts: Int[Array, "devices devices experts"]
    """How many choices each device has for each expert of every device."""
    rounds: Int[Array, ""]
    """How many it takes until all queues are empty."""


def queues_of(choices: Int[Array, "tokens top_k"], experts: int, room: int) -> Queues:
    """The queues of all devices' choices, with so many places a round and so many `experts` a device."""
    devices = jax.lax.axis_size(EXPERT)
    nn.dispatch.check_indices(f"an exchange among {devices} devices", "choices", devices * choices.size)
    order, place, sizes = nn.dispatch.by_expert(choices, devices * experts)
    counts = send.all_gather("counts of choices", sizes, EXPERT, stacks=True).reshape(devices, devices, experts)
    # All devices that exchange have the same counts: none leaves the loop before another.
    rounds = (jnp.max(jnp.sum(counts, axis=(0, 2), dtype=jnp.int32)) + (room - 1)) // room
    return Queues(order, place.reshape(choices.shape), counts, rounds)


def one_round(
    experts: nn.Experts,
    room: int,
    queues: Queues,
    number: int | Array,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top_k"] | None,
) -> Float[Array, "tokens top_k embed"]:
    """What the choices of a round give, of tokens times their weights, if any; zeros for all others."""
    order, place = queues.order, queues.place
    there, back, sizes = runs_of(queues.counts, jax.lax.axis_index(EXPERT), number * room, room)
    rows = nn.dispatch.take_rows(x, order // place.shape[-1], place)
    if weights is not None:
        rows = nn.dispatch.scaled(rows, weights.reshape(-1)[order])
    taken = _moved("choices to experts", len(rows), room, rows, there, back)
    y = experts.sorted_rows(taken, sizes, even=min(len(rows), room) // len(experts))
    given = checkpoint_name(_moved("choices from experts", room, len(rows), y, back, there), "product")
    return nn.dispatch.take_rows(given, place.reshape(-1), order[:, None]).reshape(*place.shape, x.shape[-1])


def runs_of(
    counts: Int[Array, "devices devices experts"], own: Int[Array, ""], first: int | Array, room: int
) -> tuple[Runs, Runs, Int[Array, "experts"]]:
    """What a device sends to others and gets from them in a round, the way back, and how many rows its experts get.

    The round has the places from `first` on of each queue.
    """
    by_device = counts.reshape(len(counts), -1)
    leaves = (jnp.cumsum(by_device, axis=1) - by_device).reshape(counts.shape)
    queue = jnp.moveaxis(counts, 0, 2)  # by whose they are, by expert, by who sends
    in_order = queue.reshape(len(queue), -1)
    arrives = jnp.moveaxis((jnp.cumsum(in_order, axis=1) - in_order).reshape(queue.shape), 2, 0)
    start, end = (jnp.clip(place, first, first + room) for place in (arrives, arrives + counts))
    sizes = end - start
    here, there = (jnp.where(sizes > 0, place, 0) for place in (leaves + start - arrives, start - first))
    mine = lambda array: jax.lax.dynamic_index_in_dim(array, own, 0, keepdims=False).reshape(-1)
    others = lambda array: jax.lax.dynamic_index_in_dim(array, own, 1, keepdims=False)
    flat = lambda array: others(array).reshape(-1)
    to_experts = Runs(mine(here), mine(sizes), mine(there), flat(sizes))
    from_experts = Runs(flat(there), flat(sizes), flat(here), mine(sizes))
    return to_experts, from_experts, jnp.sum(others(sizes), axis=0, dtype=jnp.int32)


def _moved(name: str, given: int, made: int, rows: Array, runs: Runs, back: Runs) -> Array:
    """`given` rows sent to other devices, on which they are among `made`; their gradients come `back`."""

    @jax.custom_vjp
    def run(rows: Float[Array, "given embed"], runs: Runs, back: Runs) -> Float[Array, "made embed"]:
        return send.ragged_all_to_all(name, rows, EXPERT, made, runs, back)

    run.defvjp(
        lambda rows, runs, back: (run(rows, runs, back), (runs, back)),
        lambda saved, gradient: (_moved(name, made, given, gradient, *saved[::-1]), None, None),
    )
    return run(rows, runs, back)
