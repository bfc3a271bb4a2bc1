"""`grouped` on TPUs and Hopper GPUs: all rows at once, a ragged product for each linear map."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._dtype import at_least_float32
from .._float32_sums import add_float32
from .._linear import dense
from .._linear_map import LinearMap
from .._matmul_precision import Fp8Matmul, MatmulPrecision
from ._grouped_kernels import TPU
from ._grouped_maps import Kernels, Maps, Parameters, recorded, replayed


def ragged(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernels: Kernels = TPU,
    in_8_bits: Kernels | None = None,
    interpret: bool = False,
) -> Array:
    """The rows' outputs.

    Maps whose products are of 8 bits have kernels of their own, if there are any. `interpret` runs kernels as plain JAX
    on any platform, which is slow: for tests.
    """
    how: Any = {"kernels": kernels, "in_8_bits": in_8_bits, "interpret": interpret}
    return ragged_forward(static, arrays, x, sizes, **how)[0]


def ragged_forward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernels: Kernels = TPU,
    in_8_bits: Kernels | None = None,
    interpret: bool = False,
) -> tuple[Array, list[Array]]:
    """The rows' outputs, and what the modules' linear maps gave."""
    maps, made = _maps(sizes, len(x), kernels, in_8_bits, interpret), []

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
    kernels: Kernels = TPU,
    in_8_bits: Kernels | None = None,
    interpret: bool = False,
) -> tuple[PyTree, Array]:
    """The gradients of the parameters and of the rows; `kept` ends in the output."""
    maps = _maps(sizes, len(x), kernels, in_8_bits, interpret)
    again = lambda arrays, x: replayed(eqx.combine(arrays, static), x, maps, kept)
    to_arrays, to_x = jax.vjp(again, arrays, x)[1](gradient)
    return to_arrays, jnp.where(_is_real(x, sizes), to_x, 0)


def _maps(sizes: Array, rows: int, kernels: Kernels, in_8_bits: Kernels | None, interpret: bool) -> Maps:
    owners = jnp.repeat(jnp.arange(len(sizes), dtype=jnp.int32), sizes, total_repeat_length=rows)

    def of(products: MatmulPrecision) -> Kernels:
        found = in_8_bits if in_8_bits is not None and isinstance(products, Fp8Matmul) else kernels
        return Kernels(*(functools.partial(kernel, interpret=interpret) for kernel in found))

    def forward(linear: LinearMap, x: Array) -> Array:
        y = of(linear.products).times(x, dense(linear).weight, sizes)
        return add_float32(y, None if linear.bias is None else jnp.where(_is_real(x, sizes), linear.bias[owners], 0))

    def backward(
        products: MatmulPrecision, parameters: Parameters, x: Array, gradient: Array
    ) -> tuple[Parameters, Array]:
        (weight, bias), exact, its = parameters, at_least_float32(x.dtype), of(products)
        to_weight, to_bias = its.outer(gradient, x, sizes, weight.dtype), None
        if bias is not None:
            of_rows = jnp.where(_is_real(x, sizes), gradient, 0)
            to_bias = jax.ops.segment_sum(of_rows.astype(exact), owners, len(sizes)).astype(bias.dtype)
        return (to_weight, to_bias), its.back(gradient, weight, sizes)

    return Maps(forward, backward)


def _is_real(x: Array, sizes: Array) -> Array:
    return (jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[:, None]
