"""Parts that formats of whole numbers share: words of 32 bits that hold several, groups of inputs, and decoding."""

import abc
import dataclasses
import math

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from ._format import finite, group_of_units, Grouped, Groups, Parts, QuantizedArray


@dataclasses.dataclass(frozen=True)
class WholeNumbers(Grouped):
    """`(code - zero) * scale` for each output and group of inputs, `zero` half of the range where none is stored."""

    bits: int = 4
    group: int | None = None
    """Inputs of a group, one after another; None: all."""
    scales: str = ".scales"
    """The end of the name of the array of scales."""
    zeros: str = ".qzeros"
    """That of the array of zeros, where `required` names it."""
    places: str = ".g_idx"
    """That of the array that states the group of each input, where there is one."""

    @property
    def many(self) -> int:
        """Return how many numbers a word has."""
        return 32 // self.bits

    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "outputs inputs"]) -> None:
        """Decode some outputs."""
        columns = out.shape[1]
        unit = math.gcd(self.group or columns, columns) if self.places not in parts else 1
        scales, zeros = self._of_units(parts, rows, columns, unit)
        table = (_NUMBERS if zeros is not None else _SIGNED)[self.bits]
        values = np.take(table, self.octets(parts, rows)).view(np.float32)[:, :columns].reshape(len(out), -1, unit)
        if zeros is not None:
            values -= zeros[..., None].astype(np.float32)
        values *= scales[..., None].astype(np.float32)
        out[...] = values.reshape(out.shape)

    def read_codes(self, parts: Parts, unit: tuple[int, int]) -> QuantizedArray:
        """Return all codes, scales and zeros."""
        columns, rows = self.shape(parts)[1], slice(0, None)
        scales, zeros = self._of_units(parts, rows, columns, unit[1])
        return QuantizedArray(self.octets(parts, rows)[:, : columns * self.bits // 8], scales, zeros)

    @property
    def groups(self) -> Groups:
        """Return the layout that the configuration states."""
        return Groups(f"int{self.bits}", (1, self.group), self.scales, has_zeros=self.zeros in self.required)

    @abc.abstractmethod
    def octets(self, parts: Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs along their inputs, of two in a byte the low bits first."""

    @abc.abstractmethod
    def of_groups(self, parts: Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scale, and the zero if there are zeros, of each of some outputs and groups."""

    def _of_units(
        self, parts: Parts, rows: slice, columns: int, unit: int
    ) -> tuple[Shaped[np.ndarray, "outputs units"], Shaped[np.ndarray, "outputs units"] | None]:
        scales, zeros = self.of_groups(parts, rows)
        group = group_of_units(columns, self.group, unit)
        if (stated := parts.get(self.places)) is not None:
            group = _stated(stated, scales.shape[1], unit)
        return finite(scales)[:, group], None if zeros is None else zeros[:, group]


def unpacked(words: Int32[np.ndarray, "rows words"], bits: int) -> UInt8[np.ndarray, "rows numbers"]:
    """Return the numbers of 4 or 8 bits in each word, the lowest bits first."""
    octets = octets_of(words)
    return octets if bits == 8 else np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(words), -1)


def octets_of(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows octets"]:
    """Return the bytes of each word, the lowest first."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def _stated(places: Shaped[np.ndarray, "columns"], number: int, unit: int) -> Shaped[np.ndarray, "units"]:
    """Return the group of each unit of columns, as stated for each column."""
    if places.min() < 0 or places.max() >= number:
        raise ValueError(f"a column of it is of group {places.max()} or {places.min()}, and it has {number}")
    units = places.reshape(-1, unit)
    if (units != units[:, :1]).any():
        raise ValueError(
            "its scales are not of neighbouring inputs, as where g_idx says another order, so that it cannot be kept; "
            "load with weights='decoded'"
        )
    return units[:, 0]


def _table(bits: int, zero: int) -> Shaped[np.ndarray, "256"]:
    """Return the float32 of each byte, or both numbers of 4 bits as one word of 64, so that one look-up takes both."""
    codes = np.arange(256, dtype=np.float32)[:, None]
    if bits == 8:
        return (codes - zero)[:, 0]
    return (np.concatenate([codes % 16, codes // 16], axis=1) - zero).view(np.uint64)[:, 0]


# By the bits of a number; from 0, and without half of the range.
_NUMBERS = {bits: _table(bits, 0) for bits in (4, 8)}
_SIGNED = {bits: _table(bits, 2 ** (bits - 1)) for bits in (4, 8)}
