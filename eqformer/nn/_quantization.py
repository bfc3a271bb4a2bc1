"""Weights in 8 or 4 bits: number formats, the linear map that decodes its weight, and the quantization of a model."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PyTree, UInt8

from .. import kernels
from .._annotation_checks import name_class
from ..kernels import BITS, codes_in_a_byte, decode_matrix, repeat_groups
from ._contracts import ComputeDtypeMatmul
from ._dtype import float_dtype
from ._linear import apply_weight, dense, DenseMap, LinearMap
from ._lora import choose_maps, replace_maps, Where
from ._module import map_modules, named_by, named_modules
from .experts._routing import Router


LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "fp4": 6.0}
"""The largest magnitude of a rounded number, by format."""


def round_to_codes(
    x: Float[Array, "*dims columns"], scales: Float32[Array, "*scale_dims"], form: str
) -> UInt8[Array, "*dims bytes"]:
    """Divide numbers by their scales and return the nearest codes, packed into bytes."""
    x = x.astype(jnp.float32) / repeat_groups(jnp.where(scales > 0, scales, 1), x.shape)
    x = jnp.clip(x, -LARGEST[form], LARGEST[form])
    if form == "fp8":
        return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    return pack_codes((jnp.round(x) + 2.0 ** (BITS[form] - 1)).astype(jnp.uint8), form)


def pack_codes(codes: UInt8[Array, "*dims columns"], form: str) -> UInt8[Array, "*dims bytes"]:
    """Pack two codes of 4 bits into each byte, low bits first; return codes of 8 bits as they are."""
    return codes if codes_in_a_byte(form) == 1 else codes[..., ::2] | codes[..., 1::2] << 4


class QuantizedLinear(LinearMap):
    """`y = W x + b` with `W = (code - zero) * scale`, decoded in float32 and rounded once, to the dtype of `x`.

    The weight is decoded in the forward pass and again in the backward pass, so only one layer's decoded weight is in
    memory at a time. Codes are bytes: no optimizer trains them and no cast changes them. Scales, and zero points that
    are floats, are ordinary float parameters. Each output has one scale, or one scale for each group of inputs. A group
    consists of consecutive indices of the last input dim, at one index of each other input dim. `nn.quantize` builds
    the map.
    """

    inputs: tuple[str, ...] = eqx.field(static=True)
    outputs: tuple[str, ...] = eqx.field(static=True)
    form: str = eqx.field(static=True)
    scale_dims: tuple[str, ...] = eqx.field(static=True)
    codes: UInt8[Array, "..."] = named_by("weight_dims")
    scales: Float[Array, "..."] | UInt8[Array, "..."] = named_by("scale_dims", keeps_float32=True)
    zeros: UInt8[Array, "..."] | Float[Array, "..."] | None = named_by("scale_dims", keeps_float32=True)
    bias: Float[Array, "..."] | None = named_by("outputs")

    def __init__(
        self,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        form: str,
        codes: UInt8[Array, "..."],
        scales: Float[Array, "..."] | UInt8[Array, "..."],
        zeros: UInt8[Array, "..."] | Float[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
    ):
        """Store the arrays; every array may have ensemble dims in front (`layers`, `experts`).

        Args:
            inputs: Names of the input dims.
            outputs: Names of the output dims.
            form: The number format: int8, int4, fp8 or fp4.
            codes: Codes with the weight's dims, outputs first; two codes of 4 bits share a byte of the last dim.
            scales: Floats, or 8-bit exponents, with the weight's dims. An input dim has size 1 if one scale serves the
                whole dim. The last dim has one entry per group.
            zeros: Zero points, one for each scale: bytes, or floats; None: half of the range.
            bias: Added to the product, with the output dims.
        """
        self.inputs, self.outputs, self.form = inputs, outputs, form
        input_sizes = scales.shape[scales.ndim - len(inputs) :]
        input_names = (name if size > 1 else "_" for name, size in zip(inputs, input_sizes, strict=True))
        self.scale_dims = (*outputs, *input_names)
        self.codes, self.scales, self.zeros, self.bias = codes, scales, zeros, bias

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: outputs, then inputs."""
        return (*self.outputs, *self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * codes_in_a_byte(self.form))

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `W x`; the backward pass decodes the codes again instead of keeping `W`."""
        return jax.checkpoint(functools.partial(_product, dtype), prevent_cse=False)(self, x)

    def matrix(self, dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the decoded weight, in float32 unless a dtype is given."""
        weight = decode_matrix(self.codes, self.form, self.scales, self.zeros)
        return weight if dtype is None else weight.astype(dtype)


