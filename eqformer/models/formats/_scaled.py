"""Numbers of 8 bits times a scale: of a block, as DeepSeek-V3 has it (arXiv:2412.19437), of a row, or of an array."""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from .._config import PublishedConfig
from ._format import (
    check_codes,
    check_part,
    Format,
    group_of_units,
    Grouped,
    Groups,
    not_negative,
    number_of_groups,
    Numbers,
    Parts,
    SCALES,
)


_CODES = ".weight"
_VALUES = {  # by what codes stand for
    "fp8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Scaled(Grouped):
    """`code * scale` (which multiplies even where it is called `weight_scale_inv`).

    A scale is one of a `block` of rows and columns; None stands for all.
    """

    block: tuple[int | None, int | None] = (None, None)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """That of the codes."""
        (dtype,), (scale,) = self.dtypes, self.needs
        dims = 3 if parts[self.codes].ndim == 3 == parts[scale].ndim else 2  # experts, as one array
        *experts, rows, columns = check_codes(parts, self.codes, dtype, dims)
        grid = self._grid(rows, columns)
        shapes = [(*experts, *grid)]
        if self.block[1] is None:
            shapes += [(*experts, *grid[:1])]
        if self.block == (None, None):
            shapes += [(*experts,)]
        check_part(parts, scale, SCALES, shapes)
        return *experts, rows, columns

    def decode(self, parts: Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Some rows."""
        columns, (height, width) = out.shape[1], self.block
        unit = math.gcd(width or columns, columns)
        group = group_of_units(len(parts[self.codes]), height, 1)[rows]
        scales = self._scales(parts)[np.ix_(group, group_of_units(columns, width, unit))]
        found = np.take(_VALUES[self.groups.form], parts[self.codes][rows].view(np.uint8))
        found.reshape(len(out), -1, unit)[...] *= scales[..., None].astype(np.float32)
        out[...] = found

    def numbers(self, parts: Parts, unit: tuple[int, int]) -> Numbers:
        """All of them."""
        codes = parts[self.codes]
        of_dims = zip(codes.shape, self.block, unit, strict=True)
        scales = self._scales(parts)[np.ix_(*(group_of_units(*each) for each in of_dims))]
        codes = codes.view(np.uint8)
        return Numbers(codes if self.groups.form == "fp8" else codes ^ 128, scales, None)

    @property
    def groups(self) -> Groups:
        """What the dtype of the codes says."""
        return Groups("fp8" if self.dtypes == ("F8_E4M3",) else "int8", self.block, self.needs[0])

    def _scales(self, parts: Parts) -> Shaped[np.ndarray, "grid_rows grid_columns"]:
        # They are the largest magnitudes of what was rounded; of whole numbers of 4 bits some programs turn the sign.
        return not_negative(parts[self.needs[0]]).reshape(self._grid(*parts[self.codes].shape))

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        height, width = self.block
        return number_of_groups(rows, height), number_of_groups(columns, width)


def block_of(published: PublishedConfig, name: str) -> tuple[int, int] | None:
    """The rows and columns of a block; None where nothing is said."""
    if (block := published.listed(name)) is None:
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        published.refuse(f"{name}={block}: it must be two whole numbers of at least 1.")
    return block[0], block[1]


def fp8(published: PublishedConfig) -> Format:
    """The format of a `quantization_config`, with a scale for each block or, without them, for each array."""
    published.expect("fmt", "e4m3", "float8_e4m3fn")
    for name in ("activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize", "scale_fmt"):
        published.take(name, None)
    block = block_of(published, "weight_block_size") or (None, None)
    activations = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")
    needs = (".weight_scale_inv",)
    found = Scaled("FP8", _CODES, needs, ignored=activations, dtypes=("F8_E4M3",), block=block)
    own: dict[str, Any] = {"codes": "", "needs": ("_scale_inv",), "decoded": "", "ignored": ("_activation_scale",)}
    return dataclasses.replace(found, also=dataclasses.replace(found, **own))
