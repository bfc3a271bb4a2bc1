"""OLMo 2 (arXiv:2501.00656), OLMo 3 (OLMo team 2025) and OLMoE (Muennighoff et al. 2024, arXiv:2409.02060).

They have norms of queries and keys over all heads. OLMo 2 and 3 have norms after sublayers; OLMoE has 64 small experts.
This file also has FlexOlmo, an OLMo 2 with experts, and the first OLMo, whose norms are `LayerNorm`s without weights.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, ClippedNorm, LayerNorm, Residual, RotaryScaling, Transformer, YarnScaling
from .._attributes import Activation, Attribute, Unpublished
from .._config_types import Index, Length, NotNegative, Positive, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import all_but_every, Period, Windows
from .._rotary_attributes import RotaryByType, RotaryPositions
from ._common import (
    ATTENTION,
    decoder_attributes,
    EDGES,
    GATED,
    head_norm_weights,
    HeadSize,
    KeyHeads,
    OF_HEADS,
    POST_NORMS,
    PRE_NORMS,
    SIZES,
    WIDTH,
)
from ._decoder import (
    attention,
    decoder,
    gated_mlp,
    head_norms,
    layer_windows,
    post_norm_block,
    pre_norm_block,
    rotary_of,
)
from ._mixtures import MIXTURE, mixture, router_attributes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """The config of an OLMo 2."""

    theta: Positive = 500_000.0
    bias: bool = False
    """Whether the attention's four projections have biases."""
    max_seq: Length = 4096


def build_olmo2(config: Olmo2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an OLMo 2 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config, bias=config.bias, output_std=None, **head_norms(config, all_heads=True), key=mixer_key
        )
        return post_norm_block(config, mixer, gated_mlp(config, output_std=None, key=feed_forward_key))

    return decoder(config, block, key=key)


_OLMO2_PRESETS = {
    "olmo2-byte-500k": Olmo2Config(vocab=256, embed=96, layers=4, heads=6, kv_heads=6, mlp=256, theta=10_000.0),
    "olmo2-1b": Olmo2Config(vocab=100_352, embed=2048, layers=16, heads=16, kv_heads=16, mlp=8192),
    "olmo2-7b": Olmo2Config(vocab=100_352, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11_008),
    "olmo2-13b": Olmo2Config(vocab=100_352, embed=5120, layers=40, heads=40, kv_heads=40, mlp=13_824),
    "olmo2-32b": Olmo2Config(vocab=100_352, embed=5120, layers=64, heads=40, kv_heads=8, mlp=27_648),
}

