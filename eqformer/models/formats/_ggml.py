"""The quantized blocks of GGUF files, as ggml lays them out: each row of an array is a row of blocks of bytes."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float32, Shaped, UInt8

from ..._failures import load_extra
from ._format import check_finite_scales, Format, Grouped, GroupLayout, Parts, QuantizedArray


ROWS, ORDER, COLUMNS = "", "order", "columns"
"""The parts of an array: the bytes of each row and, if rows or columns are stored in another order, their indices."""
_Values = Callable[[UInt8[np.ndarray, "blocks octets"]], Float32[np.ndarray, "blocks numbers"]]


@dataclasses.dataclass(frozen=True)
class Blocks(Format):
    """A type of quantized block, which has a fixed number of values in a fixed number of bytes."""

    numbers: int = 1
    """The number of values in a block."""
    octets: int = 4
    """The number of bytes in a block."""
    values: _Values = lambda octets: octets.view(np.float32)
    """A function that decodes the bytes of blocks."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (rows, columns)."""
        rows, width = parts[ROWS].shape
        if width % self.octets:
            raise ValueError(f"its rows of {width} bytes are not whole blocks of {self.octets} bytes")
        return rows, width // self.octets * self.numbers

    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Decode some rows."""
        chosen = parts[ORDER][rows] if ORDER in parts else rows
        octets = np.ascontiguousarray(parts[ROWS][chosen])
        values = self.values(octets.reshape(-1, self.octets)).reshape(out.shape)
        out[...] = values[:, parts[COLUMNS]] if COLUMNS in parts else values


_Groups = tuple[UInt8[np.ndarray, "groups 32"], Float32[np.ndarray, "groups 1"], Float32[np.ndarray, "groups 1"] | None]
"""Groups of 32 values: the codes, one in a byte; the scales; and, if stored, the value of the code 0, the least."""
_Read = Callable[[UInt8[np.ndarray, "blocks octets"]], _Groups]
_GROUP = 32  # values that share a scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedBlocks(Blocks, Grouped):
    """A type of quantized block with the values `(code - zero) * scale`, where 32 values share `scale` and `zero`."""

    bits: int = 4
    """The number of bits in a code."""
    read: _Read
    """A function from the bytes of blocks to their codes and scales."""
    has_zeros: bool = False
    """Whether blocks have zero points, which are floats."""
    scale_dtype: str = "float16"
    """The dtype that holds the scales."""

    @property
    def groups(self) -> GroupLayout:
        """Return the layout of groups, which all arrays of this type share."""
        zero_dtype = "float32" if self.has_zeros else None
        return GroupLayout(f"int{self.bits}", (1, _GROUP), ROWS, self.has_zeros, self.scale_dtype, zero_dtype)

    def read_codes(self, parts: Parts, unit: tuple[int, int]) -> QuantizedArray:
        """Return all codes, scales and zero points."""
        if COLUMNS in parts:
            raise ValueError(
                "its columns are stored in another order, so its codes cannot be kept; load with weights='decoded'"
            )
        rows = parts[ROWS][parts[ORDER]] if ORDER in parts else parts[ROWS]
        codes, scales, least = self.read(np.ascontiguousarray(rows).reshape(-1, self.octets))
        zeros = None
        if least is not None:
            # All values of a group with the scale 0 are equal. Such a group gets the codes 0 and the scale 1, so that
            # its zero point is finite.
            is_constant = scales == 0
            codes, scales = np.where(is_constant, np.uint8(0), codes), np.where(is_constant, np.float32(1), scales)
            zeros = -least / scales
        codes = codes.reshape(len(rows), -1)
        codes = codes if self.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4

        def repeat_per_unit(group_values: Float32[np.ndarray, "groups 1"]) -> Float32[np.ndarray, "rows units"]:
            return np.repeat(group_values.reshape(len(rows), -1), _GROUP // unit[1], axis=1)

        return QuantizedArray(
            codes, repeat_per_unit(scales).astype(self.scale_dtype), None if zeros is None else repeat_per_unit(zeros)
        )


def _scale(octets: UInt8[np.ndarray, "blocks 2"]) -> Float32[np.ndarray, "blocks 1"]:
    return check_finite_scales(np.ascontiguousarray(octets).view(np.float16)).astype(np.float32)


def _decoder(read: _Read, bits: int) -> _Values:
    """Return a decoder that reads blocks by `read`, with codes of `bits` bits, and computes their values.

    A value is `scale * code + least` or, if no least values are stored, `(code - zero) * scale` with half of the range
    as the zero point.
    """

    def values(octets: UInt8[np.ndarray, "blocks octets"]) -> Float32[np.ndarray, "groups 32"]:
        codes, scales, least = read(octets)
        numbers = codes.astype(np.float32)
        if least is None:
            numbers -= 2 ** (bits - 1)
        numbers *= scales
        if least is not None:
            numbers += least
        return numbers

    return values


def _low_bits(bits: int, has_least: bool) -> _Read:
    """Return the reader of blocks of 32 codes of 4 or 5 bits, with a scale and, if `has_least`, the least value.

    The last 16 bytes hold the low four bits of each code: codes 0 to 15 are in the low halves of the bytes, codes 16 to
    31 in the high halves. Codes of 5 bits have their highest bits in the four bytes before.
    """

    def read(octets: UInt8[np.ndarray, "blocks octets"]) -> _Groups:
        codes = np.concatenate([octets[:, -16:] & 15, octets[:, -16:] >> 4], axis=1)
        if bits == 5:
            codes = codes | np.unpackbits(octets[:, -20:-16], axis=1, bitorder="little") << 4
        return codes, _scale(octets[:, :2]), _scale(octets[:, 2:4]) if has_least else None

    return read


def _signed_bytes(octets: UInt8[np.ndarray, "blocks 34"]) -> _Groups:
    """Read blocks of a scale and 32 signed bytes; a code is a signed byte plus 128."""
    return octets[:, 2:] ^ 128, _scale(octets[:, :2]), None


def _k_factors(octets: UInt8[np.ndarray, "blocks octets"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the scaled factors and minimums of 8 groups; a minimum is subtracted from the values of its group.

    A block begins with a scale of all factors and a scale of all minimums. Then 12 bytes hold the factors and minimums,
    which have 6 bits each. The low six bits of bytes 0 to 3 are the factors of groups 0 to 3, and the low six bits of
    bytes 4 to 7 their minimums. Bytes 8 to 11 hold the low four bits of groups 4 to 7: factors in the low halves,
    minimums in the high halves. The upper two bits of bytes 0 to 7 are the upper two bits of groups 4 to 7.
    """
    first, second, third = (octets[:, start : start + 4] for start in (4, 8, 12))  # bytes 0 to 3, 4 to 7, 8 to 11
    factors = np.concatenate([first & 0x3F, (third & 0x0F) | (first >> 2 & 0x30)], axis=1)
    minimums = np.concatenate([second & 0x3F, (third >> 4) | (second >> 2 & 0x30)], axis=1)
    return _scale(octets[:, :2]) * factors.astype(np.float32), _scale(octets[:, 2:4]) * minimums.astype(np.float32)


