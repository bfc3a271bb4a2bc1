"""Descriptions of plans and shardings: a summary line, a table of a model, a text drawing of an array, a picture."""

import dataclasses
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .. import nn
from .._failures import Axes, load_extra
from ._layer_tables import describe_whole_tables
from ._mesh import axes_by_dim, axes_of, axis_sizes, BATCH_AXES, CONTEXT, EXPERT, FSDP, is_spec, PIPE, REPLICA, TENSOR
from ._placement import Placement
from .pipeline._simulate import simulate


def summary(plan: Placement, model: nn.LanguageModel, *, rows: int, seq: int) -> str:
    """Return a line with the mesh, the fields of the plan that matter on the mesh, and a pipeline's bubble.

    The line also names large tables of layers that stay whole on each device of an axis.
    `rows` and `seq` are the numbers of rows and tokens of a batch of the model.
    """
    devices, sizes = plan.mesh.size, axis_sizes(plan.mesh)
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "no axis is split"
    parts = [f"{devices} device{'s' * (devices > 1)}: {axes}"]
    if sizes["fsdp"] > 1:
        parts.append(f"zero {plan.zero}")
    if sizes["tensor"] > 1:
        parts.append(f"{plan.residual} stream" + (f", overlap {plan.overlap}" if plan.overlap != "none" else ""))
    if sizes["expert"] > 1:
        pieces = math.prod(map(plan.size, (*BATCH_AXES, CONTEXT))) * plan.microbatches
        methods = {
            plan.expert_method_of(model, moe, rows * seq // pieces) for moe in nn.modules(model, nn.ExpertMixture)
        }
        parts += [f"experts by {method}" for method in sorted(methods)]
    if sizes["context"] > 1:
        parts.append(f"context by {plan.context_method}")
    if plan.is_pipelined:
        schedule = plan.timetable()
        timing = simulate(schedule).lock_step
        chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
        bubble = f"bubble {100 * timing.bubble:.1f} %"
        parts.append(f"{schedule.name}, {plan.microbatches} microbatches{chunks}, {bubble}")
    elif plan.microbatches > 1:
        parts.append(f"{plan.microbatches} microbatches one after another")
    parts += describe_whole_tables(plan, model)
    return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """An array of a model, with its sharding."""

    path: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    """For each dim, the axes of more than one device that split it."""
    itemsize: int
    spec: PartitionSpec

    @property
    def nbytes(self) -> int:
        """Bytes of the full array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the shard that one device holds."""
        return math.prod(self.shard_shape) * self.itemsize

    @property
    def dims_with_axes(self) -> str:
        """Names of the dims, with the axes of split dims: `layers/pipe heads/tensor head_dim embed`."""
        return " ".join("/".join((name, *axes)) for name, axes in zip(self.dims, self.axes, strict=True))


def sharded_arrays(model: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> list[ShardedArray]:
    """Return the arrays of a model, or of its shapes, with their shardings in `specs`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    names, leaf_specs = jax.tree.leaves(nn.dims(model)), structure.flatten_up_to(specs)
    arrays = []
    for (path, leaf), dims, spec in zip(leaves, names, leaf_specs, strict=True):
        if nn.has_shape(leaf):
            spec = spec if is_spec(spec) else PartitionSpec()
            axes = split_axes(leaf.ndim, spec, mesh)
            shard_shape = NamedSharding(mesh, spec).shard_shape(leaf.shape)
            size = 0 if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf.dtype.itemsize
            name = nn.path_name(path)
            arrays.append(ShardedArray(name, tuple(dims.split()), leaf.shape, shard_shape, axes, size, spec))
    return arrays


def split_axes(ndim: int, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """Return, for each dim, the axes of more than one device that split it."""
    sizes = axis_sizes(mesh)
    used_axes = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in axes_by_dim(spec)]
    return (*used_axes, *((),) * (ndim - len(used_axes)))


def devices_by_piece(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """Return the ids of the devices that hold each piece; a piece is a pair of start and end for each dim."""
    devices: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        piece = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices.setdefault(piece, []).append(device.id)
    return {piece: sorted(ids) for piece, ids in sorted(devices.items())}


def layout_table(model: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> str:
    """Return a text table with path, dims and their axes, shapes and bytes of every array, and the total bytes.

    `specs` is the result of `partition_specs` for the model or its shapes. The last line lists the replicated arrays.
    """
    arrays = sharded_arrays(model, specs, mesh)
    rows = [("path", "dims", "shape", "per device", "bytes", "bytes per device")]
    for x in arrays:
        shape, shard_shape = ("x".join(map(str, sizes)) or "scalar" for sizes in (x.shape, x.shard_shape))
        rows.append((x.path, x.dims_with_axes, shape, shard_shape, f"{x.nbytes:,}", f"{x.bytes_per_device:,}"))
    total, per_device = sum(x.nbytes for x in arrays), sum(x.bytes_per_device for x in arrays)
    rows.append(("total", "", "", f"{per_device / total:.1%}" if total else "", f"{total:,}", f"{per_device:,}"))
    replicated = [x for x in arrays if not any(x.axes)]
    size = sum(x.nbytes for x in replicated)
    last_line = f"replicated on every device ({size:,} bytes): {', '.join(x.path for x in replicated) or 'nothing'}"
    return f"mesh: {mesh_name(mesh)}\n{nn.format_table(rows)}\n{last_line}"


def mesh_name(mesh: Mesh | AbstractMesh) -> str:
    """Return the axes of more than one device with their sizes, as text: `fsdp=2 tensor=4, 8 devices`."""
    axes = " ".join(f"{axis}={size}" for axis, size in axis_sizes(mesh).items() if size > 1)
    return f"{axes}{', ' if axes else ''}{mesh.size} device{'s' * (mesh.size > 1)}"


def draw_array(array: Array | np.ndarray | jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> str:
    """Draw the sharding of an array, or of a shape, as text: a box for each piece, with the ids of its devices.

    Only split dims are drawn: the last split dim from left to right, and the split dim before it from top to bottom. If
    more dims are split, there is a drawing for each combination of pieces along the other split dims. Raises a
    `ValueError` if the spec does not fit the shape.
    """
    shape = array.shape
    axes = _check_axes(shape, spec, mesh)
    pieces = devices_by_piece(shape, spec, mesh)
    split_dims = [dim for dim, dim_axes in enumerate(axes) if dim_axes]
    ranges = {dim: sorted({piece[dim] for piece in pieces}) for dim in split_dims}
    # The last two split dims are drawn, `down` and `right`; None stands for a missing split dim.
    *outer, down, right = [None, None, *split_dims][-max(2, len(split_dims)) :]
    shard_shape = NamedSharding(mesh, spec).shard_shape(shape)
    splits = ", ".join(f"dim {dim} over {' and '.join(axes[dim])}" for dim in split_dims)
    lines = [f"{list(shape)} over {mesh_name(mesh)}: pieces of {list(shard_shape)}, {splits or 'replicated'}"]
    for outer_ranges in itertools.product(*(ranges[dim] for dim in outer)):
        fixed = dict(zip(outer, outer_ranges, strict=True))
        lines += [", ".join(f"dim {dim} {_format_range(part)}" for dim, part in fixed.items())] if outer else []
        down_ranges = [{}] if down is None else [{down: part} for part in ranges[down]]
        rows = [_format_boxes(pieces, {**fixed, **down_range}) for down_range in down_ranges]
        heads = [_format_range(part) for part in ranges[right]] if right is not None else []
        sides = [f"dim {down} {_format_range(part)} " for part in ranges[down]] if down is not None else [""]
        lines += _draw_boxes(rows, heads, sides, "" if right is None else f"dim {right} ")
    return "\n".join(lines)


def _format_boxes(
    pieces: dict[tuple[tuple[int, int], ...], list[int]], ranges: dict[int, tuple[int, int]]
) -> list[str]:
    """Return the text of the devices of each piece that has the given range in each dim of `ranges`."""
    return [
        format_devices(devices)
        for piece, devices in pieces.items()
        if all(piece[dim] == part for dim, part in ranges.items())
    ]


def _check_axes(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Return the axes that split each dim; raise a `ValueError` if the spec does not fit the shape."""
    sizes = axis_sizes(mesh)
    call = f"draw_array: an array of shape {list(shape)} and the spec {spec}"
    if unknown := sorted(axes_of(spec) - sizes.keys()):
        raise ValueError(f"{call}: the mesh has no axis {unknown}; its axes are {list(sizes)}.")
    if len(spec) > len(shape):
        raise ValueError(f"{call}: the spec has entries for {len(spec)} dims; give at most {len(shape)} entries.")
    axes = split_axes(len(shape), spec, mesh)
    for dim, (size, dim_axes) in enumerate(zip(shape, axes)):
        pieces = math.prod(sizes[axis] for axis in dim_axes)
        if size % pieces:
            raise ValueError(f"{call}: {pieces} pieces do not divide dim {dim}, of size {size}; leave it whole.")
    return axes


def _format_range(part: tuple[int, int]) -> str:
    return f"{part[0]}:{part[1]}"


def format_devices(devices: list[int]) -> str:
    """Return the ids of devices as text: `0-3` for at least three consecutive ids, otherwise `0 4`."""
    is_run = len(devices) > 2 and devices[-1] - devices[0] == len(devices) - 1
    return f"{devices[0]}-{devices[-1]}" if is_run else " ".join(map(str, devices))


def _draw_boxes(rows: list[list[str]], heads: list[str], sides: list[str], name: str) -> list[str]:
    width = max(map(len, itertools.chain(heads, *rows)))
    margin = max(map(len, [*sides, name]))
    rule = " " * margin + ("+" + "-" * (width + 2)) * len(rows[0]) + "+"
    lines = [(name.rjust(margin) + "".join(f"  {head.center(width)} " for head in heads)).rstrip()] if heads else []
    for side, row in zip(sides, rows, strict=True):
        lines += [rule, side.rjust(margin) + "".join(f"| {cell.center(width)} " for cell in row) + "|"]
    return [*lines, rule]


AXIS_COLORS = {
    REPLICA: "#6b7785",
    FSDP: "#c2690c",
    EXPERT: "#3c8a4e",
    PIPE: "#6d4fa3",
    CONTEXT: "#b13a74",
    TENSOR: "#1f6fb2",
}
INK, FAINT, BAR, FIRST_DEVICE, OTHER_DEVICES = "#1d2733", "#7b8794", "#c9ced5", "#34475c", "#dfe5ec"
# Sizes in inches; LETTER_WIDTH is the width of a letter in the names of dims.
ROW_HEIGHT, HEADING_HEIGHT, FOOTING_HEIGHT, LEAST_WIDTH = 0.5, 1.25, 0.55, 15.0
LETTER_WIDTH = 0.0885
BOXES_WIDTH, BARS_WIDTH = 3.6, 3.0
CALL = "plot_layout(model, specs, mesh, path)"


def plot_layout(model: PyTree, specs: PyTree, mesh: Mesh, path: str | Path) -> None:
    """Write a PNG with a row for each array, which shows its dims, its pieces and its bytes.

    Split dims have the color of their axis. A box is cut into the pieces that devices hold. Each piece shows the
    ids of its devices, and the gap between two pieces has the color of the axis that splits them. The pieces of the
    device with the lowest id are dark. A bar shows the bytes of the array; its dark part shows the bytes on one
    device. Needs matplotlib.
    """
    figures = load_extra("matplotlib.figure", extra="train", call=CALL)
    arrays = sharded_arrays(model, specs, mesh)
    prefix, names = _shorten_paths([array.path for array in arrays])
    dims_x = 0.3 + 0.095 * max(map(len, names)) + 0.3
    dims_width = LETTER_WIDTH * max(len(array.dims_with_axes.replace("/", " ")) for array in arrays) + 0.5
    width = max(LEAST_WIDTH, dims_x + dims_width + BOXES_WIDTH + BARS_WIDTH + 1.2)
    height = HEADING_HEIGHT + ROW_HEIGHT * len(arrays) + FOOTING_HEIGHT
    figure = figures.Figure(figsize=(width, height), dpi=110, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    boxes_x = dims_x + dims_width
    bars_x = boxes_x + BOXES_WIDTH + 0.45
    _draw_heading(axes, arrays, mesh, width)
    titles = [(0.3, f"array{f',  … = {prefix[:-1]}' if prefix else ''}"), (dims_x, "dims / axes")]
    titles += [(boxes_x, "pieces"), (bars_x, "bytes, and bytes per device")]
    for x, text in titles:
        axes.text(x, HEADING_HEIGHT - 0.12, text, fontsize=9.5, color=FAINT, va="bottom")
    for row, (array, name) in enumerate(zip(arrays, names, strict=True)):
        y = HEADING_HEIGHT + ROW_HEIGHT * row
        if row % 2 == 0:
            _draw_box(axes, 0.15, y, width - 0.3, ROW_HEIGHT, "#f7f8fa")
        middle = y + ROW_HEIGHT / 2
        axes.text(0.3, middle, name, fontsize=10.5, color=INK, va="center")
        _draw_dims(axes, array, dims_x, middle)
        _draw_pieces(axes, array, mesh, boxes_x, y + 0.06, ROW_HEIGHT - 0.12)
        _draw_bytes(axes, array, max(x.nbytes for x in arrays), bars_x, middle, width - bars_x - 2.3)
    _draw_footing(axes, arrays, height)
    figure.savefig(path, format="png")


def _shorten_paths(paths: list[str]) -> tuple[str, list[str]]:
    """Return the longest prefix, up to a dot, that most paths share, and the paths with an ellipsis instead of it."""
    starts = [path[: index + 1] for path in paths for index, letter in enumerate(path) if letter == "."]
    common = [start for start in set(starts) if starts.count(start) > len(paths) / 2]
    prefix = max(common, key=len, default="")
    return prefix, [path.replace(prefix, "… ", 1) if prefix and path.startswith(prefix) else path for path in paths]


def _format_bytes(nbytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def _draw_box(axes: Axes, x: float, y: float, width: float, height: float, color: str, zorder: int = 1) -> None:
    patches = load_extra("matplotlib.patches", extra="train", call=CALL)
    axes.add_patch(patches.Rectangle((x, y), width, height, facecolor=color, edgecolor="none", zorder=zorder))


def _draw_heading(axes: Axes, arrays: list[ShardedArray], mesh: Mesh, width: float) -> None:
    total, per_device = sum(x.nbytes for x in arrays), sum(x.bytes_per_device for x in arrays)
    axes.text(0.3, 0.36, f"{mesh_name(mesh)}", fontsize=15, fontweight="bold", color=INK, va="center")
    share = f"{_format_bytes(per_device)} of {_format_bytes(total)} on each device ({per_device / max(total, 1):.1%})"
    axes.text(0.3, 0.72, share, fontsize=11.5, color=INK, va="center")
    used_axes = {axis for array in arrays for entry in array.axes for axis in entry}
    sizes = axis_sizes(mesh)
    legend = [(f"{axis} = {size}", AXIS_COLORS.get(axis, INK)) for axis, size in sizes.items() if axis in used_axes]
    first = min(device.id for device in mesh.devices.flat)
    legend += [(f"device {first}", FIRST_DEVICE), ("other devices", OTHER_DEVICES)]
    x = width - 0.3
    for text, color in reversed(legend):
        x -= 0.088 * len(text)
        axes.text(x, 0.36, text, fontsize=10.5, color=INK, va="center")
        _draw_box(axes, x - 0.3, 0.26, 0.2, 0.2, color)
        x -= 0.58


def _draw_footing(axes: Axes, arrays: list[ShardedArray], height: float) -> None:
    replicated = [array for array in arrays if not any(array.axes)]
    paths = [array.path for array in replicated]
    names = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    nbytes = _format_bytes(sum(array.nbytes for array in replicated))
    text = f"replicated on every device, {nbytes}: {names or 'nothing'}"
    axes.text(0.3, height - FOOTING_HEIGHT / 2, text, fontsize=10, color=FAINT, va="center")


def _draw_dims(axes: Axes, array: ShardedArray, x: float, y: float) -> None:
    for name, dim_axes in zip(array.dims, array.axes, strict=True):
        text = " ".join((name, *dim_axes))
        if dim_axes:
            color = AXIS_COLORS.get(dim_axes[0], INK)
            _draw_box(axes, x - 0.06, y - 0.13, LETTER_WIDTH * len(text) + 0.12, 0.26, color, 2)
        style = {"color": "white" if dim_axes else INK, "zorder": 3, "va": "center_baseline"}
        style |= {"fontsize": 9.5, "fontfamily": "monospace"}
        axes.text(x, y, name, fontweight="bold" if dim_axes else "normal", **style)
        axes.text(x + LETTER_WIDTH * (len(name) + 1), y, " ".join(dim_axes), **style)
        x += LETTER_WIDTH * (len(text) + 1) + 0.08


def _draw_pieces(axes: Axes, array: ShardedArray, mesh: Mesh, x: float, y: float, height: float) -> None:
    """Draw a box that is cut by each split dim in turn, from the first dim to the last.

    If several dims are split, the dim with the fewest pieces is drawn downwards, and the others to the right.
    """
    split_dims = [dim for dim, dim_axes in enumerate(array.axes) if dim_axes]
    pieces = devices_by_piece(array.shape, array.spec, mesh)
    if not split_dims:
        _draw_box(axes, x, y, BOXES_WIDTH, height, FIRST_DEVICE, 2)
        style = {"fontsize": 8.5, "color": "white", "ha": "center", "va": "center", "zorder": 4}
        axes.text(x + BOXES_WIDTH / 2, y + height / 2, "all", **style)
        return
    first = min(device for devices in pieces.values() for device in devices)
    ranges = {dim: sorted({piece[dim] for piece in pieces}) for dim in split_dims}
    by_preference = [*split_dims[-2:], *split_dims[:-2]]
    down = min(by_preference, key=lambda dim: len(ranges[dim])) if len(split_dims) > 1 else None
    for piece, devices in pieces.items():
        box_x, box_y, box_width, box_height = x, y, BOXES_WIDTH, height
        for dim in split_dims:
            count, index = len(ranges[dim]), ranges[dim].index(piece[dim])
            color = AXIS_COLORS.get(array.axes[dim][0], INK)
            gap = min(0.05, 0.2 * (box_height if dim == down else box_width) / count)
            drawn_gap = gap * (index < count - 1)
            if dim == down:
                step = (box_height + gap) / count
                _draw_box(axes, box_x, box_y + index * step + step - gap, box_width, drawn_gap, color)
                box_y, box_height = box_y + index * step, step - gap
            else:
                step = (box_width + gap) / count
                _draw_box(axes, box_x + index * step + step - gap, box_y, drawn_gap, box_height, color)
                box_x, box_width = box_x + index * step, step - gap
        is_first, text = first in devices, format_devices(devices)
        _draw_box(axes, box_x, box_y, box_width, box_height, FIRST_DEVICE if is_first else OTHER_DEVICES, 2)
        size = min(8.5, 72 * box_height * 0.8, 72 * box_width * 0.9 / (0.6 * len(text)))
        if size >= 4.5:  # Smaller numbers would not be legible.
            style = {"fontsize": size, "color": "white" if is_first else INK, "ha": "center", "zorder": 4}
            axes.text(box_x + box_width / 2, box_y + box_height / 2, text, va="center_baseline", **style)


def _draw_bytes(axes: Axes, array: ShardedArray, largest: int, x: float, y: float, width: float) -> None:
    scale = width / np.maximum(largest, 1)
    _draw_box(axes, x, y - 0.09, array.nbytes * scale, 0.18, BAR, 2)
    _draw_box(axes, x, y - 0.09, array.bytes_per_device * scale, 0.18, FIRST_DEVICE, 3)
    text = f"{_format_bytes(array.nbytes)}  →  {_format_bytes(array.bytes_per_device)}"
    axes.text(x + array.nbytes * scale + 0.1, y, text, fontsize=9.5, color=INK, va="center")
