"""Kimi K3's folders: the multimodal model, the padded vector of rates, experts in MXFP4, and hostile configurations."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from family_weights import ids_of, weight
from safetensors.numpy import load_file, save_file
from test_attributes import numbers_of
from test_options import back
from test_published import RECORDED

from eqformer import models


KIND = "kimi_k3_text"
RATES = "model.layers.0.self_attn.A_log"


def recorded(case: str = "plain") -> dict[str, Any]:
    """Return a copy of the configuration of a recorded case."""
    return json.loads(json.dumps(RECORDED[f"{KIND} {case}"]["config"]))


def multimodal() -> dict[str, Any]:
    """Return the multimodal model's configuration, as published: it holds the text model's attributes."""
    text = recorded() | {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    whole = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": text}
    return whole | {"vision_config": {"vt_hidden_size": 8}, "media_placeholder_token_id": 3}


def write(folder, config, arrays):
    """Write a published folder with this configuration and these arrays; return its path."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors")
    return folder


def arrays_of(case: str = "plain") -> dict[str, np.ndarray]:
    """Return the arrays of a recorded case."""
    return {name: weight(name, shape) for name, shape in RECORDED[f"{KIND} {case}"]["shapes"].items()}


@jax.jit
def run(model: Any, ids: np.ndarray) -> jax.Array:
    """Return the logits of ids; models of one structure share a compiled program."""
    return model(ids)[0]


def logits_in(folder, **options):
    """Return the logits of the model in a folder."""
    model = models.load(folder, **options)
    return np.asarray(run(model, ids_of(model.vocab)[:1]))


@pytest.mark.grid
def test_a_multimodal_folder_has_the_text_model(tmp_path):
    expected = logits_in(write(tmp_path / "text", recorded(), arrays_of()))
    inside = {f"language_model.{name}": array for name, array in arrays_of().items()}
    inside |= {
        "vision_tower.patch.weight": np.zeros(3, np.float32),
        "mm_projector.proj.weight": np.zeros(3, np.float32),
    }
    whole = write(tmp_path / "whole", multimodal(), inside)
    with pytest.warns(UserWarning, match="left unread: mm_projector.*vision_tower"):
        assert np.array_equal(logits_in(whole), expected)
    inside = {name: array for name, array in inside.items() if name.startswith("language_model.")}
    inside["language_model.model.output_attn_res_proj.weight"] *= -1  # the control
    other = write(tmp_path / "other", multimodal(), inside)
    assert not np.allclose(logits_in(other), expected, atol=1e-2)


