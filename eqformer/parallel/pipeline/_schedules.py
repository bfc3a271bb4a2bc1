"""The schedules of pipelines: GPipe, 1F1B, interleaved, looping and zero-bubble.

In the formulas p is the number of stages (devices), m of microbatches, v of chunks a device, i a stage from 0; F, B
and W are the times of a whole device's forward, backward to its input, and backward to its weights, of a microbatch.
A bubble is the time that a device is idle.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from ._schedule import check_counts, check_schedule, IDLE, ring_placement, Schedule, v_placement


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2018).

    Bubble (p-1)(F+B+W), `2(m+p-1)` ticks; every device remembers m microbatches.
    """
    check_counts("gpipe", stages, microbatches)
    return _in_waves("gpipe", stages, microbatches, chunks=1, group=microbatches, phases=2)


def one_f_one_b(stages: int, microbatches: int, *, fused: bool = True) -> Schedule:
    """One forward, one backward in turn, as soon as there is something to go back with (Narayanan et al. 2020).

    Bubble (p-1)(F+B+W). *Fused*, a tick holds a forward and a backward of different microbatches: `m+2(p-1)` ticks,
    the bubble holds for devices in lock-step whatever B/F is, and device i remembers `min(m, 2(p-1-i)+1)`
    microbatches. Otherwise a tick holds one entry, the bubble is that of devices that do not wait for each other's
    ticks, and device i remembers `min(m, p-i)`.
    """
    check_counts("one_f_one_b", stages, microbatches)
    if fused:
        return _in_waves("1f1b", stages, microbatches, chunks=1, group=microbatches, phases=1)
    warm_up = [stages - 1 - stage for stage in range(stages)]
    return _alternating("1f1b", stages, microbatches, chunks=1, group=microbatches, warm_up=warm_up)


def interleaved(stages: int, microbatches: int, chunks: int, *, fused: bool = True) -> Schedule:
    """1F1B over several chunks a device, in groups of p microbatches (Narayanan et al. 2021, Megatron-LM).

    Bubble (p-1)(F+B+W)/v; device i remembers `min(mv, 2(p-1-i)+(v-1)p+1)` chunks' inputs, each 1/v of a device's.
    *Fused*, a tick holds a forward and a backward: `mv+(v+1)p-2` ticks, the bubble in lock-step whatever B/F is.
    Otherwise a tick holds one entry, and the bubble is that of devices that do not wait for each other's ticks; what
    is remembered is the same. Microbatches must be a multiple of stages.
    """
    check_counts("interleaved", stages, microbatches, chunks)
    if microbatches % stages:
        below = microbatches - microbatches % stages
        raise ValueError(
            f"interleaved: microbatches go round in groups of `stages`, but microbatches={microbatches} is not a "
            f"multiple of stages={stages}; take {f'{below} or ' if below else ''}{below + stages} microbatches."
        )
    if fused:
        return _in_waves("interleaved", stages, microbatches, chunks=chunks, group=stages, phases=1)
    warm_up = [2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages)]
    return _alternating("interleaved", stages, microbatches, chunks=chunks, group=stages, warm_up=warm_up)


