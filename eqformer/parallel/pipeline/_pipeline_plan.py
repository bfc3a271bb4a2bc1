"""Where every message of a pipeline goes: the static routing that the executor of a schedule reads."""

import dataclasses
import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from ..._shapes import Array
from ._check_schedule import checked_ticks
from ._schedule import IDLE, Schedule


class Turn(NamedTuple):
    """What a device does in a tick and which slots it uses: `ticks stages` tables, `IDLE` where there is nothing.

    Within a tick the order is forward, backward, weight, and last the arrival of the neighbours' messages. `any_input`
    and `any_cotangent` tell of all devices alike whether any of them is sent one.
    """

    forward: Int[Array, "*ticks"]
    forward_input: Int[Array, "*ticks"]
    backward: Int[Array, "*ticks"]
    backward_input: Int[Array, "*ticks"]
    backward_cotangent: Int[Array, "*ticks"]
    backward_products: Int[Array, "*ticks"]
    weight: Int[Array, "*ticks"]
    weight_products: Int[Array, "*ticks"]
    arriving_input: Int[Array, "*ticks"]
    arriving_cotangent: Int[Array, "*ticks"]
    any_input: Int[Array, "*ticks"]
    any_cotangent: Int[Array, "*ticks"]


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """A schedule's turns, and how many slots its stashes need: the peak of any device, since all run one program.

    `inputs` are those of stages, kept from arrival to backward; `cotangents` wait for their backward; `products` are
    what a split backward leaves for the weight entry.
    """

    turns: Turn
    inputs: int
    cotangents: int
    products: int


def route(schedule: Schedule) -> Routes:
    """The routes of a schedule; a `ValueError` where it breaks a rule of `check_schedule`."""
    forward, backward, weight = checked_ticks(schedule)
    never = np.zeros_like(forward[:1])  # of the last part: no other sends it a cotangent
    # A moment is a tick's third: forward, backward, then weight and arrivals. A slot is free again at its end.
    arrival = np.concatenate([3 * forward[:1], 3 * forward[:-1] + 2])
    inputs, input_slots = _slots(schedule, arrival, 3 * backward + 1)
    start = np.concatenate([3 * backward[1:] + 2, never])
    end = np.concatenate([3 * backward[:-1] + 1, never])
    cotangents, cotangent_slots = _slots(schedule, start, end)
    products, product_slots = _slots(schedule, 3 * backward + 1, 3 * weight + 2) if schedule.is_split else (0, None)
    none = np.full_like(forward, IDLE)
    product_slots = none if product_slots is None else product_slots
    arriving_input = _table(schedule, forward[:-1], input_slots[1:], first_part=1)
    arriving_cotangent = _table(schedule, backward[1:], cotangent_slots[:-1])
    turns = Turn(
        forward=schedule.forward,
        forward_input=_table(schedule, forward, input_slots),
        backward=schedule.backward,
        backward_input=_table(schedule, backward, input_slots),
        backward_cotangent=_table(schedule, backward, cotangent_slots),
        backward_products=_table(schedule, backward, product_slots),
        weight=schedule.weight,
        weight_products=_table(schedule, weight, product_slots),
        arriving_input=arriving_input,
        arriving_cotangent=arriving_cotangent,
        any_input=np.broadcast_to(arriving_input.max(1, keepdims=True), arriving_input.shape),
        any_cotangent=np.broadcast_to(arriving_cotangent.max(1, keepdims=True), arriving_input.shape),
    )
    return Routes(Turn(*(table.astype(np.int32) for table in turns)), inputs, cotangents, products)


def _slots(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> tuple[int, Int[np.ndarray, "parts microbatches"]]:
    """Slots by lifetime, each device's reused as soon as they are free, which takes as many as ever live at once."""
    slots, most = np.full_like(start, IDLE), 0
    for stage in range(schedule.stages):
        parts = range(stage, len(start), schedule.stages)
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
    schedule: Schedule, when: np.ndarray, slots: np.ndarray, first_part: int = 0
) -> Int[np.ndarray, "ticks stages"]:
    """`table[when, device] = slot`; row `r` of both is of part `r + first_part`."""
    table = np.full_like(schedule.forward, IDLE)
    for part, microbatch in np.ndindex(when.shape):
        table[when[part, microbatch], (part + first_part) % schedule.stages] = slots[part, microbatch]
    return table
