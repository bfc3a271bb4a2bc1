"""Pipeline schedules: GPipe, 1F1B, interleaved, looping, zero-bubble (ZB-H1, ZB-V) and DualPipeV.

The model is cut into equal consecutive parts. A device holds one or more parts, which are called its chunks: chunk `c`
of device `i` is part `Schedule.part_of[i, c]`.

Formulas use these letters: p stages (devices), m microbatches, v chunks per device, i the index of a stage, from 0. F,
B and W are the times of a device for one microbatch: forward pass, gradients of inputs, and gradients of weights. The
bubble is the time that a device is idle in a step. A tick is a row of the schedule's table. Devices in lock-step begin
each tick together, so a tick takes as long as the slowest device. Without lock-step, a device waits only for inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from ._schedule import check_counts, check_schedule, IDLE, ring_placement, Schedule, v_placement


WORK_KINDS = ("forward", "backward", "weight")
Work = tuple[str, int, int]
"""One entry of a schedule: the kind of work, the microbatch and the chunk."""
WorkOrder = Sequence[Work | tuple[Work, ...]]
"""The work of a device in order; the entries of an inner tuple share a tick."""


def pack_schedule(
    name: str,
    orders: Sequence[WorkOrder],
    *,
    microbatches: int,
    part_of: Int[np.ndarray, "stages chunks"] | None = None,
) -> Schedule:
    """Build the table of a schedule from the order of each device's work; each entry runs as soon as its input exists.

    `orders[stage]` lists entries `(kind, microbatch, chunk)`, with the kinds "forward", "backward" and "weight". There
    are weight entries for all backward entries, or for none. Each entry takes a tick; a tuple of entries of different
    kinds takes one tick together. `part_of` is the schedule's placement, by default `ring_placement` with one chunk.
    Raises a `ValueError` for an unknown kind, and if devices wait for each other forever. This function does not check
    that the orders are complete; `simulate` does.
    """
    part_of = ring_placement(len(orders)) if part_of is None else part_of
    groups = [[_as_group(entry) for entry in order] for order in orders]
    used_kinds = {kind for order in groups for group in order for kind, _, _ in group}
    for kind in used_kinds - {*WORK_KINDS}:
        raise ValueError(
            f"pack_schedule: the kinds of work are {', '.join(WORK_KINDS)}, but the orders of {name!r} have {kind!r}; "
            "use one of the three kinds."
        )
    done: dict[Work, None] = {}
    rows, positions = [], [0] * len(groups)
    while any(position < len(order) for position, order in zip(positions, groups)):
        row, finished = np.full((len(WORK_KINDS), len(groups)), IDLE), []
        for stage, order in enumerate(groups):
            if positions[stage] == len(order):
                continue
            group = order[positions[stage]]
            # The same work with the model's part in place of the device's chunk. `_input_work` and `done` use parts.
            part_work = [(kind, microbatch, int(part_of[stage, chunk])) for kind, microbatch, chunk in group]
            inputs = {_input_work(*work, part_of.size) for work in part_work} - {None, *part_work}
            if all(work in done for work in inputs):
                for kind, microbatch, chunk in group:
                    row[WORK_KINDS.index(kind), stage] = chunk * microbatches + microbatch
                finished += part_work
                positions[stage] += 1
        if not finished:
            raise ValueError(_deadlock_message(name, groups, positions))
        done |= dict.fromkeys(finished)  # Update after the tick, because messages arrive at the end of a tick.
        rows.append(row)
    forward, backward, weight = np.stack(rows, axis=1)
    return Schedule(name, part_of, microbatches, forward, backward, weight)


def _as_group(entry: Work | tuple[Work, ...]) -> tuple[Work, ...]:
    """Return the entries that share a tick as a tuple; a single entry becomes a tuple of length 1."""
    return (cast(Work, entry),) if isinstance(entry[0], str) else cast(tuple[Work, ...], entry)


def _input_work(kind: str, microbatch: int, part: int, parts: int) -> Work | None:
    """Return the work whose result is the input of this work, or None; work names the model's part, not a chunk."""
    if kind == "forward":
        return ("forward", microbatch, part - 1) if part > 0 else None
    if kind == "backward":
        return ("backward", microbatch, part + 1) if part < parts - 1 else ("forward", microbatch, part)
    return ("backward", microbatch, part)


