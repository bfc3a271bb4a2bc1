"""Fully sharded parameters: split over devices, and gathered while they are used (ZeRO-3, arXiv:1910.02054)."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ... import nn
from .._axes import FSDP
from ..layouts._mesh import TorusSteps
from ._grad_proxies import gather, route_gradient


class Gathered(nn.Module):
    """Block whose arrays are split over devices; they are gathered when it is called, and not kept.

    The backward pass gathers again, and reduce-scatters gradients in float32 at least.
    """

    inner: PyTree
    """The block."""
    dims: tuple[int | None, ...] = eqx.field(static=True)
    """For each array the dim that is split, or None."""
    dtypes: tuple[str, ...] = eqx.field(static=True)
    """The dtype in which each array is gathered and used."""
    keeps: bool = eqx.field(static=True, default=False)
    """Whether the caller runs the block under `jax.checkpoint`, which keeps no parameters; else the block does so."""
    values: PyTree = None
    """None, or a tuple with the values of arrays for which `inner` has a gradient proxy, and None for the others."""
    steps: TorusSteps = eqx.field(static=True, default=TorusSteps())
    """TorusSteps in which arrays are gathered over a torus, and gradients scattered (`Plan.torus_steps`)."""

    def __call__(self, *args: PyTree) -> PyTree:
        """Call the block."""
        arrays, static = eqx.partition(self.inner, eqx.is_array)
        run = lambda arrays, values, args: eqx.combine(self._gather(arrays, values), static)(*args)
        if not self.keeps:
            run = jax.checkpoint(run, policy=_saves_all_but_gathered, prevent_cse=False)
        return run(arrays, self.values, args)

    def init_cache(self, *args: PyTree) -> PyTree:
        """Return the block's empty cache."""
        arrays, static = eqx.partition(self.inner, eqx.is_array)
        return eqx.combine(self._gather(arrays, self.values), static).init_cache(*args)

    def _gather(self, arrays: PyTree, values: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(arrays)
        values = (None,) * len(leaves) if values is None else values
        columns = zip(leaves, self.dims, self.dtypes, values, strict=True)
        return jax.tree.unflatten(structure, [gather(*row, self.steps) for row in columns])


class Scattered(nn.Module):
    """Block whose arrays have gradients of another dtype (16-bit arrays) or shape (split by ZeRO-2).

    `inner` is the block with gradient proxies for such arrays, and `values` has their values, None for the others.
    `dims` has the dim along which each gradient is scattered as soon as it is computed, or None, and `steps` how (see
    `Gathered`).
    """

    inner: PyTree
    values: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)
    steps: TorusSteps = eqx.field(static=True, default=TorusSteps())

    def __call__(self, *args: PyTree) -> PyTree:
        """Call the block."""
        return self._with_values()(*args)

    def init_cache(self, *args: PyTree) -> PyTree:
        """Return the block's empty cache."""
        return self._with_values().init_cache(*args)

    def _with_values(self) -> PyTree:
        arrays, static = eqx.partition(self.inner, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        columns = zip(self.values, leaves, self.dims, strict=True)
        valued = [
            leaf if value is None else route_gradient(value, leaf, dim, self.steps) for value, leaf, dim in columns
        ]
        return eqx.combine(jax.tree.unflatten(structure, valued), static)


def _saves_all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Return whether `jax.checkpoint` saves a result: not that of an all-gather, nor a reshaped or cast copy of one."""
    # Reshaping, transposing or casting again costs nothing.
    is_gather = primitive.name.startswith("all_gather") and parameters.get("axis_name") == (FSDP,)
    return not is_gather and primitive.name not in ("reshape", "convert_element_type", "transpose")
