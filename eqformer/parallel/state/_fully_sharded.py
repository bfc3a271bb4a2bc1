"""Fully sharded parameters: split over devices, and gathered while they are used (ZeRO-3, arXiv:1910.02054)."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ... import nn
from .._axes import FSDP
from ..layouts._devices import Steps
from ._stand_ins import gather, routed


class Gathered(nn.Module):
    """A block whose arrays are split over devices; they are gathered when it is called, and not kept.

    The backward pass gathers again, and reduce-scatters gradients in float32 at least.
    """

    inner: PyTree
    """The block."""
    dims: tuple[int | None, ...] = eqx.field(static=True)
    """For each array the dim that is split, or None."""
    dtypes: tuple[str, ...] = eqx.field(static=True)
    """The dtype in which each is gathered and used."""
    keeps: bool = eqx.field(static=True, default=False)
    """Whether the caller runs the block under `jax.checkpoint`, which keeps no parameters; else it does so itself."""
    values: PyTree = None
    """None, or a tuple with the values of arrays for which `inner` has a stand-in, and None for the others."""
    steps: Steps = eqx.field(static=True, default=Steps())
    """Those in which they are gathered over a torus, and gradients scattered (`Plan.torus_steps`)."""

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
        return jax.tree.unflatten(structure, [gather(*one, self.steps) for one in each])


class Scattered(nn.Module):
    """A block whose arrays have gradients of another dtype (16-bit arrays) or shape (split by ZeRO-2).

    `inner` is the block with stand-ins for such arrays, and `values` has their values, None for the others. `dims` has
    the dim along which each gradient is scattered as soon as it is computed, or None, and `steps` how (see `Gathered`).
    """

    inner: PyTree
    values: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)
    steps: Steps = eqx.field(static=True, default=Steps())

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
        whole = [leaf if value is None else routed(value, leaf, dim, self.steps) for value, leaf, dim in each]
        return eqx.combine(jax.tree.unflatten(structure, whole), rest)


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    # Reshaped, transposed or cast copies of what was gathered are not kept either: they cost nothing to make again.
    is_gather = primitive.name.startswith("all_gather") and parameters.get("axis_name") == (FSDP,)
    return not is_gather and primitive.name not in ("reshape", "convert_element_type", "transpose")
