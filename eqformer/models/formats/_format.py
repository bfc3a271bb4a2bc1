"""What a format of weights in fewer bits is: which arrays are stored for one, and how they are decoded."""

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
    needs: tuple[str, ...]
    """Those of the arrays that must stand beside it."""
    decoded: str = ".weight"
    """That of the array's own name."""
    takes: tuple[str, ...] = ()
    """Those of arrays that may."""
    ignored: tuple[str, ...] = ()
    """Those of scales of activations, which are not rounded here."""
    dtypes: tuple[str, ...] = ()
    """The dtypes, as files call them, that tell codes from plain arrays whose names end like theirs; none: all do."""
    also: "Format | None" = None
    """That of codes whose names end otherwise."""
    turned: bool = False
    """Whether arrays are stored, and decoded, with their last dim before the one that precedes it."""

    @abc.abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The decoded array's; raises a `ValueError` for arrays that do not go together."""

    @abc.abstractmethod
    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Fill `out` with some rows of an array of two dims; raises a `ValueError` for bad scales.

        The first row is a multiple of 32. Rows are columns where arrays are `turned`. Of an array of three dims,
        `parts` are those of one place of the first.
        """


class Groups(NamedTuple):
    """How a format has codes and scales."""

    form: str
    """What codes stand for, as `nn.QuantizedLinear` calls it."""
    members: tuple[int | None, int | None]
    """How many rows and how many columns of the decoded array, one after another, share a scale; None: all."""
    scale: str
    """The end of the name of the array of scales."""
    has_zeros: bool = False
    """Whether zeros are stored."""


class Numbers(NamedTuple):
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
        """What is the same for all arrays."""

    @abc.abstractmethod
    def numbers(self, parts: Parts, unit: tuple[int, int]) -> Numbers:
        """What `decode` gives the values of, and raises a `ValueError` for.

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
    found = parts[end]
    if (its := _NAMES.get(str(found.dtype), str(found.dtype))) not in dtypes:
        raise ValueError(f"its {end} is of {its}, not of {' or '.join(dtypes)}")
    if found.shape not in shapes:
        raise ValueError(f"its {end} has shape {found.shape}, not {' or '.join(map(str, shapes))}")


def check_codes(parts: Parts, end: str, dtype: str, dims: int) -> tuple[int, ...]:
    """The shape of the codes; raises a `ValueError` unless they have this dtype and so many dims."""
    check_part(parts, end, (dtype,), (found := parts[end].shape,))
    if len(found) != dims or 0 in found:
        raise ValueError(f"its {end} has shape {found}, not {dims} dims")
    return found


def not_negative(scales: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Finite scales; raises a `ValueError` if one is below 0."""
    if (finite(scales) < 0).any():
        raise ValueError("a scale of it is below 0")
    return scales


def finite(scales: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """The scales; raises a `ValueError` if one is not finite."""
    if not np.isfinite(scales.astype(np.float32)).all():
        raise ValueError("a scale of it is not finite")
    return scales


def number_of_groups(columns: int, size: int | None) -> int:
    """How many groups of `size` columns there are; None: one of all."""
    return math.ceil(columns / (size or columns))


def group_of_units(columns: int, size: int | None, unit: int) -> Int[np.ndarray, "units"]:
    """The group of each `unit` of columns, of groups of `size` columns; None: one of all."""
    return np.arange(0, columns, unit) // (size or columns)


_NAMES = {its: theirs for theirs, its in (FLOATS | OTHERS).items()}
