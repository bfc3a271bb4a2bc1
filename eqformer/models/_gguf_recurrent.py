"""Architectures of GGUF files with recurrent layers or short convolutions."""

import dataclasses
from collections.abc import Mapping

from ._gguf_architectures import (
    Architecture,
    expert_names,
    EXPERTS,
    GRANITE_EXPERTS,
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
    SIGMOID,
)
from ._gguf_conversions import (
    order_rotated_pairs,
    order_tiled_heads,
    read_conv_layers,
    read_falcon_h1,
    read_kimi,
    read_mamba2,
    read_nemotron_layers,
    read_pure_mamba2,
    read_recurrent_layers,
    restore_decay,
    restore_qwen35,
)


MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA_SIZES = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": "mamba_d_head",  # all channels, which `implied` divides by the heads
}
_MIXER = {name: published.replace("mamba.", "mixer.") for name, published in MAMBA.items()}
_WITHOUT_EXPERTS: Mapping[str, Architecture] = {
    "qwen35": Architecture(
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
        implied=read_recurrent_layers,
        # The rotary channels of time, height and width; the three positions of a text's token are equal.
        unread=("rope.dimension_sections",),
        order=order_tiled_heads,
        restore=restore_qwen35,
        left_out={"ssm_conv1d": 1, "ffn_gate_inp_shexp": 0},
        has_predictors=True,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            **{f"ffn_{name}": f"feed_forward.{published}" for name, published in NUMBERED_MAPS.items()},
            **{f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")},
        },
        sizes={"shortconv.l_cache": "conv_L_cache"},
        implied=lambda config, file: read_conv_layers(config, file) | {"block_auto_adjust_ff_dim": False},
        left_out={"shortconv.conv": 1},
        edges={"token_embd_norm": "model.embedding_norm"},
        lists=("attention.head_count_kv",),
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        {
            **MAMBA,
            "ffn_norm": "pre_ff_layernorm.weight",  # llama.cpp leaves out `.weight` here
            **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in MAPS},
        },
        sizes=MAMBA_SIZES,
        implied=read_falcon_h1,
        restore=restore_decay,
        left_out={"ssm_conv1d": 1},
        flat=("ssm_a", "ssm_d", "ssm_norm"),
        edges={"output_norm": "model.final_layernorm"},
    ),
    "mamba2": Architecture(
        "mamba2",
        {"attn_norm": "norm", **_MIXER},
        sizes={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "num_heads",
            "ssm.inner_size": "head_dim",
        },
        implied=read_pure_mamba2,
        restore=restore_decay,
        left_out={"ssm_conv1d": 1},
        flat=("ssm_a", "ssm_d", "ssm_norm"),
        edges={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        prefix="backbone.layers.",
        eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
        has_attention=False,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        {
            "attn_norm": "norm",
            **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"},
            "attn_output": "mixer.o_proj",
            **_MIXER,
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
        },
        sizes={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
            "ssm.inner_size": "mamba_head_dim",
        },
        implied=read_nemotron_layers,
        order=order_rotated_pairs,  # The order has no effect on outputs, because attention has no rotary positions.
        restore=restore_decay,
        left_out={"ssm_conv1d": 1},
        flat=("ssm_a", "ssm_d", "ssm_norm"),
        edges={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        prefix="backbone.layers.",
        eps=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        unread=("attention.layer_norm_rms_epsilon",),  # `read_nemotron_layers` reads this
        lists=("attention.head_count_kv", "feed_forward_length"),
        has_predictors=True,
    ),
}
_QWEN35_MOE = dataclasses.replace(
    _WITHOUT_EXPERTS["qwen35"],
    model_type="qwen3_5_moe_text",
    layer={**_WITHOUT_EXPERTS["qwen35"].layer, **QWEN_EXPERTS},
    sizes={**_WITHOUT_EXPERTS["qwen35"].sizes, **QWEN_EXPERT_SIZES},
)
RECURRENT: Mapping[str, Architecture] = {
    **_WITHOUT_EXPERTS,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": dataclasses.replace(
        _QWEN35_MOE,
        model_type="qwen3_next",
        layer={**_QWEN35_MOE.layer, "ssm_ba": "linear_attn.in_proj_ba"},
        order=lambda file, name: (None, None),
        unread=("attention.recurrent_layers",),
    ),
    "lfm2moe": dataclasses.replace(
        _WITHOUT_EXPERTS["lfm2"],
        model_type="lfm2_moe",
        layer={
            **_WITHOUT_EXPERTS["lfm2"].layer,
            **expert_names("feed_forward.", NUMBERED_MAPS),
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        sizes={**_WITHOUT_EXPERTS["lfm2"].sizes, **EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        numbers={"leading_dense_block_count": "num_dense_layers"},
        implied=lambda config, file: (
            read_conv_layers(config, file)
            | {
                "num_dense_layers": config["num_dense_layers"] or 0,
                "use_expert_bias": file.has("exp_probs_b.bias"),
            }
        ),
        expected=SIGMOID,
    ),
    "nemotron_h_moe": dataclasses.replace(
        _WITHOUT_EXPERTS["nemotron_h"],
        layer={
            **_WITHOUT_EXPERTS["nemotron_h"].layer,
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            **{f"ffn_{name}_exps": f"mixer.experts.{{}}.{name}_proj" for name in ("up", "down")},
            **{f"ffn_{name}_shexp": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        sizes={
            **_WITHOUT_EXPERTS["nemotron_h"].sizes,
            **ROUTED,
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        },
        numbers={
            "moe_latent_size": "moe_latent_size",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        implied=lambda config, file: (
            read_nemotron_layers(config, file) | {"norm_topk_prob": config["norm_topk_prob"] is True}
        ),
        expected={**SIGMOID, "expert_shared_count": 1},
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {**GRANITE_EXPERTS, **MAMBA, **{f"ffn_{name}": f"shared_mlp.{name}_proj" for name in MAPS}},
        sizes={"expert_shared_feed_forward_length": "shared_intermediate_size", **MAMBA_SIZES},
        numbers={
            **SCALES,
            **LOCAL_EXPERTS,
        },
        implied=read_mamba2,
        order=order_rotated_pairs,
        restore=restore_decay,
        left_out={"ssm_conv1d": 1},
        flat=("ssm_a", "ssm_d", "ssm_norm"),
        lists=("attention.head_count_kv",),
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        {
            **LATENT_NAMES,
            **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"},
            **{f"ssm_{name}": f"self_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")},
            "ssm_beta": "self_attn.b_proj",
            "ssm_a": "self_attn.A_log",
            "ssm_dt.bias": "self_attn.dt_bias",
            "ssm_norm": "self_attn.o_norm",
            **expert_names("block_sparse_moe.", NUMBERED_MAPS),
            "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
            **{f"ffn_{name}_shexp": f"block_sparse_moe.shared_experts.{name}_proj" for name in MAPS},
        },
        sizes={
            "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            **LOCAL_EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        numbers={**LATENT_OPTIONS, **ROUTED_OPTIONS},
        implied=read_kimi,
        expected=SIGMOID,
        unread=("attention.key_length", "attention.value_length"),  # widths that llama.cpp does not read
        restore=restore_decay,
        unit_dims={**{f"ssm_conv1d_{name}.weight": (1,) for name in "qkv"}, "ssm_a": (0, 1, 3)},
        lists=("attention.head_count_kv",),
        has_latents=True,
    ),
}
"""The architectures with recurrent layers or short convolutions, by their names in files."""
