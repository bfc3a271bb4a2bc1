"""Routing of a pipeline's messages and slots: the static tables that the executor of a schedule reads."""

import dataclasses
import heapq
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from ..._shapes import Array
from ._schedule import entry_ticks, IDLE, Schedule


class Link(NamedTuple):
    """Messages of one kind, activations (`is_input`) or gradients, to the device `shift` up the ring; 0 is itself."""

    is_input: bool
    shift: int


class Arrival(NamedTuple):
    """The slot of the message that a link brings a device in a tick, and whether it brings any device a message."""

    slot: Int[Array, "*ticks"]
    is_used: Bool[Array, "*ticks"]


class TickActions(NamedTuple):
    """The entries of a device in a tick and the slots that they use: `ticks stages` tables, `IDLE` for no action.

    Within a tick the order is forward, backward, weight, and last the arrivals of messages, one for each of
    `Routes.links`.
    """

    forward: Int[Array, "*ticks"]
    forward_input: Int[Array, "*ticks"]
    forward_residuals: Int[Array, "*ticks"]
    backward: Int[Array, "*ticks"]
    backward_input: Int[Array, "*ticks"]
    backward_cotangent: Int[Array, "*ticks"]
    backward_residuals: Int[Array, "*ticks"]
    backward_operands: Int[Array, "*ticks"]
    weight: Int[Array, "*ticks"]
    weight_operands: Int[Array, "*ticks"]
    arrivals: tuple[Arrival, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """A schedule's actions, and numbers of slots: the peak of any device, since all devices run one program.

    `input_slots` hold inputs of stages from arrival to backward; `cotangent_slots` hold cotangents until their
    backward; `residual_slots` hold residuals from a forward entry to its backward; `operand_slots` hold the operands
    of deferred weight gradients from a split backward to the weight entry. `links` are those that the table uses.
    """

    actions: TickActions
    links: tuple[Link, ...]
    input_slots: int
    cotangent_slots: int
    residual_slots: int
    operand_slots: int


def route_messages(schedule: Schedule) -> Routes:
    """Return the routes of a schedule; raise a `ValueError` if it breaks a rule of `check_schedule`."""
    forward, backward, weight = entry_ticks(schedule)
    never = np.zeros_like(forward[:1])  # for the last part, to which no other part sends a cotangent
    # Times are in thirds of a tick: forward, backward, then weight and arrivals. A slot is free from its end on.
    arrival = np.concatenate([3 * forward[:1], 3 * forward[:-1] + 2])
    input_count, input_slots = _assign_slots(schedule, arrival, 3 * backward + 1)
    start = np.concatenate([3 * backward[1:] + 2, never])
    end = np.concatenate([3 * backward[:-1] + 1, never])
    cotangent_count, cotangent_slots = _assign_slots(schedule, start, end)
    residual_count, residual_slots = _assign_slots(schedule, 3 * forward, 3 * backward + 1)
    operand_count, operand_slots = 0, np.full_like(forward, IDLE)
    if schedule.is_split:
        operand_count, operand_slots = _assign_slots(schedule, 3 * backward + 1, 3 * weight + 2)
    links, arrivals = [], []
    for shift in np.unique(schedule.shifts):
        senders = np.flatnonzero(schedule.shifts == shift)  # the parts whose output goes that way
        links += [Link(True, int(shift)), Link(False, int(-shift % schedule.stages))]
        arrivals += [_make_table(schedule, forward[senders], input_slots[senders + 1], senders + 1)]
        arrivals += [_make_table(schedule, backward[senders + 1], cotangent_slots[senders], senders)]
    used = [np.broadcast_to((table != IDLE).any(1, keepdims=True), table.shape) for table in arrivals]
    actions = TickActions(
        forward=schedule.forward,
        forward_input=_make_table(schedule, forward, input_slots),
        forward_residuals=_make_table(schedule, forward, residual_slots),
        backward=schedule.backward,
        backward_input=_make_table(schedule, backward, input_slots),
        backward_cotangent=_make_table(schedule, backward, cotangent_slots),
        backward_residuals=_make_table(schedule, backward, residual_slots),
        backward_operands=_make_table(schedule, backward, operand_slots),
        weight=schedule.weight,
        weight_operands=_make_table(schedule, weight, operand_slots),
        arrivals=tuple(map(Arrival, arrivals, used)),
    )
    actions = jax.tree.map(lambda table: table if table.dtype == bool else table.astype(np.int32), actions)
    return Routes(actions, tuple(links), input_count, cotangent_count, residual_count, operand_count)


def count_link_ticks(schedule: Schedule) -> dict[Link, int]:
    """Return the number of ticks in which each link between devices carries messages.

    Links from a device to itself are left out.
    """
    routes = route_messages(schedule)
    used = zip(routes.links, routes.actions.arrivals, strict=True)
    return {link: int(arrival.is_used[:, 0].sum()) for link, arrival in used if link.shift}


def _assign_slots(
    schedule: Schedule, start: np.ndarray, end: np.ndarray
) -> tuple[int, Int[np.ndarray, "parts microbatches"]]:
    """Assign slots by lifetime; return the largest number that a device uses, and the slots.

    Each device reuses its slots as soon as they are free, so it needs as many as are ever in use at once.
    """
    slots, largest_count = np.full_like(start, IDLE), 0
    for stage in range(schedule.stages):
        parts = schedule.part_of[stage]
        lifetimes = sorted((start[q, i], end[q, i], q, i) for q in parts for i in range(start.shape[1]) if end[q, i])
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        count = 0
        for begin, finish, part, microbatch in lifetimes:
            while busy and busy[0][0] <= begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, count)
                count += 1
            slots[part, microbatch] = heapq.heappop(free)
            heapq.heappush(busy, (finish, slots[part, microbatch]))
        largest_count = max(largest_count, count)
    return largest_count, slots


def _make_table(
    schedule: Schedule, ticks: np.ndarray, slots: np.ndarray, parts: np.ndarray | None = None
) -> Int[np.ndarray, "ticks stages"]:
    """Return `table[tick, device] = slot`; `ticks` and `slots` have a row for each of `parts`, by default all parts."""
    table = np.full_like(schedule.forward, IDLE)
    stages = schedule.stage_of if parts is None else schedule.stage_of[parts]
    table[ticks, np.broadcast_to(stages[:, None], ticks.shape)] = slots
    return table
