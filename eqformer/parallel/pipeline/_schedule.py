"""A pipeline schedule: a table of work by tick and device, its checks, and the routes of its messages."""

import dataclasses
import heapq
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from ..._shapes import Array


IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Table of the work of each device in each tick, and placement of the model's parts on devices.

    The model is cut into equal consecutive parts, and each device holds some of them as its chunks: chunk `chunk` of
    device `stage` is part `part_of[stage, chunk]`. A column of `part_of` has as many consecutive parts as there are
    devices, in any order, so a microbatch visits each device once per chunk; see `ring_placement` and `v_placement`.
    Raises a `ValueError` for another placement.

    An entry of a table is `chunk * microbatches + microbatch`, or `IDLE`. Within a tick a device runs its forward
    entry, then its backward entry, then its weight entry; its messages arrive before the next tick. If `weight` has no
    entries, a backward entry computes the gradients of inputs and of weights. Otherwise it computes those of inputs,
    and the weight entry, in the same tick or later, those of weights.
    """

    name: str
    """The name of the schedule in errors and pictures."""
    part_of: Int[np.ndarray, "stages chunks"]
    """The part of the model that each chunk of each device is."""
    microbatches: int
    """The microbatches of a step."""
    forward: Int[np.ndarray, "ticks stages"]
    """The forward entry of each device in each tick."""
    backward: Int[np.ndarray, "ticks stages"]
    """The backward entries."""
    weight: Int[np.ndarray, "ticks stages"]
    """The weight entries; all `IDLE` if a backward gives weight gradients too."""

    def __post_init__(self):
        expected = np.arange(self.parts).reshape(self.chunks, self.stages).T
        if not np.array_equal(np.sort(self.part_of, axis=0), expected):
            raise ValueError(
                f"Schedule {self.name!r}: chunk c of the {self.stages} devices together are the parts "
                f"c * {self.stages} to c * {self.stages} + {self.stages - 1}, each once, but part_of is "
                f"{self.part_of.tolist()}; correct it, or take ring_placement or v_placement."
            )

    @property
    def stages(self) -> int:
        """The number of devices."""
        return self.part_of.shape[0]

    @property
    def chunks(self) -> int:
        """The number of parts that each device holds."""
        return self.part_of.shape[1]

    @property
    def parts(self) -> int:
        """The number of parts that the model is cut into."""
        return self.part_of.size

    @property
    def stage_of(self) -> Int[np.ndarray, "parts"]:
        """The device that holds each part."""
        return np.argsort(self.part_of, axis=None) // self.chunks

    @property
    def chunk_of(self) -> Int[np.ndarray, "parts"]:
        """The number of each part among its device's chunks."""
        return np.argsort(self.part_of, axis=None) % self.chunks

    @property
    def shifts(self) -> Int[np.ndarray, "_"]:
        """The number of devices up the ring from each part but the last to the next part; 0: the same device.

        Activations move this far up the ring, and gradients as far down.
        """
        return np.diff(self.stage_of) % self.stages

    @property
    def ticks(self) -> int:
        """The number of ticks of the table."""
        return self.forward.shape[0]

    @property
    def is_split(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return bool((self.weight != IDLE).any())


def ring_placement(stages: int, chunks: int = 1) -> Int[np.ndarray, "stages chunks"]:
    """Place parts around the ring, once per chunk: chunk c of device i is part `c * stages + i`."""
    return np.arange(stages * chunks).reshape(chunks, stages).T


def v_placement(stages: int) -> Int[np.ndarray, "stages 2"]:
    """Place parts down the devices and back up: device i holds parts `i` and `2 * stages - 1 - i`.

    The first device therefore holds the first and the last part.
    """
    down = np.arange(stages)
    return np.stack([down, 2 * stages - 1 - down], axis=1)


def check_counts(call: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    """Raise a `ValueError` for a count below 1."""
    for count, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{call}: a pipeline has at least 1 of {count}, but {count}={value}; give 1 or more.")


def check_schedule(schedule: Schedule) -> None:
    """Raise a `ValueError` for a table that leaves work out, repeats it, or does it before its input exists.

    On every stage, each microbatch of each chunk needs one forward and one backward entry, and one weight entry if the
    schedule is split. The forward entry of a part must be in a later tick than that of the part before it, and the
    backward entry in a later tick than that of the part after it. The last part's forward and backward entries may be
    in the same tick, and so may a backward entry and its weight entry. The error names tick, stage, microbatch, chunk
    and rule.
    """
    entry_ticks(schedule)


def entry_ticks(schedule: Schedule) -> tuple[Int[np.ndarray, "parts microbatches"], ...]:
    """Return the ticks of each part's forward, backward and weight entries, after checking the schedule.

    The weight entries of a schedule that is not split are its backward entries. Raises as `check_schedule`.
    """
    forward, backward = _find_ticks(schedule, "forward"), _find_ticks(schedule, "backward")
    _check_order(schedule, forward[1:], forward[:-1], "forward", "forward of the part before it", first_part=1)
    _check_order(schedule, backward[:-1], backward[1:], "backward", "backward of the part after it")
    last_part = len(forward) - 1
    _check_order(
        schedule, backward[-1:], forward[-1:], "backward", "forward of the last part", last_part, may_share_tick=True
    )
    if not schedule.is_split:
        return forward, backward, backward
    weight = _find_ticks(schedule, "weight")
    _check_order(schedule, weight, backward, "weight entry", "backward of its part", may_share_tick=True)
    return forward, backward, weight


def _find_ticks(schedule: Schedule, kind: str) -> Int[np.ndarray, "parts microbatches"]:
    """Return the tick of each part's entry of one kind, for each microbatch."""
    table = getattr(schedule, kind)
    entries, shape = schedule.chunks * schedule.microbatches, (schedule.ticks, schedule.stages)
    if table.shape != shape:
        raise ValueError(
            f"Schedule {schedule.name!r}: the table {kind!r} has shape {table.shape}, but the rule is "
            f"(ticks, stages) = {shape} for all three; make them alike."
        )
    for tick, stage in np.argwhere((table < IDLE) | (table >= entries)).tolist():
        raise ValueError(
            f"Schedule {schedule.name!r}: the table {kind!r} has entry {table[tick, stage]} at tick {tick}, stage "
            f"{stage}, but the rule is chunk * microbatches + microbatch, 0 to {entries - 1}, or IDLE; correct it."
        )
    ticks = np.full((schedule.parts, schedule.microbatches), IDLE)
    for tick, stage in np.argwhere(table != IDLE).tolist():
        chunk, microbatch = divmod(int(table[tick, stage]), schedule.microbatches)
        part = int(schedule.part_of[stage, chunk])
        if (earlier := ticks[part, microbatch]) != IDLE:
            rule = f"one {kind}, but it already had one at tick {earlier}; take one of them out."
            raise ValueError(_error_message(schedule, tick, part, microbatch, rule))
        ticks[part, microbatch] = tick
    for part, microbatch in np.argwhere(ticks == IDLE).tolist():
        rule = f"one {kind}, but it has none at any tick; put one in" + (
            " (either every backward has its weight entry, or none)." if kind == "weight" else "."
        )
        raise ValueError(_error_message(schedule, "none", part, microbatch, rule))
    return ticks


def _check_order(
    schedule: Schedule,
    ticks: Int[np.ndarray, "parts microbatches"],
    input_ticks: Int[np.ndarray, "parts microbatches"],
    kind: str,
    input_name: str,
    first_part: int = 0,
    *,
    may_share_tick: bool = False,
) -> None:
    """Raise for entries, of the parts from `first_part`, that are not in a later tick than their input."""
    earliest = input_ticks + (not may_share_tick)
    for row, microbatch in np.argwhere(ticks < earliest).tolist():
        tick = int(ticks[row, microbatch])
        rule = (
            f"its {kind} {'no earlier' if may_share_tick else 'later'} than the {input_name}, but that has tick "
            f"{input_ticks[row, microbatch]}; move the {kind} to tick {earliest[row, microbatch]} or after."
        )
        raise ValueError(_error_message(schedule, tick, first_part + row, microbatch, rule))


def _error_message(schedule: Schedule, tick: int | str, part: int, microbatch: int, rule: str) -> str:
    chunk, stage = schedule.chunk_of[part], schedule.stage_of[part]
    return (
        f"Schedule {schedule.name!r}: the tables are wrong at tick {tick}, stage {stage}, microbatch {microbatch}, "
        f"chunk {chunk}: the rule is {rule}"
    )


# Routes of messages and slots of memory: the static tables that the executor of a schedule reads.


class Link(NamedTuple):
    """Messages of one kind, activations (`is_input`) or gradients, to the device `shift` up the ring; 0 is itself."""

    is_input: bool
    shift: int


class Arrival(NamedTuple):
    """The slot of the message that arrives over a link in a tick, and whether any device receives one."""

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
    """The actions of a schedule, and its numbers of slots: the largest of any device, since all run the same program.

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
