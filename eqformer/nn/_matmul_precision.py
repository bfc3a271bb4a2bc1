"""Precisions of a linear map's products, forward and backward: the compute dtype, or 8 bits."""

import abc
import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..kernels import E4M3, E5M2, round_to_fp8
from ._dtype import at_least_float32, multiply_vectors


@dataclasses.dataclass(frozen=True)
class MatmulPrecision(abc.ABC):
    """The three products of a map `y = W x`: the output, and the gradients of the input and of the weight.

    Each product gets whole vectors and a matrix of outputs by inputs; on a mesh they may be the slices of one device.
    It may round both in any way, sums in float32 at least, and returns `dtype`. A call computes `forward`, and its
    gradients by the other two products (in reverse mode).
    """

    operand_bits: ClassVar[int | None]
    """Bits of the operands after rounding; None if they are not rounded."""

    def __call__(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`. Under `shard_map`, gradients are summed over mesh axes over which only the other factor
        varies."""
        x_zero, weight_zero = (jnp.zeros_like(array, shape=()) for array in (x, weight))
        # With the zeros both factors vary over the same axes, and the transposes of these additions sum the gradients.
        factors = x + weight_zero.astype(x.dtype), weight + x_zero.astype(weight.dtype)
        return _multiply(self, jnp.dtype(dtype), *factors)

    @abc.abstractmethod
    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`."""

    @abc.abstractmethod
    def input_grad(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """Return the input's gradient, `W^T g`."""

    @abc.abstractmethod
    def weight_grad(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """Return the weight's gradient, `sum g x^T` over all vectors."""


class ComputeDtypeMatmul(MatmulPrecision):
    """Products of arrays without rounding, in their own dtype."""

    operand_bits: ClassVar[int | None] = None

    def __call__(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`, with JAX's gradients."""
        return self.forward(x, weight, dtype)

    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`."""
        return multiply_vectors(x, weight, dtype)

    def input_grad(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """Return the input's gradient."""
        return jnp.einsum("...o,oi->...i", gradient, weight, preferred_element_type=dtype)

    def weight_grad(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """Return the weight's gradient."""
        vectors = tuple(range(x.ndim - 1))
        return jnp.tensordot(gradient, x, (vectors, vectors), preferred_element_type=dtype)


class Fp8Matmul(MatmulPrecision):
    """Products of 8-bit numbers: weights and inputs are rounded to E4M3, gradients to E5M2; float32 sums at least.

    Before it is rounded, an array is scaled by a power of two that brings its largest magnitude to at least 128 and
    below 256 (E4M3), or to at least 2^14 and below 2^15 (E5M2): each vector of an input or a gradient, and the whole
    matrix of a weight. The scale is computed where it is used, so nothing is remembered from step to step. Powers of
    two change no digit, so a number is rounded in the same way whatever the other numbers are, except for numbers below
    2^-13 (E4M3) or 2^-28 (E5M2) of the largest, which lose up to 2^-18, or 2^-31, of it. So slices of rows, tokens and
    features, on different devices or in different microbatches, give the results of whole arrays, and no maximum is
    sent.
    """

    operand_bits: ClassVar[int | None] = 8
    E4M3: ClassVar[DTypeLike] = E4M3
    E5M2: ClassVar[DTypeLike] = E5M2

    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`."""
        codes, vector_scale = round_to_fp8(x, self.E4M3, -1)
        matrix, matrix_scale = round_to_fp8(weight, self.E4M3, None)
        y = _dot(codes, matrix, (codes.ndim - 1,), (1,), dtype)
        return _apply_scales(y, dtype, vector_scale, matrix_scale)

    def input_grad(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """Return the input's gradient."""
        codes, vector_scale = round_to_fp8(gradient, self.E5M2, -1)
        matrix, matrix_scale = round_to_fp8(weight, self.E4M3, None)
        # Some accelerators sum 8-bit products with fewer digits than float32 unless a higher precision is requested.
        y = _dot(codes, matrix, (codes.ndim - 1,), (0,), dtype, "highest")
        return _apply_scales(y, dtype, vector_scale, matrix_scale)

    def weight_grad(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """Return the weight's gradient; the scales of input vectors multiply the output's gradient before rounding."""
        codes, vector_scale = round_to_fp8(x, self.E4M3, -1)
        wide = at_least_float32(gradient.dtype)
        grad_codes, grad_scale = round_to_fp8(gradient.astype(wide) * vector_scale.astype(wide), self.E5M2, None)
        vectors = tuple(range(x.ndim - 1))
        y = _dot(grad_codes, codes, vectors, vectors, dtype, "highest")
        return _apply_scales(y, dtype, grad_scale)


def _forward(products: MatmulPrecision, dtype: DTypeLike, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return products.forward(x, weight, dtype), (x, weight)


def _backward(
    products: MatmulPrecision, dtype: DTypeLike, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, weight = residuals
    return products.input_grad(gradient, weight, x.dtype), products.weight_grad(gradient, x, weight.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(products: MatmulPrecision, dtype: DTypeLike, x: Array, weight: Array) -> Array:
    return products.forward(x, weight, dtype)


_multiply.defvjp(_forward, _backward)


def _dot(
    left: Array, right: Array, left_dims: tuple, right_dims: tuple, dtype: DTypeLike, precision: str | None = None
) -> Array:
    result_dtype = jnp.dtype(dtype)
    # The sums before scaling may exceed the range of float16.
    sum_dtype = jnp.dtype("float32") if result_dtype == jnp.float16 else result_dtype
    dims = ((left_dims, right_dims), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=sum_dtype, precision=precision)


def _apply_scales(y: Array, dtype: DTypeLike, *scales: Array) -> Array:
    wide = at_least_float32(jnp.dtype(dtype))
    product = y.astype(wide)
    for scale in scales:  # One by one, because the product of two small scales may underflow.
        product = product * scale.astype(wide)
    return product.astype(dtype)
