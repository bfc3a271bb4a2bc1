"""Fractions of counts, exact at any size, in the 32-bit integers of a device."""

import fractions
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


Count = TypeVar("Count", int, jax.Array)
MOST = 2**31 - 1  # what an int32 holds


def even_share(factor: float, number: Count, parts: int) -> Count:
    """`min(number, ceil(factor * number / parts))`, for a count on the host or counts on a device.

    In whole numbers: a factor of 1.1 is 11/10, so that 100 in 10 parts make 11, not 12. No product leaves 32 bits.
    """
    share = min(fractions.Fraction(factor).limit_denominator(1000) / parts, fractions.Fraction(1))
    if isinstance(number, int):
        return -(-share.numerator * number // share.denominator)
    return _ceil_of_product(share, number)


def check_indices(call: str, what: str, number: int) -> None:
    """Raise a `ValueError` where so many places cannot be numbered by the 32 bits of an index."""
    if number > MOST:
        raise ValueError(
            f"{call}: {number:,} {what} on one device, and indices of 32 bits reach {MOST:,}; run fewer tokens at "
            "once (more devices, more microbatches), or lower the factor."
        )


def _ceil_of_product(share: fractions.Fraction, number: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """`ceil(share * number)` of a share of at most 1, by long division: digit after digit of `number`."""
    numerator, denominator = share.numerator, share.denominator
    # The remainder is below the denominator: with one more digit, both products of a step fit into 32 bits.
    bits = 31 - denominator.bit_length()
    assert bits > 0, "a share of thousandths of fewer than a million parts"
    digits, number = -(-31 // bits), number.astype(jnp.uint32)
    quotient = remainder = jnp.zeros_like(number)
    for place in reversed(range(digits)):
        digit = (number >> (place * bits)) & (2**bits - 1)
        found = remainder * 2**bits + digit * numerator
        quotient = quotient * 2**bits + found // denominator
        remainder = found % denominator
    return (quotient + (remainder > 0).astype(jnp.uint32)).astype(jnp.int32)
