"""8-bit numbers with a scale for each block, as in DeepSeek-V3 (arXiv:2412.19437), for each row, or for the array.

Scales are floats, or powers of two in 8 bits (E8M0), which decode exactly.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from .._config_types import PublishedConfig
from . import _format


_CODES = ".weight"
_VALUES = {  # of all codes, by their number format
    "fp8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Scaled(_format.Grouped):
    """`code * scale`; the scale is a factor, even if its array is called `weight_scale_inv`.

    There is a scale for each `block` of rows and columns; None stands for all of them.
    """

    block: tuple[int | None, int | None] = (None, None)
    scale_dtypes: tuple[str, ...] = _format.SCALES
    """The dtypes of scales, as files call them."""

    def shape(self, parts: _format.Parts) -> tuple[int, ...]:
        """Return the shape of the codes, which is that of the decoded array."""
        (dtype,), (scale,) = self.dtypes, self.required
        dims = 3 if parts[self.codes].ndim == 3 == parts[scale].ndim else 2  # experts, as one array
        *experts, rows, columns = _format.check_codes(parts, self.codes, dtype, dims)
        grid = self._grid(rows, columns)
        shapes = [(*experts, *grid)]
        if self.block[1] is None:
            shapes += [(*experts, *grid[:1])]
        if self.block == (None, None):
            shapes += [(*experts,)]
        _format.check_part(parts, scale, self.scale_dtypes, shapes)
        return *experts, rows, columns

    def decode(self, parts: _format.Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Decode some rows."""
        columns, (height, width) = out.shape[1], self.block
        unit = math.gcd(width or columns, columns)
        group = _format.group_of_units(len(parts[self.codes]), height, 1)[rows]
        scales = self._scales(parts)[np.ix_(group, _format.group_of_units(columns, width, unit))]
        values = np.take(_VALUES[self.groups.form], parts[self.codes][rows].view(np.uint8))
        values.reshape(len(out), -1, unit)[...] *= scales[..., None].astype(np.float32)
        out[...] = values

    def read_codes(self, parts: _format.Parts, unit: tuple[int, int]) -> _format.QuantizedArray:
        """Return the codes and scales of all rows; scales of 8 bits are exponents."""
        codes = parts[self.codes]
        self._scales(parts)  # refuses bad scales
        stored = parts[self.required[0]].reshape(self._grid(*codes.shape))
        dims = zip(codes.shape, self.block, unit, strict=True)
        scales = (stored.view(np.uint8) if stored.itemsize == 1 else stored)[
            np.ix_(*(_format.group_of_units(size, block, step) for size, block, step in dims))
        ]
        codes = codes.view(np.uint8)
        return _format.QuantizedArray(codes if self.groups.form == "fp8" else codes ^ 128, scales, None)

    @property
    def groups(self) -> _format.GroupLayout:
        """Return the layout, whose number format is that of the codes' dtype."""
        return _format.GroupLayout("fp8" if self.dtypes == ("F8_E4M3",) else "int8", self.block, self.required[0])

    def _scales(self, parts: _format.Parts) -> Shaped[np.ndarray, "grid_rows grid_columns"]:
        scales = parts[self.required[0]]
        if scales.itemsize == 1:  # a power of two, which is NaN for 255
            scales = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        # Scales are largest magnitudes, so none is negative; only for integers of 4 bits do some programs use the sign.
        return _format.check_nonnegative_scales(scales).reshape(self._grid(*parts[self.codes].shape))

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        height, width = self.block
        return _format.number_of_groups(rows, height), _format.number_of_groups(columns, width)


def block_of(published: PublishedConfig, name: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None if the attribute is missing or null."""
    if (block := published.listed(name)) is None:
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        published.refuse(f"{name}={block}: it must be two whole numbers of at least 1.")
    return block[0], block[1]


def fp8(published: PublishedConfig) -> _format.Format:
    """Return the format of a `quantization_config`, with a scale for each block or, without them, for each array.

    `scale_fmt` states how scales were rounded when the folder was made: DeepSeek-V3.1 has powers of two as floats. The
    dtype in the file states how they are stored; bytes are exponents if `scale_fmt` is "ue8m0", as in transformers.
    """
    published.expect("fmt", "e4m3", "float8_e4m3fn")
    published.expect("scale_fmt", "float", "ue8m0")
    published.expect("expert_dtype", "fp8")
    block = block_of(published, "weight_block_size") or (None, None)
    has_exponents = published.take("scale_fmt", "float") == "ue8m0"
    parts = Scaled(
        "FP8",
        _CODES,
        (".weight_scale_inv",),
        ignored=(".activation_scale", ".input_scale", ".k_scale", ".v_scale"),
        dtypes=("F8_E4M3",),
        block=block,
        scale_dtypes=(*_format.SCALES, "F8_E8M0", *(("U8",) if has_exponents else ())),
    )
    experts = dataclasses.replace(parts, codes="", required=("_scale_inv",), decoded="", ignored=("_activation_scale",))
    return dataclasses.replace(parts, also=experts)
