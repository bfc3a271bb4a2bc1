"""Configurations that state rotary positions twice, or that releases of transformers read differently."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_attributes import case, numbers_of
from test_published import RECORDED

from eqformer import models, nn


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def without(family: str, *names: str) -> dict[str, Any]:
    return {name: its for name, its in case(family).items() if name not in ("rope_parameters", *names)}


def test_a_scaling_beside_rope_parameters_is_refused_unless_it_is_theirs():
    """Added by hand to what transformers 5 saved, it is read there without their base; here it was passed over."""
    config = without("qwen3") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert numbers_of(config).scaling is None
    with pytest.raises(
        ValueError, match=r"^config.json: rope_scaling=\{.*yarn.*but rope_parameters have .*give one of"
    ):
        numbers_of(config | {"rope_scaling": YARN})
    both = YARN | {"rope_theta": 1e6}
    assert numbers_of(config | {"rope_scaling": both | {"type": "yarn"}, "rope_parameters": both}).scaling is not None
    with pytest.raises(ValueError, match="give one of them"):  # in transformers its base would be 10,000
        numbers_of(config | {"rope_scaling": YARN, "rope_parameters": both})


@pytest.mark.parametrize("family", ["gpt_oss", "cwm", "ministral3", "mistral4"])
def test_rope_parameters_of_null_are_refused_where_transformers_takes_a_scaling_for_them(family):
    config = without(family)
    with pytest.raises(ValueError, match="^config.json: rope_parameters=None: transformers reads it as a scaling"):
        numbers_of(config | {"rope_parameters": None})
    with pytest.raises(ValueError, match="the configuration has no 'rope_parameters'"):
        numbers_of(config)
    assert numbers_of(config | {"rope_parameters": {"rope_type": "default"}}).scaling is None


def test_of_layers_types_the_older_scaling_must_be_that_of_layers_without_a_window():
    config = without("gemma3_text")
    said = {FULL: LINEAR | {"rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    numbers = numbers_of(config | {"rope_parameters": said, "rope_scaling": LINEAR})
    assert numbers == numbers_of(config | {"rope_parameters": said}) and numbers.scaling == nn.LinearScaling(4.0)
    with pytest.raises(ValueError, match="give one of them"):
        numbers_of(config | {"rope_parameters": said, "rope_scaling": LINEAR | {"factor": 8.0}})


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3", "modernbert", "gemma4_text", "mimo_v2_flash", "laguna"])
@pytest.mark.parametrize("said", [{"rope_theta": 77.0}, {"rope_type": "default", "rope_theta": 77.0}, LINEAR])
def test_rope_parameters_of_all_layers_are_refused_where_types_have_their_own(family, said):
    """Transformers looks the types up in them, finds none, and takes its defaults."""
    config, by_type = without(family), {"rope_type": "default", "rope_theta": 77.0}
    assert numbers_of(config | {"rope_parameters": {FULL: by_type, SLIDING: by_type}}).theta == 77.0
    with pytest.raises(
        ValueError, match=r"rope_parameters=.*: in this family they must be stated by type of layer: full_attention"
    ):
        numbers_of(config | {"rope_parameters": said})


def test_a_type_of_layers_without_rotary_positions_is_refused():
    with pytest.raises(ValueError, match=r"^config.json: rope_parameters do not state full_attention; state both"):
        numbers_of(without("gemma4_text") | {"rope_parameters": {SLIDING: {"rope_theta": 77.0}}})


def test_the_older_name_of_a_type_is_refused_where_newer_transformers_does_not_read_it():
    config = without("gemma3_text")
    assert numbers_of(config | {"rope_scaling": LINEAR}).scaling == nn.LinearScaling(4.0)
    with pytest.raises(
        ValueError, match=r"^config.json: rope_scaling=\{'type': .*does not read `type` here; state rope_"
    ):
        numbers_of(config | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert numbers_of(without("llama") | {"rope_scaling": {"type": "linear", "factor": 4.0}}).scaling is not None


def test_one_base_of_both_types_is_refused_where_newer_transformers_reads_it_of_one():
    config = without("olmo3")
    assert numbers_of(config | {"rope_theta": 5e5}).local_theta == 5e5
    with pytest.raises(ValueError, match=r"^config.json: rope_theta=1000.0: newer transformers takes 500000.0 for la"):
        numbers_of(config | {"rope_theta": 1e3})
    said = {kind: {"rope_type": "default", "rope_theta": 1e3} for kind in (FULL, SLIDING)}
    assert numbers_of(config | {"rope_theta": 1e3, "rope_parameters": said}).local_theta == 1e3


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_two_original_lengths_are_refused(family):
    """Transformers reads the one that stands by itself, and passes over that of the scaling."""
    config, name = without(family), "original_max_position_embeddings"
    inner = numbers_of(config | {"rope_scaling": YARN}).scaling
    outer = numbers_of(config | {name: 16, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}).scaling
    assert inner == outer == numbers_of(config | {name: 16, "rope_scaling": YARN}).scaling
    with pytest.raises(ValueError, match=rf"^config.json: {name}=32, but 16 with rope_type='yarn'; give one value"):
        numbers_of(config | {name: 32, "rope_scaling": YARN})
    assert numbers_of(config | {name: 32, "rope_scaling": LINEAR}).scaling == nn.LinearScaling(4.0)


def test_phi_3_has_one_original_length_for_any_scaling():
    """By default 4096, which transformers takes whatever stands in the scaling."""
    config = without("phi3", "original_max_position_embeddings")
    with pytest.raises(ValueError, match=r"original_max_position_embeddings=4096, but rope_scaling has YarnScaling"):
        numbers_of(config | {"rope_scaling": YARN})
    assert numbers_of(config | {"rope_scaling": YARN, "original_max_position_embeddings": 16}).scaling is not None


def test_the_pattern_that_transformers_writes_of_layers_types_decides_nothing():
    config = without("gemma3_text", "layer_types", "_sliding_window_pattern")
    want = numbers_of(config | {"sliding_window_pattern": 2}).window_layers
    assert numbers_of(config | {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}).window_layers == want
    assert numbers_of(config | {"_sliding_window_pattern": 2}) == numbers_of(config) != want


def test_llama_3s_factors_the_wrong_way_round_are_those_of_transformers():
    """There is no ramp then: waves longer than `original / low` are stretched and all others stay."""
    frequencies, _ = nn.Llama3Scaling(8.0, 4.0, 1.0, 100).frequencies(12, 500.0, jnp.ones((1, 1), jnp.int32))
    plain = 500.0 ** (-np.arange(0, 12, 2) / 12)
    want = np.where(2 * np.pi / plain > 100 / 4.0, plain / 8.0, plain)
    assert np.allclose(frequencies, want) and len({*(want / plain)}) == 2
    right, _ = nn.Llama3Scaling(8.0, 1.0, 4.0, 100).frequencies(12, 500.0, jnp.ones((1, 1), jnp.int32))
    assert not np.allclose(right, want)


def test_phi_moe_has_longrope_of_one_magnitude():
    config = RECORDED["phimoe biased"]["config"]
    parameters = config["rope_parameters"]
    assert numbers_of(config).scaling.magnitude == 1.25
    for changes, words in (
        ({"long_mscale": 1.5}, "short_mscale=1.25, long_mscale=1.5: both must be stated, and be equal"),
        ({"short_mscale": None}, "short_mscale=None, long_mscale=1.25: both must be stated"),
        ({"rope_type": "linear", "factor": 4.0}, "rope_type='linear': it must be 'default' or 'longrope'"),
        ({"short_mscale": -1.0}, "short_mscale=-1.0"),
    ):
        with pytest.raises(ValueError, match=rf"^config.json.*{words}"):
            numbers_of(config | {"rope_parameters": parameters | changes})
    with pytest.raises(ValueError, match="num_experts_per_tok=3"):
        numbers_of(config | {"num_experts_per_tok": 3})
    unscaled = dataclasses.replace(numbers_of(config), scaling=nn.LinearScaling(4.0))
    with pytest.raises(ValueError, match=r"save\(config=PhiMoEConfig\(scaling=Linear.*with a magnitude"):
        models.FAMILIES["phimoe"].write(unscaled)


def test_a_fraction_that_transformers_replaces_is_refused():
    """Bamba's configuration class sets the fraction outside of `rope_parameters` to one half."""
    config, of_half = without("bamba"), {"partial_rotary_factor": 0.5}
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    assert numbers_of(config).rotary_fraction == numbers_of(config | of_half).rotary_fraction == 0.5
    assert numbers_of(config | inside).rotary_fraction == numbers_of(config | inside | of_half).rotary_fraction == 0.25
    for rotary in ({}, {"rope_scaling": LINEAR}, {"rope_parameters": {"rope_type": "default"}}):
        with pytest.raises(ValueError, match=r"partial_rotary_factor=1.0: transformers takes 0.5 unless rope_param"):
            numbers_of(config | rotary | {"partial_rotary_factor": 1.0})


def test_a_scaling_beside_no_rotary_positions_is_refused():
    """Transformers takes an older `rope_scaling` before `rope_parameters`, and rotates with its default base."""
    config = without("olmo_hybrid") | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    assert not numbers_of(config).rotary and not numbers_of(config | {"rope_scaling": None}).rotary
    with pytest.raises(ValueError, match=r"rope_scaling=\{.*yarn.*in place of rope_parameters, .* give one of them"):
        numbers_of(config | {"rope_scaling": YARN})
