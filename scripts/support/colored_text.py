"""Colours a text by each token's first expert: a web page and a picture."""

import colorsys
import html
import math
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from eqformer import data, nn
from support.run_directory import RunDirectory
from support.whole import part_of, write_whole


matplotlib.use("agg")
FONT = "DejaVu Sans Mono"  # which matplotlib brings
WIDTH = 96  # characters a line of the picture


def has_choices(model: nn.Transformer) -> bool:
    """Whether the model has a mixture whose tokens choose their experts."""
    return any(not moe.router.facts().gives_slots for moe in nn.modules(model, nn.MoE))


def color(directory: RunDirectory, model: nn.Transformer, tokenizer: data.Tokenizer, ids: np.ndarray) -> None:
    """Write experts.html and experts.png of a text; raises a `ValueError` if tokens do not choose their experts."""
    chosen = np.asarray(eqx.filter_jit(nn.first_experts)(model, jnp.asarray(ids, jnp.int32)))
    text = data.TextStream(tokenizer)
    pieces = [text.push(int(number)) for number in ids]
    pieces[-1] += text.finish()
    title = f"{directory.path.name}: the expert that each token takes first"
    write_page(directory.experts_page, pieces, chosen, title)
    draw(directory.experts, pieces, chosen, title)


def colors(experts: int) -> list[str]:
    """Light colours, one for each expert, neighbours far apart on the colour wheel."""
    golden = (math.sqrt(5) - 1) / 2
    return [to_hex(colorsys.hls_to_rgb(number * golden % 1, 0.76, 0.65)) for number in range(experts)]


def write_page(target: Path, pieces: Sequence[str], chosen: np.ndarray, title: str) -> None:
    """Write `chosen`, an expert for each layer and piece of text, as a web page in one file."""
    experts = chosen.max() + 1
    styles = "".join(f".e{number}{{background:{color}}}" for number, color in enumerate(colors(experts)))
    legend = " ".join(f'<span class="e{number}"> {number} </span>' for number in range(experts))
    sections = []
    for layer, row in enumerate(chosen):
        spans = (f'<span class="e{e}" title="expert {e}">{html.escape(piece)}</span>' for piece, e in zip(pieces, row))
        sections.append(f"<h2>mixture {layer}</h2>\n<pre>{''.join(spans)}</pre>\n")
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n<style>'
        "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;color:#222}pre{white-space:pre-wrap;"
        f"line-height:1.5}}{styles}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f"<p>Each token in the colour of the expert that it takes first: <code>{legend}</code></p>\n"
        f"{''.join(sections)}</body></html>\n"
    )
    write_whole(target, page)


def draw(target: Path, pieces: Sequence[str], chosen: np.ndarray, title: str, lines: int = 12) -> None:
    """Draw the text's first lines, with a panel for each mixture-of-experts layer."""
    places, letters = _laid_out(pieces, lines)
    height = max((line for line, _, _ in places), default=0) + 1
    palette = np.asarray(list(map(to_rgb, colors(chosen.max() + 1))))
    figure = Figure(figsize=(0.105 * WIDTH, 0.6 + len(chosen) * (0.2 * height + 0.35)), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=10)
    for layer, axes in enumerate(figure.subplots(len(chosen), 1, squeeze=False)[:, 0]):
        image = np.ones((height, WIDTH, 3))
        for line, column, piece in places:
            image[line, column] = palette[chosen[layer, piece]]
        axes.imshow(image, aspect="auto", interpolation="nearest")
        for line, column, letter in letters:
            axes.text(column, line, letter, family=FONT, fontsize=8, ha="center", va="center", parse_math=False)
        axes.set_title(f"mixture {layer}", fontsize=8, loc="left")
        axes.set_axis_off()
    figure.savefig(part := part_of(target), format="png")
    part.replace(target)


def _laid_out(pieces: Sequence[str], lines: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, str]]]:
    """Line, column and piece of each coloured cell; and line, column and letter of each visible character."""
    glyphs = get_font(findfont(FONT)).get_charmap()
    places, letters, line, column = [], [], 0, 0
    for number, piece in enumerate(pieces):
        for letter in piece:
            if column == WIDTH:
                line, column = line + 1, 0
            if line == lines:
                return places, letters
            places.append((line, column, number))
            if not letter.isspace():
                letters.append((line, column, letter if ord(letter) in glyphs else "\N{WHITE SQUARE}"))
            line, column = (line + 1, 0) if letter == "\n" else (line, column + 1)
    return places, letters
