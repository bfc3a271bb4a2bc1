"""Slots and sums of what a loop carries: trees of arrays, the slots with a dim in front."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Int, PyTree

from ..._shapes import Array, ArrayOrShape
from .._vary import vary
from ._schedule import IDLE


def zeros(like: ArrayOrShape, axes: Iterable[str], *dims: int) -> jax.Array:
    """Zeros of the shape and dtype of `like` with more dims in front, typed as varying over `axes`."""
    return vary(jnp.zeros((*dims, *like.shape), like.dtype), sorted(axes))


def get(stash: PyTree, slot: Int[Array, ""]) -> PyTree:
    """What is in a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, False), stash)


def put(stash: PyTree, slot: Int[Array, ""], new: PyTree) -> PyTree:
    """The stash with a slot overwritten; unchanged where the slot is `IDLE`."""

    def one(x: Array, y: Array) -> Array:
        place = jnp.maximum(slot, 0)
        old = jax.lax.dynamic_index_in_dim(x, place, 0, False)
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot == IDLE, old, y), place, 0)

    return jax.tree.map(one, stash, new)


def add(sums: PyTree, more: PyTree) -> PyTree:
    """Sums in their own dtype; None adds nothing."""
    one = lambda x, y: x if y is None else x + y.astype(x.dtype)
    return jax.tree.map(one, sums, more, is_leaf=lambda x: x is None)


def add_rows(sums: PyTree, group: Int[Array, ""], more: PyTree) -> PyTree:
    """`add` to one of the equal groups of rows of each array."""

    def one(x: Array | None, y: Array | None) -> Array | None:
        if x is None or y is None:
            return x
        start = group * y.shape[0]
        rows = jax.lax.dynamic_slice_in_dim(x, start, y.shape[0]) + y.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)

    return jax.tree.map(one, sums, more, is_leaf=lambda x: x is None)
