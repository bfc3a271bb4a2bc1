"""Inverses of the changes that llama.cpp's converter makes to the order of rows, to values, and to attributes.

A function `read_...` takes the attributes that have been read, and returns attributes that replace them. The value None
removes an attribute.
"""

import re

import numpy as np
from jaxtyping import Shaped

from .._files import JsonObject
from ._gguf_file import GGUF, Order


def read_gemma_scores(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attribute whose square root divides the attention scores.

    Like llama.cpp, this recognizes the two 27B models by how many layers they have.
    """
    is_largest = config["num_hidden_layers"] in (46, 62)
    width = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": width if is_largest else config["head_dim"]}


def order_rotated_pairs(file: GGUF, name: str) -> Order:
    """Return the published order of the rows of queries and keys; in files, rows that are rotated together are
    neighbors."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", name)
    if match is None:
        return None, None
    kind = file.kind
    heads = file.values[f"{kind}.attention.head_count"]
    if match[1] == "k" and f"{kind}.attention.head_count_kv" in file.values:
        heads = max(file.numbers_by_layer("attention.head_count_kv", file.values[f"{kind}.block_count"]))
    rows = file.tensors[name].shape[0]
    if rows % (2 * heads):
        raise ValueError(
            f"{file.call}: {name} has {rows} rows, which must be a multiple of {2 * heads} (2 x {heads} heads)."
        )
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1), None


