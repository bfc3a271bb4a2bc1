"""A linear map whose weight is stored in 8 or 4 bits and decoded when the layer runs."""

import functools

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from .._dims import named_by
from .._linear import apply_weight, LinearMap
from ._formats import apply_scales, codes_in_a_byte, decode_codes


class QuantizedLinear(LinearMap):
    """`y = W x + b` with `W = (code - zero) * scale`, decoded in float32 and rounded once, to the dtype of `x`.

    The weight is decoded in the forward pass and again in the backward pass, so only one layer's decoded weight is in
    memory at a time. Codes are bytes: no optimizer trains them and no cast changes them. Scales are ordinary float
    parameters. Each output has its own scales: one, or one for each group along the last input dim and each index of
    the other input dims. `nn.quantize` builds it.
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
        """Store the arrays; every array may have ensemble dims in front (`layers`, `experts`).

        Args:
            inputs: Names of the input dims.
            outputs: Names of the output dims.
            form: The number format: int8, int4, fp8 or fp4.
            codes: Codes with the weight's dims, outputs first; two codes of 4 bits share a byte of the last dim.
            scales: Floats, or exponents of 8 bits, with the weight's dims; an input dim has size 1 where one scale
                serves the whole dim, and the last dim has one entry per group.
            zeros: Zero points, one for each scale; None: half of the range.
            bias: Added to the product, with the output dims.
        """
        self.inputs, self.outputs, self.form = inputs, outputs, form
        ends = scales.shape[scales.ndim - len(inputs) :]
        self.scale_dims = (*outputs, *(name if size > 1 else "_" for name, size in zip(inputs, ends, strict=True)))
        self.codes, self.scales, self.zeros, self.bias = codes, scales, zeros, bias

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: outputs, then inputs."""
        return (*self.outputs, *self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * codes_in_a_byte(self.form))

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `W x`; the backward pass decodes the codes again instead of keeping `W`."""
        return jax.checkpoint(functools.partial(_product, dtype), prevent_cse=False)(self, x)

    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the decoded weight, in float32 unless a dtype is given."""
        weight = apply_scales(decode_codes(self.codes, self.form, self.zeros), self.scales)
        return weight if dtype is None else weight.astype(dtype)


def _product(dtype: DTypeLike | None, linear: QuantizedLinear, x: Float[Array, "..."]) -> Float[Array, "..."]:
    return apply_weight(linear, linear.matrix(x.dtype), x, dtype)
