"""Operations whose sums over tokens, forward and backward, are float32 at least.

An array that is broadcast over tokens (a bias, a scale, a gate) has a gradient that is a sum over tokens, and JAX takes
that sum in the dtype of the broadcast. A sum of thousands of bfloat16 numbers stops growing once the addends are less
than half a step of the total. These functions cast to float32 first, then broadcast, and round once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._dtype import at_least_float32


def add_float32(x: Float[Array, "..."], other: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """Return `x + other` in the dtype of `x`, or `x` if `other` is None; either may be broadcast, as a bias is."""
    if other is None:
        return x
    sum_dtype = at_least_float32(x.dtype)
    return (x.astype(sum_dtype) + other.astype(sum_dtype)).astype(x.dtype)


def multiply_float32(x: Float[Array, "..."], other: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x * other` in the dtype of `x`; either may be broadcast, as a gate is."""
    product_dtype = at_least_float32(x.dtype)
    return (x.astype(product_dtype) * other.astype(product_dtype)).astype(x.dtype)


def broadcast_float32(x: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return `x` broadcast to `shape`, in the dtype of `x`."""
    return jnp.broadcast_to(x.astype(at_least_float32(x.dtype)), shape).astype(x.dtype)


def matmul_float32(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"]
) -> Float[Array, "*batch outputs"]:
    """Return `x W^T`: products in the dtype of `x`; sums and result float32 at least, in the gradients too.

    JAX would multiply the result's float32 gradient in float32, with the weight cast up, and round sums over tokens to
    the dtype of `x`. For 16-bit `x` only reverse mode is defined (no `jax.jvp`).
    """
    is_float32 = at_least_float32(x.dtype) == x.dtype
    return _einsum("...i,oi->...o", x, weight, x.dtype) if is_float32 else _matmul_16_bits(x, weight)


@jax.custom_vjp
def _matmul_16_bits(x: Array, weight: Array) -> Array:
    return _einsum("...i,oi->...o", x, weight, x.dtype)


def _matmul_16_bits_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = residuals
    x_gradient = _einsum("...o,oi->...i", gradient, weight, x.dtype)
    return x_gradient.astype(x.dtype), _einsum("...o,...i->oi", gradient, x, x.dtype).astype(weight.dtype)


_matmul_16_bits.defvjp(lambda x, weight: (_matmul_16_bits(x, weight), (x, weight)), _matmul_16_bits_backward)


def _einsum(pattern: str, x: Array, other: Array, dtype: np.dtype) -> Array:
    return jnp.einsum(pattern, x.astype(dtype), other.astype(dtype), preferred_element_type=at_least_float32(dtype))


@jax.custom_jvp
def lookup_rows(table: Float[Array, "rows embed"], ids: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
    """Return `table[ids]`; NaN for an id outside the table, negative or too large.

    The gradient of a token that occurs a thousand times in a batch has a thousand addends. The gradient is summed in
    float32, without a float32 copy of the table.
    """
    return _take_rows(table, ids)


@lookup_rows.defjvp
def _lookup_rows_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    (table, ids), (tangent, _) = primals, tangents
    float32_tangent = tangent.astype(at_least_float32(table.dtype))
    return lookup_rows(table, ids), _take_rows(float32_tangent, ids).astype(table.dtype)


def _take_rows(table: Array, ids: Array) -> Array:
    if not len(table):
        return jnp.full((*ids.shape, table.shape[1]), jnp.nan, table.dtype)
    # Not `jnp.take`, which counts negative ids from the end: -1 would give the last row.
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)
