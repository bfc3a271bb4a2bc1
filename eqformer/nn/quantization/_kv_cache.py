"""KV caches in 8 bits: one scale for each cached row (a token's vector of one head)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from .._dtype import at_least_float32, float_dtype


def parse_cache_dtype(dtype: object, call: str) -> tuple[str, bool]:
    """Return a cache dtype's full name, and whether it has 8 bits and needs scales.

    Accepts `"int8"`, `"float8_e4m3fn"` (`"fp8"`) and the dtypes of `float_dtype`. Raises a `ValueError` that begins
    with `call` for any other.
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
    """Divide each row by its scale and round it; return the rounded rows and the scales.

    A scale maps the row's largest magnitude to the largest number of the dtype. The error is at most `scale / 2` in
    int8, and a sixteenth of each number in float8_e4m3fn (less than the smallest step for tiny numbers). A row with a
    number that is not finite dequantizes to NaN.
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
