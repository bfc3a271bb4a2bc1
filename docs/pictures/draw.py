"""Draws the pictures of the pages on parallelism: `python docs/pictures/draw.py`; needs matplotlib."""

import pathlib
from typing import Any

import matplotlib
import numpy as np


matplotlib.use("Agg")
from matplotlib import pyplot as plt

from eqformer import models, parallel, prepare


FOLDER = pathlib.Path(__file__).parent
INK, FAINT, OTHERS, PLAIN = "#1d2733", "#6b7785", "#dfe5ec", "#c9ced5"
AXES = {"replica": "#6b7785", "fsdp": "#c2690c", "pipe": "#6d4fa3", "context": "#b13a74", "tensor": "#1f6fb2"}
DEVICES = ("#1f6fb2", "#c2690c", "#3c8a4e", "#b13a74")


def canvas(width: float, height: float) -> Any:
    """Axes of which a unit is a tenth of an inch, y downwards."""
    figure = plt.figure(figsize=(width / 10, height / 10), dpi=130)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes


def box(axes: Any, x: float, y: float, width: float, height: float, colour: str, edge: str = "white") -> None:
    """A filled rectangle."""
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=0.8))


def say(axes: Any, x: float, y: float, text: str, **options: Any) -> None:
    """A line of text, by default small and centred."""
    axes.text(x, y, text, **{"fontsize": 9, "ha": "center", "va": "center", "color": INK, **options})


def save(axes: Any, name: str) -> None:
    """Write a picture and forget it."""
    axes.figure.savefig(FOLDER / f"{name}.png")
    plt.close(axes.figure)


def plan() -> None:
    """What one device of four holds of the batch and of the model, for each axis."""
    axes = canvas(110, 50)
    sent = {
        "replica": ("gradients summed,", "once a step"),
        "fsdp": ("weights gathered,", "gradients scattered"),
        "pipe": ("activations passed on", "between neighbours"),
        "context": ("keys and values", "of each attention"),
        "tensor": ("activations gathered and", "reduced in each layer"),
    }
    say(axes, 2, 11.5, "batch", ha="left", color=FAINT)
    say(axes, 2, 28.5, "layers", ha="left", color=FAINT)
    say(axes, 2, 43, "sent", ha="left", color=FAINT)
    for number, (axis, colour) in enumerate(AXES.items()):
        x = 12 + 19.6 * number
        say(axes, x + 8, 3, axis, fontsize=13, weight="bold", color=colour)
        rows = range(2) if axis in ("replica", "fsdp") else range(8)
        columns = (0, 7) if axis == "context" else range(8)
        for row in range(8):
            for column in range(8):
                is_held = row in rows and column in columns
                box(axes, x + 2 * column, 6 + 1.4 * row, 2, 1.4, colour if is_held else OTHERS)
        for layer in range(4):
            for start, width in ((0, 6), (6.5, 9.5)):  # attention, feed-forward
                y = 20.5 + 4.4 * layer
                box(axes, x + start, y, width, 3.8, colour if axis in ("replica", "context") else OTHERS)
                if axis == "tensor":
                    box(axes, x + start, y, width / 4, 3.8, colour)
                if axis == "fsdp":
                    box(axes, x + start, y, width, 0.95, colour)
                if axis == "pipe" and layer == 0:
                    box(axes, x + start, y, width, 3.8, colour)
        for place, line in enumerate(sent[axis]):
            say(axes, x + 8, 42 + 2 * place, line)
    say(axes, 20, 18.7, "rows down, tokens across", fontsize=7.5, color=FAINT)
    say(axes, 20, 38.9, "attention, feed-forward", fontsize=7.5, color=FAINT)
    say(axes, 12, 47.5, "coloured: what the first of four devices keeps (fsdp: at zero=3)", ha="left", color=FAINT)
    save(axes, "plan")


def zero() -> None:
    """What each of four devices holds at the stages of ZeRO."""
    axes = canvas(110, 58)
    kinds = (("parameters", 1, 1), ("gradients", 1, 2), ("optimizer state", 2, 3))
    colours = ("#1f6fb2", "#c2690c", "#6d4fa3")
    whose = ("every device: all", "split: optimizer state", "split: also gradients", "split: also parameters")
    memory = ("16 P", "8 P + 8 P / n", "4 P + 12 P / n", "16 P / n")
    for device in range(4):
        say(axes, 31 + 17 * device, 5, f"device {device}", color=FAINT)
    say(axes, 99, 3.6, "bytes, P parameters", color=FAINT)
    say(axes, 99, 6, "on n devices", color=FAINT)
    for stage in range(4):
        y = 9 + 10.8 * stage
        say(axes, 2, y + 3, f"zero={stage}", ha="left", fontsize=13, weight="bold")
        say(axes, 2, y + 6.2, whose[stage], ha="left", color=FAINT)
        say(axes, 99, y + 4.2, memory[stage], fontsize=12)
        for device in range(4):
            x, top = 24 + 17 * device, y
            for (_, height, first), colour in zip(kinds, colours):
                is_split = stage >= 4 - first
                for piece in range(4):
                    is_held = not is_split or piece == device
                    box(axes, x + 3.4 * piece, top, 3.4, 1.5 * height, colour if is_held else OTHERS)
                top += 1.5 * height + 0.4
            for piece in range(4):
                box(axes, x + 3.4 * piece, top, 3.4, 1.1, "#3c8a4e" if piece == device else OTHERS)
    for number, (name, colour) in enumerate(
        [*((kind[0], colour) for kind, colour in zip(kinds, colours)), ("activations of its rows", "#3c8a4e")]
    ):
        box(axes, 24 + 17 * number, 54, 2, 2, colour)
        say(axes, 27 + 17 * number, 55, name, ha="left")
    box(axes, 99, 54, 2, 2, OTHERS)
    say(axes, 102, 55, "elsewhere", ha="left")
    save(axes, "zero")