def looping(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Breadth first: every microbatch through a chunk before the next chunk begins (Lamy-Poirier 2022).

    Bubble (p-1)(F+B+W)/v, `2(mv+p-1)` ticks; every device remembers the inputs of all mv chunks of microbatches. A
    chunk's parameters are needed for one stretch of time forwards and one backwards, so that sharded ones are gathered
    and their gradients reduced once a step. Needs m >= p, or a microbatch would come round before its turn.
    """
    check_counts("looping", stages, microbatches, chunks)
    if microbatches < stages:
        raise ValueError(
            f"looping: a device is through with a chunk when the first microbatch comes round, which needs "
            f"microbatches >= stages, but microbatches={microbatches} and stages={stages}; take at least {stages} "
            f"microbatches."
        )
    return _in_waves("looping", stages, microbatches, chunks=chunks, group=microbatches, phases=2)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """1F1B with the weights' gradients split off to fill the bubble: ZB-H1 (Qi et al. 2023).

    With m >= p the bubble is (p-1) max(F, B, F+B-W), of devices that do not wait for each other's ticks: the paper's
    (p-1)(F+B-W) where W is no more than F or B. Device i lags i microbatches behind with the weights: it remembers
    p-i microbatches before their backward and i more before their weight entry, p in all. One entry a tick,
    `3m+p-1` ticks. Fewer microbatches run too, with a larger bubble.
    """
    check_counts("zero_bubble", stages, microbatches)
    orders: list[Turns] = []
    for stage in range(stages):
        warm_up, order = min(stages - 1 - stage, microbatches), list[Work]()
        order += [("forward", k, 0) for k in range(warm_up)]
        for k in range(microbatches):
            order += [("forward", k + warm_up, 0)] if k + warm_up < microbatches else []
            order += [("backward", k, 0)]
            order += [("weight", k - stage, 0)] if k >= stage else []
        order += [("weight", k, 0) for k in range(max(microbatches - stage, 0), microbatches)]
        orders.append(order)
    return pack_schedule("zb-h1", orders, microbatches=microbatches)


Maker = Callable[[int, int], Schedule]  # of stages and microbatches
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "looping", "zb-h1", "zb-v", "dualpipe-v"]


class Kind(NamedTuple):
    """A schedule that goes by a name: what makes it, and how many chunks a device has, None for any number."""

    make: Callable[..., Schedule]
    chunks: int | None = 1


SCHEDULES: Mapping[str, Kind] = {
    "gpipe": Kind(gpipe),
    "1f1b": Kind(one_f_one_b),
    "interleaved": Kind(interleaved, chunks=None),
    "looping": Kind(looping, chunks=None),
    "zb-h1": Kind(zero_bubble),
    "zb-v": Kind(zero_bubble_v, chunks=2),
    "dualpipe-v": Kind(dualpipe_v, chunks=2),
}


def make_schedule(name: str | Maker | Schedule, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name in `SCHEDULES`, what a function of stages and microbatches makes, or a table as it is.

    `chunks` is for names alone. Raises a ValueError that says which of the schedule's rules the counts break.
    """
    if not isinstance(name, str):
        return _own_schedule(name, stages, microbatches, chunks)
    if name not in SCHEDULES:
        raise ValueError(f"make_schedule: there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}.")
    kind = SCHEDULES[name]
    if kind.chunks is None:
        return kind.make(stages, microbatches, chunks)
    if chunks != kind.chunks:
        others = [other for other, each in SCHEDULES.items() if each.chunks in (None, chunks)]
        raise ValueError(
            f"make_schedule: {name} has {'one chunk' if kind.chunks == 1 else f'{kind.chunks} chunks'} a stage, but "
            f"chunks={chunks} was given; give chunks={kind.chunks}, or choose {' or '.join(others)}."
        )
    return kind.make(stages, microbatches)


def _own_schedule(given: Maker | Schedule, stages: int, microbatches: int, chunks: int) -> Schedule:
    if chunks != 1:
        raise ValueError(
            f"make_schedule: a schedule of one's own says itself how many chunks a stage has, but chunks={chunks} was "
            f"given; leave chunks at 1."
        )
    schedule = given if isinstance(given, Schedule) else given(stages, microbatches)
    if (schedule.stages, schedule.microbatches) != (stages, microbatches):
        raise ValueError(
            f"make_schedule: the table {schedule.name!r} is for stages={schedule.stages} and "
            f"microbatches={schedule.microbatches}, but stages={stages} and microbatches={microbatches} were asked "
            f"for; make it for these, or give a function of both."
        )
    check_schedule(schedule)
    return schedule


def _wave(microbatches: int, chunks: int, group: int, *, back: bool) -> list[tuple[int, int]]:
    """(microbatch, chunk) in a device's order: each group of microbatches through all chunks, then the next group."""
    order = range(chunks)[::-1] if back else range(chunks)
    starts = range(0, microbatches, group)
    return [(start + k, chunk) for start in starts for chunk in order for k in range(group)]


def _in_waves(name: str, stages: int, microbatches: int, *, chunks: int, group: int, phases: int) -> Schedule:
    """Forwards run down the devices one tick apart, backwards up; in one phase both at once, or one after the other.

    In one phase, the first backward has the tick in which the last part does its first forward.
    """
    length = microbatches * chunks
    first_back = stages * chunks - 1 if phases == 1 else length + stages - 1
    ticks = first_back + length + stages - 1

    def table(start: int, delays: np.ndarray, *, back: bool) -> Int[np.ndarray, "ticks stages"]:
        wave = [c * microbatches + k for k, c in _wave(microbatches, chunks, group, back=back)]
        filled = np.full((ticks, stages), IDLE)
        for stage, delay in enumerate(delays):
            filled[start + delay : start + delay + length, stage] = wave
        return filled

    forward = table(0, np.arange(stages), back=False)
    backward = table(first_back, np.arange(stages)[::-1], back=True)
    placement = ring_placement(stages, chunks)
    return Schedule(name, placement, microbatches, forward, backward, np.full_like(forward, IDLE))


def _alternating(name: str, stages: int, microbatches: int, *, chunks: int, group: int, warm_up: list[int]) -> Schedule:
    """`warm_up[i]` forwards on device i, then a forward and a backward in turn, then the backwards left."""
    forwards: list[Work] = [("forward", k, c) for k, c in _wave(microbatches, chunks, group, back=False)]
    backwards: list[Work] = [("backward", k, c) for k, c in _wave(microbatches, chunks, group, back=True)]
    orders: list[Turns] = []
    for ahead in warm_up:
        order = forwards[:ahead]
        for k, backward in enumerate(backwards):
            order += [*forwards[ahead + k : ahead + k + 1], backward]
        orders.append(order)
    return pack_schedule(name, orders, microbatches=microbatches, part_of=ring_placement(stages, chunks))


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


# The work on a device's chunks: 0 on the way down the devices, 1 on the way back.
F0, F1 = ("forward", 0), ("forward", 1)
B0, B1 = ("backward", 0), ("backward", 1)
W0, W1 = ("weight", 0), ("weight", 1)


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """Zero-bubble over a V: ZB-V (Qi et al. 2023, section 6), called V-ZB in Qi et al. 2024 (arXiv:2405.15362).

    With m >= 2p-1 and W <= F <= B the bubble is (p-1) max(B, 2(B-W)) / 2, of devices that do not wait for each other's
    ticks. With F = B = W that is half of `zero_bubble`'s, and all of it because device i has nothing to begin with
    before entry i. A device remembers inputs of p microbatches, as in 1F1B, those that wait for their weight entry
    counted too. One entry a tick, `6m+p-1` ticks. Fewer microbatches run too, with a larger bubble.
    """
    check_counts("zero_bubble_v", stages, microbatches)
    orders = []
    for stage in range(stages):
        device, enough = _Device(microbatches), max(microbatches, 2 * stages - 1)
        device.does(F0, times=2 * (stages - stage) - 1)
        device.does(F1, F0, times=stage)
        device.does(F1, B1, W1, times=stages - stage)
        while device.done[F1] < enough:
            device.does(*[F0] * (device.done[F0] < enough), B0, W0, F1, B1, W1)
        device.does(B0, B1, times=stage)
        device.does(B0, W0, times=stages - stage)
        for backward, weight in ((B1, W1), (B0, W0)):
            device.does(weight, times=device.done[backward] - device.done[weight])
        orders.append(device.turns)
    return pack_schedule("zb-v", orders, microbatches=microbatches, part_of=v_placement(stages))


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: DualPipeV (DeepSeek's DualPipe, 2025, after Qi et al.'s "cut-in-half").

    A forward of one chunk and a whole backward of the other, of different microbatches, share a tick, so that with
    m >= 2p devices in lock-step are idle for a time that does not grow with m, whatever F, B and W are: it is the
    schedule to take where these differ. The published bubble, of devices that do not wait for each other's ticks, is
    (p-1)(F+2B-W) / 2; here it is less, as a backward's message leaves before its weights' gradients are there. A device
    remembers inputs of `p + 1/2` microbatches, and what i+1 chunks need for their weights, half as much as in
    `zero_bubble_v`. `2m+5p-2` ticks. Fewer microbatches run too, with a larger bubble.
    """
    check_counts("dualpipe_v", stages, microbatches)
    orders = []
    for stage in range(stages):
        device, after = _Device(microbatches), stages - 1 - stage
        device.does(F0, times=2 * after)
        device.does(F0, F1, times=stage + 1)
        device.does(B1, W1, F1, times=after)
        # The last device has the same microbatch in both chunks at first, and cannot do both in one tick.
        device.does(*((F0, (B1, W1)) if after == 0 else [(F0, B1, W1)]), (F1, B0, W0))
        device.does((F0, B1, W1), (F1, B0, W0), times=max(microbatches, 2 * stages) - 2 * stages + stage)
        device.does((B1, W1), (F1, B0, W0), times=after)
        # Half of its last backwards put their weights off, for when the device would wait for others' messages.
        last = [B1, B0] * (stage + 1)
        device.does(*[(B1, W1) if backward == B1 else (B0, W0) for backward in last[: stage + 1]], *last[stage + 1 :])
        put_off = [W1 if backward == B1 else W0 for backward in last[stage + 1 :]] + [W0] * after
        for weight in put_off[:after]:
            device.does(weight, B0)
        device.does(*put_off[after:])
        orders.append(device.turns)
    return pack_schedule("dualpipe-v", orders, microbatches=microbatches, part_of=v_placement(stages))


class _Device:
    """A device's work in order: microbatches are numbered as each kind of work on a chunk is added, up to `most`."""

    def __init__(self, most: int):
        self.most, self.turns = most, list[tuple[Work, ...]]()
        self.done = dict.fromkeys((F0, F1, B0, B1, W0, W1), 0)

    def does(self, *turns: tuple, times: int = 1) -> None:
        """These one after the other, so many times; what stands in a tuple shares a tick."""
        for turn in turns * times:
            works = turn if isinstance(turn[0], tuple) else (turn,)
            numbered = [(kind, self.done[kind, chunk], chunk) for kind, chunk in works]
            for work in works:
                self.done[work] += 1
            if there := tuple(each for each in numbered if each[1] < self.most):
                self.turns.append(there)