def with_four_heads() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a configuration and arrays with fewer heads than a head has channels: the rates end with zeros."""
    config, arrays = recorded(), arrays_of()
    config["linear_attn_config"]["num_heads"] = 4
    for name in [name for name in arrays if RATES.rpartition(".")[0] in name or ".layers.2.self_attn" in name]:
        array = arrays[name]
        if name.endswith("A_log"):
            array = np.where(np.arange(8) < 4, array, 0).astype(np.float32)
        elif name.endswith("o_proj.weight"):
            array = array[:, :32]
        elif not name.endswith(("f_a_proj.weight", "o_norm.weight")):
            array = array[: array.shape[0] // 2]
        arrays[name] = np.ascontiguousarray(array)
    return config, arrays


def test_rates_are_published_with_zeros_at_their_end(tmp_path):
    config, arrays = with_four_heads()
    folder = write(tmp_path / "folder", config, arrays)
    model, numbers = models.load(folder), models.read_config(folder)
    models.save(model, tmp_path / "saved", config=numbers)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == arrays.keys()
    assert all(np.array_equal(saved[name], array) for name, array in arrays.items())
    arrays[RATES][-1] = 0.5
    with pytest.raises(ValueError, match=r"A_log: the numbers after the first 4 must be zeros"):
        models.load(write(tmp_path / "wrong", config, arrays))
    arrays[RATES] = arrays[RATES][:4]
    with pytest.raises(ValueError, match=r"A_log: it has shape \(4,\), and the model's is \(8,\)"):
        models.load(write(tmp_path / "short", config, arrays))


@pytest.mark.grid
def test_experts_are_read_in_mxfp4(tmp_path):
    config, arrays = multimodal(), {f"language_model.{name}": array for name, array in arrays_of().items()}
    text, draw = config["text_config"], np.random.default_rng(0)
    text |= {"routed_expert_hidden_size": 32, "moe_intermediate_size": 64}
    scheme = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    scheme |= {"dynamic": False, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": scheme, "format": "mxfp4-pack-quantized"}
    text["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"} | {
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\..*", "re:.*routed_expert_.*"]
        + ["re:.*_res_proj.*", "lm_head"],
    }
    plain = dict(arrays)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for name in list(arrays):
        shape = {"w1": (64, 32), "w3": (64, 32), "w2": (32, 64)}.get(name.split(".")[-2])
        if "routed_expert_" in name:
            sizes = {"down": (32, 24), "norm": (32,), "up": (24, 32)}
            arrays[name] = plain[name] = weight(
                name, sizes[name.split("routed_expert_")[1].split("_")[0].split(".")[0]]
            )
        elif "shared_experts" in name:
            arrays[name] = plain[name] = weight(name, (24, 64) if "down_proj" in name else (64, 24))
        elif shape is not None:
            codes, scales = draw.integers(0, 16, shape), draw.integers(121, 126, (shape[0], shape[1] // 32))
            signs = np.where(codes > 7, -1, 1) * values[codes % 8]
            plain[name] = (signs * np.repeat(np.exp2(scales - 127.0), 32, axis=1)).astype(np.float32)
            del arrays[name]
            stem = name.removesuffix("weight")
            arrays[f"{stem}weight_packed"] = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
            arrays[f"{stem}weight_scale"] = scales.astype(np.uint8)
    packed = write(tmp_path / "packed", config, arrays)
    del text["quantization_config"]
    wanted = logits_in(write(tmp_path / "plain", config, plain))
    assert np.allclose(logits_in(packed), wanted, atol=1e-5 * np.std(wanted))


NETS = recorded()["linear_attn_config"]
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "silu"}, "hidden_act"),
    ({"mla_use_output_gate": False}, "mla_use_output_gate"),
    ({"mla_use_nope": False}, "mla_use_nope"),
    ({"latent_moe_use_norm": False}, "latent_moe_use_norm"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ({"attn_res_block_size": 0}, "attn_res_block_size"),
    ({"attn_res_block_size": None}, "attn_res_block_size"),
    ({"attn_res_block_size": 1.5}, "attn_res_block_size"),
    ({"activation_situ_beta": 0}, "activation_situ_beta"),
    ({"activation_situ_beta": None}, "activation_situ_beta"),
    ({"activation_situ_linear_beta": -1.0}, "activation_situ_linear_beta"),
    ({"routed_expert_hidden_size": None}, "routed_expert_hidden_size"),
    ({"linear_attn_config": NETS | {"gate_lower_bound": None}}, "gate_lower_bound"),
    ({"linear_attn_config": NETS | {"gate_lower_bound": 0.5}}, "gate_lower_bound"),
    ({"linear_attn_config": NETS | {"use_full_rank_gate": False}}, "use_full_rank_gate"),
    ({"linear_attn_config": NETS | {"kda_layers": [1]}}, "kda_layers"),
    ({"linear_attn_config": NETS | {"full_attn_layers": [2, 2]}}, "full_attn_layers"),
    ({"linear_attn_config": NETS | {"full_attn_layers": [0]}}, "full_attn_layers"),
    ({"linear_attn_config": NETS | {"num_heads": 9}}, "net_heads=9"),
    ({"linear_attn_config": NETS | {"gloom": 1}}, "gloom"),
    ({"linear_attn_config": None}, "num_heads"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ({"n_routed_experts": 8}, "n_routed_experts"),
]


@pytest.mark.parametrize("name", ["attn_res_block_size", "activation_situ_beta", "latent_moe_use_norm", "mla_use_nope"])
def test_parts_that_are_off_by_default_must_be_stated(name):
    config = recorded()
    del config[name]
    with pytest.raises(ValueError, match=name):
        numbers_of(config)


@pytest.mark.parametrize("attributes, name", HOSTILE, ids=lambda value: str(value)[:60])
def test_a_hostile_configuration_is_refused_by_name(attributes, name):
    with pytest.raises(ValueError, match=name):
        numbers_of(recorded() | attributes)


def test_layers_without_a_list_of_nets_are_nets():
    config = recorded()
    numbers = numbers_of(config)
    del config["linear_attn_config"]["kda_layers"]
    assert numbers_of(config) == numbers == back(KIND, numbers) and numbers.attention_layers == (1,)


def test_the_released_model_is_the_preset():
    full = [*range(4, 93, 4), 93]
    nets = {"num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True}
    nets |= {"gate_lower_bound": -5.0, "full_attn_layers": full}
    nets["kda_layers"] = [layer for layer in range(1, 94) if layer not in full]
    # The released `text_config`, as third parties quote it.
    config = {"model_type": KIND, "vocab_size": 163_840, "hidden_size": 7168, "intermediate_size": 33_792}
    config |= {"num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96, "head_dim": 128}
    config |= {"moe_intermediate_size": 3072, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2}
    config |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_expert_hidden_size": 3584}
    config |= {"latent_moe_use_norm": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    config |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True}
    config |= {"attn_res_block_size": 12, "hidden_act": "situ", "activation_situ_beta": 4.0, "rope_theta": 10_000.0}
    config |= {"activation_situ_linear_beta": 25.0, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 1_048_576, "tie_word_embeddings": False, "moe_renormalize": True}
    config |= {"moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0, "num_expert_group": 1}
    config |= {"topk_group": 1, "topk_method": "noaux_tc", "use_grouped_topk": True, "linear_attn_config": nets}
    assert numbers_of(config) == models.preset("kimi-k3")
