"""How arrays are sharded, as text: a table of a model and a drawing of one array."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ... import nn
from ..._extra import load_extra
from .._axes import CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR
from ._layout import axes_of, is_spec
from ._mesh import axis_sizes


@dataclasses.dataclass(frozen=True)
class Placed:
    """One array of a model and how it is cut: `axes` has, for each dim, the axes of more than one device."""

    path: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    piece: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    itemsize: int
    spec: PartitionSpec

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes_a_device(self) -> int:
        """Bytes of the piece that one device holds."""
        return math.prod(self.piece) * self.itemsize

    @property
    def named(self) -> str:
        """The dims with the axis beside each that is split: `layers/pipe heads/tensor head_dim embed`."""
        return " ".join("/".join((name, *axes)) for name, axes in zip(self.dims, self.axes, strict=True))


def placed_arrays(model: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> list[Placed]:
    """Each array of a model, or its shape, with how its spec splits it."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    names, its_specs = jax.tree.leaves(nn.dims(model)), structure.flatten_up_to(specs)
    found = []
    for (path, leaf), dims, spec in zip(leaves, names, its_specs, strict=True):
        if nn.has_shape(leaf):
            spec = spec if is_spec(spec) else PartitionSpec()
            axes = split_axes(leaf.ndim, spec, mesh)
            piece = NamedSharding(mesh, spec).shard_shape(leaf.shape)
            size = 0 if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf.dtype.itemsize
            found.append(Placed(nn.path_name(path), tuple(dims.split()), leaf.shape, piece, axes, size, spec))
    return found