def _deadlock_message(name: str, orders: Sequence[Sequence[tuple[Work, ...]]], positions: list[int]) -> str:
    waiting = [
        "stage {} at the {} of microbatch {}, chunk {}".format(stage, *order[position][0])
        for stage, (order, position) in enumerate(zip(orders, positions))
        if position < len(order)
    ]
    return (
        f"pack_schedule: the orders of {name!r} deadlock: {'; '.join(waiting)} wait for inputs that come later or "
        "never; put the work that computes an input before the work that needs it."
    )


# Schedules over a ring of devices.


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Make GPipe's schedule: all forwards, then all backwards (Huang et al. 2018).

    The bubble is (p-1)(F+B+W), in `2(m+p-1)` ticks. Every device holds the inputs of m microbatches.
    """
    check_counts("gpipe", stages, microbatches)
    return _wave_schedule("gpipe", stages, microbatches, chunks=1, group_size=microbatches, phases=2)


def one_f_one_b(stages: int, microbatches: int, *, fused: bool = True) -> Schedule:
    """Make 1F1B: forwards and backwards alternate once the first backward can run (Narayanan et al. 2020).

    The bubble is (p-1)(F+B+W). If `fused`, a tick holds a forward and a backward of different microbatches. The bubble
    is then the same in lock-step, for any ratio of B to F. There are `m+2(p-1)` ticks, and device i holds the inputs of
    `min(m, 2(p-1-i)+1)` microbatches. If not `fused`, a tick holds one entry, and the formula for the bubble holds only
    without lock-step. Device i then holds the inputs of `min(m, p-i)` microbatches.
    """
    check_counts("one_f_one_b", stages, microbatches)
    if fused:
        return _wave_schedule("1f1b", stages, microbatches, chunks=1, group_size=microbatches, phases=1)
    warm_up = [stages - 1 - stage for stage in range(stages)]
    return _alternating_schedule(
        "1f1b", stages, microbatches, chunks=1, group_size=microbatches, warm_up_forwards=warm_up
    )


def interleaved(stages: int, microbatches: int, chunks: int, *, fused: bool = True) -> Schedule:
    """Make 1F1B with several chunks per device, in groups of p microbatches (Narayanan et al. 2021, Megatron-LM).

    The bubble is (p-1)(F+B+W)/v. Device i holds the inputs of `min(mv, 2(p-1-i)+(v-1)p+1)` pairs of microbatch and
    chunk, where a chunk is 1/v of the device's layers. If `fused`, a tick holds a forward and a backward, there are
    `mv+(v+1)p-2` ticks, and the bubble is the same in lock-step, for any ratio of B to F. If not `fused`, a tick holds
    one entry, and the formula for the bubble holds only without lock-step. The number of microbatches must be a
    multiple of the number of stages.
    """
    check_counts("interleaved", stages, microbatches, chunks)
    if microbatches % stages:
        lower = microbatches - microbatches % stages
        raise ValueError(
            f"interleaved: microbatches go round in groups of `stages`, but microbatches={microbatches} is not a "
            f"multiple of stages={stages}; take {f'{lower} or ' if lower else ''}{lower + stages} microbatches."
        )
    if fused:
        return _wave_schedule("interleaved", stages, microbatches, chunks=chunks, group_size=stages, phases=1)
    warm_up = [2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages)]
    return _alternating_schedule(
        "interleaved", stages, microbatches, chunks=chunks, group_size=stages, warm_up_forwards=warm_up
    )


def looping(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Make the breadth-first schedule: every microbatch runs a chunk before the next chunk begins (Lamy-Poirier 2022).

    The bubble is (p-1)(F+B+W)/v, in `2(mv+p-1)` ticks. Every device holds the inputs of all mv pairs of microbatch and
    chunk. A chunk's forwards are consecutive, and so are its backwards. Fully sharded parameters could therefore be
    gathered twice, and their gradients reduced once, in a step. The schedule needs m >= p: a device needs m ticks for a
    chunk, and the first microbatch returns to the device after p ticks.
    """
    check_counts("looping", stages, microbatches, chunks)
    if microbatches < stages:
        raise ValueError(
            "looping: the first microbatch must have passed all stages before a device begins its next chunk, which "
            f"needs microbatches >= stages, but microbatches={microbatches} and stages={stages}; take at least "
            f"{stages} microbatches."
        )
    return _wave_schedule("looping", stages, microbatches, chunks=chunks, group_size=microbatches, phases=2)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Make ZB-H1: 1F1B with weight gradients split off to fill the bubble (Qi et al. 2023).

    With m >= p, the bubble without lock-step is (p-1) max(F, B, F+B-W), which is the paper's (p-1)(F+B-W) if W is at
    most F and at most B. Device i computes weight gradients i microbatches after their backwards. Device i holds the
    inputs of p microbatches: p-i of these wait for their backward entry, and i wait for their weight entry. A tick
    holds one entry, and there are `3m+p-1` ticks. Fewer microbatches are possible, with a larger bubble.
    """
    check_counts("zero_bubble", stages, microbatches)
    orders: list[WorkOrder] = []
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


def _chunk_order(microbatches: int, chunks: int, group_size: int, *, backward: bool) -> list[tuple[int, int]]:
    """Return a device's pairs of microbatch and chunk in order; a group runs all chunks before the next group."""
    chunk_indices = range(chunks)[::-1] if backward else range(chunks)
    starts = range(0, microbatches, group_size)
    return [(start + k, chunk) for start in starts for chunk in chunk_indices for k in range(group_size)]


