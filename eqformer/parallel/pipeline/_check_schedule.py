"""Whether a table of a pipeline can be run and does all of the work once."""

import numpy as np
from jaxtyping import Int

from ._schedule import IDLE, Schedule


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
