"""Architectures of GGUF files with experts, the table of all architectures, and the architecture of a file."""

import dataclasses
from collections.abc import Mapping

from ._gguf_architectures import (
    Architecture,
    DENSE,
    EXPERT_MAPS,
    expert_names,
    EXPERTS,
    FOUR_NORMS,
    GRANITE_EXPERTS,
    HUNYUAN,
    LATENT_NAMES,
    LATENT_OPTIONS,
    LOCAL_EXPERTS,
    MAPS,
    NUMBERED_MAPS,
    QWEN_EXPERT_SIZES,
    QWEN_EXPERTS,
    ROUTED,
    ROUTED_OPTIONS,
    SCALES,
    SHARED_EXPERTS,
    SIGMOID,
    WINDOW,
)
from ._gguf_conversions import (
    order_rotated_pairs,
    read_attention_bias,
    read_ernie_layers,
    read_gemma4,
    read_glm_options,
    read_growing_latents,
    read_latents,
    read_latents_of_v2,
    read_llama4,
    read_magnitudes,
    read_mixture,
    read_oss_scaling,
    read_partial_rotary,
    read_positions_by_type,
    read_windows,
)
from ._gguf_encoders import DISTILBERT, ENCODERS, GATED_T5, T5
from ._gguf_file import GGUF
from ._gguf_older_decoders import FALCON_WITH_TWO_NORMS, OLDER
from ._gguf_recurrent import RECURRENT


