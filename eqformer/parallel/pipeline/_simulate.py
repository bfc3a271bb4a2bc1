"""Simulation of a pipeline schedule: time, bubble, memory and messages, without running it."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from ._schedule import check_schedule, IDLE, Schedule


FORWARD, BACKWARD, WEIGHT = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """The entries of a table, one number per entry, by tick; within a tick forwards, then backwards, then weights.

    `kind` is 0 for a forward, 1 for a backward, 2 for a weight entry.
    """

    tick: Int[np.ndarray, "entries"]
    kind: Int[np.ndarray, "entries"]
    stage: Int[np.ndarray, "entries"]
    chunk: Int[np.ndarray, "entries"]
    microbatch: Int[np.ndarray, "entries"]


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """Start and end of each entry, under one rule for when entries start.

    Every device has the same work, so `idle`, the time in which a device does nothing, is the same on all devices;
    `bubble` is `idle` over the time of the work, m(F+B+W).
    """

    starts: Float[np.ndarray, "entries"]
    ends: Float[np.ndarray, "entries"]
    total: float
    idle: float
    bubble: float


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """Time, memory, messages and work of a schedule."""

    schedule: Schedule
    """The simulated schedule."""
    entries: Entries
    """All entries, in the order of ticks."""
    asynchronous: Timing
    """Times if each device runs its entries in the table's order as soon as their inputs arrive."""
    lock_step: Timing
    """Times if a tick lasts as long as its longest device."""
    in_flight: Int[np.ndarray, "entries"]
    """After each entry, on its device: the chunks' microbatches between forward and backward."""
    deferred: Int[np.ndarray, "entries"]
    """After each entry, on its device: the chunks' microbatches between backward and weight entry."""

    def peak(self, in_flight: float = 1.0, deferred: float = 1.0) -> Float[np.ndarray, "stages"]:
        """Return the peak memory of each device, with these weights for a chunk's microbatch in flight or deferred.

        `peak(1.0, 0.0)` counts inputs between forward and backward (M_B), `peak(0.0, 1.0)` those between backward and
        weight entry (M_W). Divide by `schedule.chunks` for microbatches of whole devices.
        """
        memory = in_flight * self.in_flight + deferred * self.deferred
        return np.array([memory[self.entries.stage == stage].max() for stage in range(self.schedule.stages)])

    @property
    def messages(self) -> Int[np.ndarray, "stages"]:
        """The number of activations and gradients that each device sends to another: up to 2mv."""
        schedule, entries = self.schedule, self.entries
        part, changes_device = schedule.part_of[entries.stage, entries.chunk], schedule.shifts != 0
        sends_up, sends_down = np.append(changes_device, False)[part], np.append(False, changes_device)[part]
        sends = ((entries.kind == FORWARD) & sends_up) | ((entries.kind == BACKWARD) & sends_down)
        return np.bincount(entries.stage[sends], minlength=schedule.stages)

    @property
    def executed(self) -> Int[np.ndarray, "stages"]:
        """The number of entries that each device executes; idle ticks execute nothing."""
        return np.bincount(self.entries.stage, minlength=self.schedule.stages)

    @property
    def useful_share(self) -> float:
        """The entries that a step needs over the entries executed: 1, since a table says when to do nothing."""
        kinds = 3 if self.schedule.is_split else 2
        needed = kinds * self.schedule.microbatches * self.schedule.parts
        return needed / int(self.executed.sum())

    @property
    def masked_share(self) -> float:
        """The useful share of a program that masks idle entries instead of skipping them.

        In such a program every device works in each tick in which any device has an entry: m/(m+p-1) for GPipe.
        """
        tables = (self.schedule.forward, self.schedule.backward, self.schedule.weight)
        computed = sum(int((table != IDLE).any(axis=1).sum()) * self.schedule.stages for table in tables)
        return int(self.executed.sum()) / computed


