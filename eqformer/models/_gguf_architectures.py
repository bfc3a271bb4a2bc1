"""Architectures of GGUF files: llama.cpp's names of numbers and arrays, and what its converter does to arrays."""

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Shaped

from .._files import JsonObject
from ._gguf_file import GGUF, Order


# Published names of the feed-forward layer's maps.
_MAPS = {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": published for name, published in _MAPS.items()},
}


def _keep(name: str, array: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    return array


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files: the family of its models, and how its files differ from published folders."""

    model_type: str
    """The family's `model_type`."""
    layer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of a layer's arrays by their names in files, in addition to `LAYER`.

    Both names leave out `.weight` and `.bias`, or both are whole names. `{}` stands for an expert's number.
    """
    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of sizes that every file has."""
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of numbers that not all architectures have; a file may lack them."""
    implied: Callable[[JsonObject, GGUF], JsonObject] = lambda config, file: {}
    """A function that computes attributes that files leave out, from the attributes that files have."""
    expected: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Numbers that must have one value."""
    unread: tuple[str, ...] = ()
    """Numbers without an effect on text."""
    order: Callable[[GGUF, str], Order] = lambda file, name: (None, None)
    """A function that returns the published order of an array's rows and columns."""
    restore: Callable[[str, Shaped[np.ndarray, "*dims"]], Shaped[np.ndarray, "*dims"]] = _keep
    """A function that returns the published values of an array of one dim, given its name."""
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The index of a dim of size 1 that files leave out, by the array's name."""
    edges: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of arrays outside of the layers that not all architectures have."""
    has_key_heads_by_layer: bool = False
    """Whether files have a list of the key heads of each layer, 0 for a layer without attention."""
    has_predictors: bool = False
    """Whether files count predictors of further tokens among the layers."""


def _experts(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    maps = {f"ffn_{name}_exps": f"{prefix}experts.{{}}.{published}" for name, published in names.items()}
    return {"ffn_gate_inp": f"{prefix}gate"} | maps


def _gemma_scores(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the attribute whose square root divides the attention scores.

    Like llama.cpp, this recognizes the two 27B models by their numbers of layers.
    """
    is_largest = config["num_hidden_layers"] in (46, 62)
    width = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": width if is_largest else config["head_dim"]}


_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {f"{name}_logit_softcapping": f"{name}_logit_softcapping" for name in ("attn", "final")}
_LOCAL = {
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


def _rotated_pairs(file: GGUF, name: str) -> Order:
    """Return the published order of the rows of queries and keys; in files, channels that form a pair are neighbors."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.weight", name)
    if match is None:
        return None, None
    kind = file.values["general.architecture"]
    heads = file.values[f"{kind}.attention.head_count"]
    heads = heads if match[1] == "q" else file.values.get(f"{kind}.attention.head_count_kv", heads)
    rows = file.tensors[name].shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{file.call}: {name} has {rows} rows, which {heads} heads of pairs of channels cannot have.")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1), None


def _minus_one(name: str, array: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Subtract the 1 that files add to norms' scales."""
    return array - array.dtype.type(1) if name.endswith("norm.weight") else array


def _tiled_heads(file: GGUF, name: str) -> Order:
    """Return the published order of a delta net's value heads.

    Files have the first value head of each key head, then the second of each, and so on.
    """
    kind = file.values["general.architecture"]
    keys, heads, key_width, inner = (
        file.values[f"{kind}.ssm.{size}"] for size in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    part = name.partition(".")[2].partition(".")[2]  # without the number of the layer
    width = 1 if part in _PER_HEAD else inner // heads
    start = 2 * keys * key_width if part in ("attn_qkv.weight", "ssm_conv1d.weight") else 0
    if part not in (*_PER_HEAD, *_PER_CHANNEL):
        return None, None
    by_columns, shape = part == "ssm_out.weight", file.tensors[name].shape
    if heads % keys or shape[1 if by_columns else 0] != start + heads * width:
        raise ValueError(f"{file.call}: {name} has shape {shape}, which {heads} heads of {width} cannot have.")
    order = np.arange(heads * width).reshape(heads // keys, keys, width).swapaxes(0, 1).reshape(-1) + start
    order = np.concatenate([np.arange(start), order])
    return (None, order) if by_columns else (order, None)


_PER_HEAD = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")
_PER_CHANNEL = ("attn_gate.weight", "attn_qkv.weight", "ssm_conv1d.weight", "ssm_out.weight")


def _qwen35_values(name: str, array: Shaped[np.ndarray, "*dims"]) -> Shaped[np.ndarray, "*dims"]:
    """Return published values: files add 1 to most norms' scales, and hold a function of the decay rates."""
    if name.endswith(".ssm_a"):
        if not (array < 0).all():
            raise ValueError(f"{name} holds a number that is not below 0, but all decay rates must be below 0")
        return np.log(-array)
    return array if name.endswith(".ssm_norm.weight") else _minus_one(name, array)


def _conv_layers(config: JsonObject, file: GGUF) -> JsonObject:
    """Return which layers have attention, and other attributes of LFM2."""
    heads = file.listed("lfm2.attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "head_dim": None,
    }


def _oss_scaling(config: JsonObject, file: GGUF) -> JsonObject:
    """Return gpt-oss's YaRN scaling, whose bounds are not rounded."""
    scaling = config.get("rope_scaling")
    return {"rope_scaling": scaling | {"truncate": False}} if isinstance(scaling, dict) else {}


def _growth(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the scaling of Ministral 3, with the growth of scores and the magnitude of YaRN."""
    growth, strength = config["llama_4_scaling_beta"], config["mscale_all_dim"]
    added = {"llama_4_scaling_beta": growth} | ({"mscale": strength, "mscale_all_dim": strength} if strength else {})
    scaling = {"rope_type": "default"} | (config.get("rope_scaling") or {}) | added
    return {"rope_scaling": scaling, "llama_4_scaling_beta": None, "mscale_all_dim": None}


def _glm_options(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the switches that the file's arrays and numbers imply."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "norm_topk_prob": config["norm_topk_prob"] is True,
        **{name: config[name] or 1 for name in ("n_group", "topk_group", "routed_scaling_factor")},
        **{name: config[name] or 0 for name in ("n_shared_experts", "first_k_dense_replace")},
    }


_EXPERT_MAPS = {name: f"{name}_proj" for name in _MAPS}
_QWEN35 = Architecture(
    "qwen3_5_text",
    {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    },
    sizes={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.inner_size": "linear_value_head_dim",
        "full_attention_interval": "full_attention_interval",
    },
    implied=lambda config, file: {
        "linear_value_head_dim": config["linear_value_head_dim"] // config["linear_num_value_heads"]
    },
    unread=("rope.dimension_sections",),  # positions of images, which are equal for text
    order=_tiled_heads,
    restore=_qwen35_values,
    left_out={"ssm_conv1d": 1, "ffn_gate_inp_shexp": 0},
    has_predictors=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", order=_rotated_pairs),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _experts("mlp.", _EXPERT_MAPS),
        numbers={**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        implied=lambda config, file: {"norm_topk_prob": True},
    ),
    "qwen35": _QWEN35,
    "qwen35moe": dataclasses.replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        layer={
            **_QWEN35.layer,
            **_experts("mlp.", _EXPERT_MAPS),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in _MAPS},
        },
        sizes={
            **_QWEN35.sizes,
            **_EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "gemma": Architecture("gemma", restore=_minus_one),
    "gemma2": Architecture(
        "gemma2", _FOUR_NORMS, numbers={**_WINDOW, **_SOFTCAPS}, implied=_gemma_scores, restore=_minus_one
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _FOUR_NORMS,
        numbers={**_WINDOW, **_SOFTCAPS, **_LOCAL},
        implied=_gemma_scores,
        restore=_minus_one,
    ),
    "phi3": Architecture("phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, numbers=_WINDOW),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **_experts("mlp.", _EXPERT_MAPS),
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
            **{f"ffn_{name}_exps.bias": f"mlp.experts.{name}_proj_bias" for name in _MAPS},
        },
        sizes={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        numbers=_WINDOW,
        implied=_oss_scaling,
    ),
    "mistral3": Architecture(
        "ministral3",
        numbers={
            "attention.temperature_scale": "llama_4_scaling_beta",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        },
        implied=_growth,
        order=_rotated_pairs,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            **{f"ffn_{name}": f"feed_forward.{w}" for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
            **{f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")},
        },
        sizes={"shortconv.l_cache": "conv_L_cache"},
        implied=_conv_layers,
        left_out={"shortconv.conv": 1},
        edges={"token_embd_norm": "model.embedding_norm"},
        has_key_heads_by_layer=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **_experts("mlp.", _EXPERT_MAPS),
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in _MAPS},
        },
        sizes={
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        numbers={
            "expert_shared_count": "n_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        implied=_glm_options,
        expected={"expert_gating_func": 2},  # sigmoids
        has_predictors=True,
    ),
}
# GGUF calls Mixtral "llama" too; a file with expert_count > 0 is Mixtral.
MIXTRAL = Architecture(
    "mixtral",
    _experts("block_sparse_moe.", {"gate": "w1", "up": "w3", "down": "w2"}),
    numbers={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    order=_rotated_pairs,
)
