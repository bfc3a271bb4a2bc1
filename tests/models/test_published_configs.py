"""Presets equal the configs that are read from the published `config.json` of their models."""

import dataclasses
import json
from typing import Any

import pytest
from test_attributes import numbers_of
from test_published import FIXTURES

from eqformer import models


# What is published, but for how it was trained and is sampled from.
PUBLISHED = {
    "llama-3.2-1b": """{"attention_bias": false, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 128256}""",
    "qwen2.5-7b": """{"hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": false, "use_mrope": false, "use_sliding_window": false,
        "vocab_size": 152064}""",
    "qwen2-57b-a14b": """{"decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
        "model_type": "qwen2_moe", "moe_intermediate_size": 2560, "norm_topk_prob": false, "num_attention_heads": 28,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480, "sliding_window": 131072, "tie_word_embeddings": false,
        "use_sliding_window": false, "vocab_size": 151936}""",
    "gpt-oss-20b": """{"attention_bias": true, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": ["LAYERS"],
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0,
        "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "vocab_size": 201088}""",
    "kimi-linear-48b-a3b": """{"first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
        "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20,
        24, 27], "head_dim": 128, "kda_layers": ["OTHERS"], "num_heads": 32, "short_conv_kernel_size": 4},
        "mla_use_nope": true, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
        "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "num_experts": 256,
        "num_attention_heads": 32, "num_expert_group": 1, "num_experts_per_token": 8, "num_hidden_layers": 27,
        "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1,
        "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163840}""",
    "lfm2-1.2b": """{"block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true, "conv_L_cache": 3,
        "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": true,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "use_pos_enc": true, "vocab_size": 65536}""",
    "phi4-mini": """{"attention_bias": false, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false, "max_position_embeddings": 131072,
        "mlp_bias": false, "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225,
        1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687,
        4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372,
        10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
        25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97,
        33.28, 33.49, 33.5, 44.16, 47.77], "short_factor": ["ONES"], "type": "longrope"}, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": true, "vocab_size": 200064}""",
    "exaone4-32b": """{"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 27392, "max_position_embeddings": 131072, "max_window_layers": 64, "model_type": "exaone4",
        "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "reorder_qk_norm": true,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000, "sliding_window": 4096,
        "sliding_window_pattern": "LLLG", "tie_word_embeddings": false, "vocab_size": 102400}""",
    "falcon-h1-0.5b": """{"attention_bias": false, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
        "attn_layer_indices": null, "embedding_multiplier": 5.656854249492381, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 2048, "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": true, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 24, "mamba_norm_before_gate": false, "mamba_proj_bias": false, "mamba_rms_norm": false,
        "mamba_use_mlp": true, "max_position_embeddings": 16384, "mlp_bias": false, "mlp_expansion_factor": 8,
        "mlp_multipliers": [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8,
        "num_hidden_layers": 36, "num_key_value_heads": 2, "num_logits_to_keep": 1, "projectors_bias": false,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": false, "vocab_size": 32784}""",
    "granite-4.0-h-small": """{"attention_bias": false, "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
        "hidden_act": "silu", "hidden_size": 4096, "init_method": "mup", "intermediate_size": 768,
        "layer_types": ["MAMBAS"], "logits_scaling": 16, "mamba_chunk_size": 256, "mamba_conv_bias": true,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 128, "mamba_proj_bias": false, "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 32,
        "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72,
        "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 10000, "router_aux_loss_coef": 0.001, "shared_intermediate_size": 1536,
        "tie_word_embeddings": true, "vocab_size": 100352}""",
    "hunyuan-a13b": """{"add_classification_head": false, "anyres_pooling_size": 2, "attention_bias": false,
        "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "im_end_id": 6, "im_newline_id": 12, "im_start_id": 5,
        "intermediate_size": 3072, "mask_init_id": 13, "max_position_embeddings": 32768, "mlp_bias": false,
        "model_type": "hunyuan_v1_moe", "moe_drop_tokens": false, "moe_intermediate_size": ["WIDTHS"],
        "moe_layer_num_skipped": 0, "moe_topk": ["EIGHTS"], "norm_topk_prob": true, "norm_type": "rms",
        "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_media_embeds": 257, "num_shared_expert": ["SHARED"], "org_vocab_size": 128167, "pool_type": "last",
        "position_embedding_xdrope": false, "rms_norm_eps": 1e-05, "rope_scaling": {"alpha": 1000.0, "beta_fast": 32,
        "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"}, "rope_theta": 10000.0,
        "text_end_id": 8, "text_start_id": 7, "tie_word_embeddings": true, "use_cla": false, "use_mixed_mlp_moe": true,
        "use_qk_norm": true, "use_rotary_pos_emb": true, "vit_input_resolution": 224, "vit_mapping_type": "resampler",
        "vit_norm_type": "fused", "vit_patch": 1, "vit_token": 64, "vocab_size": 128167}""",
}
SHORTENED: dict[str, list] = {
    "OTHERS": [layer for layer in range(1, 27) if layer % 4],
    "ONES": [1.0] * 48,
    "MAMBAS": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    **{name: [value] * 32 for name, value in (("WIDTHS", 3072), ("EIGHTS", 8), ("SHARED", 1))},
    "LAYERS": ["sliding_attention", "full_attention"] * 12,
}