def tensor() -> None:
    """Where the stream between layers is whole and where split, and what stands between, for the three streams."""
    axes = canvas(120, 52)
    cuts = {"whole": (1, 1), "tokens": (1, 4), "features": (4, 1)}
    by_stream = {
        "replicated": ("whole", ["product"], ["product", "all-reduce"]),
        "sequence": ("tokens", ["all-gather", "product"], ["product", "reduce-scatter"]),
        "feature": ("features", ["product", "reduce-scatter"], ["product", "reduce-scatter"]),
    }
    titles = ("stream", "heads", "stream", "hidden features", "stream")
    for place, title in enumerate(titles):
        say(axes, 20 + 23 * place, 3, title, color=FAINT)
    for row, (name, (kind, into, out)) in enumerate(by_stream.items()):
        y = 6.5 + 13.5 * row
        say(axes, 1.5, y + 5, name, ha="left", fontsize=11.5, weight="bold")
        for place in range(5):
            x = 15 + 23 * place
            across, down = cuts[kind if place % 2 == 0 else "features"]
            for i in range(across):
                for j in range(down):
                    colour = DEVICES[i + j] if across + down > 2 else PLAIN
                    box(axes, x + 10 / across * i, y + 10 / down * j, 10 / across, 10 / down, colour)
            if across + down == 2:
                say(axes, x + 5, y + 5, "whole on\nevery device", fontsize=8)
            if place == 4:
                continue
            axes.annotate(
                "", (x + 22.4, y + 5), (x + 10.6, y + 5), arrowprops={"arrowstyle": "->", "color": INK, "lw": 1}
            )
            for line, step in enumerate(into if place % 2 == 0 else out):
                is_sent = step != "product"
                weight, colour = ("bold", "#b13a74") if is_sent else ("normal", FAINT)
                say(axes, x + 16.5, y + (3.4, 6.8)[line], step, weight=weight, color=colour, fontsize=8.5)
    for device, colour in enumerate(DEVICES):
        box(axes, 15 + 14 * device, 48, 2, 2, colour)
        say(axes, 18 + 14 * device, 49, f"device {device}", ha="left")
    say(axes, 117, 49, "a square: tokens down, features across; forward pass", ha="right", color=FAINT)
    save(axes, "tensor")


def context() -> None:
    """The causal triangle by the device that works on it, and each device's share, in reading order and in zigzag."""
    axes = canvas(110, 47)
    parts = np.arange(8)
    for panel, (name, owner) in enumerate((("reading order", parts // 2), ("zigzag", np.minimum(parts, 7 - parts)))):
        x, of_token = 5 + 55 * panel, np.repeat(owner, 4)
        say(axes, x, 3, name, fontsize=13, weight="bold", ha="left")
        for query in range(32):
            for key in range(32):
                colour = DEVICES[of_token[query]] if key <= query else "#f3f5f8"
                axes.add_patch(plt.Rectangle((x + key, 6 + query), 1, 1, facecolor=colour, linewidth=0))
        for part in range(1, 8):
            axes.plot([x + 4 * part] * 2, [6, 38], color="white", lw=0.8)
            axes.plot([x, x + 32], [6 + 4 * part] * 2, color="white", lw=0.8)
        say(axes, x + 16, 39.8, "keys", color=FAINT)
        say(axes, x - 1.7, 22, "queries", color=FAINT, rotation=90)
        work = np.array([np.sum((np.arange(32) + 1)[of_token == device]) for device in range(4)])
        share = work / work.sum()
        for device in range(4):
            y = 8 + 7.6 * device
            say(axes, x + 34.5, y, f"device {device}", ha="left", color=FAINT)
            box(axes, x + 34.5, y + 1.4, 22 * share[device], 3, DEVICES[device])
            say(axes, x + 35 + 22 * share[device], y + 3, f"{100 * share[device]:.0f} %", ha="left")
        say(axes, x + 16, 43.6, f"all wait for the slowest: {4 * share.max():.2f} times the mean", fontsize=10)
    save(axes, "context")


def layout() -> None:
    """Where each array of a small Llama lies on eight devices, as the library draws it."""
    shapes = models.shapes(models.LlamaConfig(vocab=2048, embed=256, layers=8, heads=8, kv_heads=4, mlp=688))
    mesh = parallel.make_mesh(fsdp=2, pipe=2, tensor=2)
    specs = parallel.Plan(mesh, zero=3).parameter_specs(shapes)
    parallel.plot_layout(shapes, specs, mesh, FOLDER / "layout.png")


def schedules() -> None:
    """The seven schedules, as the library draws them."""
    chunks = {name: kind.chunks or 2 for name, kind in parallel.SCHEDULES.items()}
    make = lambda name: parallel.make_schedule(name, stages=4, microbatches=8, chunks=chunks[name])
    parallel.plot_timeline([make(name) for name in chunks], FOLDER / "schedules.png")


if __name__ == "__main__":
    prepare(devices=8)
    for draw in (plan, zero, tensor, context, layout, schedules):
        draw()
