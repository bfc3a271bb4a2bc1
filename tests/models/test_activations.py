"""Activations are read by any of transformers' names for them, where a family's layers have the one that is named."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import pytest
from test_attributes import case, numbers_of, PUBLISHED

from eqformer import models, nn
from eqformer.models._attributes import Activation


FOUND = [(family, entry) for family, its in PUBLISHED.items() for entry in its.attributes]
ENTRIES = [(family, entry) for family, entry in FOUND if isinstance(entry, Activation)]
NAMES = {"relu": "relu", "gelu_fast": "gelu_tanh", "swish": "silu", "gelu_python": "gelu", "relu2": "relu_squared"}


@pytest.mark.parametrize("family, entry", ENTRIES)
def test_a_named_activation_is_read_and_written(family, entry):
    for said, own in NAMES.items():
        numbers = numbers_of(case(family) | {entry.published: said})
        assert getattr(numbers, entry.name) == own
        assert numbers_of({"model_type": family} | PUBLISHED[family].write(numbers)) == numbers


@pytest.mark.parametrize(
    "preset, changes, message",
    [
        ("llama-byte-1m", {"activation": "helix"}, r"LlamaConfig\(activation='helix'\): .*take one of 'gelu', 'gel"),
        (
            "glm4-byte-500k",
            {"rotary_fraction": 0.4375, "scaling": nn.DynamicScaling(2.0, 32_768)},
            r"\(head_dim=16, rotary_fraction=0.4375, scaling=Dynamic.*\): 7 channels .*in pairs",
        ),
        ("glm4-byte-500k", {"rotary_fraction": 0.01}, r"\(head_dim=16, rotary_fraction=0.01, .*\): 0 channels"),
        ("glm4-byte-500k", {"rotary_fraction": 1.0, "head_dim": 7}, r"\(head_dim=7, .*\): 7 channels"),
        ("llama-byte-1m", {"head_dim": 7}, r"LlamaConfig\(head_dim=7\): channels turn in pairs; take an even head_dim"),
        ("kimi-linear-byte-500k", {"rope_dim": 7}, r"KimiLinearConfig\(rope_dim=7\): channels turn in pairs"),
    ],
)
def test_what_cannot_be_built_says_what_to_change(preset, changes, message):
    numbers: Any = models.preset(preset)
    shapes = lambda its: eqx.filter_eval_shape(lambda: models.build(its, key=jax.random.key(0)))
    shapes(numbers)
    with pytest.raises(ValueError, match=message):
        shapes(dataclasses.replace(numbers, **changes))
