"""Small parameters that the axis `tensor` splits, put together where they are used."""

import equinox as eqx
import jax
from jaxtyping import Array, PyTree, Shaped

from ...nn import at_least_float32, is_trainable
from .. import _send as send
from .._axes import TENSOR


def gather_parameter(leaf: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """The whole of a parameter that is split along `dim` over `tensor`; its gradient is summed in float32 at least."""
    gather = _gather if is_trainable(leaf) else _gather_plainly
    return gather(dim % leaf.ndim, leaf)


def gathered(module: PyTree, dims: tuple[int | None, ...]) -> PyTree:
    """A module with its arrays put together from the devices' slices along `dims`; None leaves one as it is."""
    arrays, rest = eqx.partition(module, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, dims, strict=True)
    return eqx.combine(structure.unflatten([x if dim is None else gather_parameter(x, dim) for x, dim in pairs]), rest)


def _gather_plainly(dim: int, leaf: Array) -> Array:
    return send.all_gather("weights over tensor", leaf, TENSOR, dim)


def _backward(dim: int, _: None, gradient: Array) -> tuple[Array]:
    wide = gradient.astype(at_least_float32(gradient.dtype))
    total = send.psum_scatter("weights over tensor", wide, TENSOR, dim)
    return (total.astype(gradient.dtype),)


_gather = jax.custom_vjp(_gather_plainly, nondiff_argnums=(0,))
_gather.defvjp(lambda dim, leaf: (_gather_plainly(dim, leaf), None), _backward)
