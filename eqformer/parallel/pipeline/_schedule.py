"""Tables of pipeline schedules: the work of each device in each tick, checks, and slots for messages and residuals."""

import dataclasses
import heapq
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from ..._shapes import Array


IDLE = -1
"""Entry of a table for a tick in which a device has nothing to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Tables of the work of each device in each tick, and the placement of the model's parts on devices.

    The model is cut into equal consecutive parts, and each device holds some of them as its chunks: chunk `chunk` of
    device `stage` is part `part_of[stage, chunk]`. With `p` devices, the parts `c * p` to `c * p + p - 1`
    must be the chunks `c` of the devices, in any order of devices, so that a microbatch visits each device once per
    chunk. Raises a `ValueError` for another placement. See `ring_placement` and `v_placement`.

    An entry of a table is `chunk * microbatches + microbatch`, or `IDLE`. Within a tick, a device runs its forward
    entry, then its backward entry, then its weight entry; its messages arrive before the next tick. If the table
    `weight` has no entries, a backward entry computes the gradients of both inputs and weights. Otherwise a backward
    entry computes the gradients of inputs, and a weight entry in the same tick or later computes the gradients of
    weights.
    """

    name: str
    """Name of the schedule in errors and pictures."""
    part_of: Int[np.ndarray, "stages chunks"]
    """Index of the model's part that device `stage` holds as chunk `chunk`, at position `[stage, chunk]`."""
    microbatches: int
    """Number of microbatches of a step."""
    forward: Int[np.ndarray, "ticks stages"]
    """Forward entry of each device in each tick."""
    backward: Int[np.ndarray, "ticks stages"]
    """Backward entry of each device in each tick."""
    weight: Int[np.ndarray, "ticks stages"]
    """Weight entry of each device in each tick; all `IDLE` if backward entries compute weight gradients too."""

    def __post_init__(self):
        expected = np.arange(self.parts).reshape(self.chunks, self.stages).T
        if not np.array_equal(np.sort(self.part_of, axis=0), expected):
            raise ValueError(
                f"Schedule {self.name!r}: chunk c of all {self.stages} devices together must be the parts "
                f"c * {self.stages} to c * {self.stages} + {self.stages - 1}, each once, but part_of is "
                f"{self.part_of.tolist()}; correct it, or use ring_placement or v_placement."
            )

    @property
    def stages(self) -> int:
        """Number of devices."""
        return self.part_of.shape[0]

    @property
    def chunks(self) -> int:
        """Number of parts that each device holds."""
        return self.part_of.shape[1]

    @property
    def parts(self) -> int:
        """Number of parts of the model."""
        return self.part_of.size

    @property
    def stage_of(self) -> Int[np.ndarray, "parts"]:
        """Device that holds each part."""
        return np.argsort(self.part_of, axis=None) // self.chunks

    @property
    def chunk_of(self) -> Int[np.ndarray, "parts"]:
        """Index of each part among the chunks of its device."""
        return np.argsort(self.part_of, axis=None) % self.chunks

    @property
    def shifts(self) -> Int[np.ndarray, "_"]:
        """For each part but the last, the number of devices up the ring from its device to the next part's device.

        The number is 0 if one device holds both parts. Gradients move down the ring by the same number of devices.
        """
        return np.diff(self.stage_of) % self.stages

    @property
    def ticks(self) -> int:
        """Number of ticks, the rows of each table."""
        return self.forward.shape[0]

    @property
    def is_split(self) -> bool:
        """Whether weight entries, and not backward entries, compute the weight gradients."""
        return bool((self.weight != IDLE).any())


def ring_placement(stages: int, chunks: int = 1) -> Int[np.ndarray, "stages chunks"]:
    """Place parts round the ring of devices, once per chunk: chunk c of device i is part `c * stages + i`."""
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
            raise ValueError(f"{call}: {count} must be at least 1, but {count}={value}; give 1 or more.")


def check_schedule(schedule: Schedule) -> None:
    """Raise a `ValueError` for a table that leaves out work, repeats work, or does work before its input exists.

    On every stage, each microbatch of each chunk needs one forward and one backward entry, and one weight entry if the
    schedule is split. The forward entry of a part must be in a later tick than the forward entry of the previous part.
    The backward entry must be in a later tick than the backward entry of the next part. The last part's forward and
    backward entries may share a tick, and so may a backward entry and its weight entry. The error names the tick,
    stage, microbatch, chunk and rule.
    """
    entry_ticks(schedule)


