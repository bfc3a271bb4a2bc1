"""Numbers of 8 bits with a scale for each row of them: what caches keep in place of floats of 16 or 32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from ._dtype import at_least_float32, float_dtype


def memory_dtype(dtype: object, call: str) -> tuple[str, bool]:
    """The full name of a dtype that memories can have, and whether it is one of 8 bits, kept with scales.

    `"int8"`, `"float8_e4m3fn"` (`"fp8"`), or one of `float_dtype`. Raises a `ValueError` that begins with `call`.
    """
    name = dtype.strip().lower() if isinstance(dtype, str) else dtype
    full = {"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}.get(str(name), str(name))
    if full in _LARGEST:
        return full, True
    try:
        return float_dtype(dtype, call), False
    except ValueError as error:
        raise ValueError(f"{error} For memories int8 and float8_e4m3fn (fp8) do too.") from error


def quantized(x: Float[Array, "*dims row"], dtype: str) -> tuple[Num[Array, "*dims row"], Float[Array, "*dims"]]:
    """Rows divided by their scales and rounded, and the scales: what makes a row's largest magnitude the dtype's.

    A row's error is at most `scale / 2` in int8, and in float8_e4m3fn a sixteenth of each number, or less where it is
    of the smallest. A row with a number that is not finite is restored as NaN.
    """
    largest, exact = _LARGEST[dtype], at_least_float32(x.dtype)
    scales = jnp.max(jnp.abs(x.astype(exact)), axis=-1) / largest
    rows = x.astype(exact) / jnp.where(scales > 0, scales, 1)[..., None]
    rows = jnp.round(rows) if dtype == "int8" else rows
    return jnp.clip(rows, -largest, largest).astype(dtype), scales


def restored(
    rows: Num[Array, "*dims row"], scales: Float[Array, "*dims"], dtype: jnp.dtype
) -> Float[Array, "*dims row"]:
    """What `quantized` gave, as floats again."""
    return (rows.astype(scales.dtype) * scales[..., None]).astype(dtype)


_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