def subtract_one(name: str, array: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Subtract the 1 that files add to norms' scales."""
    return array - array.dtype.type(1) if name.endswith("norm.weight") else array


def order_tiled_heads(file: GGUF, name: str) -> Order:
    """Return the published order of a delta net's value heads, in which all value heads of a key head are neighbors.

    Files have the first value heads of all key heads, then the second value heads of all key heads, and so on. Arrays
    without value heads keep their order.
    """
    name_in_layer = name.partition(".")[2].partition(".")[2]  # `ssm_a` of `blk.3.ssm_a`
    if name_in_layer not in (*_PER_HEAD, *_PER_CHANNEL):
        return None, None
    keys, heads, key_width, inner = (
        file.values[f"{file.kind}.ssm.{size}"] for size in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    width = 1 if name_in_layer in _PER_HEAD else inner // heads
    # These two arrays have the rows of all queries and keys before the rows of values.
    start = 2 * keys * key_width if name_in_layer in ("attn_qkv.weight", "ssm_conv1d.weight") else 0
    by_columns, shape = name_in_layer == "ssm_out.weight", file.tensors[name].shape
    if heads % keys or shape[1 if by_columns else 0] != start + heads * width:
        raise ValueError(f"{file.call}: {name} has shape {shape}, which does not fit {heads} heads of {width}.")
    order = np.arange(heads * width).reshape(heads // keys, keys, width).swapaxes(0, 1).reshape(-1) + start
    order = np.concatenate([np.arange(start), order])
    return (None, order) if by_columns else (order, None)


_PER_HEAD = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")
_PER_CHANNEL = ("attn_gate.weight", "attn_qkv.weight", "ssm_conv1d.weight", "ssm_out.weight")


def restore_decay(name: str, array: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Return the published logarithms of decay rates: files have `-exp(A_log)` as `ssm_a`."""
    if not name.endswith(".ssm_a"):
        return array
    if not (array < 0).all():
        raise ValueError(f"{name} holds a number that is not below 0, but all decay rates must be below 0")
    return np.log(-array)


def restore_qwen35(name: str, array: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Return published values: files add 1 to most norms' scales, and have `-exp(A_log)` as `ssm_a`."""
    return restore_decay(name, array) if ".ssm_" in name else subtract_one(name, array)


def read_attention_bias(config: JsonObject, file: GGUF) -> JsonObject:
    """Return whether the maps of attention layers have biases."""
    return {"attention_bias": file.has("attn_q.bias")}


def read_biases(config: JsonObject, file: GGUF) -> JsonObject:
    """Return whether the maps of attention and feed-forward layers have biases."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _attention_types(config: JsonObject, file: GGUF, other: str) -> list[str]:
    """Return the type of each layer: the `other` type for layers without key heads, or else full attention."""
    name, layers = "attention.head_count_kv", config["num_hidden_layers"]
    heads = file.numbers_by_layer(name, layers)
    if len({*heads} - {0}) != 1:
        raise ValueError(
            f"{file.call}: {file.kind}.{name}={heads}: it must have {layers} numbers, each 0 or one other number."
        )
    return ["full_attention" if number else other for number in heads]


def read_conv_layers(config: JsonObject, file: GGUF) -> JsonObject:
    """Return which layers have attention, and other attributes of LFM2."""
    return {
        "layer_types": _attention_types(config, file, "conv"),
        "conv_bias": file.has("shortconv.in_proj.bias"),
        "norm_eps": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "head_dim": None,
    }


def read_gemma4(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of Gemma 4 that files state in another way; raises a `ValueError` for layers that a
    configuration cannot describe."""
    layers, reading, head_dim = config["num_hidden_layers"], config["num_kv_shared_layers"] or 0, config["head_dim"]
    is_local = file.numbers_by_layer("attention.sliding_window_pattern", layers, bool)
    all_heads, widths = (
        file.numbers_by_layer(name, layers) for name in ("attention.head_count_kv", "feed_forward_length")
    )
    heads = [{all_heads[layer] for layer in range(layers) if is_local[layer] is local} for local in (False, True)]
    first = widths[0]
    is_wider = widths == [first] * (layers - reading) + [2 * first] * reading and reading > 0
    if any(len(numbers) != 1 for numbers in heads) or (widths != [first] * layers and not is_wider):
        raise ValueError(
            f"{file.call}: gemma4.attention.head_count_kv={all_heads}, feed_forward_length={widths}: all layers of a "
            "type must have the same number of key heads, and all layers the same width, except that the last "
            f"{reading} may have twice that width."
        )
    full_layers = [layer for layer in range(layers - reading) if not is_local[layer]]
    has_values = {f"blk.{layer}.attn_v.weight" in file.tensors for layer in full_layers}
    if len(has_values) > 1:
        raise ValueError(f"{file.call}: attn_v.weight: all layers with full attention must have it, or none.")
    shares = has_values == {False}
    (full_heads,), (local_heads,) = heads
    of_full_layers = {"head_dim": head_dim, "num_key_value_heads": full_heads}
    ids = file.tensors.get("per_layer_token_embd.weight")
    full = {"rope_type": "default"} | (config.get("rope_scaling") or {}) | {"rope_theta": config["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"] or 10_000.0}
    return {
        "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        **dict.fromkeys(("rope_scaling", "rope_theta", "rope_local_base_freq", "head_dim_swa")),
        "head_dim": config["head_dim_swa"],
        "num_key_value_heads": local_heads,
        "attention_k_eq_v": shares,
        "num_global_key_value_heads": full_heads if shares else None,
        "per_layer_config": None if shares else {str(n): of_full_layers for n in range(layers) if not is_local[n]},
        "global_head_dim": head_dim,
        "intermediate_size": first,
        "use_double_wide_mlp": is_wider,
        "enable_moe_block": bool(config["num_experts"]),
        "hidden_size_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "vocab_size_per_layer_input": None if ids is None else ids.shape[0],
        "num_kv_shared_layers": reading,
    }


def read_latents(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of DeepSeek-V2 and V3 that files state in another way; raises a `ValueError` for widths of
    heads that do not fit."""
    rope_dim, key, value = (config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    suffix = "_mla"
    if key is None or value is None:  # Older files state head widths under the keys that now hold latent widths.
        suffix = ""
        key, value = (file.values.get(f"{file.kind}.attention.{part}_length") for part in ("key", "value"))
    # `key` counts all channels of a head; `rope_dim` of them are rotated.
    if type(key) is not int or type(value) is not int or key <= rope_dim:
        raise ValueError(
            f"{file.call}: {file.kind}.attention.key_length{suffix}={key}, value_length{suffix}={value}: they must be "
            f"whole numbers, the first above rope.dimension_count={rope_dim}."
        )
    scaling, strength = config.get("rope_scaling"), config["mscale_all_dim"]
    if scaling and strength:
        # The converter multiplies the strength by 0.1, which is undone here up to the rounding of float32. Both
        # `mscale` and `mscale_all_dim` get this value: their quotient, which scales cosines and sines, is then 1,
        # because llama.cpp does not scale cosines and sines.
        scaling = scaling | dict.fromkeys(("mscale", "mscale_all_dim"), float(str(np.float32(strength * 10))))
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "head_dim": None,
        "rope_scaling": scaling,
        "mscale_all_dim": None,
        **read_mixture(config, file),
    }


def read_latents_of_v2(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of DeepSeek-V2, in which a token chooses among all experts, or only in its best groups."""
    attributes = read_latents(config, file)
    return attributes | {"topk_method": "greedy" if attributes["n_group"] == 1 else "group_limited_greedy"}


def read_growing_latents(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of Mistral 4: those of latent attention, and the growth of scores with the position.

    llama.cpp's converter leaves out the growth, and llama.cpp's scores of such a file do not grow. Raises a
    `ValueError` for a growth whose length is not the original length of the rotary scaling.
    """
    attributes, growth = read_latents(config, file), config["llama_4_scaling_beta"]
    scaling = {"rope_type": "default"} | (attributes["rope_scaling"] or {})
    name = f"{file.kind}.attention.temperature_length"
    original = scaling.get("original_max_position_embeddings")
    every = file.values.get(name, original)
    if growth and every != original:
        raise ValueError(
            f"{file.call}: {name}={every}: it must be rope.scaling.original_context_length={original}, because "
            "configurations have one length for both."
        )
    added = {"llama_4_scaling_beta": growth} if growth else {}
    return attributes | {"rope_scaling": scaling | added, "llama_4_scaling_beta": None}


def read_kimi(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of Kimi Linear that files state in another way, or that llama.cpp sets itself.

    Delta nets have as many heads as attention, and the weights of a token's experts add up to 1.
    """
    return {
        **read_latents(config, file),
        "layer_types": _attention_types(config, file, "linear_attention"),
        "linear_num_heads": config["num_attention_heads"],
        "norm_topk_prob": True,
    }


def read_oss_scaling(config: JsonObject, file: GGUF) -> JsonObject:
    """Return gpt-oss's YaRN scaling, whose bounds are not rounded."""
    scaling = config.get("rope_scaling")
    return {"rope_scaling": scaling | {"truncate": False}} if isinstance(scaling, dict) else {}


def read_growth(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the scaling of Ministral 3: YaRN with its magnitude, and the factor of queries that grows by position."""
    growth, strength = config["llama_4_scaling_beta"], config["mscale_all_dim"]
    added = {"llama_4_scaling_beta": growth} | ({"mscale": strength, "mscale_all_dim": strength} if strength else {})
    scaling = {"rope_type": "default"} | (config.get("rope_scaling") or {}) | added
    return {"rope_scaling": scaling, "llama_4_scaling_beta": None, "mscale_all_dim": None}


def read_mixture(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of a mixture of experts; files leave out attributes of parts that a model lacks."""
    return {
        "norm_topk_prob": config["norm_topk_prob"] is True,
        **{name: config[name] or 1 for name in ("n_group", "topk_group", "routed_scaling_factor")},
        **{name: config[name] or 0 for name in ("n_shared_experts", "first_k_dense_replace")},
    }


def read_llama4(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of Llama 4 that files do not state, with llama.cpp's values for them.

    llama.cpp takes a file of 128 experts for Maverick, whose queries and keys have no norms. Raises a `ValueError` for
    a stated window, which llama.cpp reads as a model without chunks.
    """
    if (name := "llama4.attention.sliding_window") in file.values:
        raise ValueError(f"{file.call}: {name}={file.values[name]}: a model without chunks is not supported.")
    return {
        **read_attention_bias(config, file),
        "intermediate_size": config["intermediate_size_moe"],
        "intermediate_size_moe": None,
        "intermediate_size_mlp": config["intermediate_size"],
        "use_qk_norm": config["num_local_experts"] != 128,
        "attention_chunk_size": 8192,
        **{"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192},
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])],
        "layer_types": None,
    }


def read_glm_options(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of GLM's models with experts that files leave out or state in another way."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        **read_partial_rotary(config, file),
        **read_mixture(config, file),
    }


def read_windows(config: JsonObject, file: GGUF, period: int = 0, *, is_first_full: bool = False) -> JsonObject:
    """Return which layers have a window: all layers but the last of each `period` of layers.

    The file may state another period, or a list with a flag for each layer instead. If the period is 0, all layers have
    full attention. With `is_first_full`, the first layer of each period has full attention, not the last.
    """
    layers, name = config["num_hidden_layers"], f"{file.kind}.attention.sliding_window_pattern"
    stated = file.values.get(name, period)
    if isinstance(stated, str):
        is_local = file.numbers_by_layer("attention.sliding_window_pattern", layers, bool)
    elif type(stated) is int and stated >= 0:
        full = 0 if is_first_full else stated - 1
        is_local = [stated > 0 and layer % stated != full for layer in range(layers)]
    else:
        raise ValueError(f"{file.call}: {name}={stated!r}: it must be a whole number or a list.")
    is_local = is_local if config["sliding_window"] else [False] * layers
    return {"layer_types": ["sliding_attention" if local else "full_attention" for local in is_local]}


def read_positions_by_type(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the rotary positions of layers with and without a window; layers with a window have no scaling."""
    theta = config["rope_theta"]
    local = {"rope_type": "default", "rope_theta": file.values.get(f"{file.kind}.rope.freq_base_swa", theta)}
    full = {"rope_type": "default"} | (config.get("rope_scaling") or {}) | {"rope_theta": theta}
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        **dict.fromkeys(("rope_theta", "rope_scaling")),
    }


def read_partial_rotary(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the width of a head and the rotated fraction of its channels, with llama.cpp's defaults for missing
    values."""
    width = config["hidden_size"] // config["num_attention_heads"]
    return {"head_dim": config["head_dim"] or width, "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}


def read_magnitudes(config: JsonObject, file: GGUF) -> JsonObject:
    """Return LongRoPE's scaling with the magnitudes of short and long rows, as in configurations of Phi-3.5-MoE."""
    scaling = config.get("rope_scaling")
    if not scaling:
        return {}
    magnitude = file.values.get("phimoe.rope.scaling.attn_factor", 1.0)
    plain = {name: value for name, value in scaling.items() if name != "attention_factor"}
    return {"rope_scaling": plain | {"short_mscale": magnitude, "long_mscale": magnitude}}


def read_mamba2(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of Granite 4 that files state in another way."""
    heads, inner, embed = config["mamba_n_heads"], config["mamba_d_head"], config["hidden_size"]
    if inner % heads or inner % embed:
        raise ValueError(
            f"{file.call}: {file.kind}.ssm.inner_size={inner}: it must be a multiple of ssm.time_step_rank={heads} and "
            f"of embedding_length={embed}."
        )
    is_rotated = file.values.get("granitehybrid.rope.scaling.finetuned", True)
    return {
        "layer_types": _attention_types(config, file, "linear_attention"),
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // embed,
        "mamba_conv_bias": file.has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has("ssm_in.bias"),
        "position_embedding_type": "rope" if is_rotated else "nope",
        **{name: config[name] or 0 for name in ("num_local_experts", "num_experts_per_tok")},
    }


def read_pure_mamba2(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of a Mamba-2 without attention, whose steps have no bounds."""
    heads, inner, embed = config["num_heads"], config["head_dim"], config["hidden_size"]
    if inner % heads or inner % embed:
        raise ValueError(
            f"{file.call}: mamba2.ssm.inner_size={inner}: it must be a multiple of ssm.time_step_rank={heads} and of "
            f"embedding_length={embed}."
        )
    return {
        "head_dim": inner // heads,
        "expand": inner // embed,
        "use_conv_bias": file.has("ssm_conv1d.bias"),
        "use_bias": file.has("ssm_in.bias"),
    }


def read_falcon_h1(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attributes of Falcon-H1 that files state in another way.

    All factors are 1, because the converter multiplies the arrays by the published factors. Files do not state whether
    the norm of a Mamba-2 comes before or after its gate: it comes after the gate, as in llama.cpp and in all published
    models.
    """
    heads, inner = config["mamba_n_heads"], config["mamba_d_head"]
    if inner % heads:
        raise ValueError(f"{file.call}: {file.kind}.ssm.inner_size={inner}: ssm.time_step_rank={heads} must divide it.")
    suffixes = {
        "mamba_rms_norm": "ssm_norm.weight",
        "mamba_conv_bias": "ssm_conv1d.bias",
        "mamba_proj_bias": "ssm_in.bias",
        "projectors_bias": "ssm_out.bias",
        "mlp_bias": "ffn_up.bias",
    }
    return {
        **read_attention_bias(config, file),
        **{name: file.has(suffix) for name, suffix in suffixes.items()},
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads,
        "mamba_norm_before_gate": False,
        **{"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2},
    }


def read_nemotron_layers(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the kinds of a Nemotron-H's layers, by their key heads and hidden features, and other attributes."""
    heads, inner, layers = config["mamba_num_heads"], config["mamba_head_dim"], config["num_hidden_layers"]
    blocks = file.values[f"{file.kind}.block_count"]  # the layers, and predictors after them
    key_heads, widths = (
        file.numbers_by_layer(name, blocks)[:layers] for name in ("attention.head_count_kv", "feed_forward_length")
    )
    if (
        inner % heads
        or any(len({*numbers} - {0}) > 1 for numbers in (key_heads, widths))
        or any(map(all, zip(key_heads, widths)))
    ):
        raise ValueError(
            f"{file.call}: {file.kind}.attention.head_count_kv={key_heads}, feed_forward_length={widths}, "
            f"ssm.inner_size={inner}: each layer must have a 0 in one of the two lists, all other numbers of a list "
            f"must be equal, and ssm.inner_size must be a multiple of ssm.time_step_rank={heads}."
        )
    mlp = "E" if config.get("n_routed_experts") else "-"
    pattern = ["*" if key else mlp if width else "M" for key, width in zip(key_heads, widths)]
    names = ("ssm_in.bias", "ssm_conv1d.bias", "ffn_up.bias")
    net_bias, conv_bias, mlp_bias = map(file.has, names)
    return {
        "hybrid_override_pattern": "".join(pattern),
        "mamba_head_dim": inner // heads,
        # Files may state the epsilon of norms under another name, which llama.cpp prefers.
        "layer_norm_epsilon": file.values.get(
            f"{file.kind}.attention.layer_norm_rms_epsilon", config["layer_norm_epsilon"]
        ),
        **{"use_bias": net_bias, "use_conv_bias": conv_bias, "mlp_bias": mlp_bias},
        **{name: config.get(name) or 1 for name in ("n_group", "topk_group", "routed_scaling_factor")},
        # In files of models with experts, this attribute is the width of the experts.
        "intermediate_size": None if mlp == "E" else config["intermediate_size"],
    }


def read_ernie_layers(config: JsonObject, file: GGUF) -> JsonObject:
    """Return which layers of an ERNIE 4.5 have experts, and other attributes that files leave out."""
    return {
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        **{name: config[name] or 0 for name in ("moe_layer_start_index", "moe_num_shared_experts")},
    }


def read_nemotron_rotary(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the rotated fraction of a Nemotron's channels, and whether maps have biases.

    The converter computes the number of rotated channels as if the heads had all channels of the residual stream
    together. Raises a `ValueError` if the heads have another number of channels, because the number is then wrong.
    """
    attributes = read_biases(config, file) | read_partial_rotary(config, file)
    heads, embed, head_dim = config["num_attention_heads"], config["hidden_size"], attributes["head_dim"]
    if heads * head_dim != embed:
        raise ValueError(
            f"{file.call}: nemotron.attention.key_length={head_dim}: it must be embedding_length / head_count = "
            f"{embed} / {heads}, from which llama.cpp's converter computes rope.dimension_count; load the published "
            "folder."
        )
    return attributes


def read_recurrent_layers(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the widths of heads and, if the file lists recurrent layers, the types of all layers."""
    value_width = config["linear_value_head_dim"] // config["linear_num_value_heads"]
    widths = read_partial_rotary(config, file) | {"linear_value_head_dim": value_width}
    name = "attention.recurrent_layers"
    if f"{file.kind}.{name}" not in file.values:
        return widths
    is_recurrent = file.numbers_by_layer(name, config["num_hidden_layers"], bool)
    return widths | {
        "layer_types": ["linear_attention" if recurrent else "full_attention" for recurrent in is_recurrent]
    }