def _wave_schedule(name: str, stages: int, microbatches: int, *, chunks: int, group_size: int, phases: int) -> Schedule:
    """Make a schedule in which each device runs all its forwards in consecutive ticks, and likewise its backwards.

    Each device begins its forwards one tick after the previous device, and its backwards one tick after the next
    device. With one phase, backwards begin in the tick in which the model's last part has its first forward. With two
    phases, backwards begin after the last forward.
    """
    length = microbatches * chunks
    first_backward = stages * chunks - 1 if phases == 1 else length + stages - 1
    ticks = first_backward + length + stages - 1

    def make_table(start: int, delays: np.ndarray, *, backward: bool) -> Int[np.ndarray, "ticks stages"]:
        order = _chunk_order(microbatches, chunks, group_size, backward=backward)
        column = [chunk * microbatches + k for k, chunk in order]
        table = np.full((ticks, stages), IDLE)
        for stage, delay in enumerate(delays):
            table[start + delay : start + delay + length, stage] = column
        return table

    forward = make_table(0, np.arange(stages), backward=False)
    backward = make_table(first_backward, np.arange(stages)[::-1], backward=True)
    placement = ring_placement(stages, chunks)
    return Schedule(name, placement, microbatches, forward, backward, np.full_like(forward, IDLE))


def _alternating_schedule(
    name: str, stages: int, microbatches: int, *, chunks: int, group_size: int, warm_up_forwards: list[int]
) -> Schedule:
    """Make a schedule in which forwards and backwards alternate, after `warm_up_forwards[i]` forwards on device i."""
    forwards: list[Work] = [
        ("forward", k, c) for k, c in _chunk_order(microbatches, chunks, group_size, backward=False)
    ]
    backwards: list[Work] = [
        ("backward", k, c) for k, c in _chunk_order(microbatches, chunks, group_size, backward=True)
    ]
    orders: list[WorkOrder] = []
    for warm_up in warm_up_forwards:
        order = forwards[:warm_up]
        for k, backward in enumerate(backwards):
            order += [*forwards[warm_up + k : warm_up + k + 1], backward]
        orders.append(order)
    return pack_schedule(name, orders, microbatches=microbatches, part_of=ring_placement(stages, chunks))


# Schedules over a V: device i holds the parts i and 2p-1-i, so the first device has the embedding and the loss. An
# entry is for one of two chunks, so it takes half of the time F, B or W.

