"""Weights in 8 or 4 bits: what their codes stand for, and how numbers are rounded to them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8


# By the name of a form of numbers: the bits of a code, and the largest number that rounding gives.
BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "fp4": 6.0}


def codes_in_a_byte(form: str) -> int:
    """How many codes a byte holds."""
    return 8 // BITS[form]


def numbers(
    codes: UInt8[Array, "*dims columns"], form: str, zeros: UInt8[Array, "*dims groups"] | None
) -> Float32[Array, "*dims all_columns"]:
    """What codes stand for, before they are scaled.

    Of two codes in a byte the low bits are the first. `int8` and `int4` are whole numbers without a sign, of which
    `zeros`, one for each group of columns, or else half of their range are taken. `fp8` is E4M3 without infinities,
    `fp4` E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero).
    """
    if codes_in_a_byte(form) == 2:
        pairs = codes[..., None] >> jnp.array([0, 4], jnp.uint8)
        codes = (pairs & 15).reshape(*codes.shape[:-1], -1)
    if form == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    if form == "fp4":  # twice the numbers are a constant's digits: looked up faster than computed
        halves = (jnp.uint32(0xC8643210) >> (4 * (codes & 7).astype(jnp.uint32))) & 15
        return jnp.where(codes > 7, -0.5, 0.5).astype(jnp.float32) * halves.astype(jnp.float32)
    whole = codes.astype(jnp.float32)
    if zeros is None:
        return whole - 2.0 ** (BITS[form] - 1)
    return whole - repeated(zeros.astype(jnp.float32), whole.shape)


def scaled(
    numbers: Float32[Array, "*dims columns"], scales: Float[Array, "*scale_dims"] | UInt8[Array, "*scale_dims"]
) -> Float32[Array, "*dims columns"]:
    """Numbers times their scales, in float32; scales of 8 bits are exponents: `2**(scale - 127)`.

    Products below `2**-126` are 0 where a platform takes subnormal numbers for 0, as CPUs and TPUs do.
    """
    if scales.dtype == jnp.uint8:  # a float32's exponent but for 0: of 2**-127 a half is taken of the numbers
        numbers = numbers * repeated(jnp.where(scales == 0, 0.5, 1.0).astype(jnp.float32), numbers.shape)
        scales = jax.lax.bitcast_convert_type(jnp.maximum(scales, 1).astype(jnp.int32) << 23, jnp.float32)
    return numbers * repeated(scales.astype(jnp.float32), numbers.shape)


def repeated(groups: Float32[Array, "*groups"], shape: tuple[int, ...]) -> Float32[Array, "*dims"]:
    """One number for each group as one for each member: of the last dim a group has equally many places."""
    times = shape[-1] // groups.shape[-1]
    return jnp.broadcast_to(jnp.repeat(groups, times, axis=-1) if times > 1 else groups, shape)


def rounded(
    x: Float[Array, "*dims columns"], scales: Float32[Array, "*scale_dims"], form: str
) -> UInt8[Array, "*dims bytes"]:
    """The codes nearest to numbers that are divided by their scales."""
    x = x.astype(jnp.float32) / repeated(jnp.where(scales > 0, scales, 1), x.shape)
    x = jnp.clip(x, -LARGEST[form], LARGEST[form])
    if form == "fp8":
        return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    return packed((jnp.round(x) + 2.0 ** (BITS[form] - 1)).astype(jnp.uint8), form)


def packed(codes: UInt8[Array, "*dims columns"], form: str) -> UInt8[Array, "*dims bytes"]:
    """Codes as they are held: those of 4 bits two in a byte."""
    return codes if codes_in_a_byte(form) == 1 else codes[..., ::2] | codes[..., 1::2] << 4
