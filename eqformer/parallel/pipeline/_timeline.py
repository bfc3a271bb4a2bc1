"""Timelines of pipeline schedules, as text and as a picture."""

import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..._failures import load_extra
from ._schedule import Schedule
from ._simulate import simulate, Simulation, Timing


Clock = Literal["asynchronous", "lock_step"]
LETTERS, FILLS, IDLE_FILL = "FBW", ">-=", "."
LABELS = ("forward", "backward", "gradients of weights")
# For each kind of entry, the color of its first chunk and of its last chunk.
COLORS = (("#8fbbe8", "#245a97"), ("#f6bd7f", "#b4530f"), ("#a9d6a5", "#37793a"))
FIRST_INK, LAST_INK, IDLE_COLOR = "#1d2733", "#ffffff", "#eceef1"
ROW, GAP = 0.34, 0.56  # inches per device, and inches between the timelines for the title


def draw_timeline(
    schedule: Schedule, *, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0, clock: Clock = "lock_step"
) -> str:
    """Draw the timeline as text: a row per device, time to the right on the smallest scale on which every label fits.

    `F3>>` is the forward of microbatch 3, `B3--` its backward, `W3==` its weight entry, each as wide as it lasts, and
    dots are idle time. With several chunks a letter follows, `F3a` for the first. The costs are those of `simulate`;
    entries that cost nothing are not drawn. `clock` says whether devices run in lock-step, as the executor does,
    or each as soon as its inputs arrive.
    """
    simulation = simulate(schedule, forward=forward, backward=backward, weight=weight)
    entries, timing = simulation.entries, getattr(simulation, clock)
    labels = [
        f"{LETTERS[kind]}{microbatch}{_chunk_name(chunk, schedule.chunks)}"
        for kind, microbatch, chunk in zip(entries.kind.tolist(), entries.microbatch.tolist(), entries.chunk.tolist())
    ]
    # A box of at least n columns keeps at least n columns, since both of its ends are rounded down.
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
    """Write a PNG of the timelines of one schedule or several, below each other on one scale of time.

    A row per device; a color per kind of entry, darker from chunk to chunk; the microbatch's number inside. Needs
    matplotlib.

    Args:
        schedules: One schedule, or several.
        path: The file to write.
        forward: The time of a forward entry.
        backward: The time of a backward entry.
        weight: The time of a weight entry.
        clock: `"lock_step"`, in which a tick lasts as long as its longest device, or `"asynchronous"`.
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
    axes.set_xlabel("time, in forwards of a device" if forward == 1 else "time", fontsize=10, color=FIRST_INK)
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
        f"{100 * timing.bubble:.1f} %, at most {peak:.4g} microbatches remembered"
    )


def _plot_schedule(axes: Any, simulation: Simulation, timing: Timing, longest: float, inch: float) -> None:
    """Plot the boxes and numbers of one schedule; `inch` is the length of a unit of time on paper."""
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
    if size >= 3.5:  # smaller numbers would not be legible
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


def _draw_legend(figure: Any, schedules: list[Schedule], y: float) -> None:
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
    """Return the color at a share of the way from the first to the second, as red, green and blue from 0 to 1."""
    ends = [[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in colors]
    return tuple((1 - share) * a + share * b for a, b in zip(*ends))
