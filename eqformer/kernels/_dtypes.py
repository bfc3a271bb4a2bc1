"""Number formats of kernels: the dtype of sums, and rounding to 8-bit floats with scales that are powers of two."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """Return float32 for a narrower floating-point dtype, and the dtype itself otherwise."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype("float32")


E4M3 = jnp.float8_e4m3fn
"""The 8-bit float with 4 exponent bits, for weights and activations."""
E5M2 = jnp.float8_e5m2
"""The 8-bit float with 5 exponent bits, for gradients."""
# The exponent of the largest magnitude after division by the scale, which is below 2^8 in E4M3 and 2^15 in E5M2.
_EXPONENTS: dict[jax.typing.DTypeLike, int] = {E4M3: 7, E5M2: 14}


def round_to_fp8(
    x: Float[Array, "..."], dtype: jax.typing.DTypeLike, dim: int | tuple[int, ...] | None
) -> tuple[Array, Float[Array, "..."]]:
    """Return `x / scale` rounded to an 8-bit dtype, and the scale, which keeps `x`'s number of dims.

    There is one scale for each slice along `dim`, or a single scalar for all of `x` if `dim` is None. Infinities and
    NaN do not become finite.
    """
    wide = at_least_float32(x.dtype)
    scale, inverse = fp8_scale(jnp.max(jnp.abs(x), dim, keepdims=dim is not None), dtype)
    return (x.astype(wide) * inverse.astype(wide)).astype(dtype), scale.astype(wide)


def fp8_scale(
    largest: Float[Array, "*dims"], dtype: jax.typing.DTypeLike
) -> tuple[Float[Array, "*dims"], Float[Array, "*dims"]]:
    """Return the scale of arrays with this largest magnitude in an 8-bit dtype, and the inverse of the scale.

    Both are powers of two in float32.
    """
    # A float32 has its exponent plus 127 in the bits above its 23 bits of mantissa.
    exponent = (jax.lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32) >> 23) - _EXPONENTS[dtype]
    exponent = jnp.clip(exponent, 1, 253)  # so that the scale's inverse is a normal number too
    scale, inverse = (jax.lax.bitcast_convert_type(bits << 23, jnp.float32) for bits in (exponent, 254 - exponent))
    return scale, inverse
