"""A linear map whose weight is held in 8 or 4 bits a number and decoded where it is used."""

import functools
from typing import Any

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from ._codes import codes_in_a_byte, numbers, scaled
from ._dims import named_by
from ._linear import applied
from ._linear_map import LinearMap


class QuantisedLinear(LinearMap):
    """`y = W x + b` with `W = (code - zero) * scale`, decoded in float32 and rounded once, to the dtype of `x`.

    A layer is decoded when it runs, and again in its backward pass, so that one layer at a time is in memory as
    numbers. Codes are bytes, which nothing trains or casts; scales are numbers like any. Each output has scales of its
    own: one, or one for each group of the last of its inputs and each place of the others. `nn.quantise` makes it.
    """

    inputs: tuple[str, ...] = eqx.field(static=True)
    outputs: tuple[str, ...] = eqx.field(static=True)
    form: str = eqx.field(static=True)
    scale_dims: tuple[str, ...] = eqx.field(static=True)
    codes: UInt8[Array, "..."] = named_by("weight_dims")
    scales: Float[Array, "..."] | UInt8[Array, "..."] = named_by("scale_dims", float32_at_least=True)
    zeros: UInt8[Array, "..."] | None = named_by("scale_dims")
    bias: Float[Array, "..."] | None = named_by("outputs")

    def __init__(
        self,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        form: str,
        codes: UInt8[Array, "..."],
        scales: Float[Array, "..."] | UInt8[Array, "..."],
        zeros: UInt8[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
    ):
        """Put the arrays together; all may have the dims of ensembles in front.

        Args:
            inputs: Names of the dims that it maps.
            outputs: Names of the dims that it gives.
            form: What codes stand for: int8, int4, fp8 or fp4.
            codes: Of the weight's dims, outputs first; two codes of 4 bits share a byte of the last.
            scales: Numbers, or exponents of 8 bits: of the same dims, 1 where one scale is for all of a dim of the
                inputs, and of the last as many as it has groups.
            zeros: The codes that stand for 0, one for each scale; None: half of the range.
            bias: What is added.
        """
        self.inputs, self.outputs, self.form = inputs, outputs, form
        ends = scales.shape[scales.ndim - len(inputs) :]
        self.scale_dims = (*outputs, *(name if size > 1 else "_" for name, size in zip(inputs, ends, strict=True)))
        self.codes, self.scales, self.zeros, self.bias = codes, scales, zeros, bias

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: the outputs, then the inputs."""
        return (*self.outputs, *self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * codes_in_a_byte(self.form))

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """`W x`; what is kept for the backward pass are codes."""
        return jax.checkpoint(functools.partial(_product, dtype), prevent_cse=False)(self, x)

    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """W, in float32 where no dtype is given."""
        weight = scaled(numbers(self.codes, self.form, self.zeros), self.scales)
        return weight if dtype is None else weight.astype(dtype)


def _product(dtype: Any, linear: QuantisedLinear, x: Float[Array, "..."]) -> Float[Array, "..."]:
    return applied(linear, linear.matrix(x.dtype), x, dtype)
