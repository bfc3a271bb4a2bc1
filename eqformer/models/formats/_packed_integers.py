"""Base class of formats of 4-bit and 8-bit integers, packed into words of 32 bits, with scales for groups of inputs."""

import abc
import dataclasses
import math

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from ._format import check_finite_scales, group_of_units, Grouped, GroupLayout, Parts, QuantizedArray


@dataclasses.dataclass(frozen=True)
class PackedIntegers(Grouped):
    """`(code - zero) * scale` for each output and group of inputs; `zero` is half of the range where none is stored."""

    bits: int = 4
    group: int | None = None
    """The number of neighboring inputs of a group; None: all."""
    scales: str = ".scales"
    """The suffix of the array of scales."""
    zeros: str = ".qzeros"
    """The suffix of the array of zero points, which is stored if `required` has it."""
    group_indices: str = ".g_idx"
    """The suffix of the array with the group of each input, which a folder may have."""

    @property
    def per_word(self) -> int:
        """The number of integers in a word."""
        return 32 // self.bits

    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "outputs inputs"]) -> None:
        """Decode some outputs."""
        columns = out.shape[1]
        unit = math.gcd(self.group or columns, columns) if self.group_indices not in parts else 1
        scales, zeros = self._scales_of_units(parts, rows, columns, unit)
        table = (_UNSIGNED if zeros is not None else _SIGNED)[self.bits]
        values = np.take(table, self.read_octets(parts, rows)).view(np.float32)[:, :columns].reshape(len(out), -1, unit)
        if zeros is not None:
            values -= zeros[..., None].astype(np.float32)
        values *= scales[..., None].astype(np.float32)
        out[...] = values.reshape(out.shape)

    def read_codes(self, parts: Parts, unit: tuple[int, int]) -> QuantizedArray:
        """Return all codes, scales and zero points."""
        columns, rows = self.shape(parts)[1], slice(0, None)
        scales, zeros = self._scales_of_units(parts, rows, columns, unit[1])
        return QuantizedArray(self.read_octets(parts, rows)[:, : columns * self.bits // 8], scales, zeros)

    @property
    def groups(self) -> GroupLayout:
        """Return the layout that the configuration states."""
        return GroupLayout(f"int{self.bits}", (1, self.group), self.scales, has_zeros=self.zeros in self.required)

    @abc.abstractmethod
    def read_octets(self, parts: Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs along their inputs; of two in a byte the low bits come first."""

    @abc.abstractmethod
    def read_scales(self, parts: Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scale of each of some outputs and groups, and the zero point if zero points are stored."""

    def _scales_of_units(
        self, parts: Parts, rows: slice, columns: int, unit: int
    ) -> tuple[Shaped[np.ndarray, "outputs units"], Shaped[np.ndarray, "outputs units"] | None]:
        scales, zeros = self.read_scales(parts, rows)
        group = group_of_units(columns, self.group, unit)
        if (group_indices := parts.get(self.group_indices)) is not None:
            group = _group_of_units(group_indices, scales.shape[1], unit)
        return check_finite_scales(scales)[:, group], None if zeros is None else zeros[:, group]


def unpack(words: Int32[np.ndarray, "rows words"], bits: int) -> UInt8[np.ndarray, "rows numbers"]:
    """Return the numbers of 4 or 8 bits in each word, the lowest bits first."""
    octets = bytes_of_words(words)
    return octets if bits == 8 else np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(words), -1)


def bytes_of_words(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows octets"]:
    """Return the bytes of each word, the lowest first."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def _group_of_units(indices: Shaped[np.ndarray, "columns"], groups: int, unit: int) -> Shaped[np.ndarray, "units"]:
    """Return the group of each unit of columns, from the group of each column."""
    if indices.min() < 0 or indices.max() >= groups:
        raise ValueError(f"a column of it is of group {indices.max()} or {indices.min()}, and it has {groups}")
    units = indices.reshape(-1, unit)
    if (units != units[:, :1]).any():
        raise ValueError(
            "its scales are not of neighboring inputs, as where g_idx says another order, so that it cannot be kept; "
            "load with weights='decoded'"
        )
    return units[:, 0]


def _table(bits: int, zero: int) -> Shaped[np.ndarray, "256"]:
    """Return the float32 of each byte, or two float32s of 4 bits each as one word of 64, for one look-up of both."""
    codes = np.arange(256, dtype=np.float32)[:, None]
    if bits == 8:
        return (codes - zero)[:, 0]
    return (np.concatenate([codes % 16, codes // 16], axis=1) - zero).view(np.uint64)[:, 0]


# Tables by the bits of a number: codes as they are, and codes less half of the range.
_UNSIGNED = {bits: _table(bits, 0) for bits in (4, 8)}
_SIGNED = {bits: _table(bits, 2 ** (bits - 1)) for bits in (4, 8)}
