"""Command R (Cohere 2024): attention and feed-forward layer read the same norm, and logits are scaled.

Command R7B and Command A (Cohere 2025) have windows and rotary positions in most layers, and neither in the others.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Attention, GatedMLP, LayerNorm, ParallelResidual, Residual, Transformer
from .._attributes import Activation, Attribute, Expect, Ignore
from .._config_types import Index, Length, NotNegative, Number, Positive
from .._family import DecoderConfig, Family
from .._layer_attributes import all_but_every, Period, Windows
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import decoder_attributes, LAYER, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, head_layer_norm, layer_windows, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """The config of a Command R."""

    theta: Positive = 8_000_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    qk_norm: bool = False
    """Whether queries and keys have norms, with a scale for each head."""
    logit_scale: Number = 0.0625
    """A factor of the logits."""
    tied: bool = True
    max_seq: Length = 8192


def build_cohere(config: CohereConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Command R with random weights."""

    def block(key: Key[Array, ""]) -> ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config,
            bias=config.bias,
            query_norm=head_layer_norm(config, "heads") if config.qk_norm else None,
            key_norm=head_layer_norm(config, "kv_heads") if config.qk_norm else None,
            rotary=rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling),
            key=mixer_key,
        )
        return _parallel(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, final_norm=_norm(config), logit_scale=config.logit_scale, key=key)


def _norm(config: DecoderConfig) -> LayerNorm:
    return LayerNorm("embed", embed=config.embed, bias=False, eps=config.eps)


def _parallel(config: DecoderConfig, mixer: Attention, gated: GatedMLP) -> ParallelResidual:
    """Return a layer whose attention and feed-forward layer both read the output of one norm."""
    return ParallelResidual((Residual(mixer), Residual(gated)), _norm(config))


_PRESETS = {
    "cohere-byte-500k": CohereConfig(256, 96, 4, 6, 2, 256, theta=10_000.0),
    "command-r": CohereConfig(256_000, 8192, 40, 64, 64, 22_528),
    "command-r-plus": CohereConfig(
        256_000, 12_288, 64, 96, 8, 33_792, theta=75_000_000.0, qk_norm=True, logit_scale=0.8333333
    ),
}

_WEIGHTS = (*LLAMA_WEIGHTS, Rule(f"{LAYER}input_layernorm.weight", "norm.weight"))
COHERE = Family(
    "cohere",
    CohereConfig,
    build_cohere,
    _PRESETS,
    "CohereForCausalLM",
    "cohere",
    (
        *decoder_attributes(RotaryPositions(500_000.0), eps="layer_norm_eps", tied=True, max_seq=8192),
        Attribute("bias", "attention_bias", False),
        Attribute("qk_norm", "use_qk_norm", False),
        Attribute("logit_scale", "logit_scale", 0.0625),
        Activation(),
    ),
    _WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2Config(DecoderConfig):
    """The config of a Command R7B or Command A."""

    window_layers: tuple[Index, ...]
    """The indices of the layers with a `window` and rotary positions; the other layers have neither."""
    window: Length = 4096
    """The number of tokens that the layers of `window_layers` see."""
    theta: Positive = 50_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    logit_scale: Number = 0.25
    """A factor of the logits."""
    tied: bool = True
    max_seq: Length = 131_072


def build_cohere2(config: Cohere2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Command R7B or Command A with random weights."""
    rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)

    def block(window: int | None, key: Key[Array, ""]) -> ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        is_rotated = window is not None
        mixer = attention(config, window=window, bias=config.bias, rotary=rotary if is_rotated else None, key=mixer_key)
        return _parallel(config, mixer, gated_mlp(config, key=feed_forward_key))

    ends = {"final_norm": _norm(config), "logit_scale": config.logit_scale}
    return decoder(config, block, layer_windows(config), **ends, key=key)


_COHERE2_PRESETS = {
    "cohere2-byte-500k": Cohere2Config(
        256, 96, 4, 6, 2, 256, window_layers=all_but_every(4, 4), window=64, theta=10_000.0
    ),
    "command-r7b": Cohere2Config(256_000, 4096, 32, 32, 8, 14_336, window_layers=all_but_every(4, 32)),
    "command-a": Cohere2Config(256_000, 12_288, 64, 96, 8, 36_864, window_layers=all_but_every(4, 64)),
}

COHERE2 = Family(
    "cohere2",
    Cohere2Config,
    build_cohere2,
    _COHERE2_PRESETS,
    "Cohere2ForCausalLM",
    "cohere2",
    (
        *decoder_attributes(eps="layer_norm_eps", tied=True, max_seq=8192),
        Windows(4096, Period(4, ("sliding_window_pattern",), but=True)),
        Attribute("bias", "attention_bias", False),
        Attribute("logit_scale", "logit_scale", 0.0625),
        Activation(),
        # Cohere's own program reads these attributes. All models of this family have these values.
        Expect("order_of_interleaved_layers", "local_attn_first", written=False),
        Expect("position_embedding_type", "rope_gptj", written=False),
        Expect("rotary_pct", 1.0, written=False),
        *(Expect(f"use_{name}", True, written=False) for name in ("gated_activation", "parallel_block")),
        Expect("use_qk_norm", False, written=False),
        Ignore("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),  # repeated, or without effect
    ),
    _WEIGHTS,
)
