"""Floats of 8 and 4 bits with a scale for each block: FP8, MXFP4, NVFP4, and ModelOpt's mixtures of them.

8-bit numbers have one scale per block (as in DeepSeek-V3, arXiv:2412.19437), per row, or per array. Scales
are floats, or powers of two in 8 bits (E8M0), which decode exactly. MXFP4 (OCP Microscaling Formats 1.0) has a power of
two for 32 numbers of 4 bits (E2M1). NVFP4 has a scale of 8 bits (E4M3) for 16 numbers, and one scale for the array.
gpt-oss stores MXFP4 in its own order of dims; compressed-tensors and ModelOpt store both formats.
"""

import dataclasses
import functools
import math

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from .._config_types import PublishedConfig
from . import _format


_CODES = ".weight"
_VALUES = {  # the values of all codes, by number format
    "fp8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Scaled(_format.Grouped):
    """`code * scale`; the scale is a factor, even if its array is called `weight_scale_inv`.

    `block` is the number of rows and the number of columns that share a scale; None stands for all of them.
    """

    block: tuple[int | None, int | None] = (None, None)
    scale_dtypes: tuple[str, ...] = _format.SCALES
    """The dtypes of scales, as files call them."""

    def shape(self, parts: _format.Parts) -> tuple[int, ...]:
        """Return the shape of the codes, which is also the shape of the decoded array."""
        (dtype,), (scale,) = self.dtypes, self.required
        has_experts = parts[self.codes].ndim == 3 and parts[scale].ndim == 3  # all experts in one array
        dims = 3 if has_experts else 2
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
        self._scales(parts)  # raises an error for invalid scales
        stored = parts[self.required[0]].reshape(self._grid(*codes.shape))
        stored = stored.view(np.uint8) if stored.itemsize == 1 else stored
        dims = zip(codes.shape, self.block, unit, strict=True)
        rows, columns = (_format.group_of_units(size, block, step) for size, block, step in dims)
        scales = stored[np.ix_(rows, columns)]
        codes = codes.view(np.uint8)
        return _format.QuantizedArray(codes if self.groups.form == "fp8" else codes ^ 128, scales, None)

    @property
    def groups(self) -> _format.GroupLayout:
        """Return the layout; the codes' dtype decides the number format."""
        return _format.GroupLayout("fp8" if self.dtypes == ("F8_E4M3",) else "int8", self.block, self.required[0])

    def _scales(self, parts: _format.Parts) -> Shaped[np.ndarray, "grid_rows grid_columns"]:
        scales = parts[self.required[0]]
        if scales.itemsize == 1:  # exponents of powers of two; 255 stands for NaN
            scales = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        # A scale is computed from the largest magnitude in its block, so it is not negative. Programs that give scales
        # a sign do so only for integers of 4 bits.
        return _format.check_nonnegative_scales(scales).reshape(self._grid(*parts[self.codes].shape))

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        height, width = self.block
        return _format.number_of_groups(rows, height), _format.number_of_groups(columns, width)


def block_shape(published: PublishedConfig, name: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None if the attribute is missing or null."""
    if (block := published.listed(name)) is None:
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        published.refuse(f"{name}={block}: it must be two whole numbers of at least 1.")
    return block[0], block[1]


def fp8(published: PublishedConfig) -> _format.Format:
    """Return the format of a `quantization_config`, with a scale for each block or, without blocks, for each array.

    `scale_fmt` states how scales were rounded when the folder was made: DeepSeek-V3.1 has powers of two as floats. The
    dtype in the file states how scales are stored. If `scale_fmt` is "ue8m0", scales of dtype U8 are exponents.
    """
    published.expect("fmt", "e4m3", "float8_e4m3fn")
    published.expect("scale_fmt", "float", "ue8m0")
    published.expect("expert_dtype", "fp8")
    block = block_shape(published, "weight_block_size") or (None, None)
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


_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
_PAIRS = np.stack([np.tile(FP4_VALUES, 16), np.repeat(FP4_VALUES, 16)], axis=-1)
"""The two numbers of each byte of codes; the low bits hold the first."""


# MXFP4 as in gpt-oss.

_BLOCKS, _SCALES, _SIZE = "_blocks", "_scales", 32


class MXFP4(_format.Grouped):
    """`values[code] * 2**(scale - 127)`; in each expert, outputs are the first dim, and blocks are along the inputs."""

    def shape(self, parts: _format.Parts) -> tuple[int, ...]:
        """Return the decoded array's shape: (experts, inputs, outputs)."""
        experts, outputs, blocks, size = _format.check_codes(parts, _BLOCKS, "U8", 4)
        _format.check_part(parts, _BLOCKS, ("U8",), ((experts, outputs, blocks, _SIZE // 2),))
        _format.check_part(parts, _SCALES, ("U8",), ((experts, outputs, blocks),))
        return experts, blocks * size * 2, outputs

    def decode(self, parts: _format.Parts, rows: slice, out: Shaped[np.ndarray, "outputs inputs"]) -> None:
        """Decode some outputs of an expert."""
        scales = _check_scales(parts[_SCALES][rows])
        scale_and_codes = scales.astype(np.uint16)[..., None] << 8 | parts[_BLOCKS][rows]
        pairs = out.reshape(*scale_and_codes.shape, 2)  # a view of the same memory
        # The mode "clip" is the only one that writes to `out` without a copy. Nothing is clipped, because the table has
        # a row for every index.
        np.take(_products(str(out.dtype)), scale_and_codes, axis=0, out=pairs, mode="clip")

    def read_codes(self, parts: _format.Parts, unit: tuple[int, int]) -> _format.QuantizedArray:
        """Return the codes and scales of an expert."""
        codes, scales = parts[_BLOCKS], _check_scales(parts[_SCALES])
        return _format.QuantizedArray(
            codes.reshape(len(codes), -1).T, np.repeat(scales, _SIZE // unit[0], axis=1).T, None
        )

    @property
    def groups(self) -> _format.GroupLayout:
        """Return the layout: E2M1, with an exponent for each block."""
        return _format.GroupLayout("fp4", (_SIZE, 1), _SCALES)


@functools.cache
def _products(dtype: str) -> Shaped[np.ndarray, "scales_and_codes 2"]:
    """Return a table of pairs of decoded numbers, with a row for each number of 16 bits.

    The upper byte of a row's index is the scale, and the lower byte has two codes. The low four bits of the lower byte
    are the first number's code.
    """
    with np.errstate(over="ignore"):
        return np.ldexp(_PAIRS, np.arange(-127, 129)[:, None, None]).reshape(-1, 2).astype(dtype)


def _check_scales(scales: UInt8[np.ndarray, "outputs blocks"]) -> UInt8[np.ndarray, "outputs blocks"]:
    if (scales == 255).any():
        raise ValueError(f"one of its {_SCALES} is 255, which is not a number")
    return scales


def mxfp4(published: PublishedConfig) -> _format.Format:
    """Return the format of a `quantization_config`."""
    return MXFP4("MXFP4", _BLOCKS, (_SCALES,), decoded="", transposed=True)


# NVFP4 and MXFP4 as in compressed-tensors and ModelOpt.

_EXPONENTS = ("U8", "F8_E8M0")


@dataclasses.dataclass(frozen=True)
class Float4(_format.Grouped):
    """`value[code] * scale`, with a scale for each group of numbers in a row.

    NVFP4's scale is the product, or the quotient, of the group's scale and the array's scale.
    """

    size: int = 16
    """The number of neighbors that share a scale."""
    array_scale: str = ""
    """The suffix of the name of the array's scale; empty: there is none, and groups have powers of two."""
    divides: bool = False
    """Whether the array's scale is a divisor of the groups' scales."""

    def shape(self, parts: _format.Parts) -> tuple[int, ...]:
        """Return the decoded array's shape."""
        rows, pairs = _format.check_codes(parts, self.codes, "U8", 2)
        if 2 * pairs % self.size:
            raise ValueError(
                f"its {self.codes} has shape {(rows, pairs)}: rows of {2 * pairs} numbers are not groups of {self.size}"
            )
        dtypes = ("F8_E4M3",) if self.array_scale else _EXPONENTS
        _format.check_part(parts, self.required[0], dtypes, ((rows, 2 * pairs // self.size),))
        if self.array_scale:
            _format.check_part(parts, self.array_scale, ("F32",), ((), (1,)))
        return rows, 2 * pairs

    def decode(self, parts: _format.Parts, rows: slice, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Decode some rows."""
        values = np.take(_PAIRS, parts[self.codes][rows], axis=0).reshape(len(out), -1, self.size)
        out[...] = (values * self._scales(parts, rows)[..., None]).reshape(out.shape)

    def read_codes(self, parts: _format.Parts, unit: tuple[int, int]) -> _format.QuantizedArray:
        """Return the codes and scales of all rows."""
        scales = self._scales(parts, slice(None))
        stored = scales if self.array_scale else parts[self.required[0]].view(np.uint8)
        return _format.QuantizedArray(parts[self.codes], np.repeat(stored, self.size // unit[1], axis=1), None)

    @property
    def groups(self) -> _format.GroupLayout:
        """Return the layout: E2M1; NVFP4's scales are floats, which are computed from two arrays."""
        scale_dtype = "float32" if self.array_scale else None
        return _format.GroupLayout("fp4", (1, self.size), self.required[0], scale_dtype=scale_dtype)

    def _scales(self, parts: _format.Parts, rows: slice) -> Float32[np.ndarray, "rows groups"]:
        """Return the scales of some rows' groups; raises a `ValueError` for a scale that is not finite or below 0."""
        stored = parts[self.required[0]][rows]
        if not self.array_scale:
            return _format.check_finite_scales(stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
        scales = _format.check_nonnegative_scales(stored.astype(np.float32))
        of_array = np.float32(parts[self.array_scale].reshape(()))
        if not np.isfinite(of_array) or of_array < 0 or (self.divides and of_array == 0):
            raise ValueError(f"its {self.array_scale} is {of_array}, which is not a finite number above 0")
        return scales / of_array if self.divides else scales * of_array


def compressed_float4(form: str) -> Float4:
    """Return compressed-tensors' format `nvfp4-pack-quantized` or `mxfp4-pack-quantized`."""
    ignored = (".input_global_scale", ".k_scale", ".v_scale")
    if form == "mxfp4-pack-quantized":
        return Float4("MXFP4", ".weight_packed", (".weight_scale",), ignored=ignored, size=32)
    scales = (".weight_scale", ".weight_global_scale")
    return Float4("NVFP4", ".weight_packed", scales, ignored=ignored, array_scale=scales[1], divides=True)


def mxfp8() -> Scaled:
    """Return MXFP8: floats of 8 bits (E4M3) with a power of two for 32 numbers."""
    ignored = (".input_scale", ".k_scale", ".v_scale")
    return Scaled(
        "MXFP8",
        ".weight",
        (".weight_scale",),
        ignored=ignored,
        dtypes=("F8_E4M3",),
        block=(1, 32),
        scale_dtypes=_EXPONENTS,
    )


_IGNORED = (".input_scale", ".k_scale", ".v_scale")
_NVFP4 = Float4(
    "NVFP4",
    ".weight",
    (".weight_scale", ".weight_scale_2"),
    ignored=_IGNORED,
    dtypes=("U8",),
    array_scale=".weight_scale_2",
)
_FP8 = Scaled("FP8", ".weight", (".weight_scale",), ignored=_IGNORED, dtypes=("F8_E4M3",))
_ALGORITHMS: dict[str, Float4 | Scaled] = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": dataclasses.replace(_FP8, block=(1, None)),
    "MIXED_PRECISION": dataclasses.replace(_NVFP4, also=_FP8),  # The codes' dtype tells which format an array has.
    "MXFP8": mxfp8(),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_MXFP4_FP8": Float4("MXFP4", ".weight", (".weight_scale",), ignored=_IGNORED, dtypes=("U8",), size=32),
}
_MIXED = ("FP8", "NVFP4", "W4A16_NVFP4")


def modelopt(published: PublishedConfig) -> _format.Format:
    """Return the format of ModelOpt's `quantization_config`, or of the `quantization` in its `hf_quant_config.json`."""
    algorithm = published.text("quant_algo")
    if algorithm not in _ALGORITHMS:
        published.refuse(f"quant_algo={algorithm!r} is not known; there are {', '.join(_ALGORITHMS)}.")
    for layer, settings in published.nested("quantized_layers").items():
        if not isinstance(settings, dict) or settings.get("quant_algo") not in _MIXED:
            published.refuse(f"quantized_layers: {layer}={settings}: there are {', '.join(_MIXED)}.")
    published.expect("has_zero_point", False)
    published.expect("pre_quant_scale", False)
    sizes = [published.take("group_size", None)]
    for name, group in published.nested("config_groups").items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            published.refuse(f"config_groups: {name}={group}: each group must have weights.")
        sizes.append(weights.get("group_size"))
    form = _ALGORITHMS[algorithm]
    size = form.size if isinstance(form, Float4) else form.block[1]
    for stated in sizes:
        if stated not in (None, size):
            published.refuse(f"group_size={stated} with quant_algo={algorithm!r}, whose groups have {size} numbers.")
    return form