def _nibbles(octets: UInt8[np.ndarray, "blocks 128"]) -> UInt8[np.ndarray, "blocks 8 32"]:
    """Return the low four bits of each 32 bytes, then their high four bits."""
    halves = octets.reshape(-1, 4, 1, 32)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 8, 32)


def _k_codes(bits: int) -> _Read:
    """Return the reader of blocks of 256 codes of 4 or 5 bits, in groups with a factor and a minimum (`_k_factors`).

    The last 128 bytes hold the low four bits. Bit `g` of the 32 bytes before them is the fifth bit of group `g`.
    """

    def read(octets: UInt8[np.ndarray, "blocks octets"]) -> _Groups:
        codes = _nibbles(octets[:, -128:])
        if bits == 5:
            codes = codes | np.stack([octets[:, 16:48] >> group & 1 for group in range(8)], axis=1) << 4
        factors, minimums = _k_factors(octets)
        return codes.reshape(-1, _GROUP), factors.reshape(-1, 1), -minimums.reshape(-1, 1)

    return read


def _q6_k(octets: UInt8[np.ndarray, "blocks 210"]) -> Float32[np.ndarray, "blocks 256"]:
    """Decode blocks of 256 codes of six bits, with a factor for each 16 numbers and one scale.

    The 256 numbers have two halves of 128. For each half, 64 bytes hold the low four bits of the codes: the low halves
    of the bytes belong to the first 64 numbers, the high halves to the last 64. Another 32 bytes for each half hold the
    upper two bits: two bits of each byte for each quarter of the half.
    """
    low, high = octets[:, :128].reshape(-1, 2, 1, 64), octets[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (low | high << 4).astype(np.float32) - 32
    factors = octets[:, 192:208].view(np.int8).astype(np.float32) * _scale(octets[:, 208:])
    return (factors[..., None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def _blocks(name: str, numbers: int, octets: int, values: _Values) -> Blocks:
    return Blocks(name, ROWS, (), numbers=numbers, octets=octets, values=values)


def _grouped(
    name: str,
    octets: int,
    read: _Read,
    *,
    numbers: int = _GROUP,
    bits: int = 4,
    has_zeros: bool = False,
    scale_dtype: str = "float16",
) -> GroupedBlocks:
    values = _decoder(read, bits)
    layout: dict[str, Any] = {"bits": bits, "has_zeros": has_zeros, "scale_dtype": scale_dtype}
    return GroupedBlocks(name, ROWS, (), numbers=numbers, octets=octets, values=values, read=read, **layout)


def _floats(dtype: DTypeLike) -> _Values:
    """Return the decoder of blocks of one float."""
    return lambda octets: octets.view(dtype).astype(np.float32)


def _by_package(name: str) -> _Values:
    """Return the decoder of the package `gguf`, the reference implementation, for a type without a decoder here.

    It raises an `ImportError` that names the extra if the package is not installed, and a `ValueError` for a number
    that is not finite.
    """

    def values(octets: UInt8[np.ndarray, "blocks octets"]) -> Float32[np.ndarray, "blocks numbers"]:
        package = load_extra("gguf", extra="gguf", call=f"an array of type {name} in a GGUF file")
        # All blocks are passed as one row, because the package's loop over rows is slow.
        with np.errstate(all="ignore"):
            decoded = package.quants.dequantize(octets.reshape(1, -1), package.GGMLQuantizationType[name])
        if not np.isfinite(decoded).all():
            raise ValueError("one of its numbers is not finite")
        return decoded.reshape(len(octets), -1)

    return values


# Types that the package `gguf` decodes, by the id of the type in files: the name, the number of values of a block, and
# its bytes. The decoders above agree with the package's bit for bit and are faster: for Q4_K of 2048 x 4096, 39 ms
# instead of 97 ms.
PACKAGED: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        29: ("IQ1_M", 256, 56),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
    }
)
# The types of blocks, by the id of the type in files.
BLOCKS: Mapping[int, Blocks] = MappingProxyType(
    {
        0: _blocks("F32", 1, 4, _floats(np.float32)),
        1: _blocks("F16", 1, 2, _floats(np.float16)),
        2: _grouped("Q4_0", 18, _low_bits(4, has_least=False)),
        3: _grouped("Q4_1", 20, _low_bits(4, has_least=True), has_zeros=True),
        6: _blocks("Q5_0", 32, 22, _decoder(_low_bits(5, has_least=False), 5)),
        7: _blocks("Q5_1", 32, 24, _decoder(_low_bits(5, has_least=True), 5)),
        8: _grouped("Q8_0", 34, _signed_bytes, bits=8),
        12: _grouped("Q4_K", 144, _k_codes(4), numbers=256, has_zeros=True, scale_dtype="float32"),
        13: _blocks("Q5_K", 256, 176, _decoder(_k_codes(5), 5)),
        14: _blocks("Q6_K", 256, 210, _q6_k),
        30: _blocks("BF16", 1, 2, _floats(ml_dtypes.bfloat16)),
        **{
            kind: _blocks(name, numbers, octets, _by_package(name))
            for kind, (name, numbers, octets) in PACKAGED.items()
        },
    }
)