def simulate(schedule: Schedule, *, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> Simulation:
    """Check a schedule and compute its times, bubble, memory and messages.

    The costs are times of a whole device for a microbatch: F, B (the gradient of the input alone) and W (of the
    weights); an entry of one of v chunks takes 1/v of it, and a backward of an unsplit schedule takes B+W. Sending
    takes no time. Raises the ValueError of `check_schedule` for a table that leaves work out, repeats it or breaks a
    dependency.
    """
    if min(forward, backward, weight) < 0 or forward + backward + weight == 0:
        raise ValueError(
            f"simulate: costs are times, none below 0 and not all 0, but forward={forward}, backward={backward}, "
            f"weight={weight}; give what each takes, in any unit."
        )
    check_schedule(schedule)
    tables = np.stack([schedule.forward, schedule.backward, schedule.weight], axis=1)
    tick, kind, stage = np.argwhere(tables != IDLE).T
    chunk, microbatch = np.divmod(tables[tick, kind, stage], schedule.microbatches)
    entries = Entries(tick, kind, stage, chunk, microbatch)
    costs = [forward, backward if schedule.is_split else backward + weight, weight]
    durations = np.array(costs, float)[kind] / schedule.chunks
    work = schedule.microbatches * float(forward + backward + weight)

    def timing(starts: np.ndarray) -> Timing:
        ends = starts + durations
        total = float(ends.max())
        return Timing(starts, ends, total, total - work, (total - work) / work)

    in_flight, deferred = _count_stored(schedule, entries)
    return Simulation(
        schedule,
        entries,
        timing(_start_asynchronously(schedule, entries, durations)),
        timing(_start_in_lock_step(schedule, entries, durations)),
        in_flight,
        deferred,
    )


def _start_asynchronously(
    schedule: Schedule, entries: Entries, durations: Float[np.ndarray, "entries"]
) -> Float[np.ndarray, "entries"]:
    """Return the start times if a device begins its next entry as soon as it is free and the input is there."""
    free = np.zeros(schedule.stages)
    # One row more at either end: the model's input and the loss's gradient are there from the start.
    finished = np.zeros((3, schedule.parts + 2, schedule.microbatches))
    starts = np.empty_like(durations)
    for n, (kind, stage, chunk, k) in enumerate(zip(entries.kind, entries.stage, entries.chunk, entries.microbatch)):
        row = schedule.part_of[stage, chunk] + 1
        ready = finished[kind, row + (-1 if kind == FORWARD else 1), k] if kind != WEIGHT else 0.0
        starts[n] = max(free[stage], ready)
        free[stage] = finished[kind, row, k] = starts[n] + durations[n]
    return starts


def _start_in_lock_step(
    schedule: Schedule, entries: Entries, durations: Float[np.ndarray, "entries"]
) -> Float[np.ndarray, "entries"]:
    """Return the start times if all devices begin a tick together and run its entries one after the other."""
    spent = np.zeros((schedule.ticks, schedule.stages))
    within = np.empty_like(durations)
    for n, (tick, stage) in enumerate(zip(entries.tick, entries.stage)):
        within[n] = spent[tick, stage]
        spent[tick, stage] += durations[n]
    lengths = spent.max(axis=1)
    return (np.cumsum(lengths) - lengths)[entries.tick] + within


def _count_stored(
    schedule: Schedule, entries: Entries
) -> tuple[Int[np.ndarray, "entries"], Int[np.ndarray, "entries"]]:
    """Count the microbatches stored for a backward and for a weight entry, after each entry on its device."""
    in_flight, deferred = np.zeros_like(entries.kind), np.zeros_like(entries.kind)
    for stage in range(schedule.stages):
        is_on_stage = entries.stage == stage
        kinds = entries.kind[is_on_stage]
        is_forward, is_backward, is_weight = (kinds == kind for kind in (FORWARD, BACKWARD, WEIGHT))
        in_flight[is_on_stage] = np.cumsum(is_forward.astype(int) - is_backward)
        if schedule.is_split:
            deferred[is_on_stage] = np.cumsum(is_backward.astype(int) - is_weight)
    return in_flight, deferred
