"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671, 2412.15115), and Qwen2-MoE (section 2.2).

Both are Llamas with biased queries, keys and values. Qwen2-MoE has small experts beside a shared expert with a gate.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Index, Length, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import LateWindows, SwitchedWindows
from . import _mixtures as mixtures
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, layer_windows, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """The config of a Qwen2."""

    theta: Positive = 1_000_000.0
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The numbers of the layers that see a `window`; all other layers see whole rows."""


def build_qwen2(config: Qwen2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen2 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, window=window, bias=True, output_bias=False, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, layer_windows(config), key=key)


_QWEN2_05B = Qwen2Config(vocab=151_936, embed=896, layers=24, heads=14, kv_heads=2, mlp=4864, tied=True)
_QWEN2_15B = Qwen2Config(vocab=151_936, embed=1536, layers=28, heads=12, kv_heads=2, mlp=8960, tied=True)
_QWEN2_7B = Qwen2Config(vocab=152_064, embed=3584, layers=28, heads=28, kv_heads=4, mlp=18_944)
_QWEN2_72B = Qwen2Config(vocab=152_064, embed=8192, layers=80, heads=64, kv_heads=8, mlp=29_568, eps=1e-5)
_QWEN2_PRESETS = {
    "qwen2-byte-500k": Qwen2Config(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, theta=10_000.0, tied=True
    ),
    "qwen2-0.5b": _QWEN2_05B,
    "qwen2-1.5b": _QWEN2_15B,
    "qwen2-7b": _QWEN2_7B,
    "qwen2-72b": _QWEN2_72B,
    "qwen2.5-0.5b": _QWEN2_05B,
    "qwen2.5-1.5b": _QWEN2_15B,
    "qwen2.5-3b": Qwen2Config(vocab=151_936, embed=2048, layers=36, heads=16, kv_heads=2, mlp=11_008, tied=True),
    "qwen2.5-7b": _QWEN2_7B,
    "qwen2.5-14b": Qwen2Config(vocab=152_064, embed=5120, layers=48, heads=40, kv_heads=8, mlp=13_824, eps=1e-5),
    "qwen2.5-32b": Qwen2Config(vocab=152_064, embed=5120, layers=64, heads=40, kv_heads=8, mlp=27_648, eps=1e-5),
    "qwen2.5-72b": _QWEN2_72B,
}

QWEN2 = Family(
    "qwen2",
    Qwen2Config,
    build_qwen2,
    _QWEN2_PRESETS,
    "Qwen2ForCausalLM",
    "qwen2",
    (*decoder_attributes(kv_heads=32, max_seq=32_768), LateWindows(4096, 28), Activation()),
    LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2MoEConfig(mixtures.QwenMoEConfig):
    """The config of a Qwen2-MoE; `mlp` is a dense layer's width, `expert_mlp` and `shared_mlp` the experts'."""

    shared_mlp: Size
    """Hidden features of the shared expert."""
    experts: Size = 60
    top_k: Size = 4
    normalise: bool = False
    bias: bool = True
    """Whether queries, keys and values have biases."""
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The numbers of the layers that see a `window`; all other layers see whole rows."""


def build_qwen2_moe(config: Qwen2MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen2-MoE with random weights."""

    def block(kind: tuple[bool, int | None], key: Key[Array, ""]) -> Block:
        (is_mixture, window), (mixer, feed_forward) = kind, jax.random.split(key)
        attended = attention(config, window=window, bias=config.bias, output_bias=False, key=mixer)
        if is_mixture:
            return pre_norm_block(config, attended, mixtures.mixture_beside_gated_shared(config, feed_forward))
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(
        config, block, list(zip(mixtures.mixture_flags(config), layer_windows(config), strict=True)), key=key
    )


def _every_other(published: PublishedConfig, layers: int) -> range:
    """Return the first, the third and so on of the first `max_window_layers` layers."""
    return range(0, min(layers, published.count("max_window_layers", 28, least=0)), 2)


_QWEN2_MOE_PRESETS = {
    "qwen2-moe-byte-500k": Qwen2MoEConfig(
        256, 64, 4, 4, 4, mlp=128, expert_mlp=32, shared_mlp=64, experts=12, theta=10_000.0, tied=True
    ),
    "qwen1.5-moe-a2.7b": Qwen2MoEConfig(151_936, 2048, 24, 16, 16, mlp=5632, expert_mlp=1408, shared_mlp=5632),
    "qwen2-57b-a14b": Qwen2MoEConfig(
        151_936, 3584, 28, 28, 4, mlp=18_944, expert_mlp=2560, shared_mlp=20_480, experts=64, top_k=8
    ),
}

QWEN2_MOE = Family(
    "qwen2_moe",
    Qwen2MoEConfig,
    build_qwen2_moe,
    _QWEN2_MOE_PRESETS,
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    (
        *decoder_attributes(kv_heads=16, max_seq=32_768),
        *mixtures.mixture_attributes(60, 4),
        SwitchedWindows(4096, _every_other),
        Attribute("bias", "qkv_bias", True),
        Attribute("shared_mlp", "shared_expert_intermediate_size"),
        Activation(),
    ),
    (*LLAMA_WEIGHTS, *mixtures.MIXTURE, *mixtures.GATED_SHARED),
)
