"""Dtypes: names, casts, sums over tokens in float32 in forward and backward passes, and 8-bit caches.

An array that is broadcast over tokens (a bias, a scale, a gate) has a gradient that is a sum over tokens, and JAX takes
that sum in the dtype of the broadcast. A sum of thousands of bfloat16 numbers stops growing once the addends are less
than half a step of the total. The operations here cast to float32 first, then broadcast, and round once.
"""

import math
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num, PyTree

from ..kernels import at_least_float32, cpu_or


def in_float32(tree: PyTree) -> PyTree:
    """Return the tree with its floating-point arrays, of JAX or NumPy, cast to float32 at least."""
    return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)) if _is_float(x) else x, tree)


def in_dtypes_of(tree: PyTree, other: PyTree) -> PyTree:
    """Return the tree with its floating-point arrays in the dtypes of the arrays of another tree."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype) if _is_float(x) else x, tree, other)


def _is_float(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


def lossless_dtype(*dtypes: jax.typing.DTypeLike) -> np.dtype:
    """Return the narrowest floating-point dtype that represents all numbers of these dtypes.

    For bfloat16 with float16 the result is float32: neither contains the other, and NumPy knows no common dtype.
    """
    by_size = sorted({jnp.dtype(dtype) for dtype in dtypes}, key=operator.attrgetter("itemsize"))
    wider = [jnp.dtype(name) for name in ("float32", "float64")]
    return next(dtype for dtype in (*by_size, *wider) if all(_contains(dtype, narrow) for narrow in by_size))


def _contains(wide: np.dtype, narrow: np.dtype) -> bool:
    """Return whether one dtype represents all numbers of another."""
    wide_info, narrow_info = jnp.finfo(wide), jnp.finfo(narrow)
    has_exponents = wide_info.maxexp >= narrow_info.maxexp and wide_info.minexp <= narrow_info.minexp
    return wide_info.nmant >= narrow_info.nmant and has_exponents


def float_dtype(dtype: object, call: str) -> str:
    """Return the full name of a floating-point dtype from a name, a short name (`bf16`, `half`) or a dtype.

    Raises a `ValueError` that begins with `call` for any other dtype, and for float64 if JAX has it switched off.
    """
    if isinstance(dtype, str):
        name, shown = dtype.strip().lower().rpartition(".")[2], repr(dtype)
    else:
        name = shown = _name(dtype)
    full = next((full for full, short in _FLOATS.items() if name == full or name in short), None)
    if full is None:
        known = ", ".join(f"{full} ({short[0]})" for full, short in _FLOATS.items())
        raise ValueError(f"{call}: {shown} is no floating-point dtype of weights; give one of {known}.")
    if full == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{call}: JAX has float64 only where JAX_ENABLE_X64=1 is set before it starts; set it.")
    return full


def _name(dtype: Any) -> str:
    try:
        return "None" if dtype is None else jnp.dtype(dtype).name  # NumPy would take None for float64.
    except TypeError:
        return str(dtype)


# The full name of each dtype, and its other names. Messages show the first of the other names.
_FLOATS = {
    "float32": ("fp32", "f32", "float", "single"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
    "float64": ("fp64", "f64", "double"),
}


def add_float32(x: Float[Array, "..."], other: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """Return `x + other` in the dtype of `x`, or `x` if `other` is None; either may be broadcast, as a bias is."""
    if other is None:
        return x
    sum_dtype = at_least_float32(x.dtype)
    return (x.astype(sum_dtype) + other.astype(sum_dtype)).astype(x.dtype)


def multiply_float32(x: Float[Array, "..."], other: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x * other` in the dtype of `x`; either may be broadcast, as a gate is."""
    product_dtype = at_least_float32(x.dtype)
    return (x.astype(product_dtype) * other.astype(product_dtype)).astype(x.dtype)


