"""MXFP4 as in gpt-oss (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits, each block with a power of
two."""

import functools

import numpy as np
from jaxtyping import Shaped, UInt8

from .._config_types import PublishedConfig
from ._format import check_codes, check_part, Format, Grouped, GroupLayout, Parts, QuantizedArray


_BLOCKS, _SCALES, _SIZE = "_blocks", "_scales", 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


class MXFP4(Grouped):
    """`values[code] * 2**(scale - 127)`; in each expert, outputs are the first dim, and blocks are along the inputs."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (experts, inputs, outputs)."""
        experts, outputs, blocks, size = check_codes(parts, _BLOCKS, "U8", 4)
        check_part(parts, _BLOCKS, ("U8",), ((experts, outputs, blocks, _SIZE // 2),))
        check_part(parts, _SCALES, ("U8",), ((experts, outputs, blocks),))
        return experts, blocks * size * 2, outputs

    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "outputs inputs"]) -> None:
        """Decode some outputs of an expert."""
        scales = _check_scales(parts[_SCALES][rows])
        scale_and_codes = scales.astype(np.uint16)[..., None] << 8 | parts[_BLOCKS][rows]
        pairs = out.reshape(*scale_and_codes.shape, 2)  # a view of the same memory
        # The table has a row for every index, so that nothing is clipped; "clip" alone writes to `out` without a copy.
        np.take(_products(str(out.dtype)), scale_and_codes, axis=0, out=pairs, mode="clip")

    def read_codes(self, parts: Parts, unit: tuple[int, int]) -> QuantizedArray:
        """Return the codes and scales of an expert."""
        codes, scales = parts[_BLOCKS], _check_scales(parts[_SCALES])
        return QuantizedArray(codes.reshape(len(codes), -1).T, np.repeat(scales, _SIZE // unit[0], axis=1).T, None)

    @property
    def groups(self) -> GroupLayout:
        """Return the layout: E2M1, with an exponent for each block."""
        return GroupLayout("fp4", (_SIZE, 1), _SCALES)


@functools.cache
def _products(dtype: str) -> Shaped[np.ndarray, "scales_and_codes 2"]:
    """Return a table of pairs of numbers, by an index with a scale in its upper byte and two codes in its lower byte.

    The code in the low bits is that of the first number.
    """
    pairs = np.stack([np.tile(FP4_VALUES, 16), np.repeat(FP4_VALUES, 16)], axis=-1)
    with np.errstate(over="ignore"):
        return np.ldexp(pairs, np.arange(-127, 129)[:, None, None]).reshape(-1, 2).astype(dtype)


def _check_scales(scales: UInt8[np.ndarray, "outputs blocks"]) -> UInt8[np.ndarray, "outputs blocks"]:
    if (scales == 255).any():
        raise ValueError(f"one of its {_SCALES} is 255, which is no number")
    return scales


def mxfp4(published: PublishedConfig) -> Format:
    """Return the format of a `quantization_config`."""
    return MXFP4("MXFP4", _BLOCKS, (_SCALES,), decoded="", transposed=True)
