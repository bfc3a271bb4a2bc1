"""Values of a wrong type in a configuration are refused by name, also values that would be read as other values."""

import json
from typing import Any

import pytest
from test_attributes import case, HARMLESS, numbers_of, PUBLISHED, SUPERSEDED, UNUSED
from test_published import ENCODERS, RECORDED

from eqformer import nn
from eqformer.models import config_types


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_decoder_of_which_a_token_sees_later_ones_is_refused(family):
    """Transformers reads `is_causal` of any configuration, and takes False for null too."""
    config = case(family)
    assert numbers_of(config | {"is_causal": True}) == numbers_of(config)
    for value in (False, None):
        if family in ENCODERS:  # an encoder, in which transformers does not look at it
            assert numbers_of(config | {"is_causal": value}) == numbers_of(config)
        else:
            with pytest.raises(ValueError, match=rf"config.json: is_causal={value}"):
                numbers_of(config | {"is_causal": value})


@pytest.mark.parametrize("name", RECORDED)
def test_what_transformers_writes_is_of_the_kinds_of_its_fields(name):
    """Every case is read, in any order, and another vocabulary is seen."""
    config = RECORDED[name]["config"]
    other = json.loads(json.dumps(config).replace('"vocab_size": ', '"vocab_size": 1'))
    assert numbers_of(config) == numbers_of(dict(reversed(config.items()))) != numbers_of(other)


def parts_of(family: str) -> list[tuple[dict[str, Any], Any]]:
    """What a family's configuration is of, each with what makes the whole of it."""
    config = case(family)
    whole = (config, lambda part: part)
    halves = [name for name in ("encoder", "decoder") if "text_config" not in config.get(name, {"text_config": 0})]
    return [whole, *((config[name], lambda part, name=name: config | {name: part}) for name in halves)]


# Those that say something only where another does.
UNREAD = {"num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input", "intermediate_size"}
UNREAD |= {
    "cross_attention_hidden_size",
    "sliding_window",
    "block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier",
    "mamba_expand",
    "expand",
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_value_of_another_kind_is_refused_by_its_attributes_name(family):
    """A configuration that a hand has written: numbers and switches as texts, or with a comma too many."""
    seen = 0
    for part, whole in parts_of(family):
        assert numbers_of(whole(part))
        for name in part.keys() - HARMLESS - SUPERSEDED - UNUSED.get(family, set()):
            if not isinstance(part[name], bool | int | float):
                continue
            for wrong in ("4", "false", [3], {"a": 1}):
                try:
                    numbers_of(whole(part | {name: wrong}))
                except ValueError as error:
                    assert name in str(error) or "block_ff_dim=" in str(error)
                    seen += 1
                else:
                    assert name in UNREAD, name
    assert seen > 8


def test_what_is_asked_for_is_said():
    config = case("llama")
    for said, asked in (
        ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps='1e-6': it must be a number of at least 0\.$"),
        ({"rms_norm_eps": None}, r"rms_norm_eps=None: it must be a number of at least 0\.$"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings='false': it must be true or false\.$"),
        ({"num_key_value_heads": 2.5}, r"num_key_value_heads=2.5: it must be a whole number of at least 1\.$"),
        ({"head_dim": "8"}, r"head_dim='8': it must be a whole number of at least 1 or null\.$"),
    ):
        with pytest.raises(ValueError, match=rf"^config.json: {asked}"):
            numbers_of(config | said)


def test_a_fraction_may_be_said_as_a_whole_number():
    numbers = numbers_of(case("granite") | {"embedding_multiplier": 3})
    assert numbers.embedding_scale == 3.0 and isinstance(numbers.embedding_scale, float)


@pytest.mark.parametrize(
    "family, name, field",
    [
        ("deepseek_v3", "norm_topk_prob", "normalize"),
        ("deepseek_v3", "rope_interleave", "interleaved"),
        ("cohere", "tie_word_embeddings", "tied"),
    ],
)
def test_a_null_in_the_place_of_what_is_true_by_default_is_refused(family, name, field):
    """For transformers it is false."""
    config = {key: value for key, value in case(family).items() if key != name}
    assert getattr(numbers_of(config), field) is True
    assert getattr(numbers_of(config | {name: False}), field) is False
    with pytest.raises(ValueError, match=rf"^config.json: {name}=None: it must be true or false; if the"):
        numbers_of(config | {name: None})


def test_a_null_leaves_the_decoders_outputs_of_t5_as_they_are():
    config = case("t5") | {"tie_word_embeddings": True}
    said = [numbers_of(config | {"scale_decoder_outputs": value}).scaled for value in (True, False, None)]
    assert said == [True, False, False]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mistral4"])
@pytest.mark.parametrize("name", ["n_group", "topk_group"])
def test_groups_of_experts_are_counted(family, name):
    """None by a null, which is one of all; transformers takes 0 for no experts at all."""
    config = case(family) | {"n_group": 1, "topk_group": 1}
    assert numbers_of(config | {name: None}) == numbers_of(config)
    with pytest.raises(ValueError, match=rf"^config.json: {name}=0: it must be a whole number of at least 1"):
        numbers_of(config | {name: 0})


@pytest.mark.parametrize(
    "family, name",
    [("deepseek_v3", "v_head_dim"), ("mixtral", "num_experts_per_tok"), ("qwen3_moe", "moe_intermediate_size")],
)
def test_what_there_must_be_some_of_is_counted(family, name):
    """Not by an error of what is divided by it."""
    config = case(family)
    assert numbers_of(config | {name: 2}) != numbers_of(config | {name: 1})
    for none in (0, -1):
        with pytest.raises(ValueError, match=rf"^config.json: {name}={none}: it must be a whole number of at least 1"):
            numbers_of(config | {name: none})


@pytest.mark.parametrize("family", ["granite", "granitemoehybrid"])
def test_logits_are_divided_by_no_0(family):
    assert numbers_of(case(family) | {"logits_scaling": 4}).logit_divisor == 4.0
    with pytest.raises(ValueError, match=r"^config.json: logits_scaling=0: logits are divided by it; give another"):
        numbers_of(case(family) | {"logits_scaling": 0})


def test_kinds():
    kind = tuple[int, ...] | None
    assert all(config_types.fits(value, kind) for value in (None, (), (1, 2)))
    assert not any(config_types.fits(value, kind) for value in (1, [1], (1.0,), (True,), "1"))
    assert (
        config_types.fits((1, 2.0), tuple[float, float])
        and not config_types.fits((1,), tuple[float, float])
        and not config_types.fits(True, float)
    )
    assert config_types.fits(nn.LinearScaling(2.0), nn.RotaryScaling | None) and not config_types.fits(
        "linear", nn.RotaryScaling | None
    )


def test_changes_of_a_nested_attribute_leave_the_configuration_as_it_is():
    values = {"rope_parameters": {"rope_theta": 1e4}}
    published = config_types.PublishedConfig(values, "config.json")
    assert published.nested("rope_parameters").pop("rope_theta") == 1e4
    assert values == {"rope_parameters": {"rope_theta": 1e4}} and published.nested("rope_parameters")