def split_axes(ndim: int, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """For each dim, the axes of more than one device that split it."""
    sizes = axis_sizes(mesh)
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    used = [tuple(axis for axis in entry if sizes[axis] > 1) for entry in entries]
    return (*used, *((),) * (ndim - len(used)))


def holders(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """The devices that hold each piece; a piece is where it starts and ends along each dim."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        piece = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        found.setdefault(piece, []).append(device.id)
    return {piece: sorted(devices) for piece, devices in sorted(found.items())}


def layout_table(model: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> str:
    """A printable table of every array: path, dims with the axis beside each that is split, shapes, bytes, totals.

    `specs` is what `partition_specs` gives for the model or its shapes. The last line lists what is whole everywhere.
    """
    arrays = placed_arrays(model, specs, mesh)
    shape = lambda sizes: "x".join(map(str, sizes)) or "scalar"
    rows = [("path", "dims", "shape", "a device", "bytes", "bytes a device")]
    rows += [
        (x.path, x.named, shape(x.shape), shape(x.piece), f"{x.nbytes:,}", f"{x.bytes_a_device:,}") for x in arrays
    ]
    total, own = sum(x.nbytes for x in arrays), sum(x.bytes_a_device for x in arrays)
    rows.append(("total", "", "", f"{own / total:.1%}" if total else "", f"{total:,}", f"{own:,}"))
    whole = [x for x in arrays if not any(x.axes)]
    size = sum(x.nbytes for x in whole)
    listed = f"whole on every device ({size:,} bytes): {', '.join(x.path for x in whole) or 'nothing'}"
    return f"mesh: {mesh_name(mesh)}\n{nn.format_table(rows)}\n{listed}"


def mesh_name(mesh: Mesh | AbstractMesh) -> str:
    """The axes of more than one device and their sizes: `fsdp=2 tensor=4, 8 devices`."""
    axes = " ".join(f"{axis}={size}" for axis, size in axis_sizes(mesh).items() if size > 1)
    return f"{axes}{', ' if axes else ''}{mesh.size} device{'s' * (mesh.size > 1)}"


def draw_array(array: Array | np.ndarray | jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> str:
    """A text drawing of how an array, or the shape of one, is spread: a box a piece, in it its devices' numbers.

    Only dims that are split are drawn: the last to the right, the one before it downwards, and for each place along
    any others a drawing of its own. Raises a `ValueError` where the spec does not fit the shape.
    """
    shape = array.shape
    axes = _fitting_axes(shape, spec, mesh)
    pieces = holders(shape, spec, mesh)
    split = [place for place, used in enumerate(axes) if used]
    starts = {place: sorted({piece[place] for piece in pieces}) for place in split}
    *outer, down, right = [None, None, *split][-max(2, len(split)) :]
    own = NamedSharding(mesh, spec).shard_shape(shape)
    over = ", ".join(f"dim {place} over {' and '.join(axes[place])}" for place in split)
    lines = [f"{list(shape)} over {mesh_name(mesh)}: pieces of {list(own)}, {over or 'whole everywhere'}"]
    for fixed in itertools.product(*(starts[place] for place in outer)):
        chosen = dict(zip(outer, fixed, strict=True))
        lines += [", ".join(f"dim {place} {_range(part)}" for place, part in chosen.items())] if outer else []
        rows = [
            [
                compact(devices)
                for piece, devices in pieces.items()
                if all(piece[place] == part for place, part in {**chosen, **along}.items())
            ]
            for along in ([{down: part} for part in starts[down]] if down is not None else [{}])
        ]
        heads = [_range(part) for part in starts[right]] if right is not None else []
        sides = [f"dim {down} {_range(part)} " for part in starts[down]] if down is not None else [""]
        lines += _boxes(rows, heads, sides, "" if right is None else f"dim {right} ")
    return "\n".join(lines)


def _fitting_axes(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    sizes = axis_sizes(mesh)
    call = f"draw_array: an array of shape {list(shape)} and the spec {spec}"
    if unknown := sorted(axes_of(spec) - sizes.keys()):
        raise ValueError(f"{call}: the mesh has no axis {unknown}; its axes are {list(sizes)}.")
    if len(spec) > len(shape):
        raise ValueError(f"{call}: it speaks of {len(spec)} dims; give at most {len(shape)} entries.")
    axes = split_axes(len(shape), spec, mesh)
    for place, (size, used) in enumerate(zip(shape, axes)):
        number = math.prod(sizes[axis] for axis in used)
        if size % number:
            raise ValueError(f"{call}: dim {place}, of {size}, is cut into {number} pieces; leave it whole.")
    return axes


def _range(part: tuple[int, int]) -> str:
    return f"{part[0]}:{part[1]}"


def compact(devices: list[int]) -> str:
    """`0-3` for a run of at least three numbers, else `0 4`."""
    run = len(devices) > 2 and devices[-1] - devices[0] == len(devices) - 1
    return f"{devices[0]}-{devices[-1]}" if run else " ".join(map(str, devices))


def _boxes(rows: list[list[str]], heads: list[str], sides: list[str], name: str) -> list[str]:
    width = max(map(len, itertools.chain(heads, *rows)))
    margin = max(map(len, [*sides, name]))
    rule = " " * margin + ("+" + "-" * (width + 2)) * len(rows[0]) + "+"
    lines = [(name.rjust(margin) + "".join(f"  {head.center(width)} " for head in heads)).rstrip()] if heads else []
    for side, row in zip(sides, rows, strict=True):
        lines += [rule, side.rjust(margin) + "".join(f"| {cell.center(width)} " for cell in row) + "|"]
    return [*lines, rule]


COLOURS = {
    REPLICA: "#6b7785",
    FSDP: "#c2690c",
    EXPERT: "#3c8a4e",
    PIPE: "#6d4fa3",
    CONTEXT: "#b13a74",
    TENSOR: "#1f6fb2",
}
INK, FAINT, WHOLE, PLAIN, FIRST, OTHERS = "#1d2733", "#7b8794", "#eceef1", "#c9ced5", "#34475c", "#dfe5ec"
ROW, HEAD, FOOT, WIDTH = 0.5, 1.25, 0.55, 15.0  # inches
CHAR = 0.0885  # inches a letter of the dims takes
BOXES, BARS = 3.6, 3.0  # inches
CALL = "picture_layout(model, specs, mesh, path)"


def picture_layout(model: PyTree, specs: PyTree, mesh: Mesh, path: str | Path) -> None:
    """A PNG with a row an array: its dims, those that are split in their axis's colour; its pieces; and its bytes.

    A box is cut into the pieces that devices hold, with the devices' numbers inside and gaps in the colours of the
    axes; the pieces of device 0, or of the first there is, are dark. The bar shows the bytes of the array and, dark,
    those that one device holds, the longest bar being the largest array. Needs matplotlib.
    """
    figures = load_extra("matplotlib.figure", extra="train", call=CALL)
    arrays = placed_arrays(model, specs, mesh)
    prefix, names = _shortened([array.path for array in arrays])
    left = 0.3 + 0.095 * max(map(len, names)) + 0.3
    dims = CHAR * max(len(array.named.replace("/", " ")) for array in arrays) + 0.5
    width, height = max(WIDTH, left + dims + BOXES + BARS + 1.2), HEAD + ROW * len(arrays) + FOOT
    figure = figures.Figure(figsize=(width, height), dpi=110, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    boxes = left + dims
    bars = boxes + BOXES + 0.45
    _heading(axes, arrays, mesh, width)
    places = (0.3, f"array{f',  … = {prefix[:-1]}' if prefix else ''}"), (left, "dims / axes"), (boxes, "pieces")
    for x, text in (*places, (bars, "bytes, and bytes a device")):
        axes.text(x, HEAD - 0.12, text, fontsize=9.5, color=FAINT, va="bottom")
    for row, (array, name) in enumerate(zip(arrays, names, strict=True)):
        y = HEAD + ROW * row
        if row % 2 == 0:
            _box(axes, 0.15, y, width - 0.3, ROW, "#f7f8fa")
        axes.text(0.3, y + ROW / 2, name, fontsize=10.5, color=INK, va="center")
        _draw_dims(axes, array, left, y + ROW / 2)
        _draw_pieces(axes, array, mesh, boxes, y + 0.06, ROW - 0.12)
        _draw_bytes(axes, array, max(other.nbytes for other in arrays), bars, y + ROW / 2, width - bars - 2.3)
    _footing(axes, arrays, height)
    figure.savefig(path, format="png")


def _shortened(paths: list[str]) -> tuple[str, list[str]]:
    """The beginning that most paths have up to a dot, and the paths with an ellipsis in its place."""
    starts = [path[: place + 1] for path in paths for place, letter in enumerate(path) if letter == "."]
    common = [start for start in set(starts) if starts.count(start) > len(paths) / 2]
    prefix = max(common, key=len, default="")
    return prefix, [path.replace(prefix, "… ", 1) if prefix and path.startswith(prefix) else path for path in paths]


def _size(nbytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def _box(axes: Any, x: float, y: float, width: float, height: float, colour: str, zorder: int = 1) -> None:
    patches = load_extra("matplotlib.patches", extra="train", call=CALL)
    axes.add_patch(patches.Rectangle((x, y), width, height, facecolor=colour, edgecolor="none", zorder=zorder))


def _heading(axes: Any, arrays: list[Placed], mesh: Mesh, width: float) -> None:
    total, own = sum(x.nbytes for x in arrays), sum(x.bytes_a_device for x in arrays)
    axes.text(0.3, 0.36, f"{mesh_name(mesh)}", fontsize=15, fontweight="bold", color=INK, va="center")
    share = f"{_size(own)} of {_size(total)} on each device ({own / max(total, 1):.1%})"
    axes.text(0.3, 0.72, share, fontsize=11.5, color=INK, va="center")
    used = {axis for array in arrays for entry in array.axes for axis in entry}
    entries = [(f"{axis} = {size}", COLOURS.get(axis, INK)) for axis, size in axis_sizes(mesh).items() if axis in used]
    first = min(device.id for device in mesh.devices.flat)
    entries += [(f"device {first}", FIRST), ("other devices", OTHERS)]
    x = width - 0.3
    for text, colour in reversed(entries):
        x -= 0.088 * len(text)
        axes.text(x, 0.36, text, fontsize=10.5, color=INK, va="center")
        _box(axes, x - 0.3, 0.26, 0.2, 0.2, colour)
        x -= 0.58


def _footing(axes: Any, arrays: list[Placed], height: float) -> None:
    whole = [array for array in arrays if not any(array.axes)]
    paths = [array.path for array in whole]
    listed = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    text = f"whole on every device, {_size(sum(array.nbytes for array in whole))}: {listed or 'nothing'}"
    axes.text(0.3, height - FOOT / 2, text, fontsize=10, color=FAINT, va="center")


def _draw_dims(axes: Any, array: Placed, x: float, y: float) -> None:
    for name, used in zip(array.dims, array.axes, strict=True):
        text = " ".join((name, *used))
        if used:
            _box(axes, x - 0.06, y - 0.13, CHAR * len(text) + 0.12, 0.26, COLOURS.get(used[0], INK), 2)
        style = {"color": "white" if used else INK, "zorder": 3, "va": "center_baseline"}
        axes.text(x, y, name, fontsize=9.5, fontfamily="monospace", fontweight="bold" if used else "normal", **style)
        axes.text(x + CHAR * (len(name) + 1), y, " ".join(used), fontsize=9.5, fontfamily="monospace", **style)
        x += CHAR * (len(text) + 1) + 0.08


def _draw_pieces(axes: Any, array: Placed, mesh: Mesh, x: float, y: float, height: float) -> None:
    """A box that is cut by each split dim in turn, the first ones outermost, the one with the fewest cuts downwards."""
    split = [place for place, used in enumerate(array.axes) if used]
    pieces = holders(array.shape, array.spec, mesh)
    if not split:
        _box(axes, x, y, BOXES, height, FIRST, 2)
        axes.text(x + BOXES / 2, y + height / 2, "all", fontsize=8.5, color="white", ha="center", va="center", zorder=4)
        return
    first = min(device for devices in pieces.values() for device in devices)
    starts = {place: sorted({piece[place] for piece in pieces}) for place in split}
    down = min([*split[-2:], *split[:-2]], key=lambda place: len(starts[place])) if len(split) > 1 else None
    for piece, devices in pieces.items():
        left, top, wide, high = x, y, BOXES, height
        for place in split:
            number, at, colour = len(starts[place]), starts[place].index(piece[place]), array.axes[place][0]
            gap = min(0.05, 0.2 * (high if place == down else wide) / number)
            if place == down:
                step = (high + gap) / number
                _box(axes, left, top + at * step + step - gap, wide, gap * (at < number - 1), COLOURS.get(colour, INK))
                top, high = top + at * step, step - gap
            else:
                step = (wide + gap) / number
                _box(axes, left + at * step + step - gap, top, gap * (at < number - 1), high, COLOURS.get(colour, INK))
                left, wide = left + at * step, step - gap
        dark, text = first in devices, compact(devices)
        _box(axes, left, top, wide, high, FIRST if dark else OTHERS, 2)
        size = min(8.5, 72 * high * 0.8, 72 * wide * 0.9 / (0.6 * len(text)))
        if size >= 4.5:  # smaller ones would not be legible
            middle = left + wide / 2, top + high / 2
            ink = "white" if dark else INK
            axes.text(*middle, text, fontsize=size, color=ink, ha="center", va="center_baseline", zorder=4)


def _draw_bytes(axes: Any, array: Placed, largest: int, x: float, y: float, width: float) -> None:
    scale = width / np.maximum(largest, 1)
    _box(axes, x, y - 0.09, array.nbytes * scale, 0.18, PLAIN, 2)
    _box(axes, x, y - 0.09, array.bytes_a_device * scale, 0.18, FIRST, 3)
    text = f"{_size(array.nbytes)}  →  {_size(array.bytes_a_device)}"
    axes.text(x + array.nbytes * scale + 0.1, y, text, fontsize=9.5, color=INK, va="center")
