"""Rare options of configurations are read as in transformers, and written so that they are read back equal."""

import dataclasses
import json
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of
from safetensors.numpy import save_file
from test_attributes import case, numbers_of, PUBLISHED
from test_published import close, RECORDED, run, write

from eqformer import models, nn


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def back(family: str, numbers: Any) -> Any:
    """The numbers of what is written of them."""
    return numbers_of({"model_type": family} | PUBLISHED[family].write(numbers))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("more", [{}, {"mscale": 0.7}, {"attention_factor": 1.2}])
def test_a_temperature_goes_out_without_changing_the_scalings_magnitude(family, more):
    """Two parameters for scores divide each other in a scaling's magnitude, one alone leaves its default."""
    rope = {name: value for name, value in YARN.items() if name != "rope_theta"} | {"mscale_all_dim": 0.5} | more
    config = {name: value for name, value in case(family).items() if name != "rope_parameters"}
    numbers = numbers_of(config | {"rope_scaling": rope})
    assert numbers.temperature == 0.5 and (numbers.scaling.magnitude is None) == (not more)
    assert back(family, numbers) == numbers
    assert back(family, dataclasses.replace(numbers, temperature=0.25)) != numbers  # the control


def test_a_temperature_without_a_scaling_is_refused():
    numbers = dataclasses.replace(models.preset("deepseek-v3-byte-500k"), scaling=None, temperature=0.5)
    with pytest.raises(
        ValueError, match=r"^save\(config=DeepSeekV3Config\(scaling=None, temperature=0.5\)\): .*give a"
    ):
        PUBLISHED["deepseek_v3"].write(numbers)


@pytest.mark.parametrize("family", ["llama", "ministral3", "gemma3_text"])
def test_a_dynamic_scaling_begins_at_the_longest_length(family):
    """Whatever original length is said beside it."""
    said = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    said = {"full_attention": said, "sliding_attention": {"rope_theta": 5.0}} if family == "gemma3_text" else said
    numbers = numbers_of(case(family) | {"rope_parameters": said})
    assert numbers.scaling == nn.DynamicScaling(2.0, 64) and back(family, numbers) == numbers
    with pytest.raises(ValueError, match=r"Config\(scaling=DynamicScaling\(.*, max_seq=65\)\): .* one number for"):
        PUBLISHED[family].write(dataclasses.replace(numbers, max_seq=65))


OF_OTHERS = {"factor": 4.0, "beta_fast": 16.0, "attention_factor": 2.0, "mscale_all_dim": 0.5, "low_freq_factor": 1.0}


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_what_another_scaling_has_is_passed_over(kind):
    """As transformers does, which warns of it; what no scaling has is refused, and what has no type."""
    said = {"rope_type": kind, "rope_theta": 1e4} | ({} if kind == "default" else {"factor": 2.0})
    said |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    said |= {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2} if kind == "longrope" else {}
    said |= {"original_max_position_embeddings": 16} if kind in ("llama3", "yarn", "longrope") else {}
    config, own = (
        case("llama"),
        {"yarn": {"attention_factor", "beta_fast", "mscale_all_dim"}, "longrope": {"attention_factor"}},
    )
    others = {name: its for name, its in OF_OTHERS.items() if name not in {*said, *own.get(kind, ())}}
    want = numbers_of(config | {"rope_parameters": said})
    assert others and numbers_of(config | {"rope_parameters": said | others}) == want
    with pytest.raises(ValueError, match=rf"rope_type='{kind}' has attributes that are not known: {{'doom': 1}}"):
        numbers_of(config | {"rope_parameters": said | others | {"doom": 1}})
    if kind == "default":
        with pytest.raises(ValueError, match=r"rope_type=None has attributes that are not known: {'factor': 4.0, "):
            numbers_of(config | {"rope_parameters": {"rope_theta": 1e4} | others})


