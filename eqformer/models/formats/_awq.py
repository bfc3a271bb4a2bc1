"""AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ stores it for `gemm`: a word holds outputs, in its own order."""

import dataclasses

import numpy as np
from jaxtyping import UInt8

from .._published_config import PublishedConfig
from ._format import check_codes, check_part, Format, number_of_groups, Parts, SCALES
from ._gptq import group_of
from ._packed_integers import bytes_of_words, PackedIntegers, unpack


_CODES, _ZEROS, _SCALES, _PER_WORD = ".qweight", PackedIntegers.zeros, PackedIntegers.scales, 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # from the lowest bits up, a word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7


@dataclasses.dataclass(frozen=True)
class AWQ(PackedIntegers):
    """Integers of 4 bits, with words along outputs."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (outputs, inputs)."""
        inputs, words = check_codes(parts, _CODES, "I32", 2)
        groups = number_of_groups(inputs, self.group)
        check_part(parts, _ZEROS, ("I32",), ((groups, words),))
        check_part(parts, _SCALES, SCALES, ((groups, words * _PER_WORD),))
        if inputs % 2:
            raise ValueError(f"its {inputs} inputs are no multiple of 2")
        return words * _PER_WORD, inputs

    def read_octets(self, parts: Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs; each word has neighboring outputs of an input."""
        octets = bytes_of_words(parts[_CODES][:, _words(rows)])
        even, odd = octets[::2], octets[1::2]
        pairs = np.stack([even & 15 | odd << 4, even >> 4 | odd & 240], axis=-1)
        return np.ascontiguousarray(_reorder(pairs).T)

    def read_scales(self, parts: Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales and zero points of some outputs; zero points are stored as codes are."""
        return parts[_SCALES][:, rows].T, _reorder(unpack(parts[_ZEROS][:, _words(rows)], 4)).T


def _words(rows: slice) -> slice:
    return slice((rows.start or 0) // _PER_WORD, None if rows.stop is None else rows.stop // _PER_WORD)


def _reorder(numbers: UInt8[np.ndarray, "rows ..."]) -> UInt8[np.ndarray, "rows outputs"]:
    """Return the numbers of each word in the order of outputs."""
    return numbers.reshape(len(numbers), -1, _PER_WORD)[..., _ORDER].reshape(len(numbers), -1)


def awq(published: PublishedConfig) -> Format:
    """Return the format of a `quantization_config`."""
    published.expect("bits", 4)
    published.expect("version", "gemm", "GEMM")
    published.expect("zero_point", True)
    return AWQ("AWQ", _CODES, (_ZEROS, _SCALES), group=group_of(published))
