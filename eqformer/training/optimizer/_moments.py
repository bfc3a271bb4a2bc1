"""Storage of an optimizer's moments between steps: in float32, in bfloat16, or as logarithms in 8 bits."""

import math
from collections.abc import Callable
from typing import TypeGuard

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree, UInt8

from ...nn import at_least_float32


MOMENTS = ("float32", "bfloat16", "8bit")
MIN_ROW = 32
"""The shortest row that is stored in 8 bits; the scales of shorter rows would take too much memory."""
_LEVELS_PER_OCTAVE = 8  # neighboring levels are 9 % apart
_SIGNED_LEVELS, _UNSIGNED_LEVELS = 127, 255  # The highest level in a row with, and in a row without negative numbers.


class MomentCodes(eqx.Module):
    """An array with 8 bits for each number: its sign, and its logarithm relative to the largest number of its row.

    The logarithm counts eighths of an octave (a factor of two). In a row with negative numbers, the level `l` stands
    for the magnitude `scale * 2 ** ((l - 127) / 8)`, and levels reach 16 octaves down. In a row without negative
    numbers, such as a mean of squares, the level `l` stands for `-scale * 2 ** ((l - 255) / 8)`, and levels reach 32
    octaves down. Level 0 is zero. A row is the whole last dim, even if a mesh splits that dim, so the codes do not
    depend on the mesh.
    """

    levels: UInt8[Array, "*dims row"]
    """The level of each number, plus 128 for a negative number."""
    scale: Float[Array, "*dims 1"]
    """The largest magnitude of each row; with a minus sign for a row that has no negative numbers."""


class Preconditioner(eqx.Module):
    """Means of `G G^T` and `G^T G` of a matrix's gradients `G`, and approximate eigenvectors of the means, in float32.

    The dims of each array are the ensemble dims of the matrix, then the dims of one side (outputs or inputs), then the
    same side flattened to one dim. The array is None if the side is too long for a basis.
    """

    left: Float[Array, "*ensemble_and_outputs rows"] | None
    """The mean of `G G^T`."""
    right: Float[Array, "*ensemble_and_inputs columns"] | None
    """The mean of `G^T G`."""
    left_basis: Float[Array, "*ensemble_and_outputs rows"] | None
    """Orthonormal columns for the outputs."""
    right_basis: Float[Array, "*ensemble_and_inputs columns"] | None
    """Orthonormal columns for the inputs."""
    ensemble: int = eqx.field(static=True)
    """The number of the matrix's ensemble dims."""
    outputs: int = eqx.field(static=True)
    """The number of the matrix's output dims."""


class CodedState(eqx.Module):
    """An optimizer's state with `MomentCodes` instead of arrays, and a count on which the rounding depends."""

    inner: PyTree
    """The optimizer's state."""
    coded: Int[Array, ""]
    """The number of times that the state was encoded before."""


def is_codes(node: object) -> TypeGuard[MomentCodes]:
    """Return whether a node is a `MomentCodes`."""
    return isinstance(node, MomentCodes)


def is_preconditioner(node: object) -> TypeGuard[Preconditioner]:
    """Return whether a node is a `Preconditioner`."""
    return isinstance(node, Preconditioner)


def is_masked(node: object) -> TypeGuard[optax.MaskedNode]:
    """Return whether a node is the mark that `optax.partition` puts in place of leaves of another transformation."""
    return isinstance(node, optax.MaskedNode)


def compress_moments(
    moments: str, transform: optax.GradientTransformation, state: PyTree, previous: PyTree = None
) -> PyTree:
    """Convert an optimizer's float32 state to the form in which it is stored.

    `previous` is the stored state before the step, or None before the first step.
    """
    if moments == "float32":
        return state
    if moments == "bfloat16":
        return map_moments(transform, _round_to_bfloat16, state)
    count = jnp.zeros((), jnp.int32) if previous is None else previous.coded + 1

    def encode_rows(x: PyTree) -> PyTree:
        return x if is_preconditioner(x) or not _has_rows(x) else encode_moment(x, count)

    return CodedState(map_moments(transform, encode_rows, state), count)


def decompress_moments(moments: str, transform: optax.GradientTransformation, state: PyTree) -> PyTree:
    """Return a stored state in float32 at least; this inverts `compress_moments` except for its rounding."""
    if moments == "float32":
        return state
    if moments == "8bit":
        return map_moments(transform, _decode_if_coded, state.inner)
    return map_moments(transform, _widen, state)


def _round_to_bfloat16(x: PyTree) -> PyTree:
    return x if is_preconditioner(x) or x.dtype != jnp.float32 else x.astype(jnp.bfloat16)


