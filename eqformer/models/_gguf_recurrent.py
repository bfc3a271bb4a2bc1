"""Architectures of GGUF files with recurrent layers or short convolutions, without experts."""

from collections.abc import Mapping

from ._gguf_architectures import Architecture, MAPS, NUMBERED_MAPS
from ._gguf_conversions import (
    order_rotated_pairs,
    order_tiled_heads,
    read_conv_layers,
    read_falcon_h1,
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
    "ssm.inner_size": "mamba_d_head",
}
_MIXER = {name: published.replace("mamba.", "mixer.") for name, published in MAMBA.items()}
RECURRENT: Mapping[str, Architecture] = {
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
        # Rotary channels for time, height and width, whose positions are equal for text.
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
"""The architectures with recurrent layers or short convolutions and without experts, by their names in files."""
