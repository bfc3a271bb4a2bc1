"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it: a word holds inputs."""

import dataclasses

import numpy as np
from jaxtyping import UInt8

from .._published_config import PublishedConfig
from ._format import check_codes, check_part, Format, number_of_groups, Parts, SCALES
from ._packed_integers import bytes_of_words, PackedIntegers, unpack


_CODES, _ZEROS, _SCALES, _GROUP_INDICES = (
    ".qweight",
    PackedIntegers.zeros,
    PackedIntegers.scales,
    PackedIntegers.group_indices,
)


@dataclasses.dataclass(frozen=True)
class GPTQ(PackedIntegers):
    """Integers with words along inputs; the first version of the format stores `zero - 1`, modulo the range."""

    shift: int = 1
    """The number that is added to a stored zero point."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (outputs, inputs)."""
        words, outputs = check_codes(parts, _CODES, "I32", 2)
        inputs = words * self.per_word
        groups = number_of_groups(inputs, self.group)
        if outputs % self.per_word:
            raise ValueError(f"its {outputs} outputs are no multiple of the {self.per_word} numbers of a word")
        check_part(parts, _ZEROS, ("I32",), ((groups, outputs // self.per_word),))
        check_part(parts, _SCALES, SCALES, ((groups, outputs),))
        if _GROUP_INDICES in parts:
            check_part(parts, _GROUP_INDICES, ("I32",), ((inputs,),))
        return outputs, inputs

    def read_octets(self, parts: Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs; each word has neighboring inputs of an output."""
        return bytes_of_words(parts[_CODES][:, rows].T)

    def read_scales(self, parts: Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales and zero points of some outputs; a word of zero points holds outputs."""
        words = slice((rows.start or 0) // self.per_word, None if rows.stop is None else rows.stop // self.per_word)
        zeros = unpack(parts[_ZEROS][:, words], self.bits).T.astype(np.int32)
        return parts[_SCALES][:, rows].T, ((zeros + self.shift) % 2**self.bits).astype(np.uint8)


def gptq(published: PublishedConfig) -> Format:
    """Return the format of a `quantization_config`."""
    published.expect("bits", 4, 8)
    published.expect("checkpoint_format", "gptq", "gptq_v2")
    published.expect("pack_dtype", "int32")
    published.expect("lm_head", False)
    group = group_of(published)
    required = (_ZEROS, _SCALES, *((_GROUP_INDICES,) if published.take("desc_act", False) else ()))
    shift = int(published.take("checkpoint_format", "gptq") == "gptq")
    return GPTQ(
        "GPTQ", _CODES, required, optional=(_GROUP_INDICES,), bits=published.take("bits"), group=group, shift=shift
    )


def group_of(published: PublishedConfig) -> int | None:
    """Return `group_size`; None for -1, which stands for all inputs."""
    return None if published.take("group_size") == -1 else published.count("group_size")
