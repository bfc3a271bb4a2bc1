"""What an optimizer's moments are kept in between steps: float32, bfloat16, or logarithms of 8 bits."""

import math
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree, UInt8

from ...nn import at_least_float32


MOMENTS = ("float32", "bfloat16", "8bit")
SHORTEST = 32  # numbers in a row, below which an array is not worth a scale a row, and stays as it is
_EIGHTHS = 8  # levels to an octave, 9 % apart
_SIGNED, _UNSIGNED = 127, 255  # levels of a row with negative numbers, and of one without


class Codes(eqx.Module):
    """An array in 8 bits a number: signs and logarithms in eighths of an octave, below the largest of their row.

    A row is along the last dim, whatever a mesh splits, so that codes do not depend on it: the largest of a row is the
    same number, however it is looked for. A level `l` of a row with negative numbers stands for
    `scale * 2 ** ((l - 127) / 8)`, and reaches 16 octaves down; of one without, such as a mean of squares, for
    `-scale * 2 ** ((l - 255) / 8)`, and reaches 32. Level 0 is zero.
    """

    levels: UInt8[Array, "*dims row"]
    """Levels, in rows with negative numbers those of negative ones plus 128."""
    scale: Float[Array, "*dims 1"]
    """The largest magnitude of each row, negative for a row that has no negative numbers."""


class CodedState(eqx.Module):
    """An optimizer's state with `Codes` in the place of arrays, and how often it was coded."""

    inner: PyTree
    """The state."""
    coded: Int[Array, ""]
    """The number of times, on which the rounding depends."""


def is_coded(node: object) -> bool:
    """Whether a node is a `Codes`."""
    return isinstance(node, Codes)


def is_masked(node: object) -> bool:
    """Whether a node is what `optax.partition` puts in the place of leaves that belong to another transformation."""
    return isinstance(node, optax.MaskedNode)


def kept(moments: str, rule: optax.GradientTransformation, state: PyTree, last: PyTree = None) -> PyTree:
    """An optimizer's state in float32 as it is between steps, which `last` was before."""
    if moments == "float32":
        return state
    if moments == "bfloat16":
        return over_moments(rule, lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state)
    number = jnp.zeros((), jnp.int32) if last is None else last.coded + 1
    return CodedState(over_moments(rule, lambda x: encoded(x, number) if _has_rows(x) else x, state), number)


def unkept(moments: str, rule: optax.GradientTransformation, state: PyTree) -> PyTree:
    """What `kept` was given, but for rounding, in float32 at least."""
    if moments == "float32":
        return state
    if isinstance(state, CodedState):
        return over_moments(rule, lambda x: decoded(x) if is_coded(x) else x, state.inner)
    return over_moments(rule, lambda x: x.astype(at_least_float32(x.dtype)), state)


def over_moments(
    rule: optax.GradientTransformation, function: Callable, state: PyTree, *likes: PyTree, other: Callable | None = None
) -> PyTree:
    """`function(x, *likes)` of what a state holds for each parameter, an array or `Codes`; `other` of counters."""
    of_leaf = lambda leaf, *likes: leaf if is_masked(leaf) else function(leaf, *likes)
    is_leaf = lambda node: is_masked(node) or is_coded(node)
    return optax.tree.map_params(
        rule, of_leaf, state, *likes, transform_non_params=other or (lambda x: x), is_leaf=is_leaf
    )


def _has_rows(x: Array) -> bool:
    # A vector may be one number a layer, and layers lie in another order in pipelines.
    return x.ndim > 1 and x.shape[-1] >= SHORTEST


def encoded(x: Float[Array, "*dims row"], number: Int[Array, ""]) -> Codes:
    """An array in 8 bits, rounded up or down so that it stays the same on average over many `number`s.

    Numbers between two levels go to the upper one if they are above a threshold in `[0, 1)` of the distance, which
    walks from `number` to `number`, and from column to column, by the fractions of irrational numbers: it comes near to
    every place equally often, sooner than at random. (Rounded to the nearest, a mean that loses less than half of the
    distance in a step would never fall.) Positive numbers of a row without negative ones are never rounded to zero.
    """
    size = jnp.abs(x)
    largest = jnp.max(size, axis=-1, keepdims=True)
    is_signed = jnp.any(x < 0, axis=-1, keepdims=True)
    share = size / jnp.where(largest > 0, largest, 1)
    exact = _EIGHTHS * jnp.log2(jnp.where(share > 0, share, 1))
    below = jnp.floor(exact)
    threshold = _threshold(number, x.shape[-1]).astype(x.dtype)
    above = jnp.exp2((exact - below) / _EIGHTHS) - 1 > threshold * (2 ** (1 / _EIGHTHS) - 1)
    top = jnp.where(is_signed, _SIGNED, _UNSIGNED)
    level = below.astype(jnp.int32) + above.astype(jnp.int32) + top
    smallest = jnp.where(is_signed, 2.0 ** ((1 - _SIGNED) / _EIGHTHS), 0.0).astype(x.dtype)
    level = jnp.where(level >= 1, level, (share > threshold * smallest).astype(jnp.int32))
    level = jnp.where(share > 0, level, 0) + jnp.where(x < 0, 128, 0)
    return Codes(level.astype(jnp.uint8), jnp.where(is_signed, largest, -largest))


def decoded(codes: Codes) -> Float[Array, "*dims row"]:
    """The numbers that codes stand for, in the dtype of their scales."""
    is_signed, level = codes.scale > 0, codes.levels.astype(jnp.int32)
    is_negative = is_signed & (level >= 128)
    level = jnp.where(is_signed, level % 128, level)
    octaves = (level - jnp.where(is_signed, _SIGNED, _UNSIGNED)).astype(codes.scale.dtype) / _EIGHTHS
    size = jnp.where(level > 0, jnp.abs(codes.scale) * jnp.exp2(octaves), 0)
    return jnp.where(is_negative, -size, size)


def _threshold(number: Int[Array, ""], row: int) -> Float[Array, "row"]:
    """Fractions of `number` times the golden ratio plus column times the inverse of the plastic ratio, in 24 bits."""
    golden, plastic = (round(2**32 * step) for step in ((math.sqrt(5) - 1) / 2, 0.7548776662466927))
    walked = number.astype(jnp.uint32) * jnp.uint32(golden) + jnp.arange(row, dtype=jnp.uint32) * jnp.uint32(plastic)
    return (walked >> 8).astype(jnp.float32) / 2**24
