"""Folders of compressed-tensors: which of its formats one is of."""

from typing import Any

from .._config import PublishedConfig
from ._format import Format
from ._packed import Packed, PLACES, ZERO
from ._scaled import block_of, Scaled


_ELSEWHERE = "ignore quantization_status global_compression_ratio kv_cache_scheme version"
_OF_ROUNDING = "observer observer_kwargs dynamic scale_dtype zp_dtype zero_point_dtype"


def compressed_tensors(published: PublishedConfig) -> Format:
    """The format of a `quantization_config`; raises a `ValueError` for another than packed or scaled numbers."""
    for name in _ELSEWHERE.split():
        published.take(name, None)
    if (sparse := published.nested("sparsity_config").get("format", "dense")) != "dense":
        published.refuse(f"sparsity_config: format={sparse!r} is not known; there is 'dense'.")
    said = {name: its for name, its in published.nested("config_groups").items() if isinstance(its, dict)}
    weights = [its.get("weights") for its in said.values()]
    if not weights or not isinstance(weights[0], dict) or any(its != weights[0] for its in weights):
        published.refuse(f"config_groups={said}: there must be groups with weights, all stored alike.")
    form = published.text("format")
    if any(its.get("format") not in (None, form) for its in said.values()):
        published.refuse(f"format={form!r}, and config_groups={said} say another.")
    return _stored(published, form, PublishedConfig(weights[0], f"{published.source}: weights", "this format"))


def _stored(published: PublishedConfig, form: Any, weights: PublishedConfig) -> Format:
    for name in _OF_ROUNDING.split():
        weights.take(name, None)
    kind, bits, strategy = weights.text("type"), weights.take("num_bits"), weights.text("strategy")
    size, block = weights.take("group_size", None), block_of(weights, "block_structure")
    is_symmetric, order = weights.take("symmetric", True), weights.take("actorder", None)
    weights.finish()
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        group = weights.count("group_size") if strategy == "group" else None
        needs = (".weight_scale", ".weight_shape", *(() if is_symmetric else (ZERO,)))
        takes = (PLACES,) if order else ()
        return Packed(f"INT{bits}", ".weight_packed", needs, takes=takes, bits=bits, group=group)
    kinds = {"float-quantized": ("float",), "int-quantized": ("int",), "naive-quantized": ("float", "int")}
    blocks = {"tensor": (None, None), "channel": (1, None), "block": block}
    if kind in kinds.get(form, ()) and bits == 8 and is_symmetric and blocks.get(strategy) is not None:
        dtype, ignored = ("F8_E4M3" if kind == "float" else "I8"), (".input_scale", ".k_scale", ".v_scale")
        block = blocks[strategy] or (None, None)
        name = "FP8" if kind == "float" else "INT8"
        return Scaled(name, ".weight", (".weight_scale",), ignored=ignored, dtypes=(dtype,), block=block)
    published.refuse(
        f"format={form!r} with {kind} of {bits} bits by {strategy}, group_size={size}, symmetric={is_symmetric} is not "
        "known; there are pack-quantized with int of 4 or 8 bits by group or channel, and float-quantized, "
        "int-quantized or naive-quantized with symmetric numbers of 8 bits by tensor, channel or block."
    )
