"""Pictures of a run: its losses, rewards, evaluations and expert loads, and a text in the colors of its experts.

All except the colored text are drawn from the rows that `JsonLines` writes.
"""

import colorsys
import html
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Integer

from .._failures import Figure, load_extra
from .._files import JsonObject, open_regular, write_atomic
from ._metrics import parse_row


def plot_losses(metrics: str | Path, path: str | Path) -> None:
    """Plot `loss` and `validation_loss` of the rows of the file `metrics`, in nats a token, as a PNG.

    If rows have `validation_bits_per_byte`, an axis on the right shows bits per byte of the validation text. If no row
    has a loss, no file is written. The file is written atomically. Needs matplotlib.
    """
    rows = read_rows(metrics)
    trained, validated = _list_points(rows, "loss"), _list_points(rows, "validation_loss")
    if not trained:
        return
    figure = make_figure("plot_losses(metrics, path)", (8, 4.5))
    axes = figure.add_subplot()
    axes.plot(*zip(*trained), color="#9ab8d6", linewidth=1, label="training, one step")
    axes.plot(*zip(*_smooth(trained)), color="#1f4e79", linewidth=1.6, label="training, smoothed")
    if validated:
        axes.plot(*zip(*validated), color="#c8552b", marker="o", markersize=4, label="validation")
    ordered = sorted(loss for _, loss in trained)
    # The highest 3 % of the losses may be cut off, so that the first losses do not flatten the curve after them.
    axes.set_ylim(0.9 * ordered[0], 1.05 * max(ordered[int(0.97 * (len(ordered) - 1))], ordered[0] * 1.2))
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    pairs = [(row.get("validation_loss"), row.get("validation_bits_per_byte")) for row in rows]
    # The quotient of nats a token and bits per byte is `ln 2` times the mean bytes of a token: the same in each row.
    ratios = [loss / bits for loss, bits in pairs if isinstance(loss, float) and isinstance(bits, float) and bits]
    if ratios:
        nats_per_bit = ratios[-1]
        to_bits, to_nats = (lambda x: np.divide(x, nats_per_bit)), (lambda x: np.multiply(x, nats_per_bit))
        right = axes.secondary_yaxis("right", functions=(to_bits, to_nats))
        right.set_ylabel("bits per byte of the validation text")
    write_atomic(path, figure.savefig)


