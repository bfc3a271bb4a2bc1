"""MiMo-V2-Flash's configurations as its publisher writes them, and values that are refused."""

import dataclasses

import pytest
from test_attributes import numbers_of
from test_published import RECORDED

from eqformer import models


# Attributes of the publisher's own program, by which the default layers and sizes are said again.
SAID = {"hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1], "sliding_window_size": 6}
SAID |= {"swa_num_key_value_heads": 2, "swa_num_attention_heads": 6, "swa_head_dim": 8, "swa_v_head_dim": 5}
SAID |= {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5}
SAID |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None}
SAID |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": None}
NEWER = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")
CASE = RECORDED["mimo_v2_flash windows"]["config"]
WITHOUT = {name: value for name, value in CASE.items() if name not in NEWER}


def test_the_publishers_own_attributes_say_the_same():
    numbers = numbers_of(CASE)
    assert numbers_of(WITHOUT | SAID) == numbers and numbers.window == 7  # with the query's own token
    others = numbers_of(WITHOUT | SAID | {"hybrid_layer_pattern": [1, 0, 0, 1], "moe_layer_freq": [0, 1, 0, 1]})
    assert others.window_layers == (0, 3) and (others.first_dense, others.dense_layers) == (1, (2,))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hybrid_layer_pattern", [0, 1], "must have a flag for each of the model's 4 layers"),
        ("moe_layer_freq", [0, 1, 1, 2], "each item a whole number of at most 1"),
        ("layer_types", ["full_attention", "conv"] * 2, "each one of"),
        ("layer_types", ["full_attention"] * 3, "must have 4 items"),
        ("mlp_layer_types", ["dense", "hash_moe"] * 2, "each one of"),
        ("swa_num_key_value_heads", 1, "this family has 2 in all layers with a window"),
        ("swa_head_dim", 4, "this family has 8 in all layers with a window"),
        ("rope_theta", 77.0, "state the base in rope_parameters"),
        ("swa_rope_theta", 77.0, "state the base in rope_parameters"),
        ("partial_rotary_factor", 0.5, "is not supported"),
        ("add_full_attention_sink_bias", True, "is not supported"),
        ("n_shared_experts", 1, "is not supported"),
        ("n_shared_experts", 2, "is not supported"),
        ("scoring_func", "softmax", "is not supported"),
        ("v_head_dim", 0, "v_head_dim=0"),
        ("sliding_window_size", 0, "sliding_window_size=0"),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}, "do not state sliding_attention"),
    ],
)
def test_values_that_no_model_has_are_refused(name, value, words):
    with pytest.raises(ValueError, match=rf"^config.json.*{words}"):
        numbers_of(WITHOUT | SAID | {name: value})


@pytest.mark.parametrize(("name", "size"), [("head_dim", 192), ("v_head_dim", 128), ("num_key_value_heads", 8)])
def test_sizes_of_windows_follow_from_defaults_too(name, size):
    config = {key: value for key, value in (WITHOUT | SAID).items() if key != name}
    with pytest.raises(
        ValueError, match=rf"swa_{name}=\d+, {name}=\d+: this family has {size} in all layers with a window"
    ):
        numbers_of(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_heads": 4}, "kv_heads must divide heads"),  # of which layers with a window have twice as many
        ({"top_k": 9}, "top_k"),
        ({"shared": 2}, r"^MiMoV2FlashConfig\(shared=2\): .* no shared experts; give shared=0"),
        ({"groups": 3}, "divides 8 experts"),
        ({"rotary_fraction": 0.1}, "rotary_fraction=0.1.*0 channels would be rotated"),
        ({"local_rotary_fraction": 0.1}, "local_rotary_fraction=0.1.*0 channels would be rotated"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        models.shapes(dataclasses.replace(numbers_of(CASE), **change))
