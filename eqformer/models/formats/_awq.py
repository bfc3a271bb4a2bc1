"""AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ stores it for `gemm`: words go along outputs, in its order."""

import dataclasses

import numpy as np
from jaxtyping import Int32, UInt8

from .._config import PublishedConfig
from ._format import check_codes, check_part, finite, Format, number_of_groups, Numbers, Parts, SCALES
from ._gptq import group_of
from ._whole_numbers import groups_of, unpacked, WholeNumbers


_CODES, _ZEROS, _SCALES, _MANY = ".qweight", WholeNumbers.zeros, WholeNumbers.scales, 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # from the lowest bits up, a word has the outputs 0, 2, 4, 6, 1, 3, 5, 7


@dataclasses.dataclass(frozen=True)
class AWQ(WholeNumbers):
    """Numbers of 4 bits."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """(outputs, inputs)."""
        inputs, words = check_codes(parts, _CODES, "I32", 2)
        groups = number_of_groups(inputs, self.group)
        check_part(parts, _ZEROS, ("I32",), ((groups, words),))
        check_part(parts, _SCALES, SCALES, ((groups, words * _MANY),))
        return words * _MANY, inputs

    def numbers(self, parts: Parts, rows: slice) -> Numbers:
        """Some outputs."""
        words = slice(rows.start // _MANY, rows.stop // _MANY)
        codes, zeros = (_numbers(parts[end][:, words]).T for end in (_CODES, _ZEROS))
        scales = finite(parts[_SCALES][:, rows].T)
        group = groups_of(codes.shape[1], self.group, scales.shape[1])
        return Numbers(codes, scales[:, group], zeros[:, group])


def _numbers(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows outputs"]:
    found = unpacked(words, 4).reshape(len(words), -1, _MANY)
    return found[..., _ORDER].reshape(len(words), -1)


def awq(published: PublishedConfig) -> Format:
    """The format of a `quantization_config`."""
    published.expect("bits", 4)
    published.expect("version", "gemm", "GEMM")
    published.expect("zero_point", True)
    for name in ("modules_to_not_convert", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len"):
        published.take(name, None)
    return AWQ("AWQ", _CODES, (_ZEROS, _SCALES), group=group_of(published))
