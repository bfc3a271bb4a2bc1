"""A `jax.shard_map` that accepts leaves other than arrays, and helpers for the mesh axes over which values vary."""

import math
from collections.abc import Callable, Iterable
from typing import TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .. import nn
from .._shapes import Array as AnyArray, ArrayOrShape
from ._mesh import axes_by_dim, axes_of, axis_sizes, is_spec


def filter_shard_map(
    fn: Callable[..., PyTree], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """Return a function that runs `fn` on each device, with the device's shards of the arrays in the arguments.

    `in_specs` is a tuple with a tree of `PartitionSpec`s for each argument, and `out_specs` is a tree of
    `PartitionSpec`s for the result. A spec may stand for a whole subtree. None means replicated. Leaves that are not
    arrays are passed to `fn` unchanged, and their specs are ignored. Every mesh axis is manual, and JAX checks over
    which axes values vary: if a spec says that a result is replicated over an axis, JAX must be able to prove that all
    devices on the axis hold the same values. The function can be called eagerly, jitted and differentiated. Raises a
    `ValueError` with the path of the array if a spec does not fit the array.
    """
    if not isinstance(in_specs, tuple | list):
        raise ValueError(
            f"filter_shard_map: in_specs must be a tuple with one entry per argument, not {in_specs!r}; for a function "
            "of one argument write `(spec,)`."
        )
    sizes = axis_sizes(mesh)
    out_specs = jax.tree.map(
        lambda spec: jax.sharding.PartitionSpec() if spec is None else spec, out_specs, is_leaf=_is_spec
    )

    def mapped(*args: PyTree) -> PyTree:
        if len(args) != len(in_specs):
            raise ValueError(
                f"filter_shard_map: the function was called with {len(args)} arguments, but in_specs has "
                f"{len(in_specs)} entries; give one entry per argument."
            )
        arrays, static_args = eqx.partition(args, _is_array)
        leaves, structure = jax.tree.flatten(arrays)
        specs = [
            spec
            for path, leaf, spec in _specs_by_leaf(in_specs, args, "in_specs")
            if _check_argument(path, leaf, spec, sizes)
        ]
        static_results: list[PyTree] = []

        def per_device(*leaves: AnyArray) -> PyTree:
            result = fn(*eqx.combine(jax.tree.unflatten(structure, leaves), static_args))
            result, static_result = eqx.partition(result, _is_array)
            for path, leaf, spec in _specs_by_leaf(out_specs, result, "out_specs"):
                _check_result(path, leaf, spec, sizes)
            static_results[:] = [static_result]
            return result

        run = jax.shard_map(per_device, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=True)
        return eqx.combine(run(*leaves), static_results[0])

    return mapped


def varying_axes(x: jax.typing.ArrayLike | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Return the manual mesh axes over which an array may vary; the set is empty outside of `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def vary(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Mark arrays as varying over `axes` too (`jax.lax.pcast`); values do not change.

    The transpose sums gradients over the added axes. So if a parameter is marked outside of the differentiated
    function, each device gets a partial sum of the gradient, and the caller reduces the partial sums once.
    """
    new_axes = tuple(axes)
    return jax.tree.map(lambda x: _vary_array(x, new_axes) if eqx.is_array(x) else x, tree)


def _vary_array(x: Array, axes: tuple[str, ...]) -> Array:
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_like(tree: PyTree, *examples: PyTree) -> PyTree:
    """Mark arrays as varying over every axis over which any array or shape in `examples` varies.

    Loops need this: JAX requires the initial carry to vary over all axes over which the results of the loop vary.
    """
    axes = frozenset[str]().union(*map(varying_axes, filter(nn.has_shape, jax.tree.leaves(examples))))
    return vary(tree, sorted(axes))


def zeros(shapes: PyTree, *dims: int) -> PyTree:
    """Return zeros of the shapes in a tree, with `dims` in front; each array varies over the axes of its shape."""

    def make_zeros(x: ArrayOrShape) -> Array:
        return vary(jnp.zeros((*dims, *x.shape), x.dtype), sorted(varying_axes(x)))

    return jax.tree.map(make_zeros, shapes)


def take_local_slice(x: Array, axis: str | tuple[str, ...], dim: int) -> Array:
    """Return this device's slice, along `dim`, of an array that is replicated over one or several axes."""
    dim = dim % x.ndim
    size = x.shape[dim] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, dim)


def _is_array(node: object) -> TypeGuard[AnyArray]:
    return eqx.is_array(node) or isinstance(node, np.ndarray)


def _is_spec(node: object) -> bool:
    return node is None or is_spec(node)


def _specs_by_leaf(specs: PyTree, tree: PyTree, name: str) -> list[tuple[str, PyTree, PyTree]]:
    """Return path, leaf and spec of each leaf of `tree`; a spec in `specs` may stand for a whole subtree."""
    entries: list[tuple[str, PyTree, PyTree]] = []

    def add_subtree(path: tuple, spec: object, subtree: PyTree) -> None:
        for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(subtree):
            entries.append(
                (nn.path_name((*path, *leaf_path)), leaf, jax.sharding.PartitionSpec() if spec is None else spec)
            )

    if name == "in_specs":
        specs = tuple(specs)
    try:
        jax.tree_util.tree_map_with_path(add_subtree, specs, tree, is_leaf=_is_spec)
    except ValueError as error:
        values = "the arguments" if name == "in_specs" else "the result"
        raise ValueError(
            f"filter_shard_map: the tree of {name} does not fit {values}; give a tree of the same structure, or one "
            f"spec for a whole subtree. {error}"
        ) from error
    return entries


def _check_argument(path: str, leaf: object, spec: PyTree, sizes: dict[str, int]) -> bool:
    """Return whether a leaf is an array; raise a `ValueError` if the array and its spec do not fit."""
    if not _is_array(leaf):
        return False
    call = _check_spec(f"argument {path}", leaf, spec, sizes)
    for dim, axes in enumerate(axes_by_dim(spec)):
        pieces = math.prod(sizes[axis] for axis in axes)
        if leaf.shape[dim] % pieces:
            product = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ValueError(
                f"{call}, which cuts dim {dim}, of size {leaf.shape[dim]}, into {pieces} pieces ({product}); choose a "
                "number of pieces that divides the size, or leave the dim whole."
            )
    return True


def _check_spec(value: str, leaf: AnyArray, spec: PyTree, sizes: dict[str, int]) -> str:
    """Raise a `ValueError` for a spec of a wrong type, or with too many dims or unknown axes.

    Return the text with which further error messages about the array begin.
    """
    call = f"filter_shard_map: {value} has shape {leaf.shape} and the spec {spec!r}"
    if not is_spec(spec):
        raise ValueError(f"{call}, which is no PartitionSpec; write for example PartitionSpec('tensor'), or None.")
    if len(spec) > leaf.ndim:
        raise ValueError(f"{call}, which has entries for {len(spec)} dims; give at most {leaf.ndim} entries.")
    if unknown := sorted(axes_of(spec) - sizes.keys()):
        raise ValueError(f"{call}, but the mesh has no axis {unknown}; its axes are {list(sizes)}.")
    return call


def _check_result(path: str, leaf: AnyArray, spec: PyTree, sizes: dict[str, int]) -> None:
    """Raise a `ValueError` for a result that does not fit its spec, or varies over axes that its spec leaves out."""
    call = _check_spec(f"result {path}".strip(), leaf, spec, sizes)
    if differs := sorted(varying_axes(leaf) - axes_of(spec)):
        raise ValueError(
            f"{call}, which declares the result replicated over the axes {differs}, but its values may differ over "
            "these axes; reduce the result over the axes (for example by jax.lax.psum), or name the axes in the spec."
        )