def test_what_scores_grow_with_is_read_beside_any_scaling():
    """As DeepSeek's attention reads it, whatever the scaling is; without one it says nothing."""
    config = case("deepseek_v3")
    said = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 0.5}
    numbers = numbers_of(config | {"rope_parameters": said})
    assert (numbers.scaling, numbers.temperature) == (nn.LinearScaling(4.0), 0.5)
    assert back("deepseek_v3", numbers) == numbers
    scales = [attention.scores.scale for attention in nn.modules(models.shapes(numbers), nn.LatentAttention)]
    plain = [
        attention.scores.scale
        for attention in nn.modules(models.shapes(dataclasses.replace(numbers, temperature=0.0)), nn.LatentAttention)
    ]
    assert np.allclose(scales, np.multiply(plain, nn.yarn_magnitude(4.0, 0.5) ** 2)) and scales != plain
    assert numbers_of(config | {"rope_parameters": said | {"rope_type": "default"}}).temperature == 0.0


def test_what_stands_beside_types_of_layers_is_not_read():
    """Transformers leaves it there and turns by the types alone."""
    config = case("olmo3")
    said = config["rope_parameters"] | {"rope_type": "yarn", "factor": 4.0}
    assert numbers_of(config | {"rope_parameters": said}) == numbers_of(config)


@pytest.mark.parametrize("rounds", [True, False])
def test_whether_yarn_is_rounded_is_read_beside_the_types_of_layers(rounds):
    """Transformers looks it up there alone, and not where the rest of a type's scaling is."""
    said, config = {"truncate": False} | YARN, case("gemma3_text")
    said = {"full_attention": said, "sliding_attention": said, "truncate": rounds}
    numbers = numbers_of(config | {"rope_parameters": said})
    assert numbers.scaling.truncate is numbers.local_scaling.truncate is rounds
    assert back("gemma3_text", numbers) == numbers
    other = dataclasses.replace(numbers, local_scaling=dataclasses.replace(numbers.scaling, truncate=not rounds))
    with pytest.raises(ValueError, match="published configurations have one `truncate` for both"):
        PUBLISHED["gemma3_text"].write(other)


def test_the_last_of_an_odd_number_of_channels_turns_with_the_one_behind_it():
    config = dataclasses.replace(models.GLM4Config(61, 24, 2, 2, 1, 20, head_dim=10), rotary_fraction=0.5)
    found = models.decoders.part_rotary(config)
    frequencies = found.theta ** (-np.arange(0, found.dim, 2) / found.dim)
    assert found.dim == 6 and np.allclose(frequencies, config.theta ** (-np.arange(0, 5, 2) / 5))


def test_heads_without_rotary_positions_may_have_an_odd_number_of_channels():
    config = dataclasses.replace(models.preset("nemotron-h-byte-500k"), head_dim=7)  # pyright: ignore[reportCallIssue]
    assert {its.query.output_shape[1] for its in nn.modules(models.shapes(config), nn.Attention)} == {7}


@pytest.mark.parametrize(
    "name, field",
    [
        *((f"{name}-byte-500k", "head_dim") for name in ("cohere", "ernie4.5", "gemma3", "llama4", "olmo3")),
        ("gemma4-byte-500k", "global_head_dim"),
        ("deepseek-v3-byte-500k", "rope_dim"),
    ],
)
def test_an_odd_number_of_channels_that_turn_is_refused_by_its_name(name, field):
    config = dataclasses.replace(models.preset(name), **{field: 7})
    with pytest.raises(ValueError, match=rf"Config\({field}=7\): channels are rotated in pairs; take an even {field}"):
        models.shapes(config)


@pytest.mark.by_default("said0-reading0", "said3-reading3")
@pytest.mark.parametrize(
    "said, reading",
    [
        ({}, ()),
        ({"index_topk_freq": 3}, (2, 3, 5, 6)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, (1, 2, 3, 5, 6)),
        ({"index_topk_freq": 3, "index_topk_pattern": "FSSFFFS"}, (1, 2, 6)),
        ({"index_topk_pattern": ["full"] * 6 + ["shared"]}, (6,)),
        ({"indexer_types": ["full", "shared"] * 3 + ["full"], "index_topk_pattern": "FFFFFFF"}, (1, 3, 5)),
    ],
)
def test_layers_that_read_a_choice_of_keys_are_those_of_transformers(said, reading):
    config = {name: its for name, its in RECORDED["glm_moe_dsa shared choices"]["config"].items()}
    config.pop("indexer_types")
    numbers = numbers_of(config | said)
    assert numbers.reading_layers == reading and back("glm_moe_dsa", numbers) == numbers
    held = [its.indexer is None for its in nn.modules(models.shapes(numbers), nn.LatentAttention)]
    assert any(held) == bool(reading)
    if theirs := sys.modules.get("transformers"):
        types = theirs.AutoConfig.for_model(config.pop("model_type"), **config | said).indexer_types
        assert types == ["shared" if layer in reading else "full" for layer in range(7)]


