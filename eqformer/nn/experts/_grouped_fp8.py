"""Products of sorted rows and their groups' matrices in 8 bits, of kernels that multiply such numbers."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._matmul_precision import Fp8Matmul, power_of_two, rounded
from ._grouped_maps import Kernels


class OfCodes(NamedTuple):
    """Products of numbers of 8 bits on one kind of accelerator: sums in float32, times scales, rounded to a dtype."""

    rows: Callable[..., Array]
    """Each row by its group's matrix, zeros behind the last group.

    `rows(codes, matrices, of_row, of_group, sizes, dtype, contracts=, interpret=)`: the scales of rows and of groups'
    matrices, and which dim of these is summed over.
    """
    outer: Callable[..., Array]
    """The sum over each group's rows of a gradient's and an input's outer product.

    `outer(gradient, codes, of_group, sizes, dtype, interpret=)`; rows behind the last group are not read.
    """


def in_8_bits(products: OfCodes) -> Kernels:
    """Kernels whose factors are rounded as by `Fp8Matmul`: a row, and a group's matrix, has a scale of its own."""

    def by_rows(x: Array, form: DTypeLike, weight: Array, sizes: Array, contracts: int, interpret: bool) -> Array:
        codes, of_row = rounded(x, form, -1)
        matrices, of_group = rounded(weight.astype(x.dtype), Fp8Matmul.E4M3, (1, 2))
        how = {"contracts": contracts, "interpret": interpret}
        return products.rows(codes, matrices, of_row, of_group[:, 0, 0], sizes, x.dtype, **how)

    def times(
        x: Float[Array, "rows inputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
        *,
        interpret: bool = False,
    ) -> Float[Array, "rows outputs"]:
        return by_rows(x, Fp8Matmul.E4M3, weight, sizes, 2, interpret)

    def back(
        gradient: Float[Array, "rows outputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
        *,
        interpret: bool = False,
    ) -> Float[Array, "rows inputs"]:
        return by_rows(gradient, Fp8Matmul.E5M2, weight, sizes, 1, interpret)

    def outer(
        gradient: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: DTypeLike,
        *,
        interpret: bool = False,
    ) -> Float[Array, "groups outputs inputs"]:
        codes, of_row = rounded(x, Fp8Matmul.E4M3, -1)
        of_group, inverses = _scales_of_groups(gradient, of_row, sizes)
        wide = gradient.astype(of_row.dtype) * of_row * inverses.astype(of_row.dtype)
        return products.outer(wide.astype(Fp8Matmul.E5M2), codes, of_group, sizes, dtype, interpret=interpret)

    return Kernels(times, back, outer)


def _scales_of_groups(
    gradient: Float[Array, "rows outputs"], of_row: Float[Array, "rows 1"], sizes: Int[Array, "groups"]
) -> tuple[Float[Array, "groups"], Float[Array, "rows 1"]]:
    """The scale of each group's gradient times `of_row`, and of each row its inverse, 0 of rows behind the last group.

    The largest of a row is what the row's own scale is made of, so that a gradient is not read once more.
    """
    largest = jnp.max(jnp.abs(gradient), -1, keepdims=True).astype(of_row.dtype) * of_row
    ends, row = jnp.cumsum(sizes, dtype=jnp.int32), jnp.arange(len(gradient), dtype=jnp.int32)[:, None]
    is_own = (row >= ends - sizes) & (row < ends)
    scale, inverse = power_of_two(jnp.max(jnp.where(is_own, largest, 0), 0, initial=0), Fp8Matmul.E5M2)
    return scale, jnp.sum(jnp.where(is_own, inverse, 0), 1, keepdims=True)
