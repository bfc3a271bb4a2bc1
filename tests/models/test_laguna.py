"""Laguna's configurations, and values that are refused because no model of the family has them."""

import dataclasses
from typing import Any

import jax
import pytest
from haste import same_trees
from nn_reference import random_module
from safetensors.numpy import load_file
from test_attributes import numbers_of
from test_published import RECORDED

from eqformer import models


CASE = RECORDED["laguna heads of layers"]["config"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layer_types", ["full_attention", "conv"] * 2, "each one of"),
        ("layer_types", ["full_attention"] * 2, "must have 4 items"),
        ("mlp_layer_types", ["dense", "hash_moe"] * 2, "each one of"),
        ("num_attention_heads_per_layer", [6, 6], "must have a number of heads for each of the model's 4 layers"),
        ("num_attention_heads_per_layer", [6, 0, 6], "a whole number of at least 1"),
        ("gating", False, "is not supported"),
        ("gating", "per-token", "is not supported"),
        ("moe_apply_router_weight_on_input", True, "is not supported"),
        ("moe_router_logit_softcapping", 30.0, "is not supported"),
        ("norm_topk_prob", False, "is not supported"),
        ("shared_expert_intermediate_size", 0, "shared_expert_intermediate_size=0"),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}, "do not state sliding_attention"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "they must be stated by type of layer"),
        ("rope_theta", 77.0, "state the base in rope_parameters"),
    ],
)
def test_values_that_no_model_has_are_refused(name, value, words):
    numbers_of(CASE)
    config = CASE if name != "rope_theta" else {key: CASE[key] for key in CASE if key != "rope_parameters"}
    with pytest.raises(ValueError, match=rf"^config.json.*{words}"):
        numbers_of(config | {name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_heads": (8, 7, 8, 8)}, "kv_heads must divide heads"),
        ({"layer_heads": (8, 8)}, "give the number of heads of each layer"),
        ({"top_k": 8}, "top_k"),
        ({"rotary_fraction": 0.1}, "rotary_fraction=0.1.*0 channels would be rotated"),
        ({"local_rotary_fraction": 0.1}, "local_rotary_fraction=0.1.*0 channels would be rotated"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        models.shapes(dataclasses.replace(numbers_of(CASE), **change))


@pytest.mark.parametrize("by_heads", [True, False])
def test_gates_of_heads_and_of_channels_are_published_by_one_name(by_heads, tmp_path):
    """A folder that states the other kind is refused by the shape of its arrays."""
    config: Any = dataclasses.replace(numbers_of(CASE), by_heads=by_heads)
    model: Any = random_module(models.build, config, key=jax.random.key(0))
    models.save(model, folder := tmp_path / "laguna", config=config)
    loaded: Any = models.load(folder)
    gate = load_file(folder / "model.safetensors")["model.layers.0.self_attn.g_proj.weight"]
    assert same_trees(model, loaded) and gate.shape == (8 if by_heads else 64, 24)
    text, names = (folder / "config.json").read_text(), ("per-head", "per-element")
    (folder / "config.json").write_text(text.replace(names[not by_heads], names[by_heads]))
    with pytest.raises(ValueError, match="g_proj"):
        models.load(folder)
