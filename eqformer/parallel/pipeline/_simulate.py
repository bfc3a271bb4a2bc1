"""Simulation of pipeline schedules without running them: times, bubble, memory, messages, and drawn timelines."""

import dataclasses
import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from ..._failures import Axes, Figure, load_extra
from ._schedule import check_schedule, IDLE, Schedule


FORWARD, BACKWARD, WEIGHT = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """All entries of a schedule's tables, as one array for each property.

    An entry is the forward pass, the backward pass or the weight gradient of one chunk of a device for one microbatch.
    Entries are sorted by tick; within a tick, forward entries come first, then backward entries, then weight entries.
    `kind` is `FORWARD`, `BACKWARD` or `WEIGHT`.
    """

    tick: Int[np.ndarray, "entries"]
    kind: Int[np.ndarray, "entries"]
    stage: Int[np.ndarray, "entries"]
    chunk: Int[np.ndarray, "entries"]
    microbatch: Int[np.ndarray, "entries"]


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """Start and end time of each entry, either in lock-step or asynchronously."""

    starts: Float[np.ndarray, "entries"]
    ends: Float[np.ndarray, "entries"]
    total: float
    """Time of a step."""
    idle: float
    """Time in which a device is idle; it is the same for all devices, because all have equal work."""
    bubble: float
    """`idle` divided by the time of a device's work, m(F+B+W) for m microbatches."""


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """Times, memory and messages of a schedule."""

    schedule: Schedule
    """The simulated schedule."""
    entries: Entries
    """All entries of the schedule, sorted by tick."""
    asynchronous: Timing
    """Times without lock-step: each device runs its entries in the order of the table, as soon as inputs arrive."""
    lock_step: Timing
    """Times in lock-step: a tick lasts as long as the slowest device."""
    in_flight: Int[np.ndarray, "entries"]
    """After each entry, the number of (microbatch, chunk) pairs on its device that wait for their backward entry."""
    deferred: Int[np.ndarray, "entries"]
    """After each entry, the number of (microbatch, chunk) pairs on its device that wait for their weight entry."""

    def peak(self, in_flight: float = 1.0, deferred: float = 1.0) -> Float[np.ndarray, "stages"]:
        """Return the peak memory of each device, if `in_flight` and `deferred` are the memory of each stored pair.

        A stored pair of microbatch and chunk waits for its backward (`in_flight`, the papers' M_B) or for its weight
        entry (`deferred`, M_W). The default counts pairs; divide by `schedule.chunks` to count microbatches.
        """
        memory = in_flight * self.in_flight + deferred * self.deferred
        return np.array([memory[self.entries.stage == stage].max() for stage in range(self.schedule.stages)])

    @property
    def messages(self) -> Int[np.ndarray, "stages"]:
        """Number of activations and gradients that each device sends: up to 2mv for m microbatches and v chunks."""
        schedule, entries = self.schedule, self.entries
        # A part is a chunk of any device, numbered in the order of the model. The first part sends no gradients down,
        # and the last part sends no activations up. Parts on the same device send each other nothing.
        part, changes_device = schedule.part_of[entries.stage, entries.chunk], schedule.shifts != 0
        sends_up, sends_down = np.append(changes_device, False)[part], np.append(False, changes_device)[part]
        sends = ((entries.kind == FORWARD) & sends_up) | ((entries.kind == BACKWARD) & sends_down)
        return np.bincount(entries.stage[sends], minlength=schedule.stages)

    @property
    def executed(self) -> Int[np.ndarray, "stages"]:
        """Number of entries that each device executes; idle ticks execute nothing."""
        return np.bincount(self.entries.stage, minlength=self.schedule.stages)

    @property
    def useful_share(self) -> float:
        """Ratio of the entries that a step needs to the executed entries: 1, because idle ticks execute nothing."""
        kinds = 3 if self.schedule.is_split else 2
        needed = kinds * self.schedule.microbatches * self.schedule.parts
        return needed / int(self.executed.sum())

    @property
    def masked_share(self) -> float:
        """`useful_share` of a program that computes idle entries too and masks their results: m/(m+p-1) for GPipe.

        In such a program, every device works in each tick in which any device has an entry.
        """
        tables = (self.schedule.forward, self.schedule.backward, self.schedule.weight)
        computed = sum(int((table != IDLE).any(axis=1).sum()) * self.schedule.stages for table in tables)
        return int(self.executed.sum()) / computed


