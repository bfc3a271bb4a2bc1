"""From an order of work on each device to a table."""

from collections.abc import Sequence

import numpy as np

from ._schedule import IDLE, Schedule


KINDS = ("forward", "backward", "weight")
Work = tuple[str, int, int]  # what is done, of which microbatch, by which chunk


def pack_schedule(name: str, orders: Sequence[Sequence[Work]], *, microbatches: int, chunks: int = 1) -> Schedule:
    """The table in which each device works through its order, one entry a tick, as early as its inputs are there.

    `orders[stage]` lists `(kind, microbatch, chunk)` with the kinds "forward", "backward" and "weight"; either every
    backward has its weight entry, or none. A ValueError names a kind that there is not, or says where the devices wait
    for each other for ever. That the orders are complete is checked by `simulate`, not here.
    """
    for kind in {kind for order in orders for kind, _, _ in order} - {*KINDS}:
        raise ValueError(
            f"pack_schedule: the kinds of work are {', '.join(KINDS)}, but the orders of {name!r} have {kind!r}; "
            f"use those."
        )
    stages, done = len(orders), {}
    rows, position = [], [0] * stages
    while any(at < len(order) for at, order in zip(position, orders)):
        row, finished = np.full((len(KINDS), stages), IDLE), []
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            kind, microbatch, chunk = order[position[stage]]
            needed = _needed(kind, chunk * stages + stage, stages * chunks)
            if needed is None or (*needed, microbatch) in done:
                row[KINDS.index(kind), stage] = chunk * microbatches + microbatch
                finished.append((kind, chunk * stages + stage, microbatch))
                position[stage] += 1
        if not finished:
            raise ValueError(_deadlock(name, orders, position))
        done |= dict.fromkeys(finished)  # what is sent arrives before the next tick, not within this one
        rows.append(row)
    forward, backward, weight = np.stack(rows, axis=1)
    return Schedule(name, stages, chunks, microbatches, forward, backward, weight)


def _needed(kind: str, part: int, parts: int) -> tuple[str, int] | None:
    """Which work, of which part of the model, gives the input of this one."""
    if kind == "forward":
        return ("forward", part - 1) if part > 0 else None
    if kind == "backward":
        return ("backward", part + 1) if part < parts - 1 else ("forward", part)
    return ("backward", part)


def _deadlock(name: str, orders: Sequence[Sequence[Work]], position: list[int]) -> str:
    waiting = [
        "stage {} at the {} of microbatch {}, chunk {}".format(stage, *order[at])
        for stage, (order, at) in enumerate(zip(orders, position))
        if at < len(order)
    ]
    return (
        f"pack_schedule: in the orders of {name!r}, nothing can go on: {'; '.join(waiting)} all wait for an input that "
        f"comes later or never; put the work that gives an input before the work that needs it."
    )
