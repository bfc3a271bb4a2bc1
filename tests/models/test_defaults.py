"""A missing attribute of a configuration has the default of the model's configuration class in transformers."""

import json
from typing import Any

import pytest
from test_attributes import numbers_of
from test_published import FIXTURES, RECORDED
from test_ranges import changed, FIRST


# What transformers takes, by `tests/fixtures/make_defaults.py`.
DEFAULTS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "attribute_defaults.json").read_text())


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with changes, those within an object added to it."""
    halves = ("decoder", "encoder", "text_config")
    return config | {name: merged(config[name], its) if name in halves else its for name, its in changes.items()}


def meaning(config: Any) -> dict[str, Any]:
    """Return a config's fields, with the width of a head where it follows from others."""
    return vars(config) | ({"head_dim": config.head_size} if hasattr(config, "head_size") else {})


# Transformers takes so many, by which heads then cannot be divided: nothing computes with it.
USELESS = {
    family: "num_key_value_heads"
    for family in ("axk1", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "minicpm3", "youtu")
}
USELESS |= dict.fromkeys(("bailing_hybrid", "glm4_moe_lite", "mistral4", "mistral_large4_text"), "num_key_value_heads")
USELESS |= {"kimi_k3_text": "num_key_value_heads"}


def faults_of(family: str, defaults: dict[str, Any]) -> list[str]:
    """Return the attributes without which a configuration does not read as transformers reads it."""
    config, faults = RECORDED[FIRST[family]]["config"], []
    for name, changes in defaults.items():
        try:
            left_out = meaning(numbers_of(changed(config, tuple(name.split(".")))))
        except ValueError:
            continue  # a size that has to be said, or attributes that do not fit each other
        stated = meaning(numbers_of(merged(config, changes))) if USELESS.get(family) != name else left_out
        unlike = {key: (own, stated[key]) for key, own in left_out.items() if own != stated[key]}
        faults += [f"{name}: {unlike}"] if unlike else []
    return faults


@pytest.mark.parametrize("part", range(2))
def test_an_attribute_that_is_left_out_has_the_default_of_its_class(part):
    assert {*DEFAULTS} == {*FIRST}
    faults = {family: faults_of(family, DEFAULTS[family]) for family in sorted(DEFAULTS)[part::2]}
    assert {family: found for family, found in faults.items() if found} == {}


def test_another_default_is_seen():
    """The negative control."""
    assert faults_of("qwen3", DEFAULTS["qwen3"] | {"max_position_embeddings": {"max_position_embeddings": 2048}})
