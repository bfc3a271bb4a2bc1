"""The interface of a format of quantized weights: the stored arrays of a weight, and how they are decoded."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from .._folder import FLOATS, OTHERS


Parts = Mapping[str, Shaped[np.ndarray, "..."]]
"""The arrays that are stored for one weight, by the suffixes of their names."""
SCALES = ("F32", "BF16", "F16")
"""The dtypes of scales, as files call them."""


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """A way to store an array as codes and scales; arrays without codes are stored as they are.

    Values are computed in float32, from codes and scales that float32 holds exactly, and rounded once, to the dtype of
    the leaf that they fill.
    """

    name: str
    """The format's name in errors."""
    codes: str
    """The suffix of the names of arrays of codes."""
    required: tuple[str, ...]
    """The suffixes of the arrays that must be stored with the codes."""
    decoded: str = ".weight"
    """The suffix of the decoded array's name."""
    optional: tuple[str, ...] = ()
    """The suffixes of arrays that may be stored with the codes."""
    ignored: tuple[str, ...] = ()
    """The suffixes of arrays that are not read: scales of activations, because activations are not quantized here."""
    dtypes: tuple[str, ...] = ()
    """The dtypes of codes, as files call them, if plain arrays may have the same suffix; empty: any dtype."""
    also: "Format | None" = None
    """The format of further codes whose names have another suffix."""
    transposed: bool = False
    """Whether arrays are stored, and decoded, with their last two dims exchanged."""

    @abc.abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape; raises a `ValueError` for arrays that do not go together."""

    @abc.abstractmethod
    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Fill `out` with some decoded rows of an array of two dims; raises a `ValueError` for bad scales.

        The first row is a multiple of 32. If arrays are `transposed`, `rows` are columns of the decoded array. For an
        array of three dims, `parts` are the parts of one index of the first dim.
        """


class GroupLayout(NamedTuple):
    """The layout of a format's codes and scales."""

    form: str
    """The number format of the codes, as `nn.QuantizedLinear` calls it."""
    members: tuple[int | None, int | None]
    """How many neighboring rows, and how many neighboring columns, of the decoded array share a scale; None: all rows,
    or all columns."""
    scale: str
    """The suffix of the name of the array of scales."""
    has_zeros: bool = False
    """Whether zero points are stored."""
    scale_dtype: str | None = None
    """The dtype of scales that are computed from several arrays; None: scales are as they are stored."""
    zero_dtype: str | None = None
    """The dtype of zero points that are floats; None: zero points are bytes."""


class QuantizedArray(NamedTuple):
    """Codes, scales and zero points as `nn.QuantizedLinear` holds them, with the dims of the decoded array."""

    codes: UInt8[np.ndarray, "code_rows code_columns"]
    """Bytes; a byte has two codes of 4 bits, which are neighbors along the dim that has groups."""
    scales: Shaped[np.ndarray, "scale_rows scale_columns"]
    """Scales as they are stored: numbers, or exponents of 8 bits."""
    zeros: Shaped[np.ndarray, "scale_rows scale_columns"] | None


@dataclasses.dataclass(frozen=True)
class Grouped(Format):
    """A format with a scale for each output and group of inputs, whose codes `nn.QuantizedLinear` can hold."""

    @property
    @abc.abstractmethod
    def groups(self) -> GroupLayout:
        """Return the layout of all arrays."""

    @abc.abstractmethod
    def read_codes(self, parts: Parts, unit: tuple[int, int]) -> QuantizedArray:
        """Return the codes, scales and zero points that `decode` reads; raises a `ValueError` as `decode` does.

        `unit` is a number of rows and a number of columns. The result has a scale, and perhaps a zero point, for each
        block of this size. Each block lies in one group of the format.
        """


@dataclasses.dataclass(frozen=True)
class Coded:
    """A quantized array of a folder or file."""

    form: Format
    parts: Parts
    shape: tuple[int, ...]
    """The shape of the decoded array."""
    dtype: str
    """The dtype to which the array is decoded by default."""


def check_part(parts: Parts, suffix: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise a `ValueError` unless an array has one of these dtypes, as files call them, and one of these shapes."""
    array = parts[suffix]
    if (dtype := _NAMES.get(str(array.dtype), str(array.dtype))) not in dtypes:
        raise ValueError(f"its {suffix} is of {dtype}, not of {' or '.join(dtypes)}")
    if array.shape not in shapes:
        raise ValueError(f"its {suffix} has shape {array.shape}, not {' or '.join(map(str, shapes))}")


def check_codes(parts: Parts, suffix: str, dtype: str, dims: int) -> tuple[int, ...]:
    """Return the shape of the codes; raises a `ValueError` unless they have this dtype and number of dims."""
    shape = parts[suffix].shape
    check_part(parts, suffix, (dtype,), (shape,))
    if len(shape) != dims or 0 in shape:
        raise ValueError(f"its {suffix} has shape {shape}, not {dims} dims")
    return shape


def check_nonnegative_scales(scales: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Return the scales; raises a `ValueError` if one is below 0, infinite or NaN."""
    if (check_finite_scales(scales) < 0).any():
        raise ValueError("one of its scales is below 0")
    return scales


def check_finite_scales(scales: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Return the scales; raises a `ValueError` if one is not finite."""
    if not np.isfinite(scales.astype(np.float32)).all():
        raise ValueError("one of its scales is not finite")
    return scales


def number_of_groups(columns: int, size: int | None) -> int:
    """Return the number of groups of `size` columns; None: one group of all columns."""
    return math.ceil(columns / (size or columns))


def group_of_units(columns: int, size: int | None, unit: int) -> Int[np.ndarray, "units"]:
    """Return, for each `unit` of columns, the index of its group of `size` columns; None: one group."""
    return np.arange(0, columns, unit) // (size or columns)


_NAMES = {dtype: name for name, dtype in (FLOATS | OTHERS).items()}
