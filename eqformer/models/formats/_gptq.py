"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it: words go along inputs."""

import dataclasses

import numpy as np
from jaxtyping import UInt8

from .._published_config import PublishedConfig
from ._format import check_codes, check_part, Format, number_of_groups, Parts, SCALES
from ._packed_integers import octets_of, unpacked, WholeNumbers


_CODES, _ZEROS, _SCALES, _PLACES = ".qweight", WholeNumbers.zeros, WholeNumbers.scales, WholeNumbers.places


@dataclasses.dataclass(frozen=True)
class GPTQ(WholeNumbers):
    """Numbers whose first version stores `zero - 1`, modulo its range."""

    shift: int = 1
    """What is added to a stored zero."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (outputs, inputs)."""
        words, outputs = check_codes(parts, _CODES, "I32", 2)
        inputs = words * self.many
        groups = number_of_groups(inputs, self.group)
        if outputs % self.many:
            raise ValueError(f"its {outputs} outputs are no multiple of the {self.many} numbers of a word")
        check_part(parts, _ZEROS, ("I32",), ((groups, outputs // self.many),))
        check_part(parts, _SCALES, SCALES, ((groups, outputs),))
        if _PLACES in parts:
            check_part(parts, _PLACES, ("I32",), ((inputs,),))
        return outputs, inputs

    def octets(self, parts: Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs; each word has neighbouring inputs of an output."""
        return octets_of(parts[_CODES][:, rows].T)

    def of_groups(self, parts: Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales and zeros of some outputs; words of zeros go along outputs."""
        words = slice((rows.start or 0) // self.many, None if rows.stop is None else rows.stop // self.many)
        zeros = unpacked(parts[_ZEROS][:, words], self.bits).T.astype(np.int32)
        return parts[_SCALES][:, rows].T, ((zeros + self.shift) % 2**self.bits).astype(np.uint8)


def gptq(published: PublishedConfig) -> Format:
    """Return the format of a `quantization_config`."""
    published.expect("bits", 4, 8)
    published.expect("checkpoint_format", "gptq", "gptq_v2")
    published.expect("pack_dtype", "int32")
    published.expect("lm_head", False)
    group = group_of(published)
    required = (_ZEROS, _SCALES, *((_PLACES,) if published.take("desc_act", False) else ()))
    shift = int(published.take("checkpoint_format", "gptq") == "gptq")
    return GPTQ("GPTQ", _CODES, required, optional=(_PLACES,), bits=published.take("bits"), group=group, shift=shift)


def group_of(published: PublishedConfig) -> int | None:
    """Return `group_size`, of which -1 stands for all inputs."""
    return None if published.take("group_size") == -1 else published.count("group_size")