def simulate(schedule: Schedule, *, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> Simulation:
    """Check a schedule, and compute its times, bubble, memory and messages.

    `forward`, `backward` and `weight` are the times F, B and W that a device needs for one microbatch and all v of its
    chunks. B is the time for the gradients of inputs alone, and W the time for the gradients of weights. Each entry is
    for one chunk, so it takes F/v, B/v or W/v; in a schedule that is not split, a backward entry takes (B+W)/v. Sending
    takes no time. Raises the `ValueError` of `check_schedule`.
    """
    if min(forward, backward, weight) < 0 or forward + backward + weight == 0:
        raise ValueError(
            f"simulate: costs are times, none below 0 and not all 0, but forward={forward}, backward={backward}, "
            f"weight={weight}; give the time of each, in any unit."
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
    """Return the start times if a device begins its next entry as soon as it is free and the input has arrived."""
    free = np.zeros(schedule.stages)
    # One more row at either end for the input of the model and the gradient of the loss, which exist from the start.
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
    """Return the start times if all devices begin each tick together, and run its entries one after the other."""
    busy_times = np.zeros((schedule.ticks, schedule.stages))
    starts_in_tick = np.empty_like(durations)
    for n, (tick, stage) in enumerate(zip(entries.tick, entries.stage)):
        starts_in_tick[n] = busy_times[tick, stage]
        busy_times[tick, stage] += durations[n]
    tick_lengths = busy_times.max(axis=1)
    tick_starts = np.cumsum(tick_lengths) - tick_lengths
    return tick_starts[entries.tick] + starts_in_tick


def _count_stored(
    schedule: Schedule, entries: Entries
) -> tuple[Int[np.ndarray, "entries"], Int[np.ndarray, "entries"]]:
    """Return `Simulation.in_flight` and `Simulation.deferred`."""
    in_flight, deferred = np.zeros_like(entries.kind), np.zeros_like(entries.kind)
    for stage in range(schedule.stages):
        is_on_stage = entries.stage == stage
        kinds = entries.kind[is_on_stage]
        is_forward, is_backward, is_weight = (kinds == kind for kind in (FORWARD, BACKWARD, WEIGHT))
        in_flight[is_on_stage] = np.cumsum(is_forward.astype(int) - is_backward)
        if schedule.is_split:
            deferred[is_on_stage] = np.cumsum(is_backward.astype(int) - is_weight)
    return in_flight, deferred


# Timelines, as text and as a picture.

Clock = Literal["asynchronous", "lock_step"]
LETTERS, FILLS, IDLE_FILL = "FBW", ">-=", "."
LABELS = ("forward", "backward", "gradients of weights")
# For each kind of entry, the colors of the first and the last chunk.
COLORS = (("#8fbbe8", "#245a97"), ("#f6bd7f", "#b4530f"), ("#a9d6a5", "#37793a"))
FIRST_INK, LAST_INK, IDLE_COLOR = "#1d2733", "#ffffff", "#eceef1"
ROW, GAP = 0.34, 0.56  # inches per device, and inches between the timelines for the title


def draw_timeline(
    schedule: Schedule, *, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0, clock: Clock = "lock_step"
) -> str:
    """Draw the timeline as text, with a row per device and time to the right.

    `F3>>` is the forward of microbatch 3, `B3--` its backward, and `W3==` its weight entry, as wide as the time that it
    takes. Dots are idle time. With several chunks, a letter names the chunk: `F3a` for the first. The scale is the
    smallest on which every label fits. For the costs see `simulate`; entries that take no time are not drawn. `clock`
    says whether devices run in lock-step, as in the executor, or start as soon as inputs arrive.
    """
    simulation = simulate(schedule, forward=forward, backward=backward, weight=weight)
    entries, timing = simulation.entries, getattr(simulation, clock)
    labels = [
        f"{LETTERS[kind]}{microbatch}{_chunk_name(chunk, schedule.chunks)}"
        for kind, microbatch, chunk in zip(entries.kind.tolist(), entries.microbatch.tolist(), entries.chunk.tolist())
    ]
    # Both ends of a box are rounded down, so a box of at least n columns still has at least n columns.
    scale = max(math.ceil(len(label) / t) for label, t in zip(labels, timing.ends - timing.starts) if t > 0)
    starts, ends = (np.floor(times * scale + 1e-6).astype(int) for times in (timing.starts, timing.ends))
    rows = [[IDLE_FILL] * int(ends.max()) for _ in range(schedule.stages)]
    for stage, kind, label, start, end in zip(entries.stage, entries.kind, labels, starts, ends):
        if end > start:
            rows[stage][start:end] = label.ljust(end - start, FILLS[kind])
    width = len(str(schedule.stages - 1))
    drawn = [f"device {stage:>{width}} |{''.join(row)}|" for stage, row in enumerate(rows)]
    return "\n".join([_title(simulation, timing), *drawn])


def plot_timeline(
    schedules: Schedule | Sequence[Schedule],
    path: str | Path,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    clock: Clock = "lock_step",
) -> None:
    """Write a PNG with the timelines of one or several schedules, on the same scale of time.

    There is a row for each device, and a color for each kind of entry, darker from chunk to chunk. Boxes contain the
    index of the microbatch. Needs matplotlib.

    Args:
        schedules: One schedule, or several.
        path: File to write.
        forward: Time of a device's forward pass for a microbatch.
        backward: Time of a device's input gradients for a microbatch.
        weight: Time of a device's weight gradients for a microbatch.
        clock: `"lock_step"` if devices begin each tick together, `"asynchronous"` if each waits only for its inputs.
    """
    figures = load_extra("matplotlib.figure", extra="train", call="plot_timeline(schedules, path)")
    schedule_list = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    simulations = [simulate(schedule, forward=forward, backward=backward, weight=weight) for schedule in schedule_list]
    longest = max(getattr(simulation, clock).total for simulation in simulations)
    heights = [ROW * schedule.stages for schedule in schedule_list]
    width = min(max(9.0, longest * 0.36 / (forward or 1.0)), 22.0)
    height = sum(heights) + GAP * len(schedule_list) + 0.85
    figure = figures.Figure(figsize=(width, height), dpi=120, facecolor="white")
    left_edge, right_edge, top = 0.85 / width, 1 - 0.25 / width, height - GAP - 0.3
    inch = width * (right_edge - left_edge) / longest
    for simulation, rows in zip(simulations, heights):
        axes = figure.add_axes((left_edge, (top - rows) / height, right_edge - left_edge, rows / height))
        _plot_schedule(axes, simulation, getattr(simulation, clock), longest, inch=inch)
        axes.tick_params(labelbottom=simulation is simulations[-1])
        top -= rows + GAP
    axes.set_xlabel("time, in forward passes of a device" if forward == 1 else "time", fontsize=10, color=FIRST_INK)
    _draw_legend(figure, schedule_list, y=1 - 0.14 / height)
    figure.savefig(path, format="png")


def _chunk_name(chunk: int, chunks: int) -> str:
    if chunks == 1:
        return ""
    return string.ascii_lowercase[chunk] if chunks <= len(string.ascii_lowercase) else f".{chunk}"


def _title(simulation: Simulation, timing: Timing) -> str:
    schedule, peak = simulation.schedule, simulation.peak().max() / simulation.schedule.chunks
    chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return (
        f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches{chunks}: bubble "
        f"{100 * timing.bubble:.1f} %, at most {peak:.4g} microbatches in memory"
    )


def _plot_schedule(axes: Axes, simulation: Simulation, timing: Timing, longest: float, inch: float) -> None:
    """Plot the boxes of one schedule, with their microbatches; `inch` is the number of inches per unit of time."""
    schedule, entries = simulation.schedule, simulation.entries
    durations = timing.ends - timing.starts
    shade = entries.chunk / max(schedule.chunks - 1, 1)
    axes.barh(range(schedule.stages), timing.total, height=0.86, color=IDLE_COLOR, zorder=1)
    axes.barh(
        entries.stage,
        durations,
        left=timing.starts,
        height=0.86,
        color=[_blend(COLORS[kind], s) for kind, s in zip(entries.kind.tolist(), shade.tolist())],
        edgecolor="white",
        linewidth=0.8,
        zorder=2,
    )
    digits = len(str(schedule.microbatches - 1))
    size = min(9.0, 72 * 0.9 * inch * durations[durations > 0].min() / (0.62 * digits))
    if size >= 3.5:  # Smaller numbers would not be legible.
        middles = timing.starts + durations / 2
        for stage, middle, k, s in zip(entries.stage, middles, entries.microbatch, shade):
            ink = LAST_INK if s > 0.5 else FIRST_INK
            axes.text(middle, stage, str(k), ha="center", va="center_baseline", fontsize=size, color=ink, zorder=3)
    axes.set_xlim(0, longest)
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.stages), [f"device {stage}" for stage in range(schedule.stages)], fontsize=9)
    axes.tick_params(length=0, labelsize=9, colors=FIRST_INK)
    axes.spines[:].set_visible(False)
    name, _, description = _title(simulation, timing).partition(",")
    style = {"textcoords": "offset points", "va": "baseline", "color": FIRST_INK}
    label = axes.annotate(name, (0, 1), (0, 6), xycoords="axes fraction", fontsize=12, fontweight="bold", **style)
    axes.annotate(description.strip(), (1, 1), (8, 6), xycoords=(label, "axes fraction"), fontsize=10, **style)


def _draw_legend(figure: Figure, schedules: list[Schedule], y: float) -> None:
    patches = load_extra("matplotlib.patches", extra="train", call="plot_timeline(schedules, path)")
    kinds = 3 if any(schedule.is_split for schedule in schedules) else 2
    handles = [patches.Patch(color=COLORS[kind][0], label=LABELS[kind]) for kind in range(kinds)]
    handles.append(patches.Patch(color=IDLE_COLOR, label="idle"))
    if any(schedule.chunks > 1 for schedule in schedules):
        handles.append(patches.Patch(color=COLORS[0][1], label="darker: a later chunk"))
    figure.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(0.99, y), ncols=len(handles), frameon=False, fontsize=9
    )


def _blend(colors: tuple[str, str], share: float) -> tuple[float, ...]:
    """Return a mixture of two colors, with `share` of the second, as red, green and blue from 0 to 1."""
    ends = [[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in colors]
    return tuple((1 - share) * a + share * b for a, b in zip(*ends))
