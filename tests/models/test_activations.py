"""Every name of an activation in transformers is read, if a family's layers support the activation."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from test_attributes import case, numbers_of, PUBLISHED

from eqformer import models, nn
from eqformer.models._attributes import Activation, published_activations


FOUND = [(family, entry) for family, its in PUBLISHED.items() for entry in its.attributes]
ENTRIES = [(family, entry) for family, entry in FOUND if isinstance(entry, Activation)]
NAMES = {"relu": "relu", "gelu_fast": "gelu_tanh", "swish": "silu", "gelu_python": "gelu", "relu2": "relu_squared"}
NAMES |= {"gelu_10": "clipped_gelu", "hardswish": "hard_swish", "leaky_relu": "leaky_relu", "linear": "identity"}
NAMES |= {"sqrtsoftplus": "sqrt_softplus"} | {its: its for its in ("relu6", "mish", "laplace", "tanh", "sigmoid")}


@pytest.mark.parametrize("family, entry", ENTRIES)
def test_a_named_activation_is_read_and_written(family, entry):
    for said, own in NAMES.items():
        numbers = numbers_of(case(family) | {entry.published: said})
        assert getattr(numbers, entry.name) == own
        assert numbers_of({"model_type": family} | PUBLISHED[family].write(numbers)) == numbers


def test_every_name_that_transformers_has_is_known_and_bends_alike():
    """Of those with weights of their own there are none."""
    activations, torch = pytest.importorskip("transformers.activations"), pytest.importorskip("torch")
    x = np.linspace(-12, 12, 97, dtype=np.float32) + np.float32(0.01)
    known = {name: activation for activation in nn.ACTIVATIONS for name in published_activations(activation)}
    assert set(activations.ACT2FN) == {*known, "prelu", "xielu"}
    found = jax.jit(lambda x: {name: nn.ACTIVATIONS[activation](x) for name, activation in known.items()})(x)
    for name, activation in known.items():
        want = activations.ACT2FN[name](torch.tensor(x)).numpy()
        assert np.allclose(found[name], want, atol=1e-6), name
        assert activation == "silu" or not np.allclose(found["silu"], want, atol=1e-3)  # which another would not pass


@pytest.mark.parametrize("gated", [True, False])
def test_t5_has_every_activation_with_a_gate_and_without(gated):
    config = case("t5")
    for its in nn.ACTIVATIONS:
        numbers = dataclasses.replace(numbers_of(config), gated=gated, activation=its)
        written = PUBLISHED["t5"].write(numbers)
        assert numbers_of({"model_type": "t5"} | written) == numbers
        assert written["is_gated_act"] == gated == written["feed_forward_proj"].startswith("gated-")
        assert written["dense_act_fn"] in published_activations(its)
    said = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
    assert numbers_of(config | said).activation == "gelu_tanh"
    with pytest.raises(ValueError, match="dense_act_fn='gelu' is not supported"):
        numbers_of(config | said | {"dense_act_fn": "gelu"})
    with pytest.raises(ValueError, match=r"T5Config\(activation='helix'\)\): .* can state only gelu, "):
        PUBLISHED["t5"].write(dataclasses.replace(numbers_of(config), activation="helix"))


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
        (
            "llama-byte-1m",
            {"head_dim": 7},
            r"LlamaConfig\(head_dim=7\): channels are rotated in pairs; take an even head_dim",
        ),
        ("kimi-linear-byte-500k", {"rope_dim": 7}, r"KimiLinearConfig\(rope_dim=7\): channels are rotated in pairs"),
    ],
)
def test_what_cannot_be_built_says_what_to_change(preset, changes, message):
    numbers: Any = models.preset(preset)
    shapes = lambda its: eqx.filter_eval_shape(lambda: models.build(its, key=jax.random.key(0)))
    shapes(numbers)
    with pytest.raises(ValueError, match=message):
        shapes(dataclasses.replace(numbers, **changes))