def entry_ticks(schedule: Schedule) -> tuple[Int[np.ndarray, "parts microbatches"], ...]:
    """Return the ticks of each part's forward, backward and weight entries, after checking the schedule.

    If the schedule is not split, the third result is the second: backward entries compute weight gradients too. Raises
    the errors of `check_schedule`.
    """
    forward, backward = _find_ticks(schedule, "forward"), _find_ticks(schedule, "backward")
    _check_order(schedule, forward[1:], forward[:-1], "forward", "the forward entry of the previous part", first_part=1)
    _check_order(schedule, backward[:-1], backward[1:], "backward", "the backward entry of the next part")
    last_part, input_name = len(forward) - 1, "the forward entry of this last part"
    _check_order(schedule, backward[-1:], forward[-1:], "backward", input_name, last_part, may_share_tick=True)
    if not schedule.is_split:
        return forward, backward, backward
    weight = _find_ticks(schedule, "weight")
    _check_order(schedule, weight, backward, "weight", "the backward entry of this part", may_share_tick=True)
    return forward, backward, weight


def _find_ticks(schedule: Schedule, kind: str) -> Int[np.ndarray, "parts microbatches"]:
    """Return the tick of the entry of one kind for each part and microbatch."""
    table = getattr(schedule, kind)
    entries, shape = schedule.chunks * schedule.microbatches, (schedule.ticks, schedule.stages)
    if table.shape != shape:
        raise ValueError(
            f"Schedule {schedule.name!r}: the table {kind!r} has shape {table.shape}, but the rule is "
            f"(ticks, stages) = {shape} for all three tables; give each this shape."
        )
    for tick, stage in np.argwhere((table < IDLE) | (table >= entries)).tolist():
        raise ValueError(
            f"Schedule {schedule.name!r}: the table {kind!r} has entry {table[tick, stage]} at tick {tick}, stage "
            f"{stage}, but the rule is that an entry is chunk * microbatches + microbatch, from 0 to {entries - 1}, or "
            "IDLE; correct the entry."
        )
    ticks = np.full((schedule.parts, schedule.microbatches), IDLE)
    for tick, stage in np.argwhere(table != IDLE).tolist():
        chunk, microbatch = divmod(int(table[tick, stage]), schedule.microbatches)
        part = int(schedule.part_of[stage, chunk])
        if (earlier := ticks[part, microbatch]) != IDLE:
            rule = f"a single {kind} entry, but there is one at tick {earlier} too; remove one of them."
            raise ValueError(_error_message(schedule, tick, part, microbatch, rule))
        ticks[part, microbatch] = tick
    for part, microbatch in np.argwhere(ticks == IDLE).tolist():
        rule = f"one {kind} entry, but there is none in any tick; add it" + (
            " (weight entries are needed for all backward entries, or for none)." if kind == "weight" else "."
        )
        raise ValueError(_error_message(schedule, None, part, microbatch, rule))
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
    """Raise a `ValueError` for an entry that is not in a later tick than its input.

    The rows of `ticks` and `input_ticks` are for the parts from `first_part` on.
    """
    earliest = input_ticks + (not may_share_tick)
    for row, microbatch in np.argwhere(ticks < earliest).tolist():
        tick = int(ticks[row, microbatch])
        rule = (
            f"a {kind} entry {'no earlier' if may_share_tick else 'later'} than {input_name}, which is in tick "
            f"{input_ticks[row, microbatch]}; move the {kind} entry to tick {earliest[row, microbatch]} or later."
        )
        raise ValueError(_error_message(schedule, tick, first_part + row, microbatch, rule))


def _error_message(schedule: Schedule, tick: int | None, part: int, microbatch: int, rule: str) -> str:
    chunk, stage = schedule.chunk_of[part], schedule.stage_of[part]
    tick_text = "" if tick is None else f"tick {tick}, "
    return (
        f"Schedule {schedule.name!r}: the tables break a rule at {tick_text}stage {stage}, microbatch {microbatch}, "
        f"chunk {chunk}: the rule is {rule}"
    )


# Slots and links: the static tables that the executor of a schedule reads. A device stores what it needs in later ticks
# in numbered slots: inputs of its parts, cotangents of their outputs, residuals, and operands of weight gradients.


class Link(NamedTuple):
    """Connection from each device to the device `shift` further up the ring, for messages of one kind.

    The messages are activations if `is_input` is true, else gradients. With a shift of 0, a device sends to itself.
    """

    is_input: bool
    shift: int


class Arrival(NamedTuple):
    """Slot of the message that arrives over a link at the end of a tick, and whether any device receives a message."""

    slot: Int[Array, "*ticks"]
    is_used: Bool[Array, "*ticks"]


