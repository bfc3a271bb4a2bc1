"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024): pre-norm, grouped queries, rotary, gated silu.

Close variants of Llama are in this file too. AFM (Arcee AI 2025) has squared ReLUs without gates, Helium (Kyutai 2025)
rotates neighboring channels together, and the Code World Model (Meta FAIR 2025) has windows in three of four layers.
SmolLM3 (Bakouch et al. 2025) has no rotary positions in every fourth layer (arXiv:2501.18795), and Seed-OSS (ByteDance
Seed 2025) has biases of queries, keys and values. InternLM3 (Shanghai AI Laboratory 2025) has biases of all maps or no
biases, and EuroBERT (Boizard et al. 2025, arXiv:2503.05500) is an encoder that is trained on masked tokens.
IQuest-Coder (IQuest Lab 2026) is a Llama of other sizes.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, DynamicScaling, Llama3Scaling, Mask, Transformer, YarnScaling
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Index, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import every, NoRotaryLayers, SwitchedWindows, Windows
from .._rotary_attributes import RotaryPositions
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LLAMA_WEIGHTS, PRE_NORMS, StatedHeadSize
from ._decoder import attention, decoder, gated_mlp, layer_windows, mlp, pre_norm_block, rotary_of


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
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, bias=config.mlp_bias, key=feed_forward_key))

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
class IQuestCoderConfig(LlamaConfig):
    """The config of an IQuest-Coder."""

    head_dim: Size | None = 128
    max_seq: Length = 131_072


_IQUEST_CODER_PRESETS = {
    "iquest-coder-byte-500k": IQuestCoderConfig(256, 96, 4, 6, 2, 256, head_dim=16, tied=True),
    "iquest-coder-v1-40b": IQuestCoderConfig(76_800, 5120, 80, 40, 8, 27_648, theta=500_000.0),
}

IQUEST_CODER = Family(
    *("iquest_coder", IQuestCoderConfig, build_llama, _IQUEST_CODER_PRESETS, "IQuestCoderForCausalLM", "iquestcoder"),
    (
        *(*decoder_attributes(kv_heads=8, max_seq=131_072), StatedHeadSize(128), *_BIASES, Activation()),
        *(Expect("clip_qkv", None, written=False), Expect("use_sliding_window", False, written=False)),
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
        mixer_key, feed_forward_key = jax.random.split(key)
        feed_forward = mlp(config, config.mlp, bias=config.mlp_bias, key=feed_forward_key)
        return pre_norm_block(config, attention(config, bias=config.bias, key=mixer_key), feed_forward)

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
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, output_bias=False, rotary=rotary, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, bias=config.mlp_bias, key=feed_forward_key))

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
    """The indices of the layers that see a `window`; all other layers see whole rows."""
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
        mixer_key, feed_forward_key = jax.random.split(key)
        gated = gated_mlp(config, bias=config.mlp_bias, key=feed_forward_key)
        return pre_norm_block(config, attention(config, window=window, key=mixer_key), gated)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """The config of a SmolLM3."""

    no_rotary_layers: tuple[Index, ...]
    """The indices of the layers without rotary positions."""
    theta: Positive = 5_000_000.0
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    tied: bool = True
    max_seq: Length = 65_536


def build_smollm3(config: SmolLM3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a SmolLM3 with random weights."""

    def block(kind: tuple[bool, int | None], key: Key[Array, ""]) -> Block:
        is_rotated, window = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        rotary = rotary_of(config, config.head_size, scaling=config.scaling) if is_rotated else None
        mixer = attention(config, window=window, bias=config.bias, rotary=rotary, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, bias=config.mlp_bias, key=feed_forward_key))

    kinds = [(layer not in config.no_rotary_layers, window) for layer, window in enumerate(layer_windows(config))]
    return decoder(config, block, kinds, key=key)


_SMOLLM3_PRESETS = {
    "smollm3-byte-400k": SmolLM3Config(
        vocab=256, embed=64, layers=8, heads=4, kv_heads=2, mlp=192, no_rotary_layers=every(4, 8), theta=10_000.0
    ),
    "smollm3-3b": SmolLM3Config(
        vocab=128_256, embed=2048, layers=36, heads=16, kv_heads=4, mlp=11_008, no_rotary_layers=every(4, 36)
    ),
}

SMOLLM3 = Family(
    "smollm3",
    SmolLM3Config,
    build_smollm3,
    _SMOLLM3_PRESETS,
    "SmolLM3ForCausalLM",
    "smollm3",
    (
        *decoder_attributes(RotaryPositions(2_000_000.0), kv_heads=4, tied=True, max_seq=32_768),
        NoRotaryLayers(),
        SwitchedWindows(None, NoRotaryLayers()),
        Activation(),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedOSSConfig(DecoderConfig):
    """The config of a Seed-OSS."""

    theta: Positive = 10_000_000.0
    bias: bool = True
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the attention's output has a bias."""
    mlp_bias: bool = False
    """Whether the feed-forward layers' maps have biases."""
    max_seq: Length = 524_288


def build_seed_oss(config: SeedOSSConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Seed-OSS with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, output_bias=config.output_bias, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, bias=config.mlp_bias, key=feed_forward_key))

    return decoder(config, block, key=key)


