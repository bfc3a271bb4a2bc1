"""The interface of a format of weights in fewer bits: which arrays stand for one, and how they are decoded."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from .._folder import FLOATS, OTHERS


Parts = Mapping[str, Shaped[np.ndarray, "..."]]  # the arrays stored for one, by the end of their names
SCALES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """A way to store an array as codes and scales, and what of each it is; arrays without codes are as they are.

    The values are computed in float32, from codes and scales that it holds exactly, and rounded once, to the dtype
    of the leaf that they fill.
    """

    name: str
    """What errors call it."""
    codes: str
    """The end of the name of an array of codes."""
    required: tuple[str, ...]
    """Those of the arrays that must stand beside it."""
    decoded: str = ".weight"
    """That of the array's own name."""
    optional: tuple[str, ...] = ()
    """Those of arrays that may."""
    ignored: tuple[str, ...] = ()
    """Those of scales of activations, which are not rounded here."""
    dtypes: tuple[str, ...] = ()
    """The dtypes, as files call them, that tell codes from plain arrays whose names end like theirs; none: all do."""
    also: "Format | None" = None
    """That of codes whose names end otherwise."""
    transposed: bool = False
    """Whether arrays are stored, and decoded, with their last dim before the one that precedes it."""

    @abc.abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape; raises a `ValueError` for arrays that do not go together."""

    @abc.abstractmethod
    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Fill `out` with some rows of an array of two dims; raises a `ValueError` for bad scales.

        The first row is a multiple of 32. Rows are columns where arrays are `transposed`. Of an array of three dims,
        `parts` are those of one place of the first.
        """


class Groups(NamedTuple):
    """The layout of a format's codes and scales."""

    form: str
    """What codes stand for, as `nn.QuantizedLinear` calls it."""
    members: tuple[int | None, int | None]
    """How many rows and how many columns of the decoded array, one after another, share a scale; None: all."""
    scale: str
    """The end of the name of the array of scales."""
    has_zeros: bool = False
    """Whether zeros are stored."""


class QuantizedArray(NamedTuple):
    """An array in fewer bits, as `nn.QuantizedLinear` holds it, its dims those of the decoded array."""

    codes: UInt8[np.ndarray, "code_rows code_columns"]
    """Bytes; of codes of 4 bits each has two neighbours, of the dim that has groups."""
    scales: Shaped[np.ndarray, "scale_rows scale_columns"]
    """As they are stored: numbers, or exponents of 8 bits."""
    zeros: UInt8[np.ndarray, "scale_rows scale_columns"] | None


@dataclasses.dataclass(frozen=True)
class Grouped(Format):
    """A format of codes of which a scale is for each output and some inputs, as `nn.QuantizedLinear` holds them."""

    @property
    @abc.abstractmethod
    def groups(self) -> Groups:
        """Return the layout, which all arrays have."""

    @abc.abstractmethod
    def read_codes(self, parts: Parts, unit: tuple[int, int]) -> QuantizedArray:
        """Return the codes, scales and zeros that `decode` reads; raises a `ValueError` as `decode` does.

        There is a scale, and perhaps a zero, for each `unit` of rows and columns, all of which are of one group.
        """


@dataclasses.dataclass(frozen=True)
class Coded:
    """An array that is stored in fewer bits."""

    form: Format
    parts: Parts
    shape: tuple[int, ...]
    """When it is decoded."""
    dtype: str
    """The one it is decoded to where no other is asked for."""


def check_part(parts: Parts, end: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise a `ValueError` unless an array has one of these dtypes, as files call them, and one of these shapes."""
    array = parts[end]
    if (dtype := _NAMES.get(str(array.dtype), str(array.dtype))) not in dtypes:
        raise ValueError(f"its {end} is of {dtype}, not of {' or '.join(dtypes)}")
    if array.shape not in shapes:
        raise ValueError(f"its {end} has shape {array.shape}, not {' or '.join(map(str, shapes))}")


def check_codes(parts: Parts, end: str, dtype: str, dims: int) -> tuple[int, ...]:
    """Return the shape of the codes; raises a `ValueError` unless they have this dtype and so many dims."""
    shape = parts[end].shape
    check_part(parts, end, (dtype,), (shape,))
    if len(shape) != dims or 0 in shape:
        raise ValueError(f"its {end} has shape {shape}, not {dims} dims")
    return shape


def not_negative(scales: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Return the scales; raises a `ValueError` if one is not finite or below 0."""
    if (finite(scales) < 0).any():
        raise ValueError("a scale of it is below 0")
    return scales


def finite(scales: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Return the scales; raises a `ValueError` if one is not finite."""
    if not np.isfinite(scales.astype(np.float32)).all():
        raise ValueError("a scale of it is not finite")
    return scales


def number_of_groups(columns: int, size: int | None) -> int:
    """Return the number of groups of `size` columns; None: one group of all columns."""
    return math.ceil(columns / (size or columns))


def group_of_units(columns: int, size: int | None, unit: int) -> Int[np.ndarray, "units"]:
    """Return the group of each `unit` of columns, for groups of `size` columns; None: one group of all columns."""
    return np.arange(0, columns, unit) // (size or columns)


_NAMES = {dtype: name for name, dtype in (FLOATS | OTHERS).items()}
