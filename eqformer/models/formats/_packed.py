"""Whole numbers of 4 or 8 bits in words of 32, with a scale for each group of a row (compressed-tensors, Kimi K2)."""

import dataclasses
import math

import numpy as np
from jaxtyping import Float32

from ._format import (
    check_codes,
    check_part,
    finite,
    Grouped,
    Groups,
    groups_of,
    number_of_groups,
    Numbers,
    Parts,
    SCALES,
    unpacked,
    whole_values,
)


_CODES, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
ZERO, PLACES = ".weight_zero_point", ".weight_g_idx"


@dataclasses.dataclass(frozen=True)
class Packed(Grouped):
    """`(code - zero) * scale`, `zero` half of the range where none is stored."""

    bits: int = 4
    group: int | None = None
    """Columns of a group; None: all."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The two numbers of `weight_shape`."""
        check_part(parts, _SHAPE, ("I64", "I32"), ((2,),))
        rows, columns = (int(size) for size in parts[_SHAPE])
        check_codes(parts, _CODES, "I32", 2)
        many = 32 // self.bits
        if rows < 1 or columns < 1 or parts[_CODES].shape != (rows, math.ceil(columns / many)):
            raise ValueError(
                f"its {_SHAPE} says {(rows, columns)}, and its {_CODES} has shape {parts[_CODES].shape}, of "
                f"{many} numbers a word"
            )
        groups = number_of_groups(columns, self.group)
        check_part(parts, _SCALE, SCALES, ((rows, groups),))
        if ZERO in parts:
            check_part(parts, ZERO, ("I32",), ((math.ceil(rows / many), groups),))
        if PLACES in parts:
            check_part(parts, PLACES, ("I32", "I64"), ((columns,),))
        return rows, columns

    def decode(self, parts: Parts, rows: slice) -> Float32[np.ndarray, "rows columns"]:
        """Some rows."""
        return whole_values(self.numbers(parts, rows), self.bits)

    def numbers(self, parts: Parts, rows: slice) -> Numbers:
        """Some rows."""
        columns = int(parts[_SHAPE][1])
        codes, scales = unpacked(parts[_CODES][rows], self.bits)[:, :columns], finite(parts[_SCALE][rows])
        group = groups_of(columns, self.group, scales.shape[1], parts.get(PLACES))
        if ZERO not in parts:
            return Numbers(codes, scales[:, group], None)
        many = 32 // self.bits
        words = parts[ZERO][rows.start // many : math.ceil(rows.stop / many)]
        zeros = unpacked(np.ascontiguousarray(words.T), self.bits).T[: len(codes)]
        return Numbers(codes, scales[:, group], zeros[:, group])

    @property
    def groups(self) -> Groups:
        """As the configuration says."""
        return Groups(f"int{self.bits}", self.group, _SCALE, ZERO in self.needs)
