"""All-gathers of small parameters that the axis `tensor` splits, where they are used."""

import equinox as eqx
import jax
from jaxtyping import Array, PyTree, Shaped

from ...nn import at_least_float32, is_trainable
from .. import _collectives as send
from .._axes import TENSOR


def gather_parameter(leaf: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """All-gather a parameter that is split along `dim` over `tensor`; sum its gradient in float32 at least."""
    gather = _gather if is_trainable(leaf) else _gather_forward
    return gather(dim % leaf.ndim, leaf)


def gather_module(module: PyTree, dims: tuple[int | None, ...]) -> PyTree:
    """All-gather a module's arrays, each along its entry of `dims`; None leaves an array as it is."""
    arrays, static = eqx.partition(module, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, dims, strict=True)
    gathered = [x if dim is None else gather_parameter(x, dim) for x, dim in pairs]
    return eqx.combine(structure.unflatten(gathered), static)


def _gather_forward(dim: int, leaf: Array) -> Array:
    return send.all_gather("weights over tensor", leaf, TENSOR, dim)


def _gather_with_residuals(dim: int, leaf: Array) -> tuple[Array, None]:
    return _gather_forward(dim, leaf), None


def _gather_backward(dim: int, _: None, gradient: Array) -> tuple[Array]:
    wide = gradient.astype(at_least_float32(gradient.dtype))
    total = send.psum_scatter("weights over tensor", wide, TENSOR, dim)
    return (total.astype(gradient.dtype),)


_gather = jax.custom_vjp(_gather_forward, nondiff_argnums=(0,))
_gather.defvjp(_gather_with_residuals, _gather_backward)