def broadcast_float32(x: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return `x` broadcast to `shape`, in the dtype of `x`."""
    return jnp.broadcast_to(x.astype(at_least_float32(x.dtype)), shape).astype(x.dtype)


# On CPUs, the second factor of a product is first reordered in memory, and with few vectors this costs more than the
# product itself. With up to `_FEW_VECTORS` vectors, the matrix is therefore the first factor. The gain is worth a
# separate case for CPUs in the program only if the matrix has at least `_LARGE_MATRIX` entries.
_FEW_VECTORS = 64
_LARGE_MATRIX = 2**16


def multiply_vectors(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*batch outputs"]:
    """Return `x W^T` in `dtype`; on CPUs a large matrix is the first factor if there are few vectors."""
    multiply = partial(jnp.einsum, "...i,oi->...o", preferred_element_type=dtype)
    if not 1 < math.prod(x.shape[:-1]) <= _FEW_VECTORS or weight.size < _LARGE_MATRIX:
        return multiply(x, weight)

    def multiply_matrix_first(x: Array, weight: Array) -> Array:
        vectors = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        outputs = jnp.einsum("oi,vi->ov", weight, vectors, preferred_element_type=dtype)
        # Without a barrier, a transposed product is compiled as a product whose second factor is the matrix.
        outputs = jax.lax.optimization_barrier(outputs).T
        return outputs.reshape(*x.shape[:-1], weight.shape[0])

    return cpu_or(multiply_matrix_first, multiply, x, weight)


def matmul_float32(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"]
) -> Float[Array, "*batch outputs"]:
    """Return `x W^T`, multiplied in the dtype of `x`, and summed and returned in float32 at least.

    The gradients are computed in the same way. JAX's own gradients would multiply in float32, with the weight cast up,
    and would round sums over tokens to the dtype of `x`. For 16-bit `x` only reverse mode is defined (no `jax.jvp`).
    """
    is_float32 = at_least_float32(x.dtype) == x.dtype
    return multiply_vectors(x, weight.astype(x.dtype), x.dtype) if is_float32 else _matmul_16_bits(x, weight)


@jax.custom_vjp
def _matmul_16_bits(x: Array, weight: Array) -> Array:
    return multiply_vectors(x, weight.astype(x.dtype), at_least_float32(x.dtype))


def _matmul_16_bits_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _matmul_16_bits(x, weight), (x, weight)


def _matmul_16_bits_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = residuals
    x_gradient = _einsum("...o,oi->...i", gradient, weight, x.dtype)
    return x_gradient.astype(x.dtype), _einsum("...o,...i->oi", gradient, x, x.dtype).astype(weight.dtype)


_matmul_16_bits.defvjp(_matmul_16_bits_forward, _matmul_16_bits_backward)


def _einsum(pattern: str, x: Array, other: Array, dtype: np.dtype) -> Array:
    return jnp.einsum(pattern, x.astype(dtype), other.astype(dtype), preferred_element_type=at_least_float32(dtype))


@jax.custom_jvp
def lookup_rows(table: Float[Array, "rows *row"], ids: Int[Array, "*batch"]) -> Float[Array, "..."]:
    """Return `table[ids]`; NaN for an id outside the table, negative or too large.

    A row's gradient has an addend for each occurrence of its token in the batch, possibly thousands. The gradient is
    therefore summed in float32, without a float32 copy of the table.
    """
    return _take_rows(table, ids)


@lookup_rows.defjvp
def _lookup_rows_jvp(primals: tuple[Array, Array], tangents: tuple[Array, object]) -> tuple[Array, Array]:
    (table, ids), (tangent, _) = primals, tangents
    float32_tangent = tangent.astype(at_least_float32(table.dtype))
    return lookup_rows(table, ids), _take_rows(float32_tangent, ids).astype(table.dtype)


def _take_rows(table: Array, ids: Array) -> Array:
    if not len(table):
        return jnp.full((*ids.shape, *table.shape[1:]), jnp.nan, table.dtype)
    # Not `jnp.take`, which counts negative ids from the end: -1 would give the last row.
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)


def parse_cache_dtype(dtype: object, call: str) -> tuple[str, bool]:
    """Return a cache dtype's full name, and whether it has 8 bits and needs scales.

    Accepts `"int8"`, `"float8_e4m3fn"` (`"fp8"`) and the dtypes of `float_dtype`. Raises a `ValueError` that begins
    with `call` for any other dtype.
    """
    name = dtype.strip().lower() if isinstance(dtype, str) else dtype
    full = {"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}.get(str(name), str(name))
    if full in _LARGEST:
        return full, True
    try:
        return float_dtype(dtype, call), False
    except ValueError as error:
        raise ValueError(f"{error} KV caches also take int8 and float8_e4m3fn (fp8).") from error


def quantize_rows(x: Float[Array, "*dims row"], dtype: str) -> tuple[Num[Array, "*dims row"], Float[Array, "*dims"]]:
    """Divide each row by its scale and round it to an 8-bit dtype; return the rounded rows and the scales.

    A scale maps the row's largest magnitude to the largest number of the dtype. The error of a number is at most half
    of the scale in int8. In float8_e4m3fn, it is at most a sixteenth of the number or, for tiny numbers, less than the
    smallest step of the dtype. A row with a number that is not finite dequantizes to NaN.
    """
    largest, exact = _LARGEST[dtype], at_least_float32(x.dtype)
    if x.shape[-1] == 0:  # Rotary keys of latent attention without rotary positions have no channels.
        return x.astype(dtype), jnp.zeros(x.shape[:-1], exact)
    scales = jnp.max(jnp.abs(x.astype(exact)), axis=-1) / largest
    rows = x.astype(exact) / jnp.where(scales > 0, scales, 1)[..., None]
    rows = jnp.round(rows) if dtype == "int8" else rows
    return jnp.clip(rows, -largest, largest).astype(dtype), scales


def dequantize_rows(
    rows: Num[Array, "*dims row"], scales: Float[Array, "*dims"], dtype: jnp.dtype
) -> Float[Array, "*dims row"]:
    """Multiply rows from `quantize_rows` by their scales and return floats of `dtype`."""
    return (rows.astype(scales.dtype) * scales[..., None]).astype(dtype)


_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
