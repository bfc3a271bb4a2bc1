"""Masks of tokens, which are made in each layer and not before the loop over layers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked(
    mask: Bool[Array, "..."], x: Float[Array, "..."], beside: Float[Array, "..."], other: float = 0
) -> Float[Array, "..."]:
    """`x` where a mask, which may be broadcast to its shape, says so, and `other` elsewhere.

    JAX computes before a loop over layers what is the same in all of them: it would broadcast the mask and `other` to
    the shape of `x` there and hand both to each turn. So they wait for `beside`, an array of few numbers that differs
    from layer to layer, and the mask is kept for the backward pass as it is given. In reverse mode alone: there is no
    `jax.jvp`.
    """
    mask, fill, _ = jax.lax.optimization_barrier((mask, jnp.asarray(other, x.dtype), jax.lax.stop_gradient(beside)))
    return _where(mask, x, fill)


@jax.custom_vjp
def _where(mask: Array, x: Array, fill: Array) -> Array:
    return jnp.where(mask, x, fill)


_where.defvjp(
    lambda mask, x, fill: (_where(mask, x, fill), mask),
    lambda mask, gradient: (None, jnp.where(mask, gradient, 0), None),
)