def _product(
    dtype: jax.typing.DTypeLike | None, linear: QuantizedLinear, x: Float[Array, "..."]
) -> Float[Array, "..."]:
    if not _is_for_few_rows(linear, x, dtype):
        return apply_weight(linear, linear.matrix(x.dtype), x, dtype)
    batch = x.shape[: x.ndim - len(linear.inputs)]
    as_matrix = lambda array: array.reshape(math.prod(linear.output_shape), -1)
    codes, scales, zeros = jax.tree.map(as_matrix, (linear.codes, linear.scales, linear.zeros))
    call = kernels.QuantizedMatmulCall(x.reshape(*batch, -1), codes, scales, zeros, linear.form)
    return kernels.QUANTIZED_MATMUL(call).reshape(*batch, *linear.output_shape)


_FEW_ROWS = 128


def _is_for_few_rows(linear: QuantizedLinear, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None) -> bool:
    """Return whether `kernels.QUANTIZED_MATMUL` can compute the product: it takes few rows, as in decoding.

    The groups of all scales must have the same size, the result must have the dtype of `x`, and the map must have no
    ensemble dims in front.
    """
    input_shape = tuple(linear.sizes[name] for name in linear.inputs)
    batch = x.shape[: x.ndim - len(input_shape)]
    scales_of_output = linear.scales.shape[linear.scales.ndim - len(input_shape) :]
    return (
        math.prod(batch) <= _FEW_ROWS
        and isinstance(linear.products, ComputeDtypeMatmul)
        and (dtype is None or jnp.dtype(dtype) == x.dtype)
        and x.shape[len(batch) :] == input_shape
        and linear.codes.ndim == len(linear.weight_dims)
        and (scales_of_output[:-1] == input_shape[:-1] or math.prod(scales_of_output) == 1)
    )


def quantize(model: PyTree, form: str, *, group: int | None = None, where: Where | None = None) -> PyTree:
    """Return the model with the weights of its linear maps rounded to codes of 8 or 4 bits.

    A scale maps the largest magnitude of its group to the largest code: 127 for `"int8"`, 7 for `"int4"`, 448 for
    `"fp8"` (E4M3). Activations, biases, norms and embedding tables stay as they are. Raises a `ValueError` for an
    unknown format, for a group that does not divide the inputs, and for a chosen map that holds no weight to round (a
    quantized map or a `LoRA`).

    Args:
        model: A tree of modules.
        form: The number format: `"int8"`, `"int4"` or `"fp8"`.
        group: How many consecutive inputs share a scale, within the last input dim of a map (`head_dim` for the output
            projection of attention). A group larger than that dim takes the whole dim. None: one scale per output.
        where: Which maps to quantize, as for `with_lora`; None: all except routers and maps with a `vocab` dim.
    """
    call = f"quantize(model, {form!r}" + (f", group={group})" if group is not None else ")")
    if form not in _FORMS:
        raise ValueError(f"{call}: unknown number format; give one of {', '.join(_FORMS)}.")
    if group is not None and group < 1:
        raise ValueError(f"{call}: a group has at least one input; give None for one scale per output.")
    chosen = choose_maps(model, _default_maps(model) if where is None else where, call)

    def quantize_map(name: str, linear: LinearMap) -> QuantizedLinear:
        return _quantize_map(linear, form, group, f"{call}: {name or 'the map'}")

    return replace_maps(model, chosen, quantize_map)


def dequantize(model: PyTree, dtype: jax.typing.DTypeLike = "float32") -> PyTree:
    """Replace every `QuantizedLinear` by a plain `Linear` with the decoded weight in `dtype`."""
    weight_dtype = float_dtype(dtype, f"dequantize(dtype={dtype!r})")

    def dequantize_map(linear: QuantizedLinear) -> LinearMap:
        return eqx.tree_at(lambda m: m.weight, dense(linear), replace_fn=lambda weight: weight.astype(weight_dtype))

    return map_modules(dequantize_map, model, QuantizedLinear)


