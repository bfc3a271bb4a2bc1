"""Fully sharded parameters: split over devices, and gathered while they are used (ZeRO-3, arXiv:1910.02054)."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ... import nn
from .._axes import FSDP
from ._stand_ins import gather, routed


class Gathered(nn.Module):
    """A block whose arrays are split over devices; they are gathered when it is called, and not kept.

    `dims` has, for each array, the dim that is split or None, and `dtypes` the dtype in which it is gathered and used.
    The backward pass gathers again, and reduce-scatters gradients in float32 at least. `keeps` says that the caller
    runs the block under `jax.checkpoint`, which keeps no parameters; otherwise the block does so itself. `values` is
    None, or a tuple with the values of arrays for which `inner` has a stand-in, and None for the others.
    """

    inner: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)
    dtypes: tuple[str, ...] = eqx.field(static=True)
    keeps: bool = eqx.field(static=True, default=False)
    values: PyTree = None

    def __call__(self, *args: PyTree) -> PyTree:
        """The block's own call."""
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        run = lambda arrays, values, args: eqx.combine(self._whole(arrays, values), rest)(*args)
        if not self.keeps:
            run = jax.checkpoint(run, policy=_all_but_gathered, prevent_cse=False)
        return run(arrays, self.values, args)

    def init_cache(self, *args: PyTree) -> PyTree:
        """The block's own empty cache."""
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        return eqx.combine(self._whole(arrays, self.values), rest).init_cache(*args)

    def _whole(self, arrays: PyTree, values: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(arrays)
        values = (None,) * len(leaves) if values is None else values
        each = zip(leaves, self.dims, self.dtypes, values, strict=True)
        return jax.tree.unflatten(structure, [gather(*one) for one in each])


class Scattered(nn.Module):
    """A block whose arrays have gradients of another dtype (16-bit arrays) or shape (split by ZeRO-2).

    `inner` is the block with stand-ins for such arrays, and `values` has their values, None for the others. `dims` has
    the dim along which each gradient is scattered as soon as it is computed, or None.
    """

    inner: PyTree
    values: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)

    def __call__(self, *args: PyTree) -> PyTree:
        """The block's own call."""
        return self._whole()(*args)

    def init_cache(self, *args: PyTree) -> PyTree:
        """The block's own empty cache."""
        return self._whole().init_cache(*args)

    def _whole(self) -> PyTree:
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        each = zip(self.values, leaves, self.dims, strict=True)
        whole = [leaf if value is None else routed(value, leaf, dim) for value, leaf, dim in each]
        return eqx.combine(jax.tree.unflatten(structure, whole), rest)


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    # Reshaped, transposed or cast copies of what was gathered are not kept either: they cost nothing to make again.
    is_gather = primitive.name.startswith("all_gather") and parameters.get("axis_name") == (FSDP,)
    return not is_gather and primitive.name not in ("reshape", "convert_element_type", "transpose")