@pytest.mark.parametrize("said", [["shared"] + ["full"] * 6, ["full"] * 6, ["full"] * 6 + ["none"]])
def test_layers_that_can_read_no_choice_are_refused(said):
    config = RECORDED["glm_moe_dsa shared choices"]["config"]
    with pytest.raises(ValueError, match=r"config.json: indexer_types=.* must have 7 items"):
        numbers_of(config | {"indexer_types": said})
    with pytest.raises(ValueError, match=r"indexer_types=.*all 3 layers must be 'full'"):
        numbers_of(
            case("deepseek_v32")
            | {"num_hidden_layers": 3, "layer_types": None, "mlp_layer_types": None}
            | {"indexer_types": ["full", "shared", "full"]}
        )
    numbers = dataclasses.replace(numbers_of(config), reading_layers=(0, 2))
    with pytest.raises(ValueError, match=r"GLMMoEDSAConfig\(reading_layers=\(0, 2\)\): layer 0 has no earlier layer"):
        models.shapes(numbers)


@pytest.mark.parametrize(
    "family, said, field, value",
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}, "layer_scales", True),
        ("olmoe", {"clip_qkv": 8}, "clip", 8.0),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}, "window", 5),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 5}, "window", None),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}, "window_layers", (0, 2)),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": None, "max_window_layers": 2},
            "window_layers",
            (0,),
        ),
        ("qwen3_5_moe_text", {"intermediate_size": 17}, "mlp", 12),
        ("llama", {"hidden_act": "gelu_python_tanh"}, "activation", "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu"}, "activation", "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu_python"}, "activation", "gelu"),
        ("gemma", {"hidden_act": "relu2", "hidden_activation": "relu2"}, "activation", "relu_squared"),
        ("nemotron_h", {"mamba_hidden_act": "swish"}, "net_activation", "silu"),
        ("nemotron_h", {"mamba_hidden_act": "tanh"}, "net_activation", "tanh"),
        ("nemotron", {"rope_percent": 0.5}, "rotary_fraction", 1.0),  # not read by transformers
        ("gpt_bigcode", {"num_attention_heads": 3, "n_head": None, "multi_query": False}, "kv_heads", 3),
        ("gpt_neo", {"num_hidden_layers": 3, "num_layers": None}, "layers", 3),
        ("bloom", {"n_embed": 48, "hidden_size": 24}, "embed", 48),
        ("gpt_neo", {"embed_dropout": 0.2, "resid_dropout": 0.1}, "dropout", 0.1),
        ("falcon", {"num_kv_heads": 3, "multi_query": True}, "kv_heads", 1),  # ignored with `multi_query`
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "max_bias", 16.0),
        ("mpt", {"attn_config": {"clip_qkv": 0}}, "clip", None),
        ("ernie4_5_moe", {"moe_k": 3, "num_experts_per_tok": 1}, "top_k", 1),
        ("kimi_linear", {"num_experts_per_token": 3, "num_experts_per_tok": 1}, "top_k", 3),
        ("kimi_linear", {"moe_renormalize": True, "norm_topk_prob": False}, "normalize", True),
    ],
)
def test_an_option_is_read_and_written(family, said, field, value):
    numbers = numbers_of(case(family) | said)
    assert getattr(numbers, field) == value and back(family, numbers) == numbers


def test_two_names_of_activations_that_differ_are_refused():
    with pytest.raises(
        ValueError, match=r"hidden_activation='gelu_pytorch_tanh' is not supported .* supports 'relu'\.$"
    ):
        numbers_of(case("gemma") | {"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"})


def test_exaones_older_names_of_attributes_are_read():
    """The publisher's own program has three names that transformers' configurations do not have."""
    older = {
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }
    config: dict[str, Any] = RECORDED["exaone biased"]["config"]
    renamed = {older.get(name, name): value for name, value in config.items()}
    assert numbers_of(renamed) == numbers_of(config) != numbers_of(renamed | {"layer_norm_epsilon": 0.5})
    with pytest.raises(ValueError, match="attributes that this family does not know: .*hidden_act="):
        numbers_of(renamed | {"hidden_act": "silu"})


