"""Architectures of GGUF files: each architecture's family, and llama.cpp's names of settings and arrays.

This file has dense decoders, and names that several architectures share. `_gguf_encoders` has text encoders,
`_gguf_older_decoders` GPT-2 and similar decoders, `_gguf_recurrent` models with recurrent layers, and `_gguf_mixtures`
other models with experts.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Shaped

from .._files import JsonObject
from ._gguf_conversions import (
    order_rotated_pairs,
    read_attention_bias,
    read_biases,
    read_gemma_scores,
    read_growth,
    read_nemotron_rotary,
    read_partial_rotary,
    read_windows,
    subtract_one,
)
from ._gguf_file import GGUF, Order


# Published names of the feed-forward layer's maps.
MAPS = {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
NUMBERED_MAPS = {"gate": "w1", "up": "w3", "down": "w2"}
LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": published for name, published in MAPS.items()},
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
    """Published names of sizes that every file of the architecture has, by their names in files."""
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of other settings, which a file may lack, by their names in files."""
    implied: Callable[[JsonObject, GGUF], JsonObject] = lambda config, file: {}
    """A function that computes attributes that files leave out, from the attributes that files have."""
    expected: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """The required values of settings; a file with another value is refused."""
    unread: tuple[str, ...] = ()
    """Names of settings that files may have and that are skipped: they have no effect on text, repeat other settings,
    or are read by `implied`."""
    order: Callable[[GGUF, str], Order] = lambda file, name: (None, None)
    """A function that returns how to reorder an array's rows and columns into the published order."""
    restore: Callable[[str, Shaped[np.ndarray, "*dims"]], Shaped[np.ndarray, "*dims"]] = _keep
    """A function that returns the published values of an array of one dim, given its name."""
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For an array from which files leave out a dim of size 1: the dim's index, by the array's name."""
    unit_dims: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """For an array of which files have other dims of size 1 than published folders: the indices of its published dims
    of size 1, by the array's name with `.weight` or `.bias`, if any."""
    layer_lists: tuple[str, ...] = ()
    """Names of the header's lists with one number for each layer, which are read as arrays."""
    flat: tuple[str, ...] = ()
    """Names of arrays that have one dim in published folders, and two dims in files."""
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    """The name of the epsilon of norms, in files and as published."""
    edges: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of arrays outside of the layers that not all architectures have."""
    classifier: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of the arrays of a classifier of texts. Empty: classifiers are refused."""
    prefix: str = "model.layers."
    """The published names of a layer's arrays before the layer's number."""
    stacks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For a model with several stacks of layers: `prefix` by the name of the stack in files, for example `enc`. The
    name of the stack also begins the names in `layer`."""
    lists: tuple[str, ...] = ()
    """Sizes that may be lists with a size for each layer; the largest one is read, and `implied` reads the others."""
    has_attention: bool = True
    """Whether some layers have attention; a file of a model without attention states 0 heads and 0 hidden features."""
    has_latents: bool = False
    """Whether keys and values are computed from latents. The widths of keys and values in the file are then the widths
    of latents."""
    has_predictors: bool = False
    """Whether files count predictors (multi-token prediction) among the layers."""


FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {f"{name}_logit_softcapping": f"{name}_logit_softcapping" for name in ("attn", "final")}
_LOCAL = {
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def expert_names(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the published names of a router and of experts, which begin with `prefix`; `names` are the maps' names."""
    maps = {f"ffn_{name}_exps": f"{prefix}experts.{{}}.{published}" for name, published in names.items()}
    return {"ffn_gate_inp": f"{prefix}gate"} | maps


EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
ROUTED_OPTIONS = {
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
SIGMOID = {"expert_gating_func": 2}
EXPERT_MAPS = {name: f"{name}_proj" for name in MAPS}
SHARED_EXPERTS = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in MAPS}
GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{name}_proj" for name in MAPS},
    **{f"ffn_{name}_shexp": f"shared_mlp.{name}_proj" for name in MAPS},
}
QWEN_EXPERTS = {
    **expert_names("mlp.", EXPERT_MAPS),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in MAPS},
}
QWEN_EXPERT_SIZES = {
    **EXPERTS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj.{}",
    "attn_v_b": "self_attn.v_b_proj.{}",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}