def _decode_if_coded(x: PyTree) -> PyTree:
    return decode_moment(x) if is_codes(x) else x


def _widen(x: PyTree) -> PyTree:
    return x if is_preconditioner(x) else x.astype(at_least_float32(x.dtype))


def map_moments(
    transform: optax.GradientTransformation,
    function: Callable[..., PyTree],
    state: PyTree,
    *likes: PyTree,
    other: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """Apply `function(moment, *likes)` to each moment of a state: an array, `MomentCodes` or a `Preconditioner`.

    `likes` are trees like the parameters. Counters become `other(counter)`; without `other`, counters stay unchanged.
    """

    def map_leaf(leaf: PyTree, *likes: PyTree) -> PyTree:
        return leaf if is_masked(leaf) else function(leaf, *likes)

    def is_leaf(node: object) -> bool:
        return is_masked(node) or is_codes(node) or is_preconditioner(node)

    return optax.tree.map_params(
        transform, map_leaf, state, *likes, transform_non_params=other or (lambda x: x), is_leaf=is_leaf
    )


def _has_rows(x: Array) -> bool:
    """Return whether an array has rows that are long enough to be stored in 8 bits."""
    # An array of one dim has no rows: its entries may belong to layers, whose order depends on the mesh.
    return x.ndim > 1 and x.shape[-1] >= MIN_ROW


def encode_moment(x: Float[Array, "*dims row"], count: Int[Array, ""]) -> MomentCodes:
    """Round an array to 8 bits, up or down, so that the mean over many encodings is the array itself.

    A number between two levels is rounded up if its position between them, from 0 to 1, is above a threshold. The
    threshold is the fractional part of `count * golden ratio + column / plastic ratio`, where `count` is the number of
    earlier encodings. Such thresholds cover the interval more evenly than random numbers. Rounding to the nearest level
    would not do: a mean that falls by less than half of the distance between levels in a step would never fall.
    Positive numbers of a row without negative numbers are never rounded to zero.
    """
    magnitude = jnp.abs(x)
    largest = jnp.max(magnitude, axis=-1, keepdims=True)
    is_signed = jnp.any(x < 0, axis=-1, keepdims=True)
    share = magnitude / jnp.where(largest > 0, largest, 1)
    exact = _LEVELS_PER_OCTAVE * jnp.log2(jnp.where(share > 0, share, 1))
    lower = jnp.floor(exact)
    threshold = _rounding_threshold(count, x.shape[-1]).astype(x.dtype)
    rounds_up = jnp.exp2((exact - lower) / _LEVELS_PER_OCTAVE) - 1 > threshold * (2 ** (1 / _LEVELS_PER_OCTAVE) - 1)
    top = jnp.where(is_signed, _SIGNED_LEVELS, _UNSIGNED_LEVELS)
    level = lower.astype(jnp.int32) + rounds_up.astype(jnp.int32) + top
    smallest = jnp.where(is_signed, 2.0 ** ((1 - _SIGNED_LEVELS) / _LEVELS_PER_OCTAVE), 0.0).astype(x.dtype)
    level = jnp.where(level >= 1, level, (share > threshold * smallest).astype(jnp.int32))
    level = jnp.where(share > 0, level, 0) + jnp.where(x < 0, 128, 0)
    return MomentCodes(level.astype(jnp.uint8), jnp.where(is_signed, largest, -largest))


def decode_moment(codes: MomentCodes) -> Float[Array, "*dims row"]:
    """Return the numbers that codes stand for, in the dtype of the codes' scales."""
    is_signed, level = codes.scale > 0, codes.levels.astype(jnp.int32)
    is_negative = is_signed & (level >= 128)
    level = jnp.where(is_signed, level % 128, level)
    top = jnp.where(is_signed, _SIGNED_LEVELS, _UNSIGNED_LEVELS)
    octaves = (level - top).astype(codes.scale.dtype) / _LEVELS_PER_OCTAVE
    magnitude = jnp.where(level > 0, jnp.abs(codes.scale) * jnp.exp2(octaves), 0)
    return jnp.where(is_negative, -magnitude, magnitude)


def _rounding_threshold(count: Int[Array, ""], row: int) -> Float[Array, "row"]:
    """Return the fractional parts of `count * golden ratio + column / plastic ratio`, in 24 bits."""
    golden, plastic = (round(2**32 * step) for step in ((math.sqrt(5) - 1) / 2, 0.7548776662466927))
    phase = count.astype(jnp.uint32) * jnp.uint32(golden) + jnp.arange(row, dtype=jnp.uint32) * jnp.uint32(plastic)
    return (phase >> 8).astype(jnp.float32) / 2**24
