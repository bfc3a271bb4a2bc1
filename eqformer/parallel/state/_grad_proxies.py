"""Gradient proxies: arrays of zeros that receive gradients of another dtype or shape than the parameters have.

JAX gives the gradient of an array in that array's dtype and shape. Gradients are summed over uses, microbatches and
devices in float32 at least, so a 16-bit array is not differentiated itself: its values are used, and its gradient is
that of a proxy, zeros in float32 whose values are never read.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import nn
from .. import _collectives as send
from .._axes import FSDP
from .._shard_map import vary_like
from ..layouts._mesh import TorusSteps


_ONE_STEP = TorusSteps()


def has_wider_grad(x: object) -> bool:
    """Return whether an array is narrower than its gradient: floating-point numbers of 16 bits or fewer."""
    return nn.is_trainable(x) and nn.at_least_float32(x.dtype) != x.dtype  # type: ignore[attr-defined]


def grad_proxy(x: Array) -> Array:
    """Return zeros of an array's shape and its gradient's dtype."""
    return vary_like(jnp.zeros(x.shape, nn.at_least_float32(x.dtype)), x)


def route_gradient(value: Array, proxy: Array, dim: int | None = None, steps: TorusSteps = _ONE_STEP) -> Array:
    """Return `value`, whose gradient goes to `proxy`: as it is or, with `dim`, summed and scattered along that dim."""
    return _route(dim, steps, vary_like(value, proxy), proxy)


def gather(
    leaf: Array,
    dim: int | None,
    dtype: str,
    value: Array | None = None,
    steps: TorusSteps = _ONE_STEP,
    used: str | None = None,
) -> Array:
    """All-gather an array that `fsdp` splits along `dim`, in `dtype`; reduce its gradient in float32 at least.

    If `leaf` is a gradient proxy, `value` is the parameter. `steps` are `Placement.torus_steps`. With `used`, the
    gathered array is cast to that dtype, and its gradient arrives in that dtype.
    """
    if dim is None:
        return leaf if value is None else route_gradient(value, leaf)
    if not nn.is_trainable(leaf):
        return _gather_forward(dim, dtype, steps, used or dtype, None, leaf)
    return _gather(dim, dtype, steps, used or dtype, None if value is None else vary_like(value, leaf), leaf)


def scatter(gradient: Array, dim: int, steps: TorusSteps = _ONE_STEP) -> Array:
    """Reduce-scatter the devices' partial gradients over `fsdp` along `dim`, in float32 at least.

    The gradient is scattered at once, or in the `steps` of `Placement.torus_steps`.
    """
    wide = gradient.astype(nn.at_least_float32(gradient.dtype))
    return send.psum_scatter("gradients over fsdp", wide, FSDP, dim, steps=steps.scatter)


def _gather_forward(dim: int, dtype: str, steps: TorusSteps, used: str, value: Array | None, leaf: Array) -> Array:
    shard = (leaf if value is None else value).astype(dtype)
    return send.all_gather("parameters over fsdp", shard, FSDP, dim, steps=steps.gather).astype(used)


def _gather_with_residuals(
    dim: int, dtype: str, steps: TorusSteps, used: str, value: Array | None, leaf: Array
) -> tuple[Array, Array]:
    return _gather_forward(dim, dtype, steps, used, value, leaf), jnp.zeros((), leaf.dtype)


def _gather_backward(
    dim: int, dtype: str, steps: TorusSteps, used: str, like: Array | np.ndarray, gradient: Array
) -> tuple[None, Array]:
    return None, scatter(gradient, dim, steps).astype(like.dtype)


_gather = jax.custom_vjp(_gather_forward, nondiff_argnums=(0, 1, 2, 3))
_gather.defvjp(_gather_with_residuals, _gather_backward)


def _route_forward(dim: int | None, steps: TorusSteps, value: Array, proxy: Array) -> Array:
    return value


def _route_with_residuals(dim: int | None, steps: TorusSteps, value: Array, proxy: Array) -> tuple[Array, Array]:
    return value, jnp.zeros((), proxy.dtype)


def _route_backward(
    dim: int | None, steps: TorusSteps, like: Array | np.ndarray, gradient: Array
) -> tuple[None, Array]:
    return None, (gradient if dim is None else scatter(gradient, dim, steps)).astype(like.dtype)


_route = jax.custom_vjp(_route_forward, nondiff_argnums=(0, 1))
_route.defvjp(_route_with_residuals, _route_backward)
