"""A picture of what a plan costs."""

from collections.abc import Mapping
from pathlib import Path

from .._extra import load_extra


def plot_costs(held: Mapping[str, int], memory: int, seconds: Mapping[str, float], path: str | Path) -> None:
    """A PNG of the bytes of a device by cause, against the `memory` that it has, and of a step's seconds by cause.

    They are a `Forecast`'s `held` and `time.by_cause`. Needs matplotlib.
    """
    figures = load_extra("matplotlib.figure", extra="train", call="plot_costs(held, memory, seconds, path)")
    figure = figures.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, found, scale, label in ((left, held, 1e-9, "GB a device"), (right, seconds, 1.0, "seconds a step")):
        names, sizes = list(found), [scale * size for size in found.values()]
        axes.barh(names[::-1], sizes[::-1], color="#1f4e79")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25, axis="x")
    left.axvline(memory * 1e-9, color="#c8552b", label="what it has")
    left.legend(frameon=False)
    figure.savefig(path, format="png")
