"""Number formats of quantized weights: how a code of 8 or 4 bits decodes, and how numbers round to codes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8


BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
"""Bits of one code, by format."""
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "fp4": 6.0}
"""The largest magnitude of a rounded number, by format."""


def codes_in_a_byte(form: str) -> int:
    """Return how many codes share a byte: 1 or 2."""
    return 8 // BITS[form]


def decode_codes(
    codes: UInt8[Array, "*dims columns"], form: str, zeros: UInt8[Array, "*dims groups"] | None
) -> Float32[Array, "*dims all_columns"]:
    """Decode codes to unscaled numbers.

    Two codes of 4 bits share a byte; the low bits come first. `int8` and `int4` are unsigned integers minus a zero
    point: `zeros`, one for each group of columns, or half of the range. `fp8` is E4M3 without infinities; `fp4` is E2M1
    (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives).
    """
    if codes_in_a_byte(form) == 2:
        pairs = codes[..., None] >> jnp.array([0, 4], jnp.uint8)
        codes = (pairs & 15).reshape(*codes.shape[:-1], -1)
    if form == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    if form == "fp4":
        # The magnitudes times two are the hex digits of one constant: a shift is faster than a table lookup.
        halves = (jnp.uint32(0xC8643210) >> (4 * (codes & 7).astype(jnp.uint32))) & 15
        return jnp.where(codes > 7, -0.5, 0.5).astype(jnp.float32) * halves.astype(jnp.float32)
    integers = codes.astype(jnp.float32)
    if zeros is None:
        return integers - 2.0 ** (BITS[form] - 1)
    return integers - repeat_groups(zeros.astype(jnp.float32), integers.shape)


def apply_scales(
    numbers: Float32[Array, "*dims columns"], scales: Float[Array, "*scale_dims"] | UInt8[Array, "*scale_dims"]
) -> Float32[Array, "*dims columns"]:
    """Multiply numbers by their group's scale, in float32; scales of 8 bits are exponents, `2**(scale - 127)`.

    Products below `2**-126` become 0 on platforms that flush subnormal numbers, as most do.
    """
    if scales.dtype == jnp.uint8:
        # The scale's bits become a float32's exponent. 2**-127 (scale 0) is subnormal in float32, so for this scale the
        # numbers are halved and then multiplied by 2**-126.
        numbers = numbers * repeat_groups(jnp.where(scales == 0, 0.5, 1.0).astype(jnp.float32), numbers.shape)
        scales = jax.lax.bitcast_convert_type(jnp.maximum(scales, 1).astype(jnp.int32) << 23, jnp.float32)
    return numbers * repeat_groups(scales.astype(jnp.float32), numbers.shape)


def repeat_groups(groups: Float32[Array, "*groups"], shape: tuple[int, ...]) -> Float32[Array, "*dims"]:
    """Repeat each group's number for every member of the group; groups divide the last dim of `shape` evenly."""
    times = shape[-1] // groups.shape[-1]
    return jnp.broadcast_to(jnp.repeat(groups, times, axis=-1) if times > 1 else groups, shape)


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
