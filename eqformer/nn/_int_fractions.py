"""Fractions of counts, exact at any size in a device's 32-bit integers."""

import fractions
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


Count = TypeVar("Count", int, jax.Array)
INT32_MAX = 2**31 - 1


def even_share(factor: float, number: Count, parts: int) -> Count:
    """Return `min(number, ceil(factor * number / parts))`, for a count on the host or counts on a device.

    The factor is taken as a fraction of whole numbers: 1.1 is 11/10, so 100 in 10 parts give 11, not 12. No product
    exceeds 32 bits.
    """
    share = min(fractions.Fraction(factor).limit_denominator(1000) / parts, fractions.Fraction(1))
    if isinstance(number, int):
        return -(-share.numerator * number // share.denominator)
    return _ceil_of_product(share, number)


def check_indices(call: str, what: str, number: int) -> None:
    """Raise a `ValueError` that begins with `call` if `number` places exceed 32-bit indices."""
    if number > INT32_MAX:
        raise ValueError(
            f"{call}: {number:,} {what} on one device, and indices of 32 bits reach {INT32_MAX:,}; run fewer tokens at "
            "once (more devices, more microbatches), or lower the factor."
        )


def _ceil_of_product(share: fractions.Fraction, number: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return `ceil(share * number)` for a share of at most 1, by long division over the digits of `number`."""
    numerator, denominator = share.numerator, share.denominator
    # The remainder is below the denominator: with one more digit, both products of a step fit into 32 bits.
    bits = 31 - denominator.bit_length()
    assert bits > 0, "a share of thousandths of fewer than a million parts"
    digits, number = -(-31 // bits), number.astype(jnp.uint32)
    quotient = remainder = jnp.zeros_like(number)
    for position in reversed(range(digits)):
        digit = (number >> (position * bits)) & (2**bits - 1)
        dividend = remainder * 2**bits + digit * numerator
        quotient = quotient * 2**bits + dividend // denominator
        remainder = dividend % denominator
    return (quotient + (remainder > 0).astype(jnp.uint32)).astype(jnp.int32)