def quantized_formats(model: PyTree) -> dict[str, dict[str, Any]]:
    """Return, for JSON, the form of each `QuantizedLinear`, and shapes and dtypes of its scales and zeros, by path."""

    def describe(array: Array | jax.ShapeDtypeStruct | None) -> dict[str, Any] | None:
        return None if array is None else {"shape": list(array.shape), "dtype": str(array.dtype)}

    return {
        name: {"form": linear.form, "scales": describe(linear.scales), "zeros": describe(linear.zeros)}
        for name, linear in named_modules(model, QuantizedLinear)
    }


def with_quantized_formats(model: PyTree, formats: Mapping[str, Any]) -> PyTree:
    """Return the model with its plain maps at these paths replaced by `QuantizedLinear`s in these formats.

    `formats` is a result of `quantized_formats`. All codes are 0: with `equinox.filter_eval_shape`, the call gives the
    shapes of a model with quantized weights. Raises a `ValueError` for a path without a plain map, and for an entry
    that `quantized_formats` does not write.
    """
    maps = dict(named_modules(model, LinearMap))

    def zeros(array: Mapping[str, Any] | None) -> Array | None:
        return None if array is None else jnp.zeros(array["shape"], array["dtype"])

    def replace(name: str, linear: LinearMap) -> QuantizedLinear:
        assert isinstance(linear, DenseMap)
        entry = formats[name]
        *outer, columns = linear.weight.shape
        codes = jnp.zeros((*outer, columns // codes_in_a_byte(entry["form"])), jnp.uint8)
        scales, zero_points = jnp.zeros(entry["scales"]["shape"], entry["scales"]["dtype"]), zeros(entry["zeros"])
        options: dict[str, Any] = {"form": entry["form"], "codes": codes, "scales": scales, "zeros": zero_points}
        return QuantizedLinear(linear.inputs, linear.outputs, bias=linear.bias, **options)

    if unknown := [name for name in formats if not isinstance(maps.get(name), DenseMap)]:
        raise ValueError(f"with_quantized_formats(model, formats): {unknown[0]} is no plain linear map of the model.")
    try:
        return replace_maps(model, formats, replace)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"with_quantized_formats(model, formats): an entry is not as quantized_formats wrote it: {error!r:.200}."
        ) from error


_FORMS = ("int8", "int4", "fp8")


def _default_maps(model: PyTree) -> Where:
    """Choose all maps except maps of routers and maps with a `vocab` dim."""
    routers = tuple(f"{name}." for name, _ in named_modules(model, Router))
    return lambda name, linear: not name.startswith(routers) and "vocab" not in (*linear.outputs, *linear.inputs)


def _quantize_map(linear: LinearMap, form: str, group: int | None, call: str) -> QuantizedLinear:
    if isinstance(linear, QuantizedLinear):
        raise ValueError(f"{call} is quantized already; dequantize the model first, or choose other maps by where=.")
    if not isinstance(linear, DenseMap):
        raise ValueError(
            f"{call} is {name_class(linear)}, which holds no weight to round; quantize before with_lora, or "
            "choose other maps by where=."
        )
    weight, inputs = linear.weight, linear.inputs
    width = weight.shape[-1]
    group_size = None if group is None else min(group, width)
    if width % codes_in_a_byte(form):
        raise ValueError(
            f"{call} has a last input dim {inputs[-1]!r} of size {width}, which is odd, and two codes share a byte; "
            "take int8 or fp8."
        )
    if group_size is not None and width % group_size:
        raise ValueError(
            f"{call} has a last input dim {inputs[-1]!r} of size {width}, which is no multiple of the group size "
            f"{group_size}; take a group that divides {width}."
        )
    magnitudes = jnp.abs(weight).astype(jnp.float32)
    if group_size is None:
        largest = jnp.max(magnitudes, tuple(range(-len(inputs), 0)), keepdims=True)
    else:
        largest = jnp.max(magnitudes.reshape(*weight.shape[:-1], -1, group_size), -1)
    scales = largest / LARGEST[form]
    codes = round_to_codes(weight, scales, form)
    return QuantizedLinear(inputs, linear.outputs, form=form, codes=codes, scales=scales, bias=linear.bias)
