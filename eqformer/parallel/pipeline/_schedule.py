"""What a pipeline does when, and which device holds which part of the model: a table, and nothing else."""

import dataclasses

import numpy as np
from jaxtyping import Int


IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Who does what at which tick, and which parts of the model each device holds.

    The model is cut into equal parts in a row; chunk `chunk` of device `stage` is part `part_of[stage, chunk]`, and a
    microbatch goes through the parts from device to device, see `ring_placement` and `v_placement`. In each column of
    `part_of` stand as many parts in a row as there are devices, in any order, so that a microbatch goes once through
    all devices for each chunk. An entry of a table is `chunk * microbatches + microbatch`, or `IDLE`. Within a tick a
    device does its forward, then its backward, then its weight entry; what it sends arrives before the next tick.
    Where `weight` has no entry at all, a backward gives the gradients of inputs and of weights; otherwise those of
    inputs alone, and the weights' come with the entry of `weight`, in that tick or later. Raises a `ValueError` for
    another placement.
    """

    name: str
    """Its name, in errors and pictures."""
    part_of: Int[np.ndarray, "stages chunks"]
    """Which part of the model is each chunk of each device."""
    microbatches: int
    """The microbatches of a step."""
    forward: Int[np.ndarray, "ticks stages"]
    """The forward entry of each device in each tick."""
    backward: Int[np.ndarray, "ticks stages"]
    """The backward entries."""
    weight: Int[np.ndarray, "ticks stages"]
    """The weight entries; none at all where a backward gives weights' gradients too."""

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
        """How many devices there are."""
        return self.part_of.shape[0]

    @property
    def chunks(self) -> int:
        """How many parts each device holds."""
        return self.part_of.shape[1]

    @property
    def parts(self) -> int:
        """How many parts the model is cut into."""
        return self.part_of.size

    @property
    def stage_of(self) -> Int[np.ndarray, "parts"]:
        """The device that holds each part."""
        return np.argsort(self.part_of, axis=None) // self.chunks

    @property
    def chunk_of(self) -> Int[np.ndarray, "parts"]:
        """Which of its device's chunks each part is."""
        return np.argsort(self.part_of, axis=None) % self.chunks

    @property
    def shifts(self) -> Int[np.ndarray, "_"]:
        """How many devices up the ring the next part lies, for each part but the last: 0 is the same device.

        Activations go that far up, and gradients as far down.
        """
        return np.diff(self.stage_of) % self.stages

    @property
    def ticks(self) -> int:
        """How many turns the table has."""
        return self.forward.shape[0]

    @property
    def is_split(self) -> bool:
        """Whether the gradients of weights are computed apart from those of inputs."""
        return bool((self.weight != IDLE).any())


def ring_placement(stages: int, chunks: int = 1) -> Int[np.ndarray, "stages chunks"]:
    """Round the ring once a chunk: chunk c of device i is part `c * stages + i`."""
    return np.arange(stages * chunks).reshape(chunks, stages).T


def v_placement(stages: int) -> Int[np.ndarray, "stages 2"]:
    """Down the devices and back: device i holds the parts i and `2 * stages - 1 - i`, the first also the last."""
    down = np.arange(stages)
    return np.stack([down, 2 * stages - 1 - down], axis=1)


def check_counts(call: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    """Raise a `ValueError` for a count below 1."""
    for count, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{call}: a pipeline has at least 1 of {count}, but {count}={value}; give 1 or more.")


def check_schedule(schedule: Schedule) -> None:
    """Refuse a table that leaves work out, does it twice, or has it before its input is there.

    The rules: on every stage each (microbatch, chunk) has one forward and one backward, and one weight entry if the
    schedule is split. A part's forward comes in a later tick than the forward of the part before it, its backward in
    a later tick than the backward of the part after it. The last part's backward may share the tick of its forward,
    a weight entry that of its backward. The ValueError names tick, stage, microbatch, chunk and rule.
    """
    checked_ticks(schedule)


def checked_ticks(schedule: Schedule) -> tuple[Int[np.ndarray, "parts microbatches"], ...]:
    """When each part of the model has its forward, backward and weight entry, of a schedule that obeys the rules.

    The weight entries of a schedule that is not split are its backward ones.
    """
    forward, backward = _ticks(schedule, "forward"), _ticks(schedule, "backward")
    _in_order(schedule, forward[1:], forward[:-1], "forward", "forward of the part before it", first=1)
    _in_order(schedule, backward[:-1], backward[1:], "backward", "backward of the part after it")
    last = len(forward) - 1
    _in_order(schedule, backward[-1:], forward[-1:], "backward", "forward of the last part", first=last, same=True)
    if not schedule.is_split:
        return forward, backward, backward
    weight = _ticks(schedule, "weight")
    _in_order(schedule, weight, backward, "weight entry", "backward of its part", same=True)
    return forward, backward, weight


def _ticks(schedule: Schedule, kind: str) -> Int[np.ndarray, "parts microbatches"]:
    """The tick at which each part of the model does this for each microbatch."""
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
    found = np.full((schedule.parts, schedule.microbatches), IDLE)
    for tick, stage in np.argwhere(table != IDLE).tolist():
        chunk, microbatch = divmod(int(table[tick, stage]), schedule.microbatches)
        part = int(schedule.part_of[stage, chunk])
        if (before := found[part, microbatch]) != IDLE:
            rule = f"one {kind}, but it already had one at tick {before}; take one of them out."
            raise ValueError(_complaint(schedule, tick, part, microbatch, rule))
        found[part, microbatch] = tick
    for part, microbatch in np.argwhere(found == IDLE).tolist():
        rule = f"one {kind}, but it has none at any tick; put one in" + (
            " (either every backward has its weight entry, or none)." if kind == "weight" else "."
        )
        raise ValueError(_complaint(schedule, "none", part, microbatch, rule))
    return found


def _in_order(
    schedule: Schedule,
    later: Int[np.ndarray, "parts microbatches"],
    earlier: Int[np.ndarray, "parts microbatches"],
    kind: str,
    needs: str,
    *,
    first: int = 0,
    same: bool = False,
) -> None:
    """For parts from `first` on, refuse what is not later than its input (in the `same` tick, if that is allowed)."""
    soonest = earlier + (not same)
    for row, microbatch in np.argwhere(later < soonest).tolist():
        tick = int(later[row, microbatch])
        rule = (
            f"its {kind} {'no earlier' if same else 'later'} than the {needs}, but that has tick "
            f"{earlier[row, microbatch]}; move the {kind} to tick {soonest[row, microbatch]} or after."
        )
        raise ValueError(_complaint(schedule, tick, first + row, microbatch, rule))


def _complaint(schedule: Schedule, tick: int | str, part: int, microbatch: int, rule: str) -> str:
    chunk, stage = schedule.chunk_of[part], schedule.stage_of[part]
    return (
        f"Schedule {schedule.name!r}: the tables are wrong at tick {tick}, stage {stage}, microbatch {microbatch}, "
        f"chunk {chunk}: the rule is {rule}"
    )
