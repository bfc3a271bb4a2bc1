"""From an order of work on each device to a table."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from ._schedule import IDLE, ring_placement, Schedule


KINDS = ("forward", "backward", "weight")
Work = tuple[str, int, int]  # what is done, of which microbatch, by which chunk
Turns = Sequence[Work | tuple[Work, ...]]  # a device's work in order; what stands together shares a tick


def pack_schedule(
    name: str,
    orders: Sequence[Turns],
    *,
    microbatches: int,
    part_of: Int[np.ndarray, "stages chunks"] | None = None,
) -> Schedule:
    """The table in which each device works through its order, one entry a tick, as early as its inputs are there.

    `orders[stage]` lists `(kind, microbatch, chunk)` with the kinds "forward", "backward" and "weight"; either every
    backward has its weight entry, or none. A tuple of these, of different kinds, shares a tick. `part_of` is the
    schedule's placement, by default `ring_placement` of one chunk. A ValueError names a kind that there is not, or
    says where the devices wait for each other for ever. That the orders are complete is checked by `simulate`, not
    here.
    """
    part_of = ring_placement(len(orders)) if part_of is None else part_of
    turns = [[_together(turn) for turn in order] for order in orders]
    for kind in {kind for order in turns for turn in order for kind, _, _ in turn} - {*KINDS}:
        raise ValueError(
            f"pack_schedule: the kinds of work are {', '.join(KINDS)}, but the orders of {name!r} have {kind!r}; "
            f"use those."
        )
    done: dict[Work, None] = {}
    rows, position = [], [0] * len(turns)
    while any(at < len(order) for at, order in zip(position, turns)):
        row, finished = np.full((len(KINDS), len(turns)), IDLE), []
        for stage, order in enumerate(turns):
            if position[stage] == len(order):
                continue
            work = [(kind, k, int(part_of[stage, chunk])) for kind, k, chunk in order[position[stage]]]
            needed = {_needed(*each, part_of.size) for each in work} - {None, *work}
            if all(each in done for each in needed):
                for kind, microbatch, chunk in order[position[stage]]:
                    row[KINDS.index(kind), stage] = chunk * microbatches + microbatch
                finished += work
                position[stage] += 1
        if not finished:
            raise ValueError(_deadlock(name, turns, position))
        done |= dict.fromkeys(finished)  # what is sent arrives before the next tick, not within this one
        rows.append(row)
    forward, backward, weight = np.stack(rows, axis=1)
    return Schedule(name, part_of, microbatches, forward, backward, weight)


def _together(turn: Work | tuple[Work, ...]) -> tuple[Work, ...]:
    return (turn,) if isinstance(turn[0], str) else turn  # type: ignore[return-value]


def _needed(kind: str, microbatch: int, part: int, parts: int) -> Work | None:
    """Which work, of which part of the model, gives the input of this one."""
    if kind == "forward":
        return ("forward", microbatch, part - 1) if part > 0 else None
    if kind == "backward":
        return ("backward", microbatch, part + 1) if part < parts - 1 else ("forward", microbatch, part)
    return ("backward", microbatch, part)


def _deadlock(name: str, orders: Sequence[Sequence[tuple[Work, ...]]], position: list[int]) -> str:
    waiting = [
        "stage {} at the {} of microbatch {}, chunk {}".format(stage, *order[at][0])
        for stage, (order, at) in enumerate(zip(orders, position))
        if at < len(order)
    ]
    return (
        f"pack_schedule: in the orders of {name!r}, nothing can go on: {'; '.join(waiting)} all wait for an input that "
        f"comes later or never; put the work that gives an input before the work that needs it."
    )
