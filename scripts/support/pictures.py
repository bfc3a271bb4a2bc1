"""Pictures of a run: its losses, the loads of its experts, and what it will cost."""

import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure


matplotlib.use("agg")


def draw_losses(metrics: Path, target: Path) -> None:
    """Draw the training and validation loss in nats a token; the file is written atomically.

    The axis on the right is in bits a byte of the validation text.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    trained = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)]
    validated = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if not trained:
        return
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*trained), color="#9ab8d6", linewidth=1, label="training, one step")
    axes.plot(*zip(*_smoothed(trained)), color="#1f4e79", linewidth=1.6, label="training, smoothed")
    if validated:
        axes.plot(*zip(*validated), color="#c8552b", marker="o", markersize=4, label="validation")
    settled = sorted(loss for _, loss in trained)
    axes.set_ylim(0.9 * settled[0], 1.05 * max(settled[int(0.97 * (len(settled) - 1))], settled[0] * 1.2))
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    ratios = [row["validation_loss"] / row["validation_bits_per_byte"] for row in rows if "validation_loss" in row]
    if ratios:
        nats = ratios[-1]
        right = axes.secondary_yaxis("right", functions=(lambda x: np.divide(x, nats), lambda x: np.multiply(x, nats)))
        right.set_ylabel("bits a byte of the validation text")
    save_whole(figure, target)


def save_whole(figure: Figure, target: Path) -> None:
    """Write the picture to another file first, and rename it, so that it is never half written."""
    part = target.with_suffix(".part.png")
    figure.savefig(part)
    part.replace(target)


def draw_loads(metrics: Path, target: Path) -> None:
    """Draw each expert's load over the steps, with a panel for each layer; nothing for a model without experts."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    found = [(row["step"], row["expert_load"]) for row in rows if "expert_load" in row]
    if not found:
        return
    steps, loads = [step for step, _ in found], np.asarray([load for _, load in found])  # steps layers experts
    layers, experts = np.shape(loads[0])
    figure = Figure(figsize=(8, 0.6 + 1.1 * layers), dpi=110, layout="constrained")
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for number, axes in enumerate(panels):
        shares = experts * loads[:, number].T
        image = axes.pcolormesh(steps, range(experts), shares, cmap="RdBu_r", vmin=0, vmax=2, shading="nearest")
        axes.set(ylabel=f"layer {number}", yticks=[0, experts - 1])
    panels[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(panels), label="load over an even share")
    save_whole(figure, target)


def draw_costs(held: dict[str, int], memory: int, seconds: dict[str, float], target: Path) -> None:
    """Draw the memory of a device by cause, against what it has, and the seconds of a step by cause."""
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, found, scale, label in ((left, held, 1e-9, "GB a device"), (right, seconds, 1.0, "seconds a step")):
        names, sizes = list(found), [scale * size for size in found.values()]
        axes.barh(names[::-1], sizes[::-1], color="#1f4e79")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25, axis="x")
    left.axvline(memory * 1e-9, color="#c8552b", label="what it has")
    left.legend(frameon=False)
    save_whole(figure, target)


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over a window centred on each point, narrower at the ends, so that the line does not lag behind."""
    reach = max(1, len(points) // 40)
    losses = [loss for _, loss in points]
    windows = [losses[max(0, i - reach) : i + reach + 1] for i in range(len(points))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows)]
