"""Where every message of a pipeline goes: the static routing that the executor of a schedule reads."""

import dataclasses
import heapq
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from ..._shapes import Array
from ._schedule import checked_ticks, IDLE, Schedule


class Link(NamedTuple):
    """Messages of one kind, activations (`is_input`) or gradients, `shift` devices up the ring; 0 is the same one."""

    is_input: bool
    shift: int


class Arrival(NamedTuple):
    """What a link brings a device in a tick: the slot, and whether it brings any device something (known to all)."""

    slot: Int[Array, "*ticks"]
    is_used: Bool[Array, "*ticks"]


class Turn(NamedTuple):
    """What a device does in a tick and which slots it uses: `ticks stages` tables, `IDLE` where there is nothing.

    Within a tick the order is forward, backward, weight, and last the arrivals of messages, one for each of
    `Routes.links`.
    """

    forward: Int[Array, "*ticks"]
    forward_input: Int[Array, "*ticks"]
    forward_kept: Int[Array, "*ticks"]
    backward: Int[Array, "*ticks"]
    backward_input: Int[Array, "*ticks"]
    backward_cotangent: Int[Array, "*ticks"]
    backward_kept: Int[Array, "*ticks"]
    backward_products: Int[Array, "*ticks"]
    weight: Int[Array, "*ticks"]
    weight_products: Int[Array, "*ticks"]
    arrivals: tuple[Arrival, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """A schedule's turns, and how many slots its stashes need: the peak of any device, since all run one program.

    `inputs` are those of stages, from arrival to backward; `cotangents` wait for their backward; `kept` is what stays
    from a forward entry to its backward; `products` are what a split backward leaves for the weight entry. `links` are
    those that the table uses.
    """

    turns: Turn
    links: tuple[Link, ...]
    inputs: int
    cotangents: int
    kept: int
    products: int


def route(schedule: Schedule) -> Routes:
    """The routes of a schedule; a `ValueError` where it breaks a rule of `check_schedule`."""
    forward, backward, weight = checked_ticks(schedule)
    never = np.zeros_like(forward[:1])  # for the last part, to which no other sends a cotangent
    # Times are in thirds of a tick: forward, backward, then weight and arrivals. A slot is free from its end on.
    arrival = np.concatenate([3 * forward[:1], 3 * forward[:-1] + 2])
    inputs, input_slots = _slots(schedule, arrival, 3 * backward + 1)
    start = np.concatenate([3 * backward[1:] + 2, never])
    end = np.concatenate([3 * backward[:-1] + 1, never])
    cotangents, cotangent_slots = _slots(schedule, start, end)
    kept, kept_slots = _slots(schedule, 3 * forward, 3 * backward + 1)
    products, product_slots = _slots(schedule, 3 * backward + 1, 3 * weight + 2) if schedule.is_split else (0, None)
    none = np.full_like(forward, IDLE)
    product_slots = none if product_slots is None else product_slots
    links, arrivals = [], []
    for shift in np.unique(schedule.shifts):
        left = np.flatnonzero(schedule.shifts == shift)  # parts whose output goes that way
        links += [Link(True, int(shift)), Link(False, int(-shift % schedule.stages))]
        arrivals += [_table(schedule, forward[left], input_slots[left + 1], left + 1)]
        arrivals += [_table(schedule, backward[left + 1], cotangent_slots[left], left)]
    used = [np.broadcast_to((table != IDLE).any(1, keepdims=True), table.shape) for table in arrivals]
    turns = Turn(
        forward=schedule.forward,
        forward_input=_table(schedule, forward, input_slots),
        forward_kept=_table(schedule, forward, kept_slots),
        backward=schedule.backward,
        backward_input=_table(schedule, backward, input_slots),
        backward_cotangent=_table(schedule, backward, cotangent_slots),
        backward_kept=_table(schedule, backward, kept_slots),
        backward_products=_table(schedule, backward, product_slots),
        weight=schedule.weight,
        weight_products=_table(schedule, weight, product_slots),
        arrivals=tuple(map(Arrival, arrivals, used)),
    )
    turns = jax.tree.map(lambda table: table if table.dtype == bool else table.astype(np.int32), turns)
    return Routes(turns, tuple(links), inputs, cotangents, kept, products)


def link_ticks(schedule: Schedule) -> dict[Link, int]:
    """In how many ticks messages go over each link between devices; what stays on its device is left out."""
    routes = route(schedule)
    used = zip(routes.links, routes.turns.arrivals, strict=True)
    return {link: int(arrival.is_used[:, 0].sum()) for link, arrival in used if link.shift}


def _slots(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> tuple[int, Int[np.ndarray, "parts microbatches"]]:
    """Slots by lifetime, each device's reused as soon as they are free, which takes as many as ever live at once."""
    slots, most = np.full_like(start, IDLE), 0
    for stage in range(schedule.stages):
        parts = schedule.part_of[stage]
        lives = sorted((start[q, i], end[q, i], q, i) for q in parts for i in range(start.shape[1]) if end[q, i])
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        count = 0
        for born, dead, part, microbatch in lives:
            while busy and busy[0][0] <= born:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, count)
                count += 1
            slots[part, microbatch] = heapq.heappop(free)
            heapq.heappush(busy, (dead, slots[part, microbatch]))
        most = max(most, count)
    return most, slots


def _table(
    schedule: Schedule, when: np.ndarray, slots: np.ndarray, parts: np.ndarray | None = None
) -> Int[np.ndarray, "ticks stages"]:
    """`table[when, device] = slot`; rows of both are of `parts`, by default of all, each on its device."""
    table = np.full_like(schedule.forward, IDLE)
    stages = schedule.stage_of if parts is None else schedule.stage_of[parts]
    table[when, np.broadcast_to(stages[:, None], when.shape)] = slots
    return table
