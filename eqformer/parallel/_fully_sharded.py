"""Parameters that are split over devices and gathered for the moment of their use (ZeRO-3, arXiv:1910.02054)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._axes import FSDP
from ._vary import vary_like


class Gathered(eqx.Module):
    """A block of which each device holds a slice of the arrays; they are gathered when it is called, and not kept.

    `dims` tells, for each array, the dim that is split or None, and `dtypes` the dtype in which it travels: that of
    its use. The backward pass gathers again, and its gradients are summed and scattered in the parameters' own dtype.
    `keeps` says that whoever runs the block recomputes it and keeps no parameters; otherwise the block sees to that.
    """

    inner: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)
    dtypes: tuple[str, ...] = eqx.field(static=True)
    keeps: bool = eqx.field(static=True, default=False)

    def __call__(self, *args: Any) -> Any:
        """The block's own call."""
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        run = lambda arrays, args: eqx.combine(self._whole(arrays), rest)(*args)
        if not self.keeps:
            run = jax.checkpoint(run, policy=_all_but_gathered, prevent_cse=False)
        return run(arrays, args)

    def init_cache(self, *args: Any) -> PyTree:
        """The block's own empty cache."""
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        return eqx.combine(self._whole(arrays), rest).init_cache(*args)

    def _whole(self, arrays: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(arrays)
        return jax.tree.unflatten(
            structure, [gather(*each) for each in zip(leaves, self.dims, self.dtypes, strict=True)]
        )


class Scattered(eqx.Module):
    """A block that every device holds whole while its gradients are split: each layer's as soon as it is made (ZeRO-2).

    `values` are the block's arrays, `inner` the block with slices in the place of those whose gradients are split;
    `dims` as for `Gathered`.
    """

    inner: PyTree
    values: tuple[Array, ...]
    dims: tuple[int | None, ...] = eqx.field(static=True)

    def __call__(self, *args: Any) -> Any:
        """The block's own call."""
        return self._whole()(*args)

    def init_cache(self, *args: Any) -> PyTree:
        """The block's own empty cache."""
        return self._whole().init_cache(*args)

    def _whole(self) -> PyTree:
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        whole = [routed(*each) for each in zip(self.values, leaves, self.dims, strict=True)]
        return eqx.combine(jax.tree.unflatten(structure, whole), rest)


def gather(leaf: Array, dim: int | None, dtype: str) -> Array:
    """The whole of an array that is split along `dim`, in `dtype`."""
    return leaf if dim is None else _gather(dim, dtype, leaf)


def _gather_plainly(dim: int, dtype: str, leaf: Array) -> Array:
    return jax.lax.all_gather(leaf.astype(dtype), FSDP, axis=dim, tiled=True)


_gather = jax.custom_vjp(_gather_plainly, nondiff_argnums=(0, 1))
_gather.defvjp(
    lambda dim, dtype, leaf: (_gather_plainly(dim, dtype, leaf), jnp.zeros((), leaf.dtype)),
    lambda dim, dtype, like, gradient: (scatter(gradient.astype(like.dtype), dim),),
)


def scatter(gradient: Array, dim: int) -> Array:
    """The sum over the devices' partial gradients, of which each keeps its slice along `dim`."""
    return jax.lax.psum_scatter(gradient, FSDP, scatter_dimension=dim, tiled=True)


def routed(whole: Array, shard: Array, dim: int | None) -> Array:
    """The values of `whole` with the gradient of `shard`, summed and scattered along `dim` where it is made."""
    return shard if dim is None else _route(dim, vary_like(whole, shard), shard)


_route = jax.custom_vjp(lambda dim, whole, shard: whole, nondiff_argnums=(0,))
_route.defvjp(lambda dim, whole, shard: (whole, None), lambda dim, _, gradient: (None, scatter(gradient, dim)))


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    # Nor another shape or dtype of what was gathered; to make these again costs nothing.
    is_gather = primitive.name.startswith("all_gather") and parameters.get("axis_name") == (FSDP,)
    return not is_gather and primitive.name not in ("reshape", "convert_element_type", "transpose")
