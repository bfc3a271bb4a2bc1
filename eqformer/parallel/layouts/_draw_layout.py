"""How arrays are sharded, as text: a table of a model and a drawing of one array."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ... import nn
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