LATENT_OPTIONS = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.key_length_mla": "qk_nope_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
DENSE: Mapping[str, Architecture] = {
    "llama": Architecture("llama", order=order_rotated_pairs),
    "arcee": Architecture("arcee", order=order_rotated_pairs, implied=read_biases),
    "smollm3": Architecture("smollm3", order=order_rotated_pairs, implied=read_biases),
    "granite": Architecture(
        "granite",
        numbers=SCALES,
        order=order_rotated_pairs,
        implied=read_biases,
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "seed_oss": Architecture(
        "seed_oss",
        {"post_attention_norm": "post_attention_layernorm"},
        implied=lambda config, file: (
            read_biases(config, file) | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}
        ),
    ),
    "olmo2": Architecture(
        "olmo2",
        _POST_NORMS,
        implied=read_attention_bias,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        eps=("attention.layer_norm_epsilon", "norm_epsilon"),
        implied=lambda config, file: {"use_bias": "blk.0.attn_q.bias" in file.tensors},
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", classifier={"cls.output": "score"}),
    "gemma": Architecture("gemma", restore=subtract_one),
    "gemma2": Architecture(
        "gemma2", FOUR_NORMS, numbers={**WINDOW, **_SOFTCAPS}, implied=read_gemma_scores, restore=subtract_one
    ),
    "gemma3": Architecture(
        "gemma3_text",
        FOUR_NORMS,
        numbers={**WINDOW, **_SOFTCAPS, **_LOCAL},
        implied=read_gemma_scores,
        restore=subtract_one,
    ),
    "phi3": Architecture("phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, numbers=WINDOW),
    "mistral3": Architecture(
        "ministral3",
        numbers={
            "attention.temperature_scale": "llama_4_scaling_beta",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        },
        implied=read_growth,
        order=order_rotated_pairs,
    ),
    "command-r": Architecture(
        "cohere",
        numbers={"logit_scale": "logit_scale"},
        implied=lambda config, file: (
            read_attention_bias(config, file)
            | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors, "logit_scale": config["logit_scale"] or 1.0}
        ),
        eps=LAYER_NORM,
    ),
    "cohere2": Architecture(
        "cohere2",
        sizes={"attention.sliding_window": "sliding_window"},
        numbers={"logit_scale": "logit_scale"},
        implied=lambda config, file: read_attention_bias(config, file) | read_windows(config, file, 4),
        unread=("attention.sliding_window_pattern",),
        eps=LAYER_NORM,
    ),
    "glm4": Architecture(
        "glm4",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        implied=lambda config, file: read_attention_bias(config, file) | read_partial_rotary(config, file),
        has_predictors=True,
    ),
    "exaone4": Architecture(
        "exaone4",
        _POST_NORMS,
        numbers=WINDOW,
        implied=lambda config, file: read_windows(config, file, 4 if config["num_hidden_layers"] == 64 else 0),
        unread=("attention.sliding_window_pattern",),
        has_predictors=True,
    ),
    "stablelm": Architecture(
        "stablelm",
        numbers={"use_parallel_residual": "use_parallel_residual"},
        implied=lambda config, file: (
            read_partial_rotary(config, file)
            | {
                "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
                "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
            }
        ),
        eps=LAYER_NORM,
    ),
    "nemotron": Architecture(
        "nemotron",
        implied=read_nemotron_rotary,
        unread=("attention.layer_norm_rms_epsilon",),  # the same number as the epsilon of the norms
        restore=subtract_one,
        eps=("attention.layer_norm_epsilon", "norm_eps"),
    ),
    "exaone": Architecture(
        "exaone",
        {
            "attn_norm": "ln_1",
            **{f"attn_{name}": f"attn.attention.{name}_proj" for name in "qkv"},
            "attn_output": "attn.attention.out_proj",
            "ffn_norm": "ln_2",
            **{"ffn_gate": "mlp.c_fc_0", "ffn_up": "mlp.c_fc_1", "ffn_down": "mlp.c_proj"},
        },
        edges={"token_embd": "transformer.wte", "output_norm": "transformer.ln_f"},
        prefix="transformer.h.",
    ),
    "jais2": Architecture("jais2", implied=read_biases, eps=LAYER_NORM),
    "apertus": Architecture(
        "apertus",
        {
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
            **{f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
        },
        implied=lambda config, file: (
            read_attention_bias(config, file) | {"rope_scaling": config.get("rope_scaling") or {"rope_type": "default"}}
        ),
        unit_dims={"xielu.beta": (), "xielu.eps": ()},
        layer_lists=tuple(f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", HUNYUAN, implied=read_attention_bias),
}