_DEEPSEEK2 = Architecture(
    "deepseek_v2",
    {
        **expert_names("mlp.", EXPERT_MAPS),
        **LATENT_NAMES,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **SHARED_EXPERTS,
    },
    sizes={
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
        **ROUTED,
    },
    numbers={
        **LATENT_OPTIONS,
        **ROUTED_OPTIONS,
    },
    implied=read_latents_of_v2,
    unread=("attention.key_length", "attention.value_length"),  # widths of latents, which follow from other sizes
    has_latents=True,
    has_predictors=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    **DENSE,
    **ENCODERS,
    **RECURRENT,
    **OLDER,
    "t5": T5,
    "qwen2moe": Architecture(
        "qwen2_moe",
        QWEN_EXPERTS,
        sizes=QWEN_EXPERT_SIZES,
        left_out={"ffn_gate_inp_shexp": 0},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        expert_names("mlp.", EXPERT_MAPS),
        numbers={**EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        implied=lambda config, file: {"norm_topk_prob": True},
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **FOUR_NORMS,
            "ffn_norm": "pre_feedforward_layernorm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            **{f"post_ffw_norm_{number}": f"post_feedforward_layernorm_{number}" for number in (1, 2)},
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps": "experts.{}.gate_up_proj",
            "ffn_down_exps": "experts.{}.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        sizes={"attention.key_length_swa": "head_dim_swa"},
        numbers={
            **WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        implied=read_gemma4,
        unread=("attention.value_length_swa", "rope.dimension_count_swa"),  # both are the channels of a head
        edges={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        lists=("attention.head_count_kv", "feed_forward_length", "attention.sliding_window_pattern"),
    ),
    "deepseek2": _DEEPSEEK2,
    "mistral4": dataclasses.replace(
        _DEEPSEEK2,
        model_type="mistral4",
        layer={**_DEEPSEEK2.layer, "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj"},
        numbers={**_DEEPSEEK2.numbers, "attention.temperature_scale": "llama_4_scaling_beta"},
        implied=read_growing_latents,
        unread=(*_DEEPSEEK2.unread, "attention.temperature_length"),  # `read_growing_latents` reads this
        has_predictors=False,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **expert_names("mlp.", EXPERT_MAPS),
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
            **{f"ffn_{name}_exps.bias": f"mlp.experts.{name}_proj_bias" for name in MAPS},
        },
        sizes={**LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        numbers=WINDOW,
        implied=read_oss_scaling,
    ),
    "llama4": Architecture(
        "llama4_text",
        {
            **expert_names("feed_forward.", EXPERT_MAPS),
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{name}_shexp": f"feed_forward.shared_expert.{name}_proj" for name in MAPS},
            **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in MAPS},
        },
        sizes={
            **LOCAL_EXPERTS,
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "expert_feed_forward_length": "intermediate_size_moe",
        },
        implied=read_llama4,
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        {
            **expert_names("mlp.", EXPERT_MAPS),
            **SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.e_score_correction_bias",
        },
        sizes={**EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        numbers={
            **WINDOW,
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        implied=lambda config, file: (
            read_windows(config, file, 4)
            | {"norm_topk_prob": config["norm_topk_prob"] is True}
            | {name: config[name] or 1 for name in ("n_group", "topk_group", "routed_scaling_factor")}
            | {name: config[name] or 0 for name in ("num_shared_experts", "first_k_dense_replace")}
        ),
        expected=SIGMOID,
        # The shared width is the product of other numbers.
        unread=("attention.sliding_window_pattern", "expert_shared_feed_forward_length"),
        has_predictors=True,
    ),
    "olmoe": Architecture(
        "olmoe",
        expert_names("mlp.", EXPERT_MAPS),
        sizes=EXPERTS,
        implied=lambda config, file: read_attention_bias(config, file) | {"norm_topk_prob": False},
    ),
    "phimoe": Architecture(
        "phimoe",
        expert_names("block_sparse_moe.", NUMBERED_MAPS),
        sizes=LOCAL_EXPERTS,
        numbers=WINDOW,
        implied=lambda config, file: (
            read_attention_bias(config, file)
            | read_magnitudes(config, file)
            | {"lm_head_bias": "output.bias" in file.tensors}
        ),
    ),
    "granitemoe": Architecture(
        "granitemoe",
        GRANITE_EXPERTS,
        sizes=LOCAL_EXPERTS,
        numbers=SCALES,
        implied=read_attention_bias,
        order=order_rotated_pairs,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {
            **expert_names("block_sparse_moe.", NUMBERED_MAPS),
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        sizes=LOCAL_EXPERTS,
        implied=read_partial_rotary,
        expected=SIGMOID,
        unread=("expert_feed_forward_length",),  # repeats the width
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **expert_names("mlp.", EXPERT_MAPS),
            **SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        sizes={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        numbers={
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        implied=read_ernie_layers,
        unread=("expert_shared_feed_forward_length",),  # a quotient that is not the width of the arrays
    ),
    "dots1": Architecture(
        "dots1",
        {
            **expert_names("mlp.", EXPERT_MAPS),
            **SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        sizes=ROUTED,
        numbers=ROUTED_OPTIONS,
        implied=lambda config, file: (
            read_attention_bias(config, file) | read_mixture(config, file) | {"sliding_window": None}
        ),
        expected=SIGMOID,
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {
            **HUNYUAN,
            **expert_names("mlp.", EXPERT_MAPS),
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in MAPS},
        },
        sizes={
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "num_shared_expert",
        },
        implied=read_attention_bias,
        unread=("expert_shared_feed_forward_length",),  # repeats the width
    ),
    "afmoe": Architecture(
        "afmoe",
        {
            **expert_names("mlp.", EXPERT_MAPS),
            **SHARED_EXPERTS,
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        sizes={**EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        numbers={
            **WINDOW,
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_scale": "route_scale",
        },
        implied=lambda config, file: (
            read_windows(config, file, 4)
            | {name: config[name] or 0 for name in ("num_shared_experts", "num_dense_layers")}
            # llama.cpp multiplies embeddings by the root of their width.
            | {"route_scale": config["route_scale"] or 1.0, "mup_enabled": True}
        ),
        expected=SIGMOID,
        unread=("attention.sliding_window_pattern",),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **expert_names("mlp.", EXPERT_MAPS),
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **SHARED_EXPERTS,
        },
        sizes=ROUTED,
        numbers=ROUTED_OPTIONS,
        implied=read_glm_options,
        expected=SIGMOID,
        has_predictors=True,
    ),
}
_MIXTRAL = Architecture(
    "mixtral",
    expert_names("block_sparse_moe.", NUMBERED_MAPS),
    numbers=LOCAL_EXPERTS,
    order=order_rotated_pairs,
)
_GRANITE_MOE_SHARED = dataclasses.replace(
    ARCHITECTURES["granitemoe"],
    model_type="granitemoeshared",
    numbers={**SCALES, "expert_shared_feed_forward_length": "shared_intermediate_size"},
)
_DEEPSEEK_V3 = dataclasses.replace(_DEEPSEEK2, model_type="deepseek_v3", implied=read_latents, expected=SIGMOID)
_OLMO3 = dataclasses.replace(
    DENSE["olmo2"],
    model_type="olmo3",
    numbers=WINDOW,
    implied=lambda config, file: (
        read_attention_bias(config, file) | read_windows(config, file, 4) | read_positions_by_type(config, file)
    ),
    unread=("attention.sliding_window_pattern", "rope.freq_base_swa"),
)
_FIRST_DENSE = "deepseek2.leading_dense_block_count"


def architecture_of(file: GGUF) -> Architecture:
    """Return the architecture of a file.

    GGUF has one name for some pairs of architectures: a "llama" with an `expert_count` above 0 is Mixtral; a
    "deepseek2" whose router has a selection bias is DeepSeek-V3; an "olmo2" with windows is OLMo 3; a "granitemoe" with
    a shared expert is `granitemoeshared`; a "t5" may have gates in its feed-forward layers; a "falcon" may have two
    norms in each layer; and a "bert" without token types is DistilBERT.
    """
    kind = file.kind
    if kind == "llama" and file.values.get("llama.expert_count"):
        return _MIXTRAL
    if kind == "deepseek2" and f"blk.{file.values.get(_FIRST_DENSE, 0)}.exp_probs_b.bias" in file.tensors:
        return _DEEPSEEK_V3
    if kind == "olmo2" and file.values.get("olmo2.attention.sliding_window"):
        return _OLMO3
    if kind == "granitemoe" and file.values.get("granitemoe.expert_shared_feed_forward_length"):
        return _GRANITE_MOE_SHARED
    if kind == "t5" and "enc.blk.0.ffn_gate.weight" in file.tensors:
        return GATED_T5
    if kind == "falcon" and "blk.0.attn_norm_2.weight" in file.tensors:
        return FALCON_WITH_TWO_NORMS
    if kind == "bert" and "token_types.weight" not in file.tensors:
        return DISTILBERT
    return ARCHITECTURES[kind]