# Work on chunk 0, through which microbatches go down the devices, and on chunk 1, through which they come back.
F0, F1 = ("forward", 0), ("forward", 1)
B0, B1 = ("backward", 0), ("backward", 1)
W0, W1 = ("weight", 0), ("weight", 1)
ChunkWork = tuple[str, int]


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """Make ZB-V, zero-bubble over a V (Qi et al. 2023, section 6), called V-ZB in Qi et al. 2024 (arXiv:2405.15362).

    With m >= 2p-1 and W <= F <= B, the bubble without lock-step is (p-1) max(B, 2(B-W)) / 2. With F = B = W this is
    half of the bubble of `zero_bubble`, and device i is idle only for i ticks at the start and p-1-i ticks at the end.
    A device holds the inputs of at most p microbatches, as in 1F1B, including those that wait for their weight entry. A
    tick holds one entry, and there are `6m+p-1` ticks. Fewer microbatches are possible, with a larger bubble.
    """
    check_counts("zero_bubble_v", stages, microbatches)
    orders = []
    for stage in range(stages):
        device, padded_microbatches = _DeviceOrder(microbatches), max(microbatches, 2 * stages - 1)
        device.append(F0, times=2 * (stages - stage) - 1)
        device.append(F1, F0, times=stage)
        device.append(F1, B1, W1, times=stages - stage)
        while device.counts[F1] < padded_microbatches:
            device.append(*[F0] * (device.counts[F0] < padded_microbatches), B0, W0, F1, B1, W1)
        device.append(B0, B1, times=stage)
        device.append(B0, W0, times=stages - stage)
        for backward, weight in ((B1, W1), (B0, W0)):
            device.append(weight, times=device.counts[backward] - device.counts[weight])
        orders.append(device.order)
    return pack_schedule("zb-v", orders, microbatches=microbatches, part_of=v_placement(stages))


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """Make DualPipeV, DualPipe cut in half (DeepSeek's DualPipe, 2025, after Qi et al.'s "cut-in-half").

    In a tick, a device runs a forward of one chunk and, for a different microbatch, a backward and a weight entry of
    the other chunk. So with m >= 2p, the idle time in lock-step does not grow with m, for any F, B and W. Choose this
    schedule if F, B and W differ and m is large. The published bubble without lock-step is (p-1)(F+2B-W) / 2; the
    bubble here is no larger, because a backward entry sends its message before the weight gradients are computed. A
    device holds the inputs of at most `p + 1/2` microbatches. At most i+1 pairs of microbatch and chunk wait for their
    weight entry, against 2i+1 pairs in `zero_bubble_v`. There are `2m+5p-2` ticks. Fewer microbatches are
    possible, with a larger bubble.
    """
    check_counts("dualpipe_v", stages, microbatches)
    orders = []
    for stage in range(stages):
        device, later_stages = _DeviceOrder(microbatches), stages - 1 - stage
        device.append(F0, times=2 * later_stages)
        device.append(F0, F1, times=stage + 1)
        device.append(B1, W1, F1, times=later_stages)
        # On the last device, the first of these forwards has a tick of its own, as in DeepSeek's code, and runs while
        # the backward waits for its input. With F=B=W, p=2, m=4 this reduces the bubble in lock-step from 21 % to 8 %.
        device.append(*((F0, (B1, W1)) if later_stages == 0 else [(F0, B1, W1)]), (F1, B0, W0))
        device.append((F0, B1, W1), (F1, B0, W0), times=max(microbatches, 2 * stages) - 2 * stages + stage)
        device.append((B1, W1), (F1, B0, W0), times=later_stages)
        # The second half of the next backwards defers its weight gradients, to fill later waits for messages.
        last_backwards = [B1, B0] * (stage + 1)
        first_half, second_half = last_backwards[: stage + 1], last_backwards[stage + 1 :]
        device.append(*[(B1, W1) if backward == B1 else (B0, W0) for backward in first_half], *second_half)
        deferred = [W1 if backward == B1 else W0 for backward in second_half] + [W0] * later_stages
        for weight in deferred[:later_stages]:
            device.append(weight, B0)
        device.append(*deferred[later_stages:])
        orders.append(device.order)
    return pack_schedule("dualpipe-v", orders, microbatches=microbatches, part_of=v_placement(stages))


