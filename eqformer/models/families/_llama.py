"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024): pre-norm, grouped queries, rotary, gated silu.

AFM (Arcee AI 2025) has squared ReLUs without gates, Helium (Kyutai 2025) rotates neighboring channels together, and the
Code World Model (Meta FAIR 2025) has windows in three of four layers.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Llama3Scaling, MLP, Transformer, YarnScaling
from .._attributes import Activation, Attribute, Ignore
from .._config_types import Index, Length, NotNegative, Positive, PublishedConfig
from .._family import DecoderConfig, Family
from .._layer_attributes import Windows
from .._rotary_attributes import RotaryPositions
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import activation_of, attention, damping, decoder, gated_mlp, layer_windows, pre_norm_block, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The config of a Llama."""

    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    max_seq: Length = 8192


def build_llama(config: LlamaConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Llama with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=config.bias, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, bias=config.mlp_bias, key=feed_forward))

    return decoder(config, block, key=key)


def _llama3(
    embed: int, layers: int, heads: int, mlp: int, factor: float | None = None, tied: bool = False
) -> LlamaConfig:
    scaling, max_seq = None, 8192
    if factor is not None:
        max_seq = 131_072
        scaling = Llama3Scaling(
            factor=factor, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
        )
    return LlamaConfig(
        vocab=128_256,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=8,
        mlp=mlp,
        theta=500_000.0,
        scaling=scaling,
        tied=tied,
        max_seq=max_seq,
    )


_PRESETS = {
    "llama-byte-1m": LlamaConfig(vocab=256, embed=128, layers=4, heads=8, kv_heads=4, mlp=384, tied=True),
    "llama-byte-8m": LlamaConfig(vocab=256, embed=256, layers=8, heads=8, kv_heads=4, mlp=1024),
    "llama-byte-34m": LlamaConfig(vocab=256, embed=512, layers=12, heads=8, kv_heads=4, mlp=1536),
    "llama-2-7b": LlamaConfig(vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11_008, max_seq=4096),
    "llama-2-13b": LlamaConfig(vocab=32_000, embed=5120, layers=40, heads=40, kv_heads=40, mlp=13_824, max_seq=4096),
    "llama-2-70b": LlamaConfig(vocab=32_000, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28_672, max_seq=4096),
    "llama-3-8b": _llama3(4096, 32, 32, 14_336),
    "llama-3-70b": _llama3(8192, 80, 64, 28_672),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336, factor=8.0),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672, factor=8.0),
    "llama-3.1-405b": _llama3(16_384, 126, 128, 53_248, factor=8.0),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, factor=32.0, tied=True),
}

_BIASES = (Attribute("bias", "attention_bias", False), Attribute("mlp_bias", "mlp_bias", False))
LLAMA = Family(
    "llama",
    LlamaConfig,
    build_llama,
    _PRESETS,
    "LlamaForCausalLM",
    "llama",
    (
        *decoder_attributes(),
        *_BIASES,
        Activation(),
        Ignore("is_llama_config"),  # SmolLM2 has it
    ),
    LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArceeConfig(LlamaConfig):
    """The config of an AFM."""

    activation: str = "relu_squared"
    max_seq: Length = 65_536


def build_arcee(config: ArceeConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an AFM with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        mlp = MLP(
            embed=config.embed,
            mlp=config.mlp,
            activation=activation_of(config),
            bias=config.mlp_bias,
            output_std=damping(config) * config.mlp**-0.5,
            key=feed_forward,
        )
        return pre_norm_block(config, attention(config, bias=config.bias, key=mixer), mlp)

    return decoder(config, block, key=key)


_ARCEE_PRESETS = {
    "arcee-byte-500k": ArceeConfig(256, 96, 4, 6, 2, 384, tied=True),
    "afm-4.5b": ArceeConfig(
        128_004, 2560, 36, 20, 4, 18_432, head_dim=128, scaling=YarnScaling(20.0, 4096, magnitude=1.0)
    ),
}

ARCEE = Family(
    "arcee",
    ArceeConfig,
    build_arcee,
    _ARCEE_PRESETS,
    "ArceeForCausalLM",
    "arcee",
    (*decoder_attributes(max_seq=4096), *_BIASES, Activation("relu2")),
    LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeliumConfig(LlamaConfig):
    """The config of a Helium."""

    theta: Positive = 100_000.0
    eps: NotNegative = 1e-8
    max_seq: Length = 4096


def build_helium(config: HeliumConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Helium with random weights."""
    rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=config.bias, output_bias=False, rotary=rotary, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, bias=config.mlp_bias, key=feed_forward))

    return decoder(config, block, key=key)


_HELIUM_PRESETS = {
    "helium-byte-500k": HeliumConfig(256, 96, 4, 6, 6, 256, head_dim=16, theta=10_000.0, tied=True),
    "helium-1-preview-2b": HeliumConfig(48_000, 2560, 24, 20, 20, 7040, head_dim=128),
}

HELIUM = Family(
    "helium",
    HeliumConfig,
    build_helium,
    _HELIUM_PRESETS,
    "HeliumForCausalLM",
    "helium",
    (
        *decoder_attributes(RotaryPositions(100_000.0), head_dim=128, kv_heads=20, max_seq=4096),
        *_BIASES,
        Activation(),
    ),
    LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CWMConfig(DecoderConfig):
    """The config of a Code World Model."""

    window_layers: tuple[Index, ...]
    """The numbers of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 8192
    """The number of tokens that the layers of `window_layers` see."""
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    max_seq: Length = 131_072


def build_cwm(config: CWMConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Code World Model with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        gated = gated_mlp(config, bias=config.mlp_bias, key=feed_forward)
        return pre_norm_block(config, attention(config, window=window, key=mixer), gated)

    return decoder(config, block, layer_windows(config), key=key)


def _all_but_first_of_four(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if layer % 4)


_CWM_PRESETS = {
    "cwm-byte-500k": CWMConfig(
        256, 96, 4, 6, 2, 256, window_layers=(1, 2, 3), window=64, head_dim=16, theta=10_000.0, tied=True
    ),
    "cwm-32b": CWMConfig(
        *(128_256, 6144, 64, 48, 8, 21_504),
        window_layers=tuple(layer for layer in range(64) if layer % 4),
        head_dim=128,
        scaling=Llama3Scaling(16.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192),
    ),
}

CWM = Family(
    "cwm",
    CWMConfig,
    build_cwm,
    _CWM_PRESETS,
    "CwmForCausalLM",
    "cwm",
    (
        *decoder_attributes(RotaryPositions(1_000_000.0, required=True), head_dim=128, kv_heads=8, max_seq=131_072),
        Windows(8192, _all_but_first_of_four),
        Attribute("mlp_bias", "mlp_bias", False),
        Activation(),
    ),
    LLAMA_WEIGHTS,
)