COMMAND_A_PLUS: dict[str, Any] = {
    "model_type": "cohere2_moe",
    **dict.fromkeys(("hidden_size", "intermediate_size", "sliding_window"), 4096),
    **{"num_hidden_layers": 32, "num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128},
    **{"vocab_size": 262_144, "max_position_embeddings": 200_000, "layer_norm_eps": 1e-5, "rms_norm_eps": None},
    **{"num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 4, "norm_topk_prob": True},
    **{"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "average", "rope_theta": 50_000},
    **{"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "first_k_dense_replace": 0},
    **{"attention_bias": False, "logit_scale": 1.0, "hidden_act": "silu", "tie_word_embeddings": True},
    # Attributes of the publisher's own program.
    **{"norm_type": "layer_norm", "transformer_block_type": "parallel", "position_embedding_type": "rope_gptj"},
    **{"rotary_pct": 1.0, "use_embedding_sharing": True, "use_parallel_block": True, "use_qk_norm": False},
}


def test_command_a_plus_is_read_with_its_publishers_attributes():
    config = numbers_of(COMMAND_A_PLUS)
    assert config == PUBLISHED["cohere2_moe"].presets["command-a-plus"]
    assert config != numbers_of(COMMAND_A_PLUS | {"norm_topk_prob": False})
    with_rms = COMMAND_A_PLUS | {"rms_norm_eps": 1e-6, "norm_type": "rms_norm"}
    assert numbers_of(with_rms) == dataclasses.replace(config, rms_eps=1e-6)
    for refused, changes in (
        ("norm_type='layer_norm'", {"rms_norm_eps": 1e-6}),
        ("norm_type='rms_norm'", {"norm_type": "rms_norm"}),
        ("use_parallel_block=False", {"use_parallel_block": False}),
        ("rope_scaling=.*", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ):
        with pytest.raises(ValueError, match=f"{refused}(: transformers ignores it| is not supported)"):
            numbers_of(COMMAND_A_PLUS | changes)


@pytest.mark.grid
def test_a_folder_of_ax_k1_is_read_as_it_is_published(tmp_path):
    """Published folders have fused experts, no biases of choices, and norms after dense layers, which nothing reads."""
    arrays, ids = write(tmp_path, "axk1 plain"), jnp.asarray(ids_of(61), jnp.int32)
    with_biases, expert = run(models.load(tmp_path), ids), "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    biases = {name: np.zeros_like(array) for name, array in arrays.items() if name.endswith("correction_bias")}
    save_file(arrays | biases, tmp_path / "model.safetensors")
    with_zeros = run(models.load(tmp_path), ids)
    published = {name: array for name, array in arrays.items() if name not in biases and ".experts." not in name}
    published["model.layers.0.post_mlp_layernorm.weight"] = np.full(24, 2.0, np.float32)
    experts = range(RECORDED["axk1 plain"]["config"]["n_routed_experts"])
    for layer in range(1, RECORDED["axk1 plain"]["config"]["num_hidden_layers"]):
        gates, ups, downs = (
            np.stack([arrays[expert.format(layer, number, part)] for number in experts])
            for part in ("gate", "up", "down")
        )
        published[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gates, ups], 1)
        published[f"model.layers.{layer}.mlp.experts.down_proj"] = downs
    save_file(published, tmp_path / "model.safetensors")
    config = RECORDED["axk1 plain"]["config"] | {"model_type": "AXK1", "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"left unread: model.layers.0. \(1\)"):
        model = models.load(tmp_path)
    assert not models.read_config(tmp_path).balanced  # pyright: ignore[reportAttributeAccessIssue]
    assert jnp.array_equal(run(model, ids), with_zeros) and not close(with_zeros, np.asarray(with_biases), 1e-2)
    with pytest.raises(ValueError, match="model.layers.1.post_mlp_layernorm.weight"):
        del published["model.layers.1.post_mlp_layernorm.weight"]
        save_file(published, tmp_path / "model.safetensors")
        models.load(tmp_path)
