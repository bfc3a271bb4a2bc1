"""A pipeline schedule: a table of work by tick and device, the placement of the model's parts, and their checks."""

import dataclasses

import numpy as np
from jaxtyping import Int


IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Table of the work of each device in each tick, and placement of the model's parts on devices.

    The model is cut into equal parts in a row; chunk `chunk` of device `stage` is part `part_of[stage, chunk]`, and a
    microbatch goes through the parts from device to device, see `ring_placement` and `v_placement`. Each column of
    `part_of` holds as many consecutive parts as there are devices, in any order, so that a microbatch visits all
    devices once for each chunk. An entry of a table is `chunk * microbatches + microbatch`, or `IDLE`. Within a tick a
    device does its forward, then its backward, then its weight entry; its messages arrive before the next tick. If
    `weight` has no entry at all, a backward gives the gradients of inputs and of weights; otherwise it gives those of
    inputs alone, and the weight gradients come with the entry of `weight`, in that tick or later. Raises a
    `ValueError` for another placement.
    """

    name: str
    """Its name, in errors and pictures."""
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
        """The chunk of its device that each part is."""
        return np.argsort(self.part_of, axis=None) % self.chunks

    @property
    def shifts(self) -> Int[np.ndarray, "_"]:
        """The distance in devices up the ring to the next part, for each part but the last; 0 is the same device.

        Activations go that far up, and gradients as far down.
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
    """Place parts round the ring once per chunk: chunk c of device i is part `c * stages + i`."""
    return np.arange(stages * chunks).reshape(chunks, stages).T


def v_placement(stages: int) -> Int[np.ndarray, "stages 2"]:
    """Place parts down the devices and back: device i holds `i` and `2 * stages - 1 - i`, the first also the last."""
    down = np.arange(stages)
    return np.stack([down, 2 * stages - 1 - down], axis=1)


def check_counts(call: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    """Raise a `ValueError` for a count below 1."""
    for count, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{call}: a pipeline has at least 1 of {count}, but {count}={value}; give 1 or more.")


def check_schedule(schedule: Schedule) -> None:
    """Raise a `ValueError` for a table that leaves work out, repeats it, or does it before its input exists.

    The rules: on every stage each (microbatch, chunk) has one forward and one backward, and one weight entry if the
    schedule is split. A part's forward comes in a later tick than the forward of the part before it, its backward in
    a later tick than the backward of the part after it. The last part's backward may share the tick of its forward,
    a weight entry that of its backward. The error names tick, stage, microbatch, chunk and rule.
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
