"""Step 3.5's configurations and arrays as its publishers write them, and values that are refused."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import pytest
from haste import same_trees
from safetensors.numpy import load_file, save_file
from test_attributes import numbers_of
from test_published import RECORDED

from eqformer import models


CASE = RECORDED["step3p5 padded lists"]["config"]
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 32.0}
# The publishers' attributes of a model with one predictor, and transformers' attributes of the same model.
OLDER = {
    "rope_theta": [5e3, 1e4, 5e3, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
    "rope_scaling": LLAMA3,
    "yarn_only_types": ["full_attention"],
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "moe_layers_enum": "1,2",
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 9, "head_dim": 8}
    | {"num_attention_groups": 3, "true_head_dim": 8},
    "num_attention_groups": 3,
    "num_nextn_predict_layers": 1,
    "swiglu_limits": [0.0, 0.0, 7.0, 7.0],
    "swiglu_limits_shared": [0.0, 0.0, 16, 0.0],
    "moe_num_experts": 7,
    "moe_top_k": 3,
    "share_expert_dims": 14,
    "zero_centered": True,
}
NEWER = {
    "rope_parameters": {
        "full_attention": LLAMA3 | {"rope_theta": 5e3, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_sliding_attention_heads": 9,
    "num_key_value_heads": 3,
    "swiglu_limits": [None, None, 7.0],
    "swiglu_limits_shared": [0.0, 0.0, 16],
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "share_expert_dim": 14,
}
OTHERS = {name: value for name, value in CASE.items() if name not in {*OLDER, *NEWER, "per_layer_config"}}


def test_the_publishers_attributes_mean_what_transformers_makes_of_them():
    older, newer = numbers_of(OTHERS | OLDER), numbers_of(OTHERS | NEWER)
    assert older == newer and older.local_heads == 9 and older.limits == (0.0, 0.0, 7.0)
    assert numbers_of(OTHERS | OLDER | {"moe_layers_enum": [0, 2]}).mixtures == (True, False, True)
    assert older != numbers_of(OTHERS | OLDER | {"partial_rotary_factors": [0.5, 0.5, 0.5, 1.0]})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "per_layer_config",
            {"1": {"num_attention_heads": 9}},
            r"layer 0 has \{\}, but with num_sliding_attention_heads=9",
        ),
        ("per_layer_config", {"0": {"num_attention_heads": 9}, "1": {"head_dim": 4}}, "layer 1 has"),
        ("per_layer_config", CASE["per_layer_config"] | {"7": {"num_attention_heads": 9}}, "no such layers"),
        ("swiglu_limits", [0.5, 0.5], "must have a bound for each of the model's 3 layers"),
        ("swiglu_limits", [0.5, -0.5, 0.5], "swiglu_limits"),
        ("gating", "per-element", "is not supported"),
        ("use_bidirectional_attention", True, "is not supported"),
        ("attention_other_setting", {"num_attention_heads": 9, "head_dim": 4}, "only num_attention_heads may differ"),
        ("layer_types", ["sliding_attention", "conv", "sliding_attention"], "each one of"),
    ],
)
def test_values_that_no_model_has_are_refused(name, value, words):
    numbers_of(CASE)
    with pytest.raises(ValueError, match=rf"^config.json.*{words}"):
        numbers_of(CASE | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rope_theta", [5e3, 1e4, 6e3, 1e4], "layers of the type full_attention must have the same value"),
        ("rope_theta", [5e3, 1e4], "must have a value for each of the model's 3 layers"),
        ("moe_layers_enum", "1,two", "must list indices of layers"),
    ],
)
def test_lists_that_no_model_has_are_refused(name, value, words):
    with pytest.raises(ValueError, match=rf"^config.json: {name}.*{words}"):
        numbers_of(OTHERS | OLDER | {name: value})


def test_bounds_of_other_layers_than_the_models_are_refused():
    with pytest.raises(ValueError, match="give the bound of each layer"):
        models.shapes(dataclasses.replace(numbers_of(CASE), limits=(0.5,)))


@pytest.mark.grid
def test_arrays_by_the_publishers_names_are_read_and_predictors_are_not(tmp_path):
    folder = tmp_path / "step"
    config = models.preset("step3p5-byte-500k")
    model: Any = eqx.filter_jit(models.build)(config, key=jax.random.key(0))
    models.save(model, folder, config=config)
    arrays = load_file(folder / "model.safetensors")
    older = {}
    for name, array in arrays.items():
        parts = {"moe.gate_proj": array[:, :32], "moe.up_proj": array[:, 32:]} if "gate_up_proj" in name else {}
        for part, half in parts.items():
            older[name.replace("mlp.experts.gate_up_proj", f"{part}.weight")] = half.copy()
        replaced = name.replace("mlp.experts.down_proj", "moe.down_proj.weight").replace(
            "mlp.shared_experts", "share_expert"
        )
        replaced = replaced.replace("mlp.gate.e_score_correction_bias", "moe.router_bias").replace(
            "mlp.gate.", "moe.gate."
        )
        older |= {} if parts else {replaced: array}
    assert {*older}.isdisjoint(name for name in arrays if "experts" in name or ".gate." in name)
    older["model.layers.4.enorm.weight"] = arrays["model.norm.weight"]
    save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"model\.layers\.4"):
        loaded = models.load(folder)
    assert same_trees(model, loaded)
    older["model.layers.1.moe.router_bias"] += 1.0
    save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"model\.layers\.4"):
        assert not same_trees(model, models.load(folder))