class _DeviceOrder:
    """Builder of a device's work order, which counts the microbatches of each kind of work on each chunk."""

    def __init__(self, microbatches: int):
        self.microbatches, self.order = microbatches, list[tuple[Work, ...]]()
        self.counts = dict.fromkeys((F0, F1, B0, B1, W0, W1), 0)

    def append(self, *groups: ChunkWork | tuple[ChunkWork, ...], times: int = 1) -> None:
        """Append groups of work `times` times; the entries of a tuple share a tick.

        Each entry is for the next microbatch of its kind of work and chunk. An entry after the last microbatch is left
        out.
        """
        for group in groups * times:
            entries = cast(tuple[ChunkWork, ...], group if isinstance(group[0], tuple) else (group,))
            works = [(kind, self.counts[kind, chunk], chunk) for kind, chunk in entries]
            for entry in entries:
                self.counts[entry] += 1
            if existing := tuple(work for work in works if work[1] < self.microbatches):
                self.order.append(existing)


# Schedules by name.

Maker = Callable[[int, int], Schedule]
"""Function that returns a schedule for a number of stages and of microbatches."""
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "looping", "zb-h1", "zb-v", "dualpipe-v"]


class NamedSchedule(NamedTuple):
    """Function that makes a named schedule, and the number of chunks per device (None: the caller chooses)."""

    make: Callable[..., Schedule]
    chunks: int | None = 1


SCHEDULES: Mapping[str, NamedSchedule] = {
    "gpipe": NamedSchedule(gpipe),
    "1f1b": NamedSchedule(one_f_one_b),
    "interleaved": NamedSchedule(interleaved, chunks=None),
    "looping": NamedSchedule(looping, chunks=None),
    "zb-h1": NamedSchedule(zero_bubble),
    "zb-v": NamedSchedule(zero_bubble_v, chunks=2),
    "dualpipe-v": NamedSchedule(dualpipe_v, chunks=2),
}


def make_schedule(name: str | Maker | Schedule, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a schedule from its name in `SCHEDULES`, from a function that makes it, or from a finished table.

    A function is called with the numbers of stages and microbatches. Only schedules given by name take `chunks`. Raises
    a `ValueError` if the numbers break a rule of the schedule.
    """
    if not isinstance(name, str):
        return _check_custom(name, stages, microbatches, chunks)
    if name not in SCHEDULES:
        raise ValueError(f"make_schedule: there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}.")
    kind = SCHEDULES[name]
    if kind.chunks is None:
        return kind.make(stages, microbatches, chunks)
    if chunks != kind.chunks:
        alternatives = [fitting for fitting, schedule in SCHEDULES.items() if schedule.chunks in (None, chunks)]
        raise ValueError(
            f"make_schedule: {name} has {'one chunk' if kind.chunks == 1 else f'{kind.chunks} chunks'} per device, but "
            f"chunks={chunks}; give chunks={kind.chunks}, or choose {' or '.join(alternatives)}."
        )
    return kind.make(stages, microbatches)


def _check_custom(schedule: Maker | Schedule, stages: int, microbatches: int, chunks: int) -> Schedule:
    """Return the table of a user's schedule, which may be a function, after checking it."""
    if chunks != 1:
        raise ValueError(
            f"make_schedule: a custom schedule sets its number of chunks itself, but chunks={chunks}; give chunks=1."
        )
    table = schedule if isinstance(schedule, Schedule) else schedule(stages, microbatches)
    if (table.stages, table.microbatches) != (stages, microbatches):
        raise ValueError(
            f"make_schedule: the table {table.name!r} is for stages={table.stages} and "
            f"microbatches={table.microbatches}, but stages={stages} and microbatches={microbatches}; make a table for "
            "these numbers, or give a function of both."
        )
    check_schedule(table)
    return table