# The defaults of transformers, with what publishers changed of them, by `tests/fixtures/make_published.py`.
DEFAULTS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "published_configs.json").read_text())


def published(name: str) -> dict[str, Any]:
    """The configuration with its lists of one thing, which are shortened above."""
    if name in DEFAULTS:
        return DEFAULTS[name]
    text = PUBLISHED[name]
    for word, values in SHORTENED.items():
        text = text.replace(f'["{word}"]', json.dumps(values))
    return json.loads(text)


def meaning(numbers: Any) -> dict[str, Any]:
    """The numbers without the longest rows, which change nothing, and with the width of a head where it follows."""
    found = dataclasses.asdict(numbers)
    if "heads" in found:
        found["head_dim"] = found.get("head_dim") or numbers.embed // numbers.heads
    return {name: value for name, value in found.items() if name != "max_seq"}


@pytest.mark.quick
def test_recorded_defaults_lack_what_any_configuration_has():
    generic = {"_name_or_path", "chunk_size_feed_forward", "id2label", "return_dict", "transformers_version"}
    assert [name for name, config in DEFAULTS.items() if generic & config.keys()] == []
    assert all({"model_type", "vocab_size"} & config.keys() for config in DEFAULTS.values())  # the control


@pytest.mark.quick
def test_recorded_releases_are_of_fixtures():
    versions = json.loads((FIXTURES / "versions.json").read_text())
    assert [name for name in versions if not (FIXTURES / name).exists()] == []
    assert versions["published_configs.json"].keys() == {"torch", "transformers"}


# What publishers' folders have besides, and transformers leaves unread.
LEFT_OVER: dict[str, dict[str, Any]] = {
    "command-r": {"model_max_length": 131_072},
    "command-r7b": {"cache_implementation": "hybrid", "layer_switch": 4, "position_embedding_type": "rope_gptj"}
    | {"order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0, "use_parallel_embedding": True}
    | dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), True)
    | {"use_qk_norm": False},
    "gemma2-9b": {"sliding_window_size": 4096},
    "gpt2-large": {"n_special": 0, "predict_special_tokens": True},
    "gpt-j-6b": {"rotary": True, "scale_attn_weights": True, "summary_type": "cls_index", "summary_first_dropout": 0.1}
    | dict.fromkeys(("summary_proj_to_labels", "summary_use_proj"), True),
    "gpt-neo-125m": {"attention_layers": ["global", "local"] * 6, "summary_type": "cls_index", "attention_dropout": 0},
    "starcoder": {"inference_runner": 0, "max_batch_size": None, "max_sequence_length": None, "pad_key_length": True}
    | {"pre_allocate_kv_cache": False, "validate_runner_input": True, "attention_softmax_in_fp32": True},
    "nemotron-h-8b": {"attention_head_dim": 128},
    "opt-350m": {"activation_dropout": 0.0, "attention_dropout": 0.0, "prefix": "</s>", "layerdrop": 0.0},
    "smollm3-3b": {"max_window_layers": 28},
    "starcoder2-7b": {"activation_function": "gelu", "layer_norm_epsilon": 1e-5}
    | {"norm_type": "layer_norm", "mlp_type": "default"}
    | dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"), True),
}


@pytest.mark.parametrize("name", LEFT_OVER)
def test_what_a_folder_has_besides_changes_nothing(name):
    family = next(one for one in models.FAMILIES.values() if name in one.presets)
    said = {"model_type": family.model_type} | family.write(models.preset(name))
    assert numbers_of(said | LEFT_OVER[name]) == models.preset(name)
    with pytest.raises(ValueError, match="does not know: gloom=3"):
        numbers_of(said | LEFT_OVER[name] | {"gloom": 3})


def test_a_head_of_nemotron_is_as_wide_as_its_first_configurations_say():
    said = {name: its for name, its in DEFAULTS["nemotron-h-8b"].items() if name != "head_dim"}
    assert numbers_of(said | {"attention_head_dim": 96}).head_dim == 96
    assert numbers_of(said | {"attention_head_dim": 96, "head_dim": 64}).head_dim == 64


@pytest.mark.parametrize("name", [*PUBLISHED, *DEFAULTS])
def test_a_published_configuration_is_its_preset(name):
    assert meaning(numbers_of(published(name))) == meaning(models.preset(name))
    other = json.loads(json.dumps(published(name)).replace('"vocab_size": ', '"vocab_size": 1'))
    assert meaning(numbers_of(other)) != meaning(models.preset(name))
