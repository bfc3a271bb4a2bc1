"""What formats of whole numbers share: words of 32 bits that hold several, groups of inputs, and what a number is."""

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from ._format import Grouped, Groups, Parts


@dataclasses.dataclass(frozen=True)
class WholeNumbers(Grouped):
    """`(code - zero) * scale` for each output and group of inputs, `zero` half of the range where none is stored."""

    bits: int = 4
    group: int | None = None
    """Inputs of a group, one after another; None: all."""
    scales: str = ".scales"
    """The end of the name of the array of scales."""
    zeros: str = ".qzeros"
    """That of the array of zeros, where `needs` names it."""

    @property
    def many(self) -> int:
        """The numbers of a word."""
        return 32 // self.bits

    def decode(self, parts: Parts, rows: slice) -> Float32[np.ndarray, "outputs inputs"]:
        """Some outputs."""
        found = self.numbers(parts, rows)
        codes, scales = found.codes.astype(np.float32), found.scales.astype(np.float32)
        return (codes - (2 ** (self.bits - 1) if found.zeros is None else found.zeros)) * scales

    @property
    def groups(self) -> Groups:
        """What the configuration says."""
        return Groups(f"int{self.bits}", self.group, self.scales, has_zeros=self.zeros in self.needs)


def unpacked(words: Int32[np.ndarray, "rows words"], bits: int) -> UInt8[np.ndarray, "rows numbers"]:
    """The numbers of 4 or 8 bits in each word, the lowest bits first."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(words), -1)


def groups_of(
    columns: int, size: int | None, number: int, stated: Shaped[np.ndarray, "columns"] | None = None
) -> Shaped[np.ndarray, "columns"]:
    """The group of each column: as stated, or one after another; raises a `ValueError` for one that there is not."""
    if stated is None:
        return np.arange(columns) // (size or columns)
    if stated.min() < 0 or stated.max() >= number:
        raise ValueError(f"a column of it is of group {stated.max()} or {stated.min()}, and it has {number}")
    return stated
