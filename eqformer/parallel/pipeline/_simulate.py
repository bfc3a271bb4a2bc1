"""What a table of a pipeline costs, worked out without running it."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from ._schedule import check_schedule, IDLE, Schedule


FORWARD, BACKWARD, WEIGHT = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """What a table holds, one number an entry, by tick; within a tick forwards, then backwards, then weights.

    `kind` is 0 for a forward, 1 for a backward, 2 for a weight entry.
    """

    tick: Int[np.ndarray, "entries"]
    kind: Int[np.ndarray, "entries"]
    stage: Int[np.ndarray, "entries"]
    chunk: Int[np.ndarray, "entries"]
    microbatch: Int[np.ndarray, "entries"]


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """When each entry starts and ends, under one idea of time.

    Every device has the same work, so that `idle`, the time in which a device does nothing, is the same on each;
    `bubble` is it over the time of the work, m(F+B+W).
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
    """What was simulated."""
    entries: Entries
    """All entries, one after the other."""
    asynchronous: Timing
    """Each device runs its entries in the table's order as soon as their inputs are there."""
    lock_step: Timing
    """A tick lasts as long as its longest device."""
    held: Int[np.ndarray, "entries"]
    """After each entry, on its device: the microbatches of chunks between forward and backward."""
    waiting: Int[np.ndarray, "entries"]
    """Those between backward and weight entry."""

    def peak(self, held: float = 1.0, waiting: float = 1.0) -> Float[np.ndarray, "stages"]:
        """The most that each device remembers at once, of microbatches of chunks that weigh this much.

        `peak(1.0, 0.0)` counts inputs between forward and backward (M_B), `peak(0.0, 1.0)` those between backward and
        weight entry (M_W). Divide by `schedule.chunks` for microbatches of whole devices.
        """
        weights = held * self.held + waiting * self.waiting
        return np.array([weights[self.entries.stage == stage].max() for stage in range(self.schedule.stages)])

    @property
    def messages(self) -> Int[np.ndarray, "stages"]:
        """How many activations and gradients each device sends to another: up to 2mv."""
        schedule, entries = self.schedule, self.entries
        part, leaves = schedule.part_of[entries.stage, entries.chunk], schedule.shifts != 0
        up, down = np.append(leaves, False)[part], np.append(False, leaves)[part]
        sends = ((entries.kind == FORWARD) & up) | ((entries.kind == BACKWARD) & down)
        return np.bincount(entries.stage[sends], minlength=schedule.stages)

    @property
    def executed(self) -> Int[np.ndarray, "stages"]:
        """How many entries each device executes; idle turns execute nothing."""
        return np.bincount(self.entries.stage, minlength=self.schedule.stages)

    @property
    def useful_share(self) -> float:
        """The entries that a step needs over the entries executed: 1, for a table says where to do nothing."""
        kinds = 3 if self.schedule.is_split else 2
        needed = kinds * self.schedule.microbatches * self.schedule.parts
        return needed / int(self.executed.sum())

    @property
    def masked_share(self) -> float:
        """The useful share, were idle turns computed and thrown away, as by programs that mask instead of skip.

        Then every device works in each tick that has such an entry on any device: m/(m+p-1) for GPipe.
        """
        tables = (self.schedule.forward, self.schedule.backward, self.schedule.weight)
        turns = sum(int((table != IDLE).any(axis=1).sum()) * self.schedule.stages for table in tables)
        return int(self.executed.sum()) / turns


def simulate(schedule: Schedule, *, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> Simulation:
    """Check a table and work out its times, bubble, memory and messages.

    The costs are times of a whole device for a microbatch: F, B (the gradient of the input alone) and W (of the
    weights); an entry of one of v chunks takes 1/v of it, and a backward of an unsplit schedule takes B+W. Sending
    takes no time. A table that leaves work out, repeats it or breaks a dependency gives the ValueError of
    `check_schedule`.
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

    held, waiting = _remembered(schedule, entries)
    return Simulation(
        schedule,
        entries,
        timing(_asynchronous(schedule, entries, durations)),
        timing(_lock_step(schedule, entries, durations)),
        held,
        waiting,
    )


def _asynchronous(
    schedule: Schedule, entries: Entries, durations: Float[np.ndarray, "entries"]
) -> Float[np.ndarray, "entries"]:
    """Starts, if a device begins its next entry as soon as it is free and the input is there."""
    free = np.zeros(schedule.stages)
    # One row more at either end: the model's input and the loss's gradient are there from the start.
    done = np.zeros((3, schedule.parts + 2, schedule.microbatches))
    starts = np.empty_like(durations)
    for n, (kind, stage, chunk, k) in enumerate(zip(entries.kind, entries.stage, entries.chunk, entries.microbatch)):
        row = schedule.part_of[stage, chunk] + 1
        ready = done[kind, row + (-1 if kind == FORWARD else 1), k] if kind != WEIGHT else 0.0
        starts[n] = max(free[stage], ready)
        free[stage] = done[kind, row, k] = starts[n] + durations[n]
    return starts


def _lock_step(
    schedule: Schedule, entries: Entries, durations: Float[np.ndarray, "entries"]
) -> Float[np.ndarray, "entries"]:
    """Starts, if all devices begin a tick together and each does its entries of it one after the other."""
    spent = np.zeros((schedule.ticks, schedule.stages))
    within = np.empty_like(durations)
    for n, (tick, stage) in enumerate(zip(entries.tick, entries.stage)):
        within[n] = spent[tick, stage]
        spent[tick, stage] += durations[n]
    lengths = spent.max(axis=1)
    return (np.cumsum(lengths) - lengths)[entries.tick] + within


def _remembered(schedule: Schedule, entries: Entries) -> tuple[Int[np.ndarray, "entries"], Int[np.ndarray, "entries"]]:
    """What is held for a backward, and what waits for a weight entry, after each entry on its device."""
    held, waiting = np.zeros_like(entries.kind), np.zeros_like(entries.kind)
    for stage in range(schedule.stages):
        mine = entries.stage == stage
        is_forward, is_backward, is_weight = (entries.kind[mine] == kind for kind in (FORWARD, BACKWARD, WEIGHT))
        held[mine] = np.cumsum(is_forward.astype(int) - is_backward)
        if schedule.is_split:
            waiting[mine] = np.cumsum(is_backward.astype(int) - is_weight)
    return held, waiting
