"""GLM-5.3-Flash's older and newer attributes, and lists of layers that are refused."""

import dataclasses
import sys
from typing import Any

import pytest
from test_attributes import numbers_of
from test_options import back
from test_published import RECORDED

from eqformer import models, nn


NET_SIZES: dict[str, Any] = {"num_heads": 6, "head_dim": 10, "short_conv_kernel_size": 5}
BOUNDS: list[tuple[dict[str, Any], float | None]] = [
    ({}, -5.0),
    ({"gate_lower_bound": -2.0}, -2.0),
    ({"gate_lower_bound": None}, -5.0),
    ({"gate_lower_bound": None, "safe_gate": False}, None),
    ({"gate_lower_bound": -3.0, "safe_gate": False}, -3.0),
]


def recorded(case: str) -> dict[str, Any]:
    """A copy of the configuration of a case."""
    return dict(RECORDED[f"glm5_next_text {case}"]["config"])


def transformers_config(config: dict[str, Any]) -> Any:
    """The configuration as transformers reads it; None where transformers is not imported."""
    config = dict(config)
    library = sys.modules.get("transformers")
    return library.AutoConfig.for_model(config.pop("model_type"), **config) if library else None


@pytest.mark.parametrize("attributes, bound", BOUNDS)
def test_the_older_object_of_nets_takes_precedence(attributes, bound):
    config = recorded("plain") | {"linear_attn_config": NET_SIZES | {"kda_layers": [1, 3]} | attributes}
    numbers = numbers_of(config)
    assert (numbers.net_heads, numbers.net_head_dim, numbers.taps) == (6, 10, 5)
    assert numbers.lowest_log_decay == bound and back("glm5_next_text", numbers) == numbers
    if theirs := transformers_config(config):
        assert (theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim) == (6, 10, 5)
        assert theirs.linear_lower_bound == bound


@pytest.mark.parametrize("attributes", [{"num_heads": "6"}, {"kda_layers": 3}, {"gloom": 1}])
def test_the_older_object_of_nets_is_checked(attributes):
    with pytest.raises(ValueError, match=rf"^config.json, linear_attn_config: .*{next(iter(attributes))}="):
        numbers_of(recorded("plain") | {"linear_attn_config": NET_SIZES | attributes})


@pytest.mark.parametrize(
    "attributes, refusal",
    [
        ({"linear_lower_bound": 0.5}, "config.json: linear_lower_bound=0.5"),
        ({"linear_attn_config": {"gate_lower_bound": 0.0}}, "config.json, linear_attn_config: gate_lower_bound=0.0"),
        (
            {"linear_attn_config": {"gate_lower_bound": "low"}},
            "config.json, linear_attn_config: gate_lower_bound='low'",
        ),
        ({"linear_attn_config": NET_SIZES, "linear_lower_bound": 2.0}, "config.json: linear_lower_bound=2.0"),
    ],
)
def test_a_bound_of_decays_that_is_not_negative_is_refused_by_its_own_name(attributes, refusal):
    with pytest.raises(ValueError, match=rf"^{refusal}: it must be"):
        numbers_of(recorded("plain") | attributes)


def test_full_attention_is_indexed_attention():
    config = recorded("plain")
    types = [name.replace("indexed", "full") for name in config["layer_types"]]
    assert types == ["linear_attention", "full_attention", "linear_attention"]
    numbers = numbers_of(config | {"layer_types": types})
    assert numbers == numbers_of(config) and numbers.attention_layers == (1,)
    assert numbers != numbers_of(config | {"layer_types": types[1:] + types[:1]})  # the control
    with pytest.raises(ValueError, match=r"^config.json: layer_types=.*must have 3 items"):
        numbers_of(config | {"layer_types": ["linear_attention", "sparse_attention", "linear_attention"]})
    if theirs := transformers_config(config | {"layer_types": types}):
        assert theirs.layer_types == config["layer_types"]


@pytest.mark.parametrize(
    "attributes, reading",
    [
        ({}, ()),
        ({"index_topk_pattern": "FSFF"}, (1,)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (1,)),
    ],
)
def test_layers_that_read_a_choice_are_those_of_transformers(attributes, reading):
    config = recorded("shared choices")
    config.pop("indexer_types")
    numbers = numbers_of(config | attributes)
    assert numbers.reading_layers == reading and back("glm5_next_text", numbers) == numbers
    lacks_indexer = [layer.indexer is None for layer in nn.modules(models.shapes(numbers), nn.LatentAttention)]
    assert any(lacks_indexer) == bool(reading)
    if theirs := transformers_config(config | attributes):
        modes = [(layer, theirs.indexer_types[layer]) for layer in numbers.attention_layers]
        assert modes == [(layer, "shared" if layer in reading else "full") for layer in numbers.attention_layers]


@pytest.mark.parametrize(
    "modes, refusal",
    [
        (["full"] * 3, "must have 4 items"),
        (["full", "none", "full", "full"], "must have 4 items"),
        (["shared", "full", "full", "full"], r"layers \[0\] read the keys"),
        (["shared", "shared", "full", "full"], r"layers \[0, 1\] read the keys"),
        (["full", "full", "full", "shared"], r"layers \[3\] read the keys"),  # after a layer without attention
    ],
)
def test_indexer_types_without_a_choice_to_read_are_refused(modes, refusal):
    with pytest.raises(ValueError, match=rf"^config.json: indexer_types=.*{refusal}"):
        numbers_of(recorded("shared choices") | {"indexer_types": modes})


def test_reading_layers_without_a_choice_to_read_are_refused():
    numbers = numbers_of(recorded("shared choices"))
    for layers in ((0,), (3,), (1, 2)):
        with pytest.raises(ValueError, match=r"^GLM5NextConfig\(reading_layers=.*the layer before it must have an"):
            models.shapes(dataclasses.replace(numbers, reading_layers=layers))


def test_pools_that_do_not_fill_a_choice_are_refused():
    numbers = dataclasses.replace(numbers_of(recorded("plain")), index_top_k=7, index_pool=3)
    with pytest.raises(ValueError, match=r"^GLM5NextConfig\(index_top_k=7, index_pool=3\): .*a multiple of index_pool"):
        models.shapes(numbers)