class TickActions(NamedTuple):
    """Entries of a device in a tick and the slots that they use; `IDLE` stands for no entry, and for no slot.

    The fields of `Routes.actions` are tables of shape `ticks stages`. Within a tick, the order of actions is forward,
    backward, weight, and last the arrivals, which have an item for each of `Routes.links`.
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
    """Actions of all devices in all ticks, the links that they use, and the numbers of slots.

    All devices run the same program, so every device allocates as many slots as the device that needs the most.
    """

    actions: TickActions
    links: tuple[Link, ...]
    input_slots: int
    """Number of slots for inputs of parts. A slot is used from the input's arrival to the backward entry."""
    cotangent_slots: int
    """Number of slots for cotangents of outputs. A slot is used from the cotangent's arrival to the backward entry."""
    residual_slots: int
    """Number of slots for residuals. A slot is used from the forward entry to the backward entry."""
    operand_slots: int
    """Number of slots for operands of weight gradients. A slot is used from the backward entry to the weight entry."""


def route_messages(schedule: Schedule) -> Routes:
    """Assign slots and links to a schedule; raise a `ValueError` if the schedule breaks a rule of `check_schedule`."""
    forward, backward, weight = entry_ticks(schedule)
    # Times of slots are in thirds of a tick: forward, then backward, then weight entry and arrivals. A slot is used
    # from its start to its end, and is free at its end. If the end is 0, no slot is used.
    arrival = np.concatenate([3 * forward[:1], 3 * forward[:-1] + 2])
    input_count, input_slots = _assign_slots(schedule, arrival, 3 * backward + 1)
    never = np.zeros_like(forward[:1])  # No other part sends a cotangent to the last part.
    start = np.concatenate([3 * backward[1:] + 2, never])
    end = np.concatenate([3 * backward[:-1] + 1, never])
    cotangent_count, cotangent_slots = _assign_slots(schedule, start, end)
    residual_count, residual_slots = _assign_slots(schedule, 3 * forward, 3 * backward + 1)
    operand_count, operand_slots = 0, np.full_like(forward, IDLE)
    if schedule.is_split:
        operand_count, operand_slots = _assign_slots(schedule, 3 * backward + 1, 3 * weight + 2)
    links, arrivals = [], []
    for shift in np.unique(schedule.shifts):
        senders = np.flatnonzero(schedule.shifts == shift)  # Parts whose output is sent over the link.
        links += [Link(True, int(shift)), Link(False, int(-shift % schedule.stages))]
        # A part's activations arrive at the next part in the tick of its forward entry. Its cotangents arrive in the
        # tick of the next part's backward entry.
        arrivals += [_make_table(schedule, forward[senders], input_slots[senders + 1], senders + 1)]
        arrivals += [_make_table(schedule, backward[senders + 1], cotangent_slots[senders], senders)]
    is_used = [np.broadcast_to((table != IDLE).any(1, keepdims=True), table.shape) for table in arrivals]
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
        arrivals=tuple(map(Arrival, arrivals, is_used)),
    )
    actions = jax.tree.map(lambda table: table if table.dtype == bool else table.astype(np.int32), actions)
    return Routes(actions, tuple(links), input_count, cotangent_count, residual_count, operand_count)


def count_link_ticks(schedule: Schedule) -> dict[Link, int]:
    """Return, for each link between different devices, the number of ticks in which it carries messages."""
    routes = route_messages(schedule)
    links = zip(routes.links, routes.actions.arrivals, strict=True)
    return {link: int(arrival.is_used[:, 0].sum()) for link, arrival in links if link.shift}


def _assign_slots(
    schedule: Schedule, start: np.ndarray, end: np.ndarray
) -> tuple[int, Int[np.ndarray, "parts microbatches"]]:
    """Return the largest number of slots that a device uses, and the slot of each part and microbatch.

    A slot is used from `start` to `end`, and reused as soon as it is free. The number of slots of a device is therefore
    the largest number of slots that are in use at one time.
    """
    slots, largest_count = np.full_like(start, IDLE), 0
    for stage in range(schedule.stages):
        parts = schedule.part_of[stage]
        lifetimes = sorted(
            (start[part, microbatch], end[part, microbatch], part, microbatch)
            for part in parts
            for microbatch in range(start.shape[1])
            if end[part, microbatch]
        )
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
    """Return a table with `slots` at the given `ticks`, in the columns of the devices that hold the parts.

    `ticks` and `slots` have a row for each of `parts`, by default for all parts.
    """
    table = np.full_like(schedule.forward, IDLE)
    stages = schedule.stage_of if parts is None else schedule.stage_of[parts]
    table[ticks, np.broadcast_to(stages[:, None], ticks.shape)] = slots
    return table
