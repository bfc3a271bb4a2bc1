"""Formats of 4-bit and 8-bit integers, packed into words of 32 bits, with scales for groups of inputs: GPTQ and AWQ."""

import abc
import dataclasses
import math

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from .._config_types import PublishedConfig
from . import _format


# The suffixes of the arrays of GPTQ and AWQ: codes, scales, zero points, and the group of each input.
_CODES, _SCALES, _ZEROS, _GROUP_INDICES = ".qweight", ".scales", ".qzeros", ".g_idx"


@dataclasses.dataclass(frozen=True)
class PackedIntegers(_format.Grouped):
    """Base class of formats with the values `(code - zero) * scale`, where a group of inputs shares `scale` and `zero`.

    If no zero points are stored, `zero` is half of the range of codes.
    """

    bits: int = 4
    group: int | None = None
    """The number of neighboring inputs of a group; None: all inputs are one group."""
    scales: str = _SCALES
    """The suffix of the array of scales."""
    zeros: str = _ZEROS
    """The suffix of the array of zero points, which is stored if `required` has it."""
    group_indices: str = _GROUP_INDICES
    """The suffix of the array with the group of each input; a folder may lack this array."""

    @property
    def per_word(self) -> int:
        """The number of integers in a word."""
        return 32 // self.bits

    def decode(self, parts: _format.Parts, rows: slice, out: Shaped[np.ndarray, "outputs inputs"]) -> None:
        """Decode some outputs."""
        columns = out.shape[1]
        # A unit is a number of neighboring inputs that are surely in one group.
        unit = math.gcd(self.group or columns, columns) if self.group_indices not in parts else 1
        scales, zeros = self._scales_of_units(parts, rows, columns, unit)
        table = (_UNSIGNED if zeros is not None else _SIGNED)[self.bits]
        values = np.take(table, self.read_octets(parts, rows)).view(np.float32)[:, :columns].reshape(len(out), -1, unit)
        if zeros is not None:
            values -= zeros[..., None].astype(np.float32)
        values *= scales[..., None].astype(np.float32)
        out[...] = values.reshape(out.shape)

    def read_codes(self, parts: _format.Parts, unit: tuple[int, int]) -> _format.QuantizedArray:
        """Return all codes, scales and zero points."""
        columns, rows = self.shape(parts)[1], slice(0, None)
        scales, zeros = self._scales_of_units(parts, rows, columns, unit[1])
        return _format.QuantizedArray(self.read_octets(parts, rows)[:, : columns * self.bits // 8], scales, zeros)

    @property
    def groups(self) -> _format.GroupLayout:
        """Return the layout that the configuration states."""
        return _format.GroupLayout(
            f"int{self.bits}", (1, self.group), self.scales, has_zeros=self.zeros in self.required
        )

    @abc.abstractmethod
    def read_octets(self, parts: _format.Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs in the order of inputs; the low bits of a byte are the first code."""

    @abc.abstractmethod
    def read_scales(self, parts: _format.Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales of some outputs for all groups, and the zero points; None: no zero points are stored."""

    def _scales_of_units(
        self, parts: _format.Parts, rows: slice, columns: int, unit: int
    ) -> tuple[Shaped[np.ndarray, "outputs units"], Shaped[np.ndarray, "outputs units"] | None]:
        """Return the scales and zero points of some outputs, for each `unit` of neighboring inputs."""
        scales, zeros = self.read_scales(parts, rows)
        group = _format.group_of_units(columns, self.group, unit)
        if (group_indices := parts.get(self.group_indices)) is not None:
            group = _group_of_units(group_indices, scales.shape[1], unit)
        return _format.check_finite_scales(scales)[:, group], None if zeros is None else zeros[:, group]


def unpack(words: Int32[np.ndarray, "rows words"], bits: int) -> UInt8[np.ndarray, "rows integers"]:
    """Return the integers of 4 or 8 bits in each word, the lowest bits first."""
    octets = bytes_of_words(words)
    return octets if bits == 8 else np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(words), -1)


def bytes_of_words(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows octets"]:
    """Return the bytes of each word, the lowest byte first."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def _group_of_units(indices: Shaped[np.ndarray, "columns"], groups: int, unit: int) -> Shaped[np.ndarray, "units"]:
    """Return the group of each unit of columns, from the group of each column."""
    if indices.min() < 0 or indices.max() >= groups:
        raise ValueError(f"its columns are of groups {indices.min()} to {indices.max()}, but it has {groups} groups")
    units = indices.reshape(-1, unit)
    if (units != units[:, :1]).any():
        raise ValueError(
            "the inputs of a group are not neighbors (g_idx has another order), so its codes cannot be kept; load "
            "with weights='decoded'"
        )
    return units[:, 0]


def _table(bits: int, zero: int) -> Shaped[np.ndarray, "256"]:
    """Return a table from each byte to its float32 or, for two 4-bit codes in a byte, to two float32s.

    The table holds two float32s as one word of 64 bits, so that one look-up decodes both codes.
    """
    codes = np.arange(256, dtype=np.float32)[:, None]
    if bits == 8:
        return (codes - zero)[:, 0]
    return (np.concatenate([codes % 16, codes // 16], axis=1) - zero).view(np.uint64)[:, 0]


# Tables by the bits of a code. `_UNSIGNED` has the codes as they are, `_SIGNED` the codes minus half of the range.
_UNSIGNED = {bits: _table(bits, 0) for bits in (4, 8)}
_SIGNED = {bits: _table(bits, 2 ** (bits - 1)) for bits in (4, 8)}


@dataclasses.dataclass(frozen=True)
class GPTQ(PackedIntegers):
    """GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it: a word packs several inputs.

    The first version of the format stores `zero - 1`, modulo the range.
    """

    shift: int = 1
    """The number that is added to a stored zero point."""

    def shape(self, parts: _format.Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (outputs, inputs)."""
        words, outputs = _format.check_codes(parts, _CODES, "I32", 2)
        inputs = words * self.per_word
        groups = _format.number_of_groups(inputs, self.group)
        if outputs % self.per_word:
            raise ValueError(f"its {outputs} outputs are not a multiple of the {self.per_word} integers of a word")
        _format.check_part(parts, _ZEROS, ("I32",), ((groups, outputs // self.per_word),))
        _format.check_part(parts, _SCALES, _format.SCALES, ((groups, outputs),))
        if _GROUP_INDICES in parts:
            _format.check_part(parts, _GROUP_INDICES, ("I32",), ((inputs,),))
        return outputs, inputs

    def read_octets(self, parts: _format.Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs; each word has neighboring inputs of an output."""
        return bytes_of_words(parts[_CODES][:, rows].T)

    def read_scales(self, parts: _format.Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales and zero points of some outputs; a word packs the zero points of several outputs."""
        words = slice((rows.start or 0) // self.per_word, None if rows.stop is None else rows.stop // self.per_word)
        zeros = unpack(parts[_ZEROS][:, words], self.bits).T.astype(np.int32)
        return parts[_SCALES][:, rows].T, ((zeros + self.shift) % 2**self.bits).astype(np.uint8)


def gptq(published: PublishedConfig) -> _format.Format:
    """Return the format of a `quantization_config`."""
    published.expect("bits", 4, 8)
    published.expect("checkpoint_format", "gptq", "gptq_v2")
    published.expect("pack_dtype", "int32")
    published.expect("lm_head", False)
    group = group_of(published)
    required = (_ZEROS, _SCALES, *((_GROUP_INDICES,) if published.take("desc_act", False) else ()))
    shift = int(published.take("checkpoint_format", "gptq") == "gptq")
    return GPTQ(
        "GPTQ", _CODES, required, optional=(_GROUP_INDICES,), bits=published.count("bits"), group=group, shift=shift
    )


def group_of(published: PublishedConfig) -> int | None:
    """Return `group_size`; None for -1, which stands for all inputs."""
    return None if published.take("group_size") == -1 else published.count("group_size")


_PER_WORD = 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # from the lowest bits up, a word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7


@dataclasses.dataclass(frozen=True)
class AWQ(PackedIntegers):
    """AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ stores it for `gemm`: a word packs 8 outputs of 4 bits."""

    def shape(self, parts: _format.Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (outputs, inputs)."""
        inputs, words = _format.check_codes(parts, _CODES, "I32", 2)
        groups = _format.number_of_groups(inputs, self.group)
        _format.check_part(parts, _ZEROS, ("I32",), ((groups, words),))
        _format.check_part(parts, _SCALES, _format.SCALES, ((groups, words * _PER_WORD),))
        if inputs % 2:
            raise ValueError(f"its {inputs} inputs are not a multiple of 2")
        return words * _PER_WORD, inputs

    def read_octets(self, parts: _format.Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs; each word has neighboring outputs of an input."""
        octets = bytes_of_words(parts[_CODES][:, _words(rows)])
        even, odd = octets[::2], octets[1::2]  # the bytes of two neighboring inputs, with the codes of two outputs each
        low_codes, high_codes = (even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)
        return np.ascontiguousarray(_reorder(np.stack([low_codes, high_codes], axis=-1)).T)

    def read_scales(self, parts: _format.Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales and zero points of some outputs; zero points are packed in the same way as codes."""
        return parts[_SCALES][:, rows].T, _reorder(unpack(parts[_ZEROS][:, _words(rows)], 4)).T


def _words(rows: slice) -> slice:
    return slice((rows.start or 0) // _PER_WORD, None if rows.stop is None else rows.stop // _PER_WORD)


def _reorder(integers: UInt8[np.ndarray, "rows ..."]) -> UInt8[np.ndarray, "rows outputs"]:
    """Return the integers of each word in the order of outputs."""
    return integers.reshape(len(integers), -1, _PER_WORD)[..., _ORDER].reshape(len(integers), -1)


def awq(published: PublishedConfig) -> _format.Format:
    """Return the format of a `quantization_config`."""
    published.expect("bits", 4)
    published.expect("version", "gemm", "GEMM")
    published.expect("zero_point", True)
    return AWQ("AWQ", _CODES, (_ZEROS, _SCALES), group=group_of(published))