def plot_evaluations(metrics: str | Path, path: str | Path) -> None:
    """Plot the scores that `Evaluations` wrote to the file `metrics`, as a PNG.

    One panel has the bits per byte of each text. The other panel has the accuracy of each task, and averages over
    tasks. If no row has such a score, no file is written. The file is written atomically. Needs matplotlib.
    """
    rows = read_rows(metrics)
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(_EVALUATION))
    labels = {name: _label_score(name.removeprefix(_EVALUATION)) for name in names}
    panels = [
        (title, curves)
        for title in ("bits per byte", "accuracy")
        if (curves := {name: label for name, (panel, label) in labels.items() if panel == title})
    ]
    if not panels:
        return
    figure = make_figure("plot_evaluations(metrics, path)", (6 * len(panels) + 2, 4.5))
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name, label in curves.items():
            axes.plot(*zip(*_list_points(rows, name)), marker="o", markersize=4, label=label)
        axes.set(xlabel="step", ylabel=title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    write_atomic(path, figure.savefig)


_EVALUATION = "evaluation/"
_SCORES = {"bits_per_byte": "bits per byte", "acc": "accuracy", "exact_match": "accuracy"}
"""The panel in which each kind of score is drawn."""


def _label_score(name: str) -> tuple[str | None, str]:
    """Return the panel and the label of a score such as `arc_easy/acc`; the panel is None if no panel draws it."""
    subject, _, metric = name.rpartition("/")
    if subject == "average":
        return "accuracy", f"average, {metric.replace('_', ' ')}"
    score, _, filter_name = metric.partition(" (")
    return _SCORES.get(score), f"{subject} ({filter_name}" if filter_name else subject


def plot_expert_loads(metrics: str | Path, path: str | Path) -> None:
    """Plot `expert_load` of the rows of the file `metrics` over the steps, as a PNG with a panel for each layer.

    If no row has loads, no file is written. The file is written atomically. Needs matplotlib.
    """
    rows = [row for row in read_rows(metrics) if "expert_load" in row]
    if not rows:
        return
    steps, loads = [row["step"] for row in rows], _stack_loads(rows, metrics)
    _, layers, experts = loads.shape
    figure = make_figure("plot_expert_loads(metrics, path)", (8, 0.6 + 1.1 * layers))
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(panels):
        shares = experts * loads[:, layer].T
        image = axes.pcolormesh(steps, range(experts), shares, cmap="RdBu_r", vmin=0, vmax=2, shading="nearest")
        axes.set(ylabel=f"layer {layer}", yticks=[0, experts - 1])
    panels[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(panels), label="load, as a multiple of an even share")
    write_atomic(path, figure.savefig)


def plot_rewards(metrics: str | Path, path: str | Path) -> None:
    """Plot the metrics of `policy_loss` in rows of the file `metrics`, as a PNG of four panels (`_REWARD_PANELS`).

    The panels show rewards, the length of completions, shares, and nats a token. If no row has a reward, no file is
    written. The file is written atomically. Needs matplotlib.
    """
    rows = read_rows(metrics)
    if not _list_points(rows, "reward"):
        return
    figure = make_figure("plot_rewards(metrics, path)", (11, 7))
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, _REWARD_PANELS.items(), strict=True):
        curves = {name: points for name in names if (points := _list_points(rows, name))}
        for name, points in curves.items():
            (line,) = axes.plot(*zip(*points), linewidth=1, alpha=0.45)
            label = name.replace("_", " ")
            axes.plot(*zip(*_smooth(points)), color=line.get_color(), linewidth=1.6, label=label)
        axes.set(xlabel="step", ylabel=title)
        axes.grid(alpha=0.25)
        if curves:
            axes.legend(frameon=False, fontsize=8)
    write_atomic(path, figure.savefig)


_REWARD_PANELS = {
    "reward": ("reward", "reward_std", "validation_reward"),
    "tokens of a completion": ("completion_tokens",),
    "share": ("clip_fraction", "truncated", "groups_without_signal"),
    "nats a token": ("entropy", "kl", "sampler_difference"),
}
"""The metrics that each panel of `plot_rewards` draws."""


def _list_points(rows: list[JsonObject], name: str) -> list[tuple[int | float, float]]:
    """Return the step and the value of each row that has a float of this name; `JsonLines` writes NaN as null."""
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]


def read_rows(metrics: str | Path) -> list[JsonObject]:
    """Read the rows of a metrics.jsonl."""
    with open_regular(metrics) as file:
        return [parse_row(line, f"{metrics}: line {number}") for number, line in enumerate(file, 1)]


def _stack_loads(rows: list[JsonObject], metrics: str | Path) -> Float[np.ndarray, "steps layers experts"]:
    try:
        loads = np.asarray([row["expert_load"] for row in rows], np.float64)
    except (TypeError, ValueError):
        loads = np.zeros(0)
    if loads.ndim != 3:
        raise ValueError(
            f"{metrics}: expert_load must hold one number for each layer and expert, with the same numbers of layers "
            "and experts in all rows; draw rows of one model only."
        )
    return loads


def make_figure(call: str, size: tuple[int | float, int | float]) -> Figure:
    """Make an empty figure of `size` inches; if matplotlib is missing, the error names the public `call`."""
    figures = load_extra("matplotlib.figure", extra="train", call=call)
    return figures.Figure(figsize=size, dpi=110, layout="constrained")


def _smooth(points: list[tuple[int | float, float]]) -> list[tuple[int | float, float]]:
    """Replace each value by the mean of a window centered on it, so that the smooth line does not lag behind."""
    half_width = max(1, len(points) // 40)
    losses = [loss for _, loss in points]
    windows = [losses[max(0, i - half_width) : i + half_width + 1] for i in range(len(points))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows)]


