"""Draws the picture of the page on layouts for text: `python docs/pictures/draw_inference.py`; needs matplotlib."""

import pathlib
from typing import Any

import matplotlib
import numpy as np

from eqformer import systems


matplotlib.use("Agg")
from matplotlib import pyplot as plt


FOLDER = pathlib.Path(__file__).parent
OWN, OTHERS, SENT = "#1f6fb2", "#dfe5ec", "#f0b46a"
EMBED, QUERIES, KEYS, HIDDEN = 18_432, 48 * 256, 256, 73_728  # PaLM 540B, whose feed-forward layer is gated
WIDENED, NARROWED = QUERIES + 2 * HIDDEN, QUERIES + HIDDEN
WEIGHTS = EMBED * (WIDENED + NARROWED + 2 * KEYS)


def stays(tokens: float, x: int, y: int) -> float:
    """Megabytes a layer of weights that stay, attention by rows, in bfloat16."""
    over = {"embed_devices": x, "feature_devices": y}
    matmuls = systems.weight_stationary_bytes(tokens, EMBED, widened=WIDENED, narrowed=NARROWED, **over)
    return (matmuls + systems.attention_exchange_bytes(tokens, QUERIES, KEYS, over="rows", **over)) / 1e6


def gathers(tokens: float, devices: int, number: int) -> float:
    """Megabytes a layer of weights gathered over a number of the devices, in bfloat16."""
    over = {"gathered": number, "stationary": devices // number}
    return systems.weight_gathered_bytes(WEIGHTS, tokens, EMBED, whole=EMBED * 2 * KEYS, **over) / 1e6


def held(axes: Any, place: float, title: str, own: tuple[int, int], sent: bool) -> None:
    """A matrix of 8 parts, `embed` downwards: the device's own, and what it is sent of the others'."""
    rows, columns = own
    height, width = 8 / rows, 8 / columns
    for row in range(rows):
        for column in range(columns):
            mine = row == 0 and column == 0
            colour = OWN if mine else SENT if sent and column == 0 else OTHERS
            part = plt.Rectangle((place + column * width, row * height), width, height, facecolor=colour, edgecolor="w")
            axes.add_patch(part)
    axes.text(place + 4, -0.6, title, ha="center", va="bottom", fontsize=9)


def lines() -> None:
    """Who holds what; bytes against tokens on 64 devices; bytes of a step of 512 rows against devices."""
    figure = plt.figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 2.2))
    axes = above.subplots()
    axes.set(xlim=(-3, 41), ylim=(9.2, -2.2), aspect="equal")
    axes.axis("off")
    titles = ("1-D, 1 x 8", (1, 8), False), ("2-D, 2 x 4", (2, 4), False), ("gathered, 2 x 4", (2, 4), True)
    for number, (title, own, sent) in enumerate((*titles, ("gathered, 8 x 1", (8, 1), True))):
        held(axes, 10.5 * number, title, own, sent)
    axes.text(-0.4, 4, "embed", rotation=90, ha="right", va="center", fontsize=9)
    axes.text(4, 8.3, "heads, mlp", ha="center", va="top", fontsize=9)

    left, right = below.subplots(1, 2)
    tokens = np.geomspace(64, 2**21, 60)
    one = [stays(t, 1, 64) for t in tokens]
    left.plot(tokens, one, color="#6b7785", label="1-D stationary")
    left.plot(tokens, [stays(t, 4, 16) for t in tokens], color=OWN, label="2-D stationary, 4 x 16")
    for number, colour in ((4, "#f0b46a"), (16, "#c2690c"), (64, "#7a3f05")):
        left.plot(tokens, [gathers(t, 64, number) for t in tokens], color=colour, label=f"gathered over {number}")
    left.set(xscale="log", yscale="log", xlabel="tokens in a step, 64 devices", ylabel="MB a layer that a device sends")
    left.legend(frameon=False, fontsize=8)
    counts = [8, 16, 32, 64, 128, 256]
    right.plot(counts, [stays(512, 1, n) for n in counts], color="#6b7785", marker=".", label="1-D stationary")
    two = [min(stays(512, x, n // x) for x in (2, 4, 8, 16) if x < n) for n in counts]
    right.plot(counts, two, color=OWN, marker=".", label="2-D stationary, best X")
    right.set(xscale="log", xticks=counts, xticklabels=counts, ylim=(0, None), xlabel="devices, 512 tokens in a step")
    right.minorticks_off()
    right.legend(frameon=False, fontsize=8)
    for panel in (left, right):
        panel.grid(alpha=0.25)
    figure.savefig(FOLDER / "inference.png")


if __name__ == "__main__":
    lines()
