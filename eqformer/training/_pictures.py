"""Pictures of a run, of the rows that `JsonLines` wrote: its losses, and the loads of its experts."""

import colorsys
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from .._atomic_write import write_atomic
from .._extra import load_extra
from .._read import open_regular
from ._metrics import parse_row


def plot_losses(metrics: str | Path, path: str | Path) -> None:
    """A PNG of the training and validation loss in nats a token, `loss` and `validation_loss` of the rows of `metrics`.

    Where rows have `validation_bits_per_byte`, an axis on the right is in bits a byte of the validation text. Nothing
    is drawn of rows without losses. The file is written atomically. Needs matplotlib.
    """
    rows = _rows(metrics)
    trained = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)]
    validated = [(row["step"], row["validation_loss"]) for row in rows if isinstance(row.get("validation_loss"), float)]
    if not trained:
        return
    figure = figure_of("plot_losses(metrics, path)", (8, 4.5))
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
    both = [(row.get("validation_loss"), row.get("validation_bits_per_byte")) for row in rows]
    ratios = [loss / bits for loss, bits in both if isinstance(loss, float) and isinstance(bits, float) and bits]
    if ratios:
        nats = ratios[-1]
        right = axes.secondary_yaxis("right", functions=(lambda x: np.divide(x, nats), lambda x: np.multiply(x, nats)))
        right.set_ylabel("bits a byte of the validation text")
    write_atomic(path, figure.savefig)


def plot_expert_loads(metrics: str | Path, path: str | Path) -> None:
    """A PNG of each expert's load over the steps, `expert_load` of the rows of `metrics`, with a panel for each layer.

    Nothing is drawn of rows without loads. The file is written atomically. Needs matplotlib.
    """
    rows = [row for row in _rows(metrics) if "expert_load" in row]
    if not rows:
        return
    steps, loads = [row["step"] for row in rows], _loads(rows, metrics)
    _, layers, experts = loads.shape
    figure = figure_of("plot_expert_loads(metrics, path)", (8, 0.6 + 1.1 * layers))
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for number, axes in enumerate(panels):
        shares = experts * loads[:, number].T
        image = axes.pcolormesh(steps, range(experts), shares, cmap="RdBu_r", vmin=0, vmax=2, shading="nearest")
        axes.set(ylabel=f"layer {number}", yticks=[0, experts - 1])
    panels[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(panels), label="load over an even share")
    write_atomic(path, figure.savefig)


def _rows(metrics: str | Path) -> list[dict[str, Any]]:
    with open_regular(metrics) as file:
        return [parse_row(line, f"{metrics}: line {number}") for number, line in enumerate(file, 1)]


def _loads(rows: list[dict[str, Any]], metrics: str | Path) -> Float[np.ndarray, "steps layers experts"]:
    try:
        loads = np.asarray([row["expert_load"] for row in rows], np.float64)
    except (TypeError, ValueError):
        loads = np.zeros(0)
    if loads.ndim != 3:
        raise ValueError(f"{metrics}: expert_load must have one number an expert and layer, alike in all rows.")
    return loads


def figure_of(call: str, size: tuple[int | float, int | float]) -> Any:
    """An empty figure of so many inches, for a public `call`, which is named where matplotlib is missing."""
    figures = load_extra("matplotlib.figure", extra="train", call=call)
    return figures.Figure(figsize=size, dpi=110, layout="constrained")


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over a window centred on each point, narrower at the ends, so that the line does not lag behind."""
    reach = max(1, len(points) // 40)
    losses = [loss for _, loss in points]
    windows = [losses[max(0, i - reach) : i + reach + 1] for i in range(len(points))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows)]


def plot_experts(
    chosen: Integer[np.ndarray, "mixtures seq"], pieces: Sequence[str], path: str | Path, *, title: str, lines: int = 12
) -> None:
    """A PNG of a text's first `lines`, each piece in the colour of its expert, with a panel for each mixture; or, where
    `path` ends in .html, a web page of all of it.

    `chosen` is what `nn.first_experts` gives of a row, and `pieces` the text of each of its ids, as
    `data.TextStream(tokenizer).pieces(ids)`. The file is written atomically. A picture needs matplotlib.
    """
    colors = _colors(int(chosen.max()) + 1)
    if Path(path).suffix == ".html":
        page = _page(chosen, pieces, colors, title)
        write_atomic(path, page)
        return
    places, letters = _laid_out(pieces, lines)
    height = max((line for line, _, _ in places), default=0) + 1
    size = 0.105 * _WIDTH, 0.6 + len(chosen) * (0.2 * height + 0.35)
    figure = figure_of("plot_experts(chosen, pieces, path)", size)
    figure.suptitle(title, fontsize=10)
    for layer, axes in enumerate(figure.subplots(len(chosen), 1, squeeze=False)[:, 0]):
        image = np.ones((height, _WIDTH, 3))
        for line, column, piece in places:
            image[line, column] = colors[chosen[layer, piece]]
        axes.imshow(image, aspect="auto", interpolation="nearest")
        for line, column, letter in letters:
            axes.text(column, line, letter, family=_FONT, fontsize=8, ha="center", va="center", parse_math=False)
        axes.set_title(f"mixture {layer}", fontsize=8, loc="left")
        axes.set_axis_off()
    write_atomic(path, figure.savefig)


_FONT, _WIDTH = "DejaVu Sans Mono", 96  # the font that matplotlib brings, and characters a line of the picture


def _colors(experts: int) -> list[tuple[float, float, float]]:
    """Light colours, one for each expert, neighbours far apart on the colour wheel."""
    golden = (math.sqrt(5) - 1) / 2
    return [colorsys.hls_to_rgb(number * golden % 1, 0.76, 0.65) for number in range(experts)]


def _page(chosen: np.ndarray, pieces: Sequence[str], colors: list[tuple[float, float, float]], title: str) -> str:
    written = ["#" + bytes(round(255 * part) for part in color).hex() for color in colors]
    styles = "".join(f".e{number}{{background:{color}}}" for number, color in enumerate(written))
    legend = " ".join(f'<span class="e{number}"> {number} </span>' for number in range(len(colors)))
    sections = []
    for layer, row in enumerate(chosen):
        spans = (f'<span class="e{e}" title="expert {e}">{html.escape(piece)}</span>' for piece, e in zip(pieces, row))
        sections.append(f"<h2>mixture {layer}</h2>\n<pre>{''.join(spans)}</pre>\n")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n<style>'
        "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;color:#222}pre{white-space:pre-wrap;"
        f"line-height:1.5}}{styles}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f"<p>Each token in the colour of the expert that it takes first: <code>{legend}</code></p>\n"
        f"{''.join(sections)}</body></html>\n"
    )


def _laid_out(pieces: Sequence[str], lines: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, str]]]:
    """Line, column and piece of each coloured cell; and line, column and letter of each visible character."""
    fonts = load_extra("matplotlib.font_manager", extra="train", call="plot_experts(chosen, pieces, path)")
    glyphs = fonts.get_font(fonts.findfont(_FONT)).get_charmap()
    places, letters, line, column = [], [], 0, 0
    for number, piece in enumerate(pieces):
        for letter in piece:
            if column == _WIDTH:
                line, column = line + 1, 0
            if line == lines:
                return places, letters
            places.append((line, column, number))
            if not letter.isspace():
                letters.append((line, column, letter if ord(letter) in glyphs else "\N{WHITE SQUARE}"))
            line, column = (line + 1, 0) if letter == "\n" else (line, column + 1)
    return places, letters