_SEED_OSS_PRESETS = {
    "seed-oss-byte-500k": SeedOSSConfig(
        256, 96, 4, 6, 2, 256, head_dim=16, theta=1e4, output_bias=True, mlp_bias=True, tied=True
    ),
    "seed-oss-36b": SeedOSSConfig(155_136, 5120, 64, 80, 8, 27_648, head_dim=128),
}

SEED_OSS = Family(
    "seed_oss",
    SeedOSSConfig,
    build_seed_oss,
    _SEED_OSS_PRESETS,
    "SeedOssForCausalLM",
    "seed_oss",
    (
        *decoder_attributes(kv_heads=8, max_seq=524_288),
        StatedHeadSize(128),
        Attribute("bias", "attention_bias", True),
        Attribute("output_bias", "attention_out_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
        Activation(),
        Ignore("residual_dropout"),  # a setting of training
    ),
    (*EDGES, *ATTENTION, *PRE_NORMS, *gated_weights(bias=True)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternLM3Config(DecoderConfig):
    """The config of an InternLM3."""

    head_dim: Size | None = 128
    bias: bool = False
    """Whether all maps of a layer have biases."""
    eps: NotNegative = 1e-5


def build_internlm3(config: InternLM3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an InternLM3 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, bias=config.bias, key=feed_forward_key))

    return decoder(config, block, key=key)


class _LayerBias(Entry):
    """Whether a layer's maps have biases, as `attention_bias` and `mlp_bias` or by the publishers' names."""

    _names = (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))

    def read(self, published: PublishedConfig) -> Fields:
        """Return `bias`; refuse biases of attention alone or of feed-forward layers alone, as transformers does."""
        of_attention, of_mlp = (published.flag(name, published.flag(older, False)) for name, older in self._names)
        if of_attention != of_mlp:
            published.refuse(f"attention_bias={of_attention}, mlp_bias={of_mlp}: in this family both must be equal.")
        return {"bias": of_attention}

    def write(self, config: InternLM3Config) -> Attributes:
        """Return both attributes."""
        return {name: config.bias for name, _ in self._names}


_INTERNLM3_PRESETS = {
    "internlm3-byte-500k": InternLM3Config(256, 96, 4, 6, 2, 256, head_dim=16, bias=True, tied=True),
    "internlm3-8b": InternLM3Config(
        *(128_512, 4096, 48, 32, 2, 10_240), theta=50_000_000.0, scaling=DynamicScaling(6.0, 32_768)
    ),
}

INTERNLM3 = Family(
    "internlm3",
    InternLM3Config,
    build_internlm3,
    _INTERNLM3_PRESETS,
    "InternLM3ForCausalLM",
    "internlm3",
    (
        *decoder_attributes(kv_heads=2, max_seq=32_768),
        StatedHeadSize(128),
        Attribute("eps", "rms_norm_eps", 1e-5),
        _LayerBias(),
        Activation(),
    ),
    (*EDGES, *ATTENTION, *PRE_NORMS, *gated_weights(bias=True)),
)


@dataclasses.dataclass(frozen=True)
class EuroBERTConfig(DecoderConfig):
    """The config of a EuroBERT."""

    _: dataclasses.KW_ONLY
    theta: Positive = 250_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 8192


def build_eurobert(config: EuroBERTConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a EuroBERT with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, mask=Mask(is_causal=False), key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, key=key)


_EUROBERT_PRESETS = {
    "eurobert-byte-200k": EuroBERTConfig(256, 64, 4, 4, 2, 96),
    "eurobert-210m": EuroBERTConfig(128_256, 768, 12, 12, 12, 3072),
    "eurobert-610m": EuroBERTConfig(128_256, 1152, 26, 18, 6, 4096),
    "eurobert-2.1b": EuroBERTConfig(128_256, 2304, 32, 18, 6, 6144),
}

EUROBERT = Family(
    *("eurobert", EuroBERTConfig, build_eurobert, _EUROBERT_PRESETS, "EuroBertForMaskedLM", "eurobert"),
    (
        *decoder_attributes(max_seq=8192),
        Activation(),
        Expect("attention_bias", False),
        Expect("mlp_bias", False),
        Ignore("is_causal"),  # The family's models are encoders, so this attribute has no effect.
        Ignore("classifier_pooling", "clf_pooling", "mask_token_id"),
        Ignore("bos_token", "eos_token", "pad_token", "mask_token"),  # The tokenizer has them, too.
    ),
    LLAMA_WEIGHTS,
    classifier=None,  # The scores of its classifiers are means over tokens.
)
