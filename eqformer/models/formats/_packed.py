"""Whole numbers of 4 or 8 bits in words of 32, with a scale for each group of a row (compressed-tensors, Kimi K2)."""

import dataclasses
import math

import numpy as np
from jaxtyping import UInt8

from ._format import check_codes, check_part, number_of_groups, Parts, SCALES
from ._whole_numbers import octets_of, unpacked, WholeNumbers


_CODES, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
ZERO, PLACES = ".weight_zero_point", ".weight_g_idx"


@dataclasses.dataclass(frozen=True)
class Packed(WholeNumbers):
    """Numbers along rows, with zeros or without."""

    scales: str = _SCALE
    zeros: str = ZERO
    places: str = PLACES

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape, which `weight_shape` states."""
        check_part(parts, _SHAPE, ("I64", "I32"), ((2,),))
        rows, columns = (int(size) for size in parts[_SHAPE])
        check_codes(parts, _CODES, "I32", 2)
        if rows < 1 or columns < 1 or parts[_CODES].shape != (rows, math.ceil(columns / self.many)):
            raise ValueError(
                f"its {_SHAPE} says {(rows, columns)}, and its {_CODES} has shape {parts[_CODES].shape}, of "
                f"{self.many} numbers a word"
            )
        groups = number_of_groups(columns, self.group)
        check_part(parts, _SCALE, SCALES, ((rows, groups),))
        if ZERO in parts:
            check_part(parts, ZERO, ("I32",), ((math.ceil(rows / self.many), groups),))
        if PLACES in parts:
            check_part(parts, PLACES, ("I32", "I64"), ((columns,),))
        return rows, columns

    def octets(self, parts: Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs, which are stored so."""
        return octets_of(parts[_CODES][rows])

    def of_groups(self, parts: Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales and zeros of some outputs; words of zeros go along outputs."""
        scales = parts[_SCALE][rows]
        if ZERO not in parts:
            return scales, None
        words = parts[ZERO][(rows.start or 0) // self.many :][: math.ceil(len(scales) / self.many)]
        return scales, unpacked(words.T, self.bits).T[: len(scales)]
