"""Over which mesh axes a value varies, as `shard_map` tracks it; and slices of a value that does not vary."""

from collections.abc import Iterable

import equinox as eqx
import jax
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree


def varying_axes(x: ArrayLike | jax.ShapeDtypeStruct) -> frozenset[str]:
    """The manual mesh axes over which an array inside `shard_map` may differ; none outside."""
    return jax.typeof(x).manual_axis_type.varying


def vary(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """The same values, typed as varying over `axes` too (`pcast`); its transpose is a sum over the added axes.

    Applied to a parameter before differentiation, it keeps each device's gradient a partial sum, to be reduced once.
    """
    wanted = tuple(axes)
    return jax.tree.map(lambda x: _varied(x, wanted) if eqx.is_array(x) else x, tree)


def _varied(x: Array, axes: tuple[str, ...]) -> Array:
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_like(tree: PyTree, *others: PyTree) -> PyTree:
    """`vary` over every axis that any array of `others` varies over, as the initial carry of a loop must."""
    arrays = [x for x in jax.tree.leaves(others) if eqx.is_array(x)]
    axes = frozenset().union(*map(varying_axes, arrays)) if arrays else frozenset()
    return vary(tree, sorted(axes))


def own_part(x: Array, axis: str | tuple[str, ...], dim: int) -> Array:
    """This device's slice of a dim of an array that is replicated over an axis, or over several."""
    dim = dim % x.ndim
    size = x.shape[dim] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, dim)
