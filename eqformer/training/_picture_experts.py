"""A text coloured by the expert that each token takes first: a picture or a page."""

import colorsys
import html
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from .._atomic_write import write_atomic
from .._extra import load_extra
from ._pictures import figure_of


def picture_experts(
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
    figure = figure_of("picture_experts(chosen, pieces, path)", size)
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
    fonts = load_extra("matplotlib.font_manager", extra="train", call="picture_experts(chosen, pieces, path)")
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
