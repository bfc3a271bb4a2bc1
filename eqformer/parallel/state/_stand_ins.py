"""Gradients of another dtype or shape than their arrays', by stand-ins: zeros that have the gradient's own.

JAX gives the gradient of an array in that array's dtype and shape. Gradients are summed over uses, microbatches and
devices in float32 at least, so a 16-bit array is not differentiated itself: its values are used, and its gradient is
that of a stand-in, zeros in float32 whose values are never read.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import nn
from .. import _send as send
from .._axes import FSDP
from .._vary import vary_like
from ..layouts._devices import Steps


_AT_ONCE = Steps()


def is_narrow(x: object) -> bool:
    """Whether an array's gradient is wider than the array: one of 16 bits or fewer, of floating-point numbers."""
    return nn.is_trainable(x) and nn.at_least_float32(x.dtype) != x.dtype  # type: ignore[attr-defined]


def stand_in(x: Array) -> Array:
    """Zeros of an array's shape and its gradient's dtype."""
    return vary_like(jnp.zeros(x.shape, nn.at_least_float32(x.dtype)), x)


def routed(value: Array, stand_in: Array, dim: int | None = None, steps: Steps = _AT_ONCE) -> Array:
    """The values of `value` with the gradient of `stand_in`, there summed and scattered along `dim` if one is given."""
    return _route(dim, steps, vary_like(value, stand_in), stand_in)


def gather(
    leaf: Array,
    dim: int | None,
    dtype: str,
    value: Array | None = None,
    steps: Steps = _AT_ONCE,
    used: str | None = None,
) -> Array:
    """The whole of an array that `fsdp` splits along `dim`, in `dtype`; its gradient crosses in float32 at least.

    Where `leaf` is a stand-in, `value` has its values. `steps` are `Placement.torus_steps`. With `used` it is cast to
    that dtype once it is there, which is its gradient's then.
    """
    if dim is None:
        return leaf if value is None else routed(value, leaf)
    if not nn.is_trainable(leaf):
        return _gather_plainly(dim, dtype, steps, used or dtype, None, leaf)
    return _gather(dim, dtype, steps, used or dtype, None if value is None else vary_like(value, leaf), leaf)


def scatter(gradient: Array, dim: int, steps: Steps = _AT_ONCE) -> Array:
    """The sum over the devices' partial gradients, in float32 at least, of which each keeps its slice along `dim`.

    It is scattered at once, or in the `steps` of `Placement.torus_steps`.
    """
    wide = gradient.astype(nn.at_least_float32(gradient.dtype))
    return send.psum_scatter("gradients over fsdp", wide, FSDP, dim, steps=steps.scatter)


def _gather_plainly(dim: int, dtype: str, steps: Steps, used: str, value: Array | None, leaf: Array) -> Array:
    own = (leaf if value is None else value).astype(dtype)
    return send.all_gather("parameters over fsdp", own, FSDP, dim, steps=steps.gather).astype(used)


def _gather_backward(
    dim: int, dtype: str, steps: Steps, used: str, like: Array | np.ndarray, gradient: Array
) -> tuple[None, Array]:
    return None, scatter(gradient, dim, steps).astype(like.dtype)


_gather = jax.custom_vjp(_gather_plainly, nondiff_argnums=(0, 1, 2, 3))
_gather.defvjp(lambda *given: (_gather_plainly(*given), jnp.zeros((), given[-1].dtype)), _gather_backward)


def _route_backward(dim: int | None, steps: Steps, like: Array | np.ndarray, gradient: Array) -> tuple[None, Array]:
    return None, (gradient if dim is None else scatter(gradient, dim, steps)).astype(like.dtype)


_route = jax.custom_vjp(lambda dim, steps, value, stand_in: value, nondiff_argnums=(0, 1))
_route.defvjp(lambda dim, steps, value, stand_in: (value, jnp.zeros((), stand_in.dtype)), _route_backward)