_WEIGHTS = (*EDGES, *ATTENTION, *head_norm_weights(OF_HEADS), *GATED, *POST_NORMS)
OLMO2 = Family(
    "olmo2",
    Olmo2Config,
    build_olmo2,
    _OLMO2_PRESETS,
    "Olmo2ForCausalLM",
    "olmo2",
    (*decoder_attributes(), Attribute("bias", "attention_bias", False), Activation()),
    _WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(DecoderConfig):
    """The config of an OLMo 3."""

    window_layers: tuple[Index, ...]
    """The indices of the layers that see a `window`; `theta` and `scaling` are for all other layers."""
    window: Length = 4096
    """The number of tokens that the layers of `window_layers` see."""
    theta: Positive = 500_000.0
    local_theta: Positive = 500_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    max_seq: Length = 65_536


def build_olmo3(config: Olmo3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an OLMo 3 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        if window is None:
            rotary = rotary_of(config, config.head_size, scaling=config.scaling)
        else:
            rotary = rotary_of(config, config.head_size, theta=config.local_theta, scaling=config.local_scaling)
        norms = head_norms(config, all_heads=True)
        mixer = attention(
            config, window=window, bias=config.bias, output_std=None, rotary=rotary, **norms, key=mixer_key
        )
        return post_norm_block(config, mixer, gated_mlp(config, output_std=None, key=feed_forward_key))

    return decoder(config, block, layer_windows(config), key=key)


_YARN = YarnScaling(8.0, 8192, magnitude=1.2079441541679836)
_OLMO3_PRESETS = {
    "olmo3-byte-500k": Olmo3Config(
        256, 96, 4, 6, 6, 256, window_layers=all_but_every(4, 4), window=64, theta=10_000.0, local_theta=10_000.0
    ),
    "olmo3-7b": Olmo3Config(100_278, 4096, 32, 32, 32, 11_008, window_layers=all_but_every(4, 32), scaling=_YARN),
    "olmo3-32b": Olmo3Config(100_278, 5120, 64, 40, 8, 27_648, window_layers=all_but_every(4, 64), scaling=_YARN),
}

OLMO3 = Family(
    "olmo3",
    Olmo3Config,
    build_olmo3,
    _OLMO3_PRESETS,
    "Olmo3ForCausalLM",
    "olmo3",
    (
        *decoder_attributes(RotaryByType(500_000.0, 500_000.0, ("rope_theta", "rope_theta"))),
        Windows(4096, Period(4, but=True)),
        Attribute("bias", "attention_bias", False),
        Activation(),
    ),
    _WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexOlmoConfig(Olmo2Config):
    """The config of a FlexOlmo; `mlp` is an expert's width."""

    experts: Size = 7
    """The number of experts of a layer."""
    top_k: Size = 5
    """The number of experts that each token chooses."""
    normalize: bool = False
    """Whether the weights of a token's experts are normalized to add up to 1."""
    balance: NotNegative = 0.01
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""


def build_flex_olmo(config: FlexOlmoConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a FlexOlmo with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, router_key, experts_key = jax.random.split(key, 3)
        mixer = attention(
            config, bias=config.bias, output_std=None, **head_norms(config, all_heads=True), key=mixer_key
        )
        feed_forward = mixture(
            config,
            lambda key: gated_mlp(config, output_std=None, key=key),
            normalize=config.normalize,
            router=router_key,
            experts=experts_key,
        )
        return post_norm_block(config, mixer, feed_forward)

    return decoder(config, block, key=key)


_FLEX_OLMO_PRESETS = {
    "flex-olmo-byte-500k": FlexOlmoConfig(256, 64, 4, 4, 4, 32, experts=12, top_k=4, theta=10_000.0, tied=True),
    "flex-olmo-7x7b": FlexOlmoConfig(100_352, 4096, 32, 32, 32, 11_008),
}

FLEX_OLMO = Family(
    "flex_olmo",
    FlexOlmoConfig,
    build_flex_olmo,
    _FLEX_OLMO_PRESETS,
    "FlexOlmoForCausalLM",
    "flex_olmo",
    (
        *decoder_attributes(RotaryPositions(500_000.0), max_seq=4096),
        *router_attributes(7, 5, balance=0.01, local_first=True),
        Attribute("bias", "attention_bias", False),
        Activation(),
    ),
    (*EDGES, *ATTENTION, *head_norm_weights(OF_HEADS), *POST_NORMS, *MIXTURE),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """The config of an OLMo of 2024."""

    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    clip: Positive | None = None
    """The bound of the magnitudes of queries, keys and values; None: no bound."""
    max_seq: Length = 2048


def build_olmo(config: OlmoConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an OLMo of 2024 with random weights; its norms are `LayerNorm`s without weights."""

    def norm() -> LayerNorm:
        return LayerNorm("embed", embed=config.embed, eps=config.eps, scale=False, bias=False)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        clipped = None if config.clip is None else ClippedNorm(None, config.clip)
        mixer = attention(
            config, bias=config.bias, query_norm=clipped, key_norm=clipped, value_norm=clipped, key=mixer_key
        )
        return Block(Residual(mixer, norm()), Residual(gated_mlp(config, key=feed_forward_key), norm()))

    return decoder(config, block, final_norm=norm(), key=key)


_OLMO_PRESETS = {
    "olmo-byte-500k": OlmoConfig(256, 96, 4, 6, 6, 256, clip=8.0),
    "olmo-1b": OlmoConfig(50_304, 2048, 16, 16, 16, 8192, tied=True),
    "olmo-7b": OlmoConfig(50_304, 4096, 32, 32, 32, 11_008),
}

OLMO = Family(
    "olmo",
    OlmoConfig,
    build_olmo,
    _OLMO_PRESETS,
    "OlmoForCausalLM",
    "olmo",
    (
        *(*SIZES, WIDTH, KeyHeads(), HeadSize(), RotaryPositions()),
        Unpublished("eps", 1e-5, "all OLMo of 2024 have the same eps"),
        Attribute("tied", "tie_word_embeddings", False),
        Attribute("max_seq", "max_position_embeddings", 2048),
        Attribute("bias", "attention_bias", False),
        Attribute("clip", "clip_qkv", None),
        Activation(),
    ),
    (*EDGES, *ATTENTION, *GATED),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OLMoEConfig(DecoderConfig):
    """The config of an OLMoE; `mlp` is the width of an expert."""

    experts: Size = 64
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    normalize: bool = False
    """Whether the weights of a token's experts are normalized to add up to 1."""
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    clip: Positive | None = None
    """The bound of the magnitudes of queries, keys (both after their norms) and values; None: no bound."""
    balance: NotNegative = 0.01
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    max_seq: Length = 4096


def build_olmoe(config: OLMoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an OLMoE with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        router_key, experts_key = jax.random.split(feed_forward_key)
        feed_forward = mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            normalize=config.normalize,
            router=router_key,
            experts=experts_key,
        )
        norms = head_norms(config, all_heads=True)
        if config.clip is None:
            mixer = attention(config, bias=config.bias, **norms, key=mixer_key)
        else:
            mixer = attention(
                config,
                bias=config.bias,
                query_norm=ClippedNorm(norms["query_norm"], config.clip),
                key_norm=ClippedNorm(norms["key_norm"], config.clip),
                value_norm=ClippedNorm(None, config.clip),
                key=mixer_key,
            )
        return pre_norm_block(config, mixer, feed_forward)

    return decoder(config, block, key=key)


_PRESETS = {
    "olmoe-byte-500k": OLMoEConfig(256, 64, 4, heads=4, kv_heads=4, mlp=32, experts=16, top_k=4, tied=True),
    "olmoe-1b-7b": OLMoEConfig(50_304, 2048, 16, heads=16, kv_heads=16, mlp=1024),
}

OLMOE = Family(
    "olmoe",
    OLMoEConfig,
    build_olmoe,
    _PRESETS,
    "OlmoeForCausalLM",
    "olmoe",
    (
        *decoder_attributes(max_seq=4096),
        *router_attributes(64, 8, balance=0.01, local_first=True),
        Attribute("bias", "attention_bias", False),
        Activation(),
        Attribute("clip", "clip_qkv", None),
    ),
    (*EDGES, *ATTENTION, *head_norm_weights(OF_HEADS), *PRE_NORMS, *MIXTURE),
)