def plot_experts(
    chosen: Integer[np.ndarray, "mixtures seq"], pieces: Sequence[str], path: str | Path, *, title: str, lines: int = 12
) -> None:
    """Draw a text's first `lines` with each token in the color of its expert, as a PNG with a panel for each mixture.

    If `path` ends in .html, the file is a web page of the whole text. `chosen` is the result of `nn.first_experts` for
    the text's ids. `pieces` is the text of each id, as `data.TextStream(tokenizer).pieces(ids)` returns it. The file
    is written atomically. A PNG needs matplotlib.
    """
    colors = _make_colors(int(chosen.max()) + 1)
    if Path(path).suffix == ".html":
        write_atomic(path, _make_page(chosen, pieces, colors, title))
        return
    cells, letters = _lay_out(pieces, lines)
    height = max((line for line, _, _ in cells), default=0) + 1
    size = 0.105 * _WIDTH, 0.6 + len(chosen) * (0.2 * height + 0.35)
    figure = make_figure("plot_experts(chosen, pieces, path)", size)
    figure.suptitle(title, fontsize=10)
    for layer, axes in enumerate(figure.subplots(len(chosen), 1, squeeze=False)[:, 0]):
        image = np.ones((height, _WIDTH, 3))
        for line, column, piece in cells:
            image[line, column] = colors[chosen[layer, piece]]
        axes.imshow(image, aspect="auto", interpolation="nearest")
        for line, column, letter in letters:
            axes.text(column, line, letter, family=_FONT, fontsize=8, ha="center", va="center", parse_math=False)
        axes.set_title(f"mixture {layer}", fontsize=8, loc="left")
        axes.set_axis_off()
    write_atomic(path, figure.savefig)


_FONT = "DejaVu Sans Mono"  # matplotlib includes this font
_WIDTH = 96  # characters in a line of the picture


def _make_colors(experts: int) -> list[tuple[float, float, float]]:
    """Return a light color for each expert; neighboring experts are far apart on the color wheel."""
    golden = (math.sqrt(5) - 1) / 2
    return [colorsys.hls_to_rgb(number * golden % 1, 0.76, 0.65) for number in range(experts)]


def _make_page(chosen: np.ndarray, pieces: Sequence[str], colors: list[tuple[float, float, float]], title: str) -> str:
    """Return the web page of `plot_experts`."""
    hex_colors = ["#" + bytes(round(255 * channel) for channel in color).hex() for color in colors]
    styles = "".join(f".e{number}{{background:{color}}}" for number, color in enumerate(hex_colors))
    legend = " ".join(f'<span class="e{number}"> {number} </span>' for number in range(len(colors)))
    sections = []
    for layer, row in enumerate(chosen):
        spans = (f'<span class="e{e}" title="expert {e}">{html.escape(piece)}</span>' for piece, e in zip(pieces, row))
        sections.append(f"<h2>mixture {layer}</h2>\n<pre>{''.join(spans)}</pre>\n")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n<style>'
        "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;color:#222}pre{white-space:pre-wrap;"
        f"line-height:1.5}}{styles}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f"<p>Each token in the color of its first expert: <code>{legend}</code></p>\n"
        f"{''.join(sections)}</body></html>\n"
    )


def _lay_out(pieces: Sequence[str], lines: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, str]]]:
    """Return (line, column, piece) of each colored cell, and (line, column, letter) of each visible character."""
    fonts = load_extra("matplotlib.font_manager", extra="train", call="plot_experts(chosen, pieces, path)")
    glyphs = fonts.get_font(fonts.findfont(_FONT)).get_charmap()
    cells, letters, line, column = [], [], 0, 0
    for number, piece in enumerate(pieces):
        for letter in piece:
            if column == _WIDTH:
                line, column = line + 1, 0
            if line == lines:
                return cells, letters
            cells.append((line, column, number))
            if not letter.isspace():
                letters.append((line, column, letter if ord(letter) in glyphs else "\N{WHITE SQUARE}"))
            line, column = (line + 1, 0) if letter == "\n" else (line, column + 1)
    return cells, letters
