"""MXFP4 as gpt-oss has it (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits, with a power of two each."""

import numpy as np
from jaxtyping import Float32, UInt8

from .._config import PublishedConfig
from ._format import check_codes, check_part, Format, Grouped, Groups, Numbers, Parts


_BLOCKS, _SCALES, _SIZE = "_blocks", "_scales", 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# Of a byte both numbers, its low bits first, as one to be taken at once; of a scale its power of two (255 has none).
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1).view(np.uint64)[:, 0]
_POWERS = np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127)


class MXFP4(Grouped):
    """`values[code] * 2**(scale - 127)`; of each expert blocks go along inputs, and outputs come first."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """(experts, inputs, outputs)."""
        experts, outputs, blocks, size = check_codes(parts, _BLOCKS, "U8", 4)
        check_part(parts, _BLOCKS, ("U8",), ((experts, outputs, blocks, _SIZE // 2),))
        check_part(parts, _SCALES, ("U8",), ((experts, outputs, blocks),))
        return experts, blocks * size * 2, outputs

    def decode(self, parts: Parts, rows: slice) -> Float32[np.ndarray, "inputs outputs"]:
        """Some inputs of an expert."""
        codes, scales = _stored(parts, rows)
        values = np.take(_PAIRS, codes).view(np.float32) * np.take(_POWERS, scales)[..., None]
        return values.reshape(len(codes), -1).T

    def numbers(self, parts: Parts, rows: slice) -> Numbers:
        """Some inputs of an expert."""
        codes, scales = _stored(parts, rows)
        pairs = np.stack([codes & 15, codes >> 4], axis=-1)
        return Numbers(pairs.reshape(len(codes), -1).T, np.repeat(scales, _SIZE, axis=1).T, None)

    @property
    def groups(self) -> Groups:
        """E2M1, with an exponent for each block."""
        return Groups("fp4", _SIZE, _SCALES)


def _stored(
    parts: Parts, rows: slice
) -> tuple[UInt8[np.ndarray, "outputs blocks 16"], UInt8[np.ndarray, "outputs blocks"]]:
    blocks = slice(rows.start // _SIZE, rows.stop // _SIZE)
    codes, scales = parts[_BLOCKS][:, blocks], parts[_SCALES][:, blocks]
    if (scales == 255).any():
        raise ValueError(f"one of its {_SCALES} is 255, which is no number")
    return codes, scales


def mxfp4(published: PublishedConfig) -> Format:
    """The format of a `quantization_config`."""
    for name in ("modules_to_not_convert", "dequantize"):
        published.take(name, None)
    return MXFP4("MXFP4", _BLOCKS, (_SCALES,), decoded="")
