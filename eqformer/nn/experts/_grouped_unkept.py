"""`grouped` on CPUs where nothing is kept for gradients: forward passes, prompts and decoding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._float32_sums import add_float32
from .._linear import DenseMap, linear_maps, LinearMap
from .._matmul_precision import ComputeDtypeMatmul
from ._grouped_blocks import even_load, LEAST, outputs, Slots, WHOLE


LARGE = 2**23  # bytes of a group's weights: a copy of as much, which a block makes, is no longer read from a cache


def unkept(static: PyTree, arrays: PyTree, x: Array, sizes: Array, *, even: int | None = None) -> Array:
    """The rows' outputs: in slots where a copy of each group's weights would cost more than empty slots do.

    A block of rows copies its group's weights out of the ensemble, and one batched product for the slots of all groups
    copies none. Blocks win where few groups have rows at all, and where small weights meet many rows.
    """
    even = even_load(sizes, len(x), even)
    # In 16 bits fused operations round less often, so that maps in codes, which go by blocks, would differ.
    is_wide = jnp.finfo(x.dtype).bits >= 32
    number = max(LEAST, even * 5 // 4) if is_wide and even >= 2 and _are_better_together(static, arrays, even) else 0
    return outputs(static, arrays, x, sizes, Slots(sizes, len(x), min(number, len(x)), even), _LEFT)[0]


def _are_better_together(static: PyTree, arrays: PyTree, even: int) -> bool:
    if not all(isinstance(one, DenseMap) for one in linear_maps(static)):  # codes would be decoded for all at once
        return False
    large = sum(array[0].nbytes for array in jax.tree.leaves(arrays)) >= LARGE
    return large or even < LEAST


def _left(linear: LinearMap, x: Array) -> Array:
    """Return `linear(x)` of few rows, with the weight on the left, so that it is multiplied in the order it is stored.

    Of eight weights of 2048 x 2048 and 16 rows each that takes 0.6 of the time.
    """
    if not isinstance(linear, DenseMap) or not isinstance(linear.products, ComputeDtypeMatmul):
        return linear(x)
    return add_float32(jnp.einsum("oi,ni->on", linear.weight.astype(x.dtype), x).T, linear.bias)


_LEFT = WHOLE._replace(forward=_left)
