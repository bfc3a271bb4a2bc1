"""From the names of dims to mesh axes: the sharding of each array."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeGuard

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ... import nn
from ..._prepare import run_once
from ..._shapes import ENSEMBLE_DIMS, is_shape
from ._mesh import axis_sizes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axis splits each named dim: `Layout({"heads": "tensor", "mlp": "tensor", "layers": "pipe"})`.

    An axis splits an array once: where several of its dims ask for one axis, the last takes it, which in a linear map
    (outputs, then inputs) is the side that it contracts. Dims in `lenient` stay whole where their axis does not divide
    them. Where the axis of a dim in `moving` does not, it splits the largest other dim that it can. For all other
    dims that is an error. `fsdp_axis` is one more axis, over which every array of at least `smallest` entries is split
    on its largest dim that it divides and that is still whole, but not on an ensemble's: fully sharded state.
    """

    dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lenient: frozenset[str] = frozenset()
    fsdp_axis: str | None = None
    smallest: int = 1024
    moving: frozenset[str] = frozenset()


def partition_specs(model: PyTree, layout: Layout, mesh: Mesh | AbstractMesh) -> PyTree:
    """A tree like `model` with a `PartitionSpec` for each array, and None for all else.

    Works on arrays and on shapes. Raises a `ValueError` that names the array, the dim, its size, the axis and its size
    where an axis does not divide a dim.
    """
    sizes = axis_sizes(mesh)
    for name, axis in layout.dims.items():
        if axis not in sizes:
            raise ValueError(f"Layout({{{name!r}: {axis!r}}}): the mesh has no such axis; its axes are {list(sizes)}.")
    if layout.fsdp_axis not in (None, *sizes):
        raise ValueError(
            f"Layout(fsdp_axis={layout.fsdp_axis!r}): the mesh has no such axis; its axes are {list(sizes)}."
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    names = jax.tree.leaves(nn.dims(model))
    specs = [
        _spec(layout, sizes, nn.path_name(path), name.split(), leaf.shape) if nn.has_shape(leaf) else None
        for (path, leaf), name in zip(leaves, names, strict=True)
    ]
    return jax.tree.unflatten(structure, specs)


def shardings(specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """The `NamedSharding` of each `PartitionSpec`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def is_spec(node: object) -> TypeGuard[PartitionSpec]:
    """Whether a node is a `PartitionSpec`."""
    return isinstance(node, PartitionSpec)


def axes_of(spec: PartitionSpec | None) -> frozenset[str]:
    """Every axis that a spec splits over."""
    entries = () if spec is None else spec
    return frozenset(axis for entry in entries if entry for axis in ((entry,) if isinstance(entry, str) else entry))


def dim_over(spec: PartitionSpec | None, axis: str) -> int | None:
    """Which dim a spec splits over `axis`, or None."""
    entries = () if spec is None else spec
    places = [i for i, entry in enumerate(entries) if entry and axis in ((entry,) if isinstance(entry, str) else entry)]
    return places[0] if places else None


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)


def _spec(layout: Layout, sizes: dict[str, int], path: str, names: list[str], shape: tuple[int, ...]) -> PartitionSpec:
    entries: list[str | None] = [None] * len(shape)
    taken: set[str] = set()
    elsewhere = dict.fromkeys(() if layout.fsdp_axis is None else (layout.fsdp_axis,), layout.smallest)
    for place in reversed(range(len(shape))):
        axis = layout.dims.get(names[place])
        if axis is None or axis in taken or sizes[axis] == 1:
            continue
        if shape[place] % sizes[axis]:
            if names[place] in layout.lenient:
                continue
            if names[place] in layout.moving:
                elsewhere[axis] = 0
                continue
            raise ValueError(
                f"the layout splits dim {names[place]!r} over axis {axis!r}, but {path} has {shape[place]} of it and "
                f"the axis {sizes[axis]} devices; take an axis that divides the dim: {_divisors(shape[place])}."
            )
        entries[place] = axis
        taken.add(axis)
    for axis, smallest in elsewhere.items():
        free = [
            place
            for place, size in enumerate(shape)
            if entries[place] is None and names[place] not in ENSEMBLE_DIMS and size % sizes[axis] == 0
        ]
        if free and axis not in taken and sizes[axis] > 1 and math.prod(shape) >= smallest:
            entries[max(free, key=lambda place: shape[place])] = axis
            taken.add(axis)
    return PartitionSpec(*entries)


def init_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> PyTree:
    """`make(*args)` computed by all devices together, each its own pieces.

    `shardings` maps the shapes of the result to a tree of `NamedSharding`s; where these `shapes` are known already,
    `make` is traced once and not twice. Random numbers are functions of a key and a place in the array, so the values
    are those of one device, whatever the mesh.
    """
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    lowered = lower_sharded(make, shardings, *args, shapes=shapes)
    run = lowered.compile(compiler_options=run_once(jax.default_backend()))
    rest = eqx.filter(shapes, is_shape, inverse=True)
    return eqx.combine(run(), rest)


def lower_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> jax.stages.Lowered:
    """The program of `init_sharded`, lowered: `.compile().memory_analysis()` gives what each device needs."""
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    with jax.default_device(None):
        return jax.jit(lambda: eqx.filter(make(*args), eqx.is_array), out_shardings=shardings(shapes)).lower()
