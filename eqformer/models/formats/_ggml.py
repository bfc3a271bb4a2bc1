"""The quantized blocks of GGUF files, as ggml lays them out: each row of an array is a row of blocks of bytes."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float32, Shaped, UInt8

from ..._failures import load_extra
from ._format import check_finite_scales, Format, Parts


ROWS, ORDER, COLUMNS = "", "order", "columns"
"""The parts of an array: the bytes of each row and, if rows or columns are stored in another order, their indices."""
_Values = Callable[[UInt8[np.ndarray, "blocks octets"]], Float32[np.ndarray, "blocks numbers"]]


@dataclasses.dataclass(frozen=True)
class Blocks(Format):
    """A type of quantized block, which has a fixed number of values in a fixed number of bytes."""

    numbers: int = 1
    """The values of a block."""
    octets: int = 4
    """The bytes of a block."""
    values: _Values = lambda octets: octets.view(np.float32)
    """A function that decodes the bytes of blocks."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (rows, columns)."""
        rows, width = parts[ROWS].shape
        if width % self.octets:
            raise ValueError(f"its rows of {width} bytes are no whole blocks of {self.octets}")
        return rows, width // self.octets * self.numbers

    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Decode some rows."""
        chosen = parts[ORDER][rows] if ORDER in parts else rows
        octets = np.ascontiguousarray(parts[ROWS][chosen])
        values = self.values(octets.reshape(-1, self.octets)).reshape(out.shape)
        out[...] = values[:, parts[COLUMNS]] if COLUMNS in parts else values


def _scale(octets: UInt8[np.ndarray, "blocks 2"]) -> Float32[np.ndarray, "blocks 1"]:
    return check_finite_scales(np.ascontiguousarray(octets).view(np.float16)).astype(np.float32)


def _low_bits(bits: int, lowest: bool) -> _Values:
    """Return the decoder of blocks of 32 codes of 4 or 5 bits, with a scale and, if `lowest`, a minimum.

    The last 16 bytes hold the low four bits of each code: codes 0 to 15 are in the low halves of the bytes, codes 16 to
    31 in the high halves. Codes of 5 bits have their highest bits in the four bytes before.
    """

    def values(octets: UInt8[np.ndarray, "blocks octets"]) -> Float32[np.ndarray, "blocks 32"]:
        codes = np.concatenate([octets[:, -16:] & 15, octets[:, -16:] >> 4], axis=1)
        if bits == 5:
            codes = codes | np.unpackbits(octets[:, -20:-16], axis=1, bitorder="little") << 4
        scaled, factor = codes.astype(np.float32), _scale(octets[:, :2])
        return factor * scaled + _scale(octets[:, 2:4]) if lowest else (scaled - 2 ** (bits - 1)) * factor

    return values


def _q8_0(octets: UInt8[np.ndarray, "blocks 34"]) -> Float32[np.ndarray, "blocks 32"]:
    """Decode blocks of a scale and 32 signed bytes."""
    return octets[:, 2:].view(np.int8).astype(np.float32) * _scale(octets[:, :2])


def _k_pairs(octets: UInt8[np.ndarray, "blocks octets"], codes: UInt8[np.ndarray, "blocks 8 32"]) -> np.ndarray:
    """Decode 8 groups of 32 codes; each group has a factor and a minimum of 6 bits, and the block a scale for each of
    them.

    After the two scales, 12 bytes hold the factors and minimums. The low six bits of bytes 0 to 3 are the factors of
    groups 0 to 3, those of bytes 4 to 7 their minimums. Groups 4 to 7 have their low four bits in bytes 8 to 11
    (factors in the low halves, minimums in the high halves), and their upper two bits in the upper bits of bytes 0 to
    7.
    """
    low, least, shared = (octets[:, start : start + 4] for start in (4, 8, 12))
    factors = np.concatenate([low & 63, shared & 15 | low >> 2 & 48], axis=1)
    lowest = np.concatenate([least & 63, shared >> 4 | least >> 2 & 48], axis=1)
    factor = (_scale(octets[:, :2]) * factors.astype(np.float32))[..., None]
    least = (_scale(octets[:, 2:4]) * lowest.astype(np.float32))[..., None]
    return (factor * codes.astype(np.float32) - least).reshape(-1, 256)


def _nibbles(octets: UInt8[np.ndarray, "blocks 128"]) -> UInt8[np.ndarray, "blocks 8 32"]:
    """Return the low four bits of each 32 bytes, then their high four bits."""
    halves = octets.reshape(-1, 4, 1, 32)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(octets: UInt8[np.ndarray, "blocks 144"]) -> Float32[np.ndarray, "blocks 256"]:
    """Decode blocks of 256 codes of four bits, in groups with a factor and a minimum (`_k_pairs`)."""
    return _k_pairs(octets, _nibbles(octets[:, 16:]))


def _q5_k(octets: UInt8[np.ndarray, "blocks 176"]) -> Float32[np.ndarray, "blocks 256"]:
    """Decode blocks like those of Q4_K, whose codes have a fifth bit: bit `g` of 32 bytes is that of group `g`."""
    high = np.stack([octets[:, 16:48] >> group & 1 for group in range(8)], axis=1)
    return _k_pairs(octets, _nibbles(octets[:, 48:]) | high << 4)


def _q6_k(octets: UInt8[np.ndarray, "blocks 210"]) -> Float32[np.ndarray, "blocks 256"]:
    """Decode blocks of 256 codes of six bits, with a factor for each 16 numbers and a scale.

    For each half of 128 numbers, 64 bytes hold the low four bits of the codes: those of the first 64 numbers in their
    low halves, those of the last 64 in their high halves. 32 bytes hold the upper two bits, for each quarter of the
    half in other bits.
    """
    low, high = octets[:, :128].reshape(-1, 2, 1, 64), octets[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (low | high << 4).astype(np.float32) - 32
    factors = octets[:, 192:208].view(np.int8).astype(np.float32) * _scale(octets[:, 208:])
    return (factors[..., None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def _blocks(name: str, numbers: int, octets: int, values: _Values) -> Blocks:
    return Blocks(name, ROWS, (), numbers=numbers, octets=octets, values=values)


def _floats(dtype: DTypeLike) -> _Values:
    """Return the decoder of blocks of one float."""
    return lambda octets: octets.view(dtype).astype(np.float32)


def _by_package(name: str) -> _Values:
    """Return the decoder of the package `gguf`, the reference implementation, for a type that has none here.

    It raises an `ImportError` that names the extra if the package is not installed, and a `ValueError` for a number
    that is not finite.
    """

    def values(octets: UInt8[np.ndarray, "blocks octets"]) -> Float32[np.ndarray, "blocks numbers"]:
        package = load_extra("gguf", extra="gguf", call=f"an array of type {name} in a GGUF file")
        # As one row, since the package's loop over rows is slow.
        with np.errstate(all="ignore"):
            decoded = package.quants.dequantize(octets.reshape(1, -1), package.GGMLQuantizationType[name])
        if not np.isfinite(decoded).all():
            raise ValueError("one of its numbers is not finite")
        return decoded.reshape(len(octets), -1)

    return values


# Types that the package `gguf` decodes: name, numbers of a block, bytes of a block, by their numbers in files. The
# decoders above agree with the package's bit for bit and are faster: Q4_K of 2048 x 4096 took 39 ms, and 97 ms there.
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
# The types of blocks, by their numbers in files.
BLOCKS: Mapping[int, Blocks] = MappingProxyType(
    {
        0: _blocks("F32", 1, 4, _floats(np.float32)),
        1: _blocks("F16", 1, 2, _floats(np.float16)),
        2: _blocks("Q4_0", 32, 18, _low_bits(4, lowest=False)),
        3: _blocks("Q4_1", 32, 20, _low_bits(4, lowest=True)),
        6: _blocks("Q5_0", 32, 22, _low_bits(5, lowest=False)),
        7: _blocks("Q5_1", 32, 24, _low_bits(5, lowest=True)),
        8: _blocks("Q8_0", 32, 34, _q8_0),
        12: _blocks("Q4_K", 256, 144, _q4_k),
        13: _blocks("Q5_K", 256, 176, _q5_k),
        14: _blocks("Q6_K", 256, 210, _q6_k),
        30: _blocks("BF16", 1, 2, _floats(ml_dtypes.bfloat16)),
        **{
            kind: _blocks(name, numbers, octets, _by_package(name))
            for kind, (name, numbers, octets) in PACKAGED.items()
        },
    }
)
