"""The format compressed-tensors (Kimi K2 and others): scaled numbers of 8 bits, or integers packed in 32-bit words."""

import dataclasses
import math

import numpy as np
from jaxtyping import UInt8

from .._config_types import PublishedConfig
from ._format import check_codes, check_part, Format, number_of_groups, Parts, SCALES
from ._packed_integers import bytes_of_words, PackedIntegers, unpack
from ._scaled_floats import block_shape, compressed_float4, mxfp8, Scaled


_CODES, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
ZERO, GROUP_INDICES = ".weight_zero_point", ".weight_g_idx"


@dataclasses.dataclass(frozen=True)
class PackedWeights(PackedIntegers):
    """Integers packed along rows, with zero points or without."""

    scales: str = _SCALE
    zeros: str = ZERO
    group_indices: str = GROUP_INDICES

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """Return the decoded array's shape, which `weight_shape` states."""
        check_part(parts, _SHAPE, ("I64", "I32"), ((2,),))
        rows, columns = (int(size) for size in parts[_SHAPE])
        check_codes(parts, _CODES, "I32", 2)
        if rows < 1 or columns < 1 or parts[_CODES].shape != (rows, math.ceil(columns / self.per_word)):
            raise ValueError(
                f"its {_SHAPE} says {(rows, columns)}, and its {_CODES} has shape {parts[_CODES].shape}, of "
                f"{self.per_word} numbers per word"
            )
        groups = number_of_groups(columns, self.group)
        check_part(parts, _SCALE, SCALES, ((rows, groups),))
        if ZERO in parts:
            check_part(parts, ZERO, ("I32",), ((math.ceil(rows / self.per_word), groups),))
        if GROUP_INDICES in parts:
            check_part(parts, GROUP_INDICES, ("I32", "I64"), ((columns,),))
        return rows, columns

    def read_octets(self, parts: Parts, rows: slice) -> UInt8[np.ndarray, "outputs octets"]:
        """Return the codes of some outputs."""
        return bytes_of_words(parts[_CODES][rows])

    def read_scales(self, parts: Parts, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales and zero points of some outputs; a word holds the zero points of several outputs."""
        scales = parts[_SCALE][rows]
        if ZERO not in parts:
            return scales, None
        words = parts[ZERO][(rows.start or 0) // self.per_word :][: math.ceil(len(scales) / self.per_word)]
        return scales, unpack(words.T, self.bits).T[: len(scales)]


# Attributes for how scales were computed, which are not read; the scales' arrays state their dtype.
UNREAD_OF_WEIGHTS = frozenset("observer observer_kwargs dynamic scale_dtype zp_dtype zero_point_dtype".split())
# Attributes of a group that are not read: its modules, which the arrays' names show, and the rounding of activations,
# which are not rounded here.
UNREAD_OF_GROUPS = frozenset(("targets", "input_activations", "output_activations"))


_FLOATS = {  # format, type, bits, strategy, size of groups
    ("nvfp4-pack-quantized", "float", 4, "tensor_group", 16),
    ("mxfp4-pack-quantized", "float", 4, "group", 32),
    ("mxfp8-quantized", "float", 8, "group", 32),
}


def compressed_tensors(published: PublishedConfig) -> Format:
    """Return the format of a `quantization_config`; raises a `ValueError` unless it has packed or scaled numbers."""
    if (sparse := published.nested("sparsity_config").get("format", "dense")) != "dense":
        published.refuse(f"sparsity_config: format={sparse!r} is not known; there is 'dense'.")
    groups = {name: group for name, group in published.nested("config_groups").items() if isinstance(group, dict)}
    weights = [group.get("weights") for group in groups.values()]
    if not weights or not isinstance(weights[0], dict) or any(settings != weights[0] for settings in weights):
        published.refuse(f"config_groups={groups}: there must be groups with weights, all stored alike.")
    names = {name for group in groups.values() for name in group}
    if unknown := sorted(names - {"weights", "format", *UNREAD_OF_GROUPS}):
        published.refuse(f"config_groups: attributes that this format does not know: {', '.join(unknown)}.")
    form = published.text("format")
    if any(group.get("format") not in (None, form) for group in groups.values()):
        published.refuse(f"format={form!r}, but config_groups={groups} state another format.")
    return _format_of(published, form, PublishedConfig(weights[0], f"{published.source}: weights", "this format"))


def _format_of(published: PublishedConfig, form: str, weights: PublishedConfig) -> Format:
    kind, bits, strategy = weights.text("type"), weights.take("num_bits"), weights.text("strategy")
    size, block = weights.take("group_size", None), block_shape(weights, "block_structure")
    is_symmetric, order = weights.take("symmetric", True), weights.take("actorder", None)
    weights.finish_strictly(lambda name, value: name in UNREAD_OF_WEIGHTS)
    if strategy not in ("group", "tensor_group") and size not in (None, -1):
        weights.refuse(f"group_size={size} beside strategy={strategy!r}; only strategy='group' has groups.")
    if strategy != "block" and block is not None:
        weights.refuse(f"block_structure={block} beside strategy={strategy!r}; only strategy='block' has blocks.")
    if form != "pack-quantized" and order:
        weights.refuse(f"actorder={order!r} beside format={form!r}; only format='pack-quantized' has an order.")
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        group = weights.count("group_size") if strategy == "group" else None
        required = (".weight_scale", ".weight_shape", *(() if is_symmetric else (ZERO,)))
        optional = (GROUP_INDICES,) if order else ()
        return PackedWeights(f"INT{bits}", ".weight_packed", required, optional=optional, bits=bits, group=group)
    if (form, kind, bits, strategy, size) in _FLOATS and is_symmetric:
        return mxfp8() if bits == 8 else compressed_float4(form)
    kinds = {"float-quantized": ("float",), "int-quantized": ("int",), "naive-quantized": ("float", "int")}
    blocks = {"tensor": (None, None), "channel": (1, None), "block": block}
    scaled_block = blocks.get(strategy)
    if kind in kinds.get(form, ()) and bits == 8 and is_symmetric and scaled_block is not None:
        name, dtype = ("FP8", "F8_E4M3") if kind == "float" else ("INT8", "I8")
        ignored = (".input_scale", ".k_scale", ".v_scale")
        return Scaled(name, ".weight", (".weight_scale",), ignored=ignored, dtypes=(dtype,), block=scaled_block)
    published.refuse(
        f"format={form!r} with {kind} of {bits} bits by {strategy}, group_size={size}, symmetric={is_symmetric} is not "
        "known; there are pack-quantized with int of 4 or 8 bits by group or channel, and float-quantized, "
        "int-quantized or naive-quantized with symmetric numbers of 8 bits by tensor, channel or block, "
        "nvfp4-pack-quantized by tensor_group of 16, and mxfp4-pack-quantized or mxfp8-quantized by group of 32."
    )
