"""Folders of compressed-tensors: which of its formats one is of."""

from typing import Any

from .._config import PublishedConfig
from ._format import Format
from ._packed import Packed, PLACES, ZERO
from ._scaled import block_of, Scaled


# How scales were found, which nothing reads: their arrays say of which dtype they are.
UNREAD_OF_WEIGHTS = frozenset("observer observer_kwargs dynamic scale_dtype zp_dtype zero_point_dtype".split())
# Of a group that has weights nothing else is read: which modules it is for (the arrays' names say so), and how
# activations are rounded (here they are not).
UNREAD_OF_GROUPS = frozenset(("targets", "input_activations", "output_activations"))


def compressed_tensors(published: PublishedConfig) -> Format:
    """Return the format of a `quantization_config`; raises a `ValueError` for another than packed or scaled numbers."""
    if (sparse := published.nested("sparsity_config").get("format", "dense")) != "dense":
        published.refuse(f"sparsity_config: format={sparse!r} is not known; there is 'dense'.")
    groups = {name: group for name, group in published.nested("config_groups").items() if isinstance(group, dict)}
    weights = [group.get("weights") for group in groups.values()]
    if not weights or not isinstance(weights[0], dict) or any(other != weights[0] for other in weights):
        published.refuse(f"config_groups={groups}: there must be groups with weights, all stored alike.")
    names = {name for group in groups.values() for name in group}
    if unknown := sorted(names - {"weights", "format", *UNREAD_OF_GROUPS}):
        published.refuse(f"config_groups: attributes that this format does not know: {', '.join(unknown)}.")
    form = published.text("format")
    if any(group.get("format") not in (None, form) for group in groups.values()):
        published.refuse(f"format={form!r}, and config_groups={groups} say another.")
    return _stored(published, form, PublishedConfig(weights[0], f"{published.source}: weights", "this format"))


def _stored(published: PublishedConfig, form: Any, weights: PublishedConfig) -> Format:
    kind, bits, strategy = weights.text("type"), weights.take("num_bits"), weights.text("strategy")
    size, block = weights.take("group_size", None), block_of(weights, "block_structure")
    is_symmetric, order = weights.take("symmetric", True), weights.take("actorder", None)
    weights.finish_strictly(lambda name, value: name in UNREAD_OF_WEIGHTS)
    if strategy != "group" and size not in (None, -1):
        weights.refuse(f"group_size={size} beside strategy={strategy!r}; only strategy='group' has groups.")
    if strategy != "block" and block is not None:
        weights.refuse(f"block_structure={block} beside strategy={strategy!r}; only strategy='block' has blocks.")
    if form != "pack-quantized" and order:
        weights.refuse(f"actorder={order!r} beside format={form!r}; only format='pack-quantized' has an order.")
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
