"""Rounding to 8-bit floating point, with scales that are powers of two."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._dtype import at_least_float32


E4M3 = jnp.float8_e4m3fn
"""The 8-bit float with 4 exponent bits, for weights and activations."""
E5M2 = jnp.float8_e5m2
"""The 8-bit float with 5 exponent bits, for gradients."""
# The exponent of the largest magnitude of what is rounded: below 256 in E4M3 and below 2^15 in E5M2.
_EXPONENTS: dict[Any, int] = {E4M3: 7, E5M2: 14}


def round_to_fp8(
    x: Float[Array, "..."], dtype: Any, dim: int | tuple[int, ...] | None
) -> tuple[Array, Float[Array, "..."]]:
    """Return `x` over its scale in an 8-bit dtype, and the scale: one for each slice along `dim`, or for all of `x`.

    Numbers that are not finite are not finite afterwards.
    """
    wide = at_least_float32(x.dtype)
    scale, inverse = fp8_scale(jnp.max(jnp.abs(x), dim, keepdims=dim is not None), dtype)
    return (x.astype(wide) * inverse.astype(wide)).astype(dtype), scale.astype(wide)


def fp8_scale(largest: Float[Array, "*dims"], dtype: Any) -> tuple[Float[Array, "*dims"], Float[Array, "*dims"]]:
    """Return the power of two, in float32, by which a largest magnitude is divided for an 8-bit dtype; its inverse."""
    # A float32's exponent, to which 127 is added, stands above 23 bits of digits.
    exponent = (jax.lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32) >> 23) - _EXPONENTS[dtype]
    exponent = jnp.clip(exponent, 1, 253)  # so that the scale's inverse is a number too
    scale, inverse = (jax.lax.bitcast_convert_type(bits << 23, jnp.float32) for bits in (exponent, 254 - exponent))
    return scale, inverse
