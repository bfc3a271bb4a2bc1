"""`grouped` where kernels support its maps: all rows at once, a grouped product for each linear map."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ...kernels import GroupedMatmul, GroupedMatmulCall
from .._dtype import at_least_float32
from .._float32_sums import add_float32
from .._linear import dense, LinearMap
from .._matmul_precision import Fp8Matmul, MatmulPrecision
from ._grouped_maps import Maps, Parameters, recorded, replayed


KernelFor = Callable[[GroupedMatmulCall], GroupedMatmul]
"""The kernel that computes a call."""


def ragged(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernel_for: KernelFor,
    most: int | None = None,
) -> Array:
    """Return the rows' outputs, of maps that are computed by the kernel of `kernel_for` each."""
    return ragged_forward(static, arrays, x, sizes, kernel_for=kernel_for, most=most)[0]


def ragged_forward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernel_for: KernelFor,
    most: int | None = None,
) -> tuple[Array, list[Array]]:
    """Return the rows' outputs, and those of the modules' linear maps."""
    maps, made = _maps(sizes, len(x), kernel_for, most), []

    def forward(linear: LinearMap, x: Array) -> Array:
        made.append(maps.forward(linear, x))
        return made[-1]

    y, kept = recorded(eqx.combine(arrays, static), x, maps._replace(forward=forward))
    # A map's output has zeros behind the last group.
    return (y if any(y is one for one in made) else jnp.where(_is_real(x, sizes), y, 0)), kept


def ragged_backward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    kept: Sequence[Array],
    gradient: Array,
    *,
    kernel_for: KernelFor,
    most: int | None = None,
) -> tuple[PyTree, Array]:
    """Return the gradients of the parameters and of the rows; `kept` ends in the output."""
    maps = _maps(sizes, len(x), kernel_for, most)
    again = lambda arrays, x: replayed(eqx.combine(arrays, static), x, maps, kept)
    to_arrays, to_x = jax.vjp(again, arrays, x)[1](gradient)
    return to_arrays, jnp.where(_is_real(x, sizes), to_x, 0)


def _maps(sizes: Array, rows: int, kernel_for: KernelFor, most: int | None) -> Maps:
    owners = jnp.repeat(jnp.arange(len(sizes), dtype=jnp.int32), sizes, total_repeat_length=rows)

    def kernel_of(products: MatmulPrecision, x: Array, weight: Array) -> GroupedMatmul:
        return kernel_for(GroupedMatmulCall(x, weight, sizes, isinstance(products, Fp8Matmul), most))

    def forward(linear: LinearMap, x: Array) -> Array:
        weight = dense(linear).weight
        y = kernel_of(linear.products, x, weight).forward(x, weight, sizes)
        return add_float32(y, None if linear.bias is None else jnp.where(_is_real(x, sizes), linear.bias[owners], 0))

    def backward(
        products: MatmulPrecision, parameters: Parameters, x: Array, output_grad: Array
    ) -> tuple[Parameters, Array]:
        (weight, bias), wide = parameters, at_least_float32(x.dtype)
        kernel, bias_grad = kernel_of(products, x, weight), None
        weight_grad = kernel.weight_grad(output_grad, x, sizes, weight.dtype)
        if bias is not None:
            of_rows = jnp.where(_is_real(x, sizes), output_grad, 0)
            bias_grad = jax.ops.segment_sum(of_rows.astype(wide), owners, len(sizes)).astype(bias.dtype)
        return (weight_grad, bias_grad), kernel.input_grad(output_grad, weight, sizes)

    return Maps(forward, backward)


def _is_real(x: Array, sizes: Array) -> Array:
    return (jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[:, None]
