"""A figure of the costs of a plan."""

from collections.abc import Mapping
from pathlib import Path

from .._extra import load_extra


def plot_costs(held: Mapping[str, int], memory: int, seconds: Mapping[str, float], path: str | Path) -> None:
    """Write a PNG of the bytes of a device by cause beside the `memory` that it has, and of a step's seconds by cause.

    They are a `Forecast`'s `held` and `time.by_cause`. Needs matplotlib.
    """
    figures = load_extra("matplotlib.figure", extra="train", call="plot_costs(held, memory, seconds, path)")
    figure = figures.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    memory_axes, time_axes = figure.subplots(1, 2)
    panels = ((memory_axes, held, 1e-9, "GB a device"), (time_axes, seconds, 1.0, "seconds a step"))
    for axes, costs, scale, label in panels:
        names, sizes = list(costs), [scale * size for size in costs.values()]
        axes.barh(names[::-1], sizes[::-1], color="#1f4e79")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25, axis="x")
    memory_axes.axvline(memory * 1e-9, color="#c8552b", label="what it has")
    memory_axes.legend(frameon=False)
    figure.savefig(path, format="png")
