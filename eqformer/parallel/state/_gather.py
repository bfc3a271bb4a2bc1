"""Small parameters that an axis splits, put together where they are used."""

import jax
from jaxtyping import Array, Float

from ...nn import at_least_float32


def gather_parameter(leaf: Float[Array, "..."], axis: str, dim: int) -> Float[Array, "..."]:
    """The whole of a parameter that is split along `dim` over `axis`; its gradient is summed in float32 at least."""
    return _gather(axis, dim % leaf.ndim, leaf)


def _gather_plainly(axis: str, dim: int, leaf: Array) -> Array:
    return jax.lax.all_gather(leaf, axis, axis=dim, tiled=True)


def _backward(axis: str, dim: int, _: None, gradient: Array) -> tuple[Array]:
    wide = gradient.astype(at_least_float32(gradient.dtype))
    total = jax.lax.psum_scatter(wide, axis, scatter_dimension=dim, tiled=True)
    return (total.astype(gradient.dtype),)


_gather = jax.custom_vjp(_gather_plainly, nondiff_argnums=(0, 1))
_gather.defvjp(lambda axis, dim, leaf: (_gather_plainly(axis, dim, leaf), None), _backward)
