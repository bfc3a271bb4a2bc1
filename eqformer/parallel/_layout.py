"""Shardings of arrays from the names of their dims, and arrays that are created sharded."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TypeGuard

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import nn
from .._prepare import single_run_options
from .._shapes import ENSEMBLE_DIMS, is_shape
from ._mesh import axis_sizes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axis that splits each named dim: `Layout({"heads": "tensor", "mlp": "tensor", "layers": "pipe"})`.

    An axis splits at most one dim of an array. If several dims map to the same axis, the last of them is split; in a
    linear map (outputs, then inputs) this is a contracted dim. If an axis does not divide its dim, a dim in `lenient`
    stays whole, a dim in `moving` passes the axis to the largest other dim that the axis divides, and any other dim is
    an error. `fsdp_axis` is the axis of fully sharded state: it splits every array of at least `smallest` entries, on
    the largest dim that it divides, that no other axis splits, and that is no ensemble's.
    """

    dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lenient: frozenset[str] = frozenset()
    fsdp_axis: str | None = None
    smallest: int = 1024
    moving: frozenset[str] = frozenset()


def partition_specs(model: PyTree, layout: Layout, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return a tree like `model` with a `PartitionSpec` for each array, and None for all other leaves.

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
        _array_spec(layout, sizes, nn.path_name(path), name.split(), leaf.shape) if nn.has_shape(leaf) else None
        for (path, leaf), name in zip(leaves, names, strict=True)
    ]
    return jax.tree.unflatten(structure, specs)


def shardings(specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the `NamedSharding` of each `PartitionSpec`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def is_spec(node: object) -> TypeGuard[PartitionSpec]:
    """Return whether a node is a `PartitionSpec`."""
    return isinstance(node, PartitionSpec)


def axes_by_dim(spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    """Return the axes that a spec splits each of its dims over; `()` for None."""
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec or ()]


def axes_of(spec: PartitionSpec | None) -> frozenset[str]:
    """Return every axis that a spec splits over."""
    return frozenset(itertools.chain(*axes_by_dim(spec)))


def dim_over(spec: PartitionSpec | None, axis: str) -> int | None:
    """Return the dim that a spec splits over `axis`, or None."""
    return next((dim for dim, axes in enumerate(axes_by_dim(spec)) if axis in axes), None)


def init_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> PyTree:
    """Return `make(*args)`, computed by all devices together, each its own shards.

    No device, and no host, ever holds a whole model. `shardings` maps the shapes of the result to a tree of
    `NamedSharding`s; where these `shapes` are known already, `make` is traced once and not twice. Random numbers are
    functions of a key and an index in the array, so the values are those of one device, whatever the mesh.
    """
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    lowered = lower_sharded(make, shardings, *args, shapes=shapes)
    run = lowered.compile(compiler_options=single_run_options(jax.default_backend()))
    return eqx.combine(run(), eqx.filter(shapes, is_shape, inverse=True))


def lower_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> jax.stages.Lowered:
    """Lower the program of `init_sharded`: `.compile().memory_analysis()` gives the bytes that each device needs."""
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    with jax.default_device(None):
        return jax.jit(lambda: eqx.filter(make(*args), eqx.is_array), out_shardings=shardings(shapes)).lower()


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)


def _array_spec(
    layout: Layout, sizes: dict[str, int], path: str, names: list[str], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the spec of the array at `path` with dims of these `names`."""
    entries: list[str | None] = [None] * len(shape)
    used_axes: set[str] = set()
    # Axes that may split any free dim, and the least number of entries of an array for it.
    any_dim_axes = dict.fromkeys(() if layout.fsdp_axis is None else (layout.fsdp_axis,), layout.smallest)
    for dim in reversed(range(len(shape))):
        axis = layout.dims.get(names[dim])
        if axis is None or axis in used_axes or sizes[axis] == 1:
            continue
        if shape[dim] % sizes[axis]:
            if names[dim] in layout.lenient:
                continue
            if names[dim] in layout.moving:
                any_dim_axes[axis] = 0
                continue
            raise ValueError(
                f"the layout splits dim {names[dim]!r} over axis {axis!r}, but {path} has {shape[dim]} of it and "
                f"the axis {sizes[axis]} devices; take an axis that divides the dim: {_divisors(shape[dim])}."
            )
        entries[dim] = axis
        used_axes.add(axis)
    for axis, smallest in any_dim_axes.items():
        free_dims = [
            dim
            for dim, size in enumerate(shape)
            if entries[dim] is None and names[dim] not in ENSEMBLE_DIMS and size % sizes[axis] == 0
        ]
        if free_dims and axis not in used_axes and sizes[axis] > 1 and math.prod(shape) >= smallest:
            entries[max(free_dims, key=lambda dim: shape[dim])] = axis
            used_axes.add(axis)
    return PartitionSpec(*entries)
