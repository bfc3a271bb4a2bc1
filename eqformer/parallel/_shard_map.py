"""`jax.shard_map` over trees that hold more than arrays."""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from .. import nn
from .._shapes import Array
from ._vary import varying_axes
from .layouts._layout import axes_of, is_spec
from .layouts._mesh import axis_sizes


def filter_shard_map(
    fn: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Run `fn` on each device, on its shards of the arguments' arrays; leaves that are not arrays are passed on.

    `in_specs` is a tuple with, for each argument, a tree of `PartitionSpec`s, each for a whole subtree; `out_specs` is
    such a tree for the result. None means replicated; the specs of leaves that are not arrays are ignored. Every mesh
    axis is manual, and JAX checks over which axes values vary: a result that is declared replicated over an axis must
    be provably so. Works eagerly, jitted and differentiated, for a layer or a whole loss. Raises a `ValueError` that
    names the array if a spec does not fit it.
    """
    if not isinstance(in_specs, tuple | list):
        raise ValueError(
            f"filter_shard_map: in_specs is a tuple with one entry an argument, not {in_specs!r}; for a function of "
            "one argument write `(spec,)`."
        )
    sizes = axis_sizes(mesh)
    out_specs = jax.tree.map(lambda spec: PartitionSpec() if spec is None else spec, out_specs, is_leaf=_is_spec)

    def mapped(*args: PyTree) -> PyTree:
        if len(args) != len(in_specs):
            raise ValueError(
                f"filter_shard_map: the function was called with {len(args)} arguments, but in_specs has "
                f"{len(in_specs)} entries; give one entry an argument."
            )
        arrays, rest = eqx.partition(args, _is_array)
        leaves, structure = jax.tree.flatten(arrays)
        specs = [spec for path, leaf, spec in _by_leaf(in_specs, args, "in_specs") if _fits(path, leaf, spec, sizes)]
        result_rest: list[Any] = []

        def per_device(*leaves: Array) -> PyTree:
            result = fn(*eqx.combine(jax.tree.unflatten(structure, leaves), rest))
            result, others = eqx.partition(result, _is_array)
            for path, leaf, spec in _by_leaf(out_specs, result, "out_specs"):
                _check_result(path, leaf, spec, sizes)
            result_rest[:] = [others]
            return result

        run = jax.shard_map(per_device, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=True)
        return eqx.combine(run(*leaves), result_rest[0])

    return mapped


def _is_array(node: object) -> TypeGuard[Array]:
    return eqx.is_array(node) or isinstance(node, np.ndarray)


def _is_spec(node: object) -> bool:
    return node is None or is_spec(node)


def _by_leaf(specs: PyTree, tree: PyTree, name: str) -> list[tuple[str, Any, Any]]:
    """Path, leaf and spec of each leaf, from a tree of specs in which one may stand for a whole subtree."""
    found: list[tuple[str, Any, Any]] = []

    def below(path: tuple, spec: object, part: PyTree) -> None:
        for rest, leaf in jax.tree_util.tree_leaves_with_path(part):
            found.append((nn.path_name((*path, *rest)), leaf, PartitionSpec() if spec is None else spec))

    if name == "in_specs":
        specs = tuple(specs)
    try:
        jax.tree_util.tree_map_with_path(below, specs, tree, is_leaf=_is_spec)
    except ValueError as error:
        what = "the arguments" if name == "in_specs" else "the result"
        raise ValueError(
            f"filter_shard_map: the tree of {name} does not fit {what}; give specs in a tree like theirs, or one for a "
            f"whole subtree. {error}"
        ) from error
    return found


def _fits(path: str, leaf: object, spec: Any, sizes: dict[str, int]) -> bool:
    """Whether a leaf is an array, whose spec must then name dims that it has and axes that divide them."""
    if not _is_array(leaf):
        return False
    call = _check_spec(f"argument {path}", leaf, spec, sizes)
    for place, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else entry or ()
        number = math.prod(sizes[axis] for axis in axes)
        if leaf.shape[place] % number:
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ValueError(
                f"{call}, which cuts dim {place}, of {leaf.shape[place]}, into {number} pieces ({over}); choose sizes "
                "of which the second divides the first, or leave the dim whole."
            )
    return True


def _check_spec(what: str, leaf: Array, spec: Any, sizes: dict[str, int]) -> str:
    call = f"filter_shard_map: {what} has shape {leaf.shape} and the spec {spec!r}"
    if not is_spec(spec):
        raise ValueError(f"{call}, which is no PartitionSpec; write PartitionSpec('tensor'), say, or None.")
    if len(spec) > leaf.ndim:
        raise ValueError(f"{call}, which speaks of {len(spec)} dims; give at most {leaf.ndim} entries.")
    if unknown := sorted(axes_of(spec) - sizes.keys()):
        raise ValueError(f"{call}, but the mesh has no axis {unknown}; its axes are {list(sizes)}.")
    return call


def _check_result(path: str, leaf: Array, spec: Any, sizes: dict[str, int]) -> None:
    """Check that a result has the dims of its spec, and varies only over axes that the spec splits it over."""
    call = _check_spec(f"result {path}".strip(), leaf, spec, sizes)
    if differs := sorted(varying_axes(leaf) - axes_of(spec)):
        raise ValueError(
            f"{call}, by which it is the same on all devices of the axes {differs}, but it may differ there; reduce it "
            "(jax.lax.psum or pmean over them, say), or name the axes in the spec."
        )
