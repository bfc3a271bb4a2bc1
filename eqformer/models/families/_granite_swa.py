"""Granite SWA (Granite Team, IBM, 2026): a Granite 3 with windows in most layers and a sink in each softmax.

Each layer has a base of rotary positions of its own, or no rotary positions. Some models have experts.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import Attention, GatedMLP, MoE, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Fields
from .._config_types import Attributes, Index, Length, NotNegative, PublishedConfig
from .._family import Family
from .._layer_attributes import layers_of, Windows
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import decoder_attributes, LAYER, leaf_paths, LLAMA_WEIGHTS
from ._decoder import gated_mlp, layer_windows, rotary_of
from ._granite import (
    GRANITE,
    granite_attention,
    granite_decoder,
    granite_mixture,
    GRANITE_MOE,
    GraniteConfig,
    GraniteMoESharedConfig,
    joined_weights,
    moe_attributes,
    SCALES,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WindowsAndBases(GraniteConfig):
    """Fields of a Granite SWA: the layers with a window, and the base of rotary positions of each layer."""

    window_layers: tuple[Index, ...]
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 128
    """The number of tokens that the layers of `window_layers` see."""
    layer_thetas: tuple[NotNegative, ...] = ()
    """The base of rotary positions of each layer; 0: the layer has no rotary positions. An empty tuple: all layers have
    `theta`."""

    def __post_init__(self):
        if self.layer_thetas and len(self.layer_thetas) != self.layers:
            raise ValueError(
                f"{type(self).__name__}(layers={self.layers}, layer_thetas={self.layer_thetas}): give a base for each "
                "layer, or an empty tuple."
            )

    @property
    def thetas(self) -> tuple[float, ...]:
        """The base of rotary positions of each layer; 0: the layer has no rotary positions."""
        return self.layer_thetas or (self.theta,) * self.layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteSWAConfig(_WindowsAndBases):
    """The config of a Granite SWA."""

    max_seq: Length = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoESWAConfig(_WindowsAndBases, GraniteMoESharedConfig):
    """The config of a Granite SWA with experts, and perhaps a shared expert; `mlp` is an expert's width."""


def build_granite_swa(config: GraniteSWAConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Granite SWA with random weights."""
    feed_forward = lambda key: gated_mlp(config, bias=config.mlp_bias, output_std=None, key=key)
    return _build_swa(config, feed_forward, key)


def build_granite_moe_swa(config: GraniteMoESWAConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Granite SWA with experts, with random weights."""
    return _build_swa(config, lambda key: granite_mixture(config, config.shared_mlp, jax.random.split(key, 3)), key)


def _build_swa(
    config: _WindowsAndBases, feed_forward: Callable[[Key[Array, ""]], GatedMLP | MoE], key: Key[Array, ""]
) -> Transformer:
    def layers(kind: tuple[int | None, float], key: Key[Array, ""]) -> tuple[Attention, GatedMLP | MoE]:
        window, theta = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        rotary = rotary_of(config, config.head_size, theta=theta, scaling=config.scaling) if theta else None
        sinks = jnp.zeros(config.heads, jnp.float32)
        mixer = granite_attention(config, sinks=sinks, window=window, rotary=rotary, key=mixer_key)
        return mixer, feed_forward(feed_forward_key)

    return granite_decoder(config, layers, list(zip(layer_windows(config), config.thetas, strict=True)), key=key)


class _LayerThetas(Entry):
    """Rotary positions, and `layer_rope_theta`, the base of each layer."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta`, `scaling` and `layer_thetas`; refuse a list of another length."""
        fields, layers = RotaryPositions().read(published), layers_of(published)
        stated = published.listed("layer_rope_theta", NotNegative)
        if stated is not None and len(stated) != layers:
            published.refuse(f"layer_rope_theta={stated} must have a base for each of the model's {layers} layers.")
        thetas = tuple(map(float, stated or ()))
        return fields | {"layer_thetas": () if {*thetas} == {fields["theta"]} else thetas}

    def write(self, config: _WindowsAndBases) -> Attributes:
        """Return the attributes of rotary positions, and `layer_rope_theta`."""
        return RotaryPositions().write(config) | {"layer_rope_theta": list(config.thetas)}


def _all_but_every_fourth_from_the_first(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    """Return the layers with a window, for a configuration without `layer_types`."""
    return tuple(layer for layer in range(layers) if layer % 4)


_MIXED = "feed_forward.layer."
_WINDOWS = Windows(128, _all_but_every_fourth_from_the_first)
_SINKS = Rule(f"{LAYER}self_attn.sinks", "mixer.layer.scores.sinks")
_GRANITE_SWA_PRESETS = {
    "granite-swa-byte-500k": GraniteSWAConfig(
        **vars(GRANITE.presets["granite-byte-500k"]), window_layers=(1, 2, 3), window=64
    )
}
_GRANITE_MOE_SWA_PRESETS = {
    "granite-moe-swa-byte-500k": GraniteMoESWAConfig(
        **vars(GRANITE_MOE.presets["granite-moe-byte-500k"]), window_layers=(1, 2, 3), window=64
    )
}
GRANITE_SWA = Family(
    "granite_swa",
    GraniteSWAConfig,
    build_granite_swa,
    _GRANITE_SWA_PRESETS,
    "GraniteSWAForCausalLM",
    "granite_swa",
    (
        *decoder_attributes(_LayerThetas(), kv_heads=4, tied=True, max_seq=8192),
        *SCALES,
        _WINDOWS,
        Activation(),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    (*LLAMA_WEIGHTS, _SINKS),
)
GRANITE_MOE_SWA = Family(
    "granitemoe_swa",
    GraniteMoESWAConfig,
    build_granite_moe_swa,
    _GRANITE_MOE_SWA_PRESETS,
    "GraniteMoeSWAForCausalLM",
    "granitemoe_swa",
    (*moe_attributes(_LayerThetas()), Count("shared_mlp", "shared_intermediate_size", 0, minimum=0), _WINDOWS),
    (
        *(*LLAMA_WEIGHTS, _SINKS),
        Rule(f"{LAYER}block_sparse_moe.router.weight", f"{_MIXED}router.linear.weight"),
        Rule(
            f"{LAYER}block_sparse_moe.experts.gate_up_proj",
            leaf_paths(("gate", "up"), "weight", f"{_MIXED}experts.mlps."),
            axis=1,
        ),
        Rule(f"{LAYER}block_sparse_moe.experts.down_proj", f"{_MIXED}experts.mlps.down.weight"),
        *joined_weights(f"{LAYER}shared_mlp.", f"{_MIXED}shared."),
    ),
)
