"""Broadcasts whose gradients, sums over tokens, are taken in float32 at least.

An array that is broadcast over tokens (a bias, a scale, a gate) has a gradient that is a sum over tokens, and JAX takes
that sum in the dtype of the broadcast. A sum of thousands of bfloat16 numbers stops growing when the addends are less
than half a step of the total. So these functions cast to float32 first, then broadcast, and round once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._dtype import at_least_float32


def wide_sum(x: Float[Array, "..."], other: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """`x + other` in the dtype of `x`, of which either may be broadcast, as a bias is; `x` itself for None."""
    if other is None:
        return x
    wide = at_least_float32(x.dtype)
    return (x.astype(wide) + other.astype(wide)).astype(x.dtype)


def wide_product(x: Float[Array, "..."], other: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x * other` in the dtype of `x`, of which either may be broadcast, as a gate is."""
    wide = at_least_float32(x.dtype)
    return (x.astype(wide) * other.astype(wide)).astype(x.dtype)


def spread(x: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """`x` broadcast to `shape`."""
    return jnp.broadcast_to(x.astype(at_least_float32(x.dtype)), shape).astype(x.dtype)


def wide_map(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"]
) -> Float[Array, "*batch outputs"]:
    """`x W^T` with products in the dtype of `x`, and sums and result in float32 at least; the gradients' too.

    JAX would multiply the result's float32 gradient in float32, with the weight cast up, and round what it sums over
    tokens to the dtype of `x`. In 16 bits there is one derivative, in reverse mode, or more of them, but no `jax.jvp`.
    """
    return _product("...i,oi->...o", x, weight, x.dtype) if _is_wide(x) else _narrow_map(x, weight)


@jax.custom_vjp
def _narrow_map(x: Array, weight: Array) -> Array:
    return _product("...i,oi->...o", x, weight, x.dtype)


def _narrow_map_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = saved
    to_x = _product("...o,oi->...i", gradient, weight, x.dtype)
    return to_x.astype(x.dtype), _product("...o,...i->oi", gradient, x, x.dtype).astype(weight.dtype)


_narrow_map.defvjp(lambda x, weight: (_narrow_map(x, weight), (x, weight)), _narrow_map_backward)


def _product(pattern: str, x: Array, other: Array, dtype: np.dtype) -> Array:
    return jnp.einsum(pattern, x.astype(dtype), other.astype(dtype), preferred_element_type=at_least_float32(dtype))


def _is_wide(x: Array) -> bool:
    return at_least_float32(x.dtype) == x.dtype


@jax.custom_jvp
def look_up(table: Float[Array, "rows embed"], ids: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
    """`table[ids]`; NaN for an id outside the table, be it negative or too large.

    The gradient of a token that occurs a thousand times in a batch has a thousand addends. So the gradient is summed in
    float32, without a float32 copy of the table.
    """
    return _rows(table, ids)


@look_up.defjvp
def _look_up_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    (table, ids), (change, _) = primals, tangents
    wide = change.astype(at_least_float32(table.dtype))
    return look_up(table, ids), _rows(wide, ids).astype(table.dtype)


def _rows(table: Array, ids: Array) -> Array:
    if not len(table):
        return jnp.full((*ids.shape, table.shape[1]), jnp.nan, table.dtype)
    # Not `jnp.take`, which counts negative ids from the end: -1 would give the last row.
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)
