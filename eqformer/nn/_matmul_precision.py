"""Precisions of the products of a linear map, forward and backward: the compute dtype, or 8 bits."""

import abc
import dataclasses
import math
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..kernels import cpu_or, E4M3, E5M2, round_to_fp8
from ._dtype import at_least_float32


@dataclasses.dataclass(frozen=True)
class MatmulPrecision(abc.ABC):
    """The three products of a map `y = W x`: of its input, and those of which its two gradients are made.

    Each is given whole numbers of vectors and a matrix of outputs by inputs, which may be slices of a device, and may
    round them as it likes; it sums in float32 at least, and returns `dtype`. Called, it gives `forward`, of which the
    other two make the gradients (in reverse mode).
    """

    operand_bits: ClassVar[int | None]
    """Bits of the operands after rounding; None where they stay as they are."""

    def __call__(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """`W x`; gradients are summed over mesh axes that one of the two varies over and the other does not."""
        of_x, of_weight = (jnp.zeros_like(one, shape=()) for one in (x, weight))
        typed_alike = x + of_weight.astype(x.dtype), weight + of_x.astype(weight.dtype)
        return _multiplied(self, jnp.dtype(dtype), *typed_alike)

    @abc.abstractmethod
    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """`W x`."""

    @abc.abstractmethod
    def to_input(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """The input's gradient, `W^T g`."""

    @abc.abstractmethod
    def to_weight(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """The weight's gradient, `sum g x^T` over all vectors."""


# On CPUs a matrix is multiplied by one vector where it is stored, and reordered first for more vectors, which costs as
# much as products with three or four.
_FEWEST = 3


class ComputeDtypeMatmul(MatmulPrecision):
    """Products of the arrays as they are, in their own dtype."""

    operand_bits: ClassVar[int | None] = None

    def __call__(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """`W x`, with the gradients that JAX makes."""
        return self.forward(x, weight, dtype)

    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """`W x`; of two or three vectors by one product each on CPUs."""
        together = partial(jnp.einsum, "...i,oi->...o", preferred_element_type=dtype)
        if not 1 < math.prod(x.shape[:-1]) <= _FEWEST:
            return together(x, weight)

        def apart(x: Array, weight: Array) -> Array:
            each = [together(one, weight) for one in x.reshape(math.prod(x.shape[:-1]), x.shape[-1])]
            return jnp.stack(each).reshape(*x.shape[:-1], weight.shape[0])

        return cpu_or(apart, together, x, weight)

    def to_input(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """The input's gradient."""
        return jnp.einsum("...o,oi->...i", gradient, weight, preferred_element_type=dtype)

    def to_weight(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """The weight's gradient."""
        vectors = tuple(range(x.ndim - 1))
        return jnp.tensordot(gradient, x, (vectors, vectors), preferred_element_type=dtype)


class Fp8Matmul(MatmulPrecision):
    """Products of numbers of 8 bits: weights and inputs rounded to E4M3, gradients to E5M2, sums in float32 at least.

    What is rounded is scaled first by the power of two that brings its largest magnitude to 128 at least and below 256
    (E4M3), or to 2^14 and below 2^15 (E5M2): of an input or a gradient that of each vector, of a weight that of the
    matrix. The scale is found where it is used, so that nothing is remembered from step to step. As powers of two
    change no digit, a number is rounded alike beside whatever others, but for those below 2^-13 (E4M3) or 2^-28 (E5M2)
    of the largest, which lose up to 2^-18, or 2^-31, of it. So slices of rows, tokens and features, on their own
    devices or in their own microbatches, give what the whole gives, and no maximum is sent.
    """

    operand_bits: ClassVar[int | None] = 8
    E4M3: ClassVar[Any] = E4M3
    E5M2: ClassVar[Any] = E5M2

    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """`W x`."""
        codes, of_vector = round_to_fp8(x, self.E4M3, -1)
        of_weight, of_all = round_to_fp8(weight, self.E4M3, None)
        y = _dot(codes, of_weight, (codes.ndim - 1,), (1,), dtype)
        return _scaled(y, dtype, of_vector, of_all)

    def to_input(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """The input's gradient."""
        codes, of_vector = round_to_fp8(gradient, self.E5M2, -1)
        of_weight, of_all = round_to_fp8(weight, self.E4M3, None)
        # Some accelerators add 8-bit products up in fewer digits than float32's unless a higher precision is asked for.
        y = _dot(codes, of_weight, (codes.ndim - 1,), (0,), dtype, "highest")
        return _scaled(y, dtype, of_vector, of_all)

    def to_weight(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """The weight's gradient: an input's scale, which differs from vector to vector, goes to its gradient."""
        codes, of_vector = round_to_fp8(x, self.E4M3, -1)
        wide = gradient.astype(at_least_float32(gradient.dtype)) * of_vector.astype(at_least_float32(gradient.dtype))
        of_gradient, of_all = round_to_fp8(wide, self.E5M2, None)
        vectors = tuple(range(x.ndim - 1))
        y = _dot(of_gradient, codes, vectors, vectors, dtype, "highest")
        return _scaled(y, dtype, of_all)


def _forward(products: MatmulPrecision, dtype: Any, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return products.forward(x, weight, dtype), (x, weight)


def _backward(
    products: MatmulPrecision, dtype: Any, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, weight = saved
    return products.to_input(gradient, weight, x.dtype), products.to_weight(gradient, x, weight.dtype)


_multiplied = jax.custom_vjp(
    lambda products, dtype, x, weight: products.forward(x, weight, dtype), nondiff_argnums=(0, 1)
)
_multiplied.defvjp(_forward, _backward)


def _dot(
    left: Array, right: Array, left_dims: tuple, right_dims: tuple, dtype: DTypeLike, precision: str | None = None
) -> Array:
    wanted = jnp.dtype(dtype)
    summed = jnp.dtype("float32") if wanted == jnp.float16 else wanted  # which ends before the unscaled sums do
    dims = ((left_dims, right_dims), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=summed, precision=precision)


def _scaled(y: Array, dtype: DTypeLike, *scales: Array) -> Array:
    wide = at_least_float32(jnp.dtype(dtype))
    product = y.astype(wide)
    for scale in scales:  # one by one, since two small scales have a product that is no number
        product = product * scale.astype(wide)
    return product.astype(dtype)
