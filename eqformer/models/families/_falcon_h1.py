"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and a Mamba-2 side by side, with a multiplier for each map."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import Block, GateNorm, ParallelResidual, Residual, ScaledActivation, Scores, Transformer
from .._attributes import Activation, Attribute, Attributes, Entry, Expect, Fields, Ignore
from .._config_types import Length, NotNegative, Number, PublishedConfig
from .._family import DecoderConfig, Family
from .._weight_rules import Rule
from ._common import attention_weights, decoder_attributes, gated_weights, LAYER
from ._decoder import activation_of, attention, decoder, gated_mlp, norm
from ._state_spaces import mamba2, mamba_weights, NetSizes, STATED_MAMBA_ATTRIBUTES


@dataclasses.dataclass(frozen=True)
class Scales(Entry):
    """A list of factors; all are 1 where the attribute is missing or null."""

    name: str
    published: str
    count: int

    def read(self, published: PublishedConfig) -> Fields:
        """Return the factors; refuse a list of another length, and items that are no numbers."""
        stated = published.listed(self.published, Number)
        scales = [1.0] * self.count if stated is None else stated
        if len(scales) != self.count:
            published.refuse(f"{self.published}={stated}: it must be a list of {self.count} numbers.")
        return {self.name: tuple(scales)}

    def write(self, config: "FalconH1Config") -> Attributes:
        """Return the list."""
        return {self.published: list(getattr(config, self.name))}


_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "attention_input_scale": "attention_in_multiplier",
    "key_scale": "key_multiplier",
    "attention_scale": "attention_out_multiplier",
    "net_input_scale": "ssm_in_multiplier",
    "net_scale": "ssm_out_multiplier",
    "logit_scale": "lm_head_multiplier",
}
ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(kv_heads=8, max_seq=8192),
    *STATED_MAMBA_ATTRIBUTES,
    *(Attribute(name, published, 1.0) for name, published in _SCALES.items()),
    Scales("net_scales", "ssm_multipliers", 5),
    Scales("mlp_scales", "mlp_multipliers", 2),
    Attribute("net_norm", "mamba_rms_norm", False),
    Attribute("norm_first", "mamba_norm_before_gate", True),
    Attribute("bias", "attention_bias", False),
    Attribute("output_bias", "projectors_bias", False),
    Attribute("mlp_bias", "mlp_bias", False),
    Activation(),
    Expect("mamba_use_mlp", True, written=False),
    # Settings of running, and attributes that transformers never reads.
    Ignore("mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor", "attn_layer_indices"),
    Ignore("layers_block_type", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
)
WEIGHTS = (
    Rule("model.embed_tokens.weight", "embedding.weight"),
    Rule("model.final_layernorm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule(f"{LAYER}input_layernorm.weight", "mixer.norm.weight"),
    *attention_weights(path="mixer.branches.0.layer"),
    *mamba_weights(f"{LAYER}mamba.", "mixer.branches.1.layer."),
    Rule(f"{LAYER}pre_ff_layernorm.weight", "feed_forward.norm.weight"),
    *gated_weights(prefix=f"{LAYER}feed_forward.", bias=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconH1Config(NetSizes, DecoderConfig):
    """The config of a Falcon-H1; scales are factors."""

    embedding_scale: Number = 1.0
    """A factor of the embeddings."""
    attention_input_scale: Number = 1.0
    """A factor of the attention's input."""
    key_scale: Number = 1.0
    """A factor of the attention's keys."""
    attention_scale: Number = 1.0
    """A factor of the attention's output."""
    net_input_scale: Number = 1.0
    """A factor of a Mamba-2's input."""
    net_scales: tuple[Number, ...] = (1.0,) * 5
    """Factors of a Mamba-2's gates, values, keys, queries and steps."""
    net_scale: Number = 1.0
    """A factor of a Mamba-2's output."""
    mlp_scales: tuple[Number, ...] = (1.0, 1.0)
    """Factors of a feed-forward layer's gate and of its output."""
    logit_scale: Number = 1.0
    """A factor of the logits."""
    net_norm: bool = False
    """Whether a Mamba-2's output has a norm."""
    norm_first: bool = True
    """Whether the norm of a Mamba-2's output is applied before its gate."""
    bias: bool = False
    """Whether the attention's maps have biases."""
    output_bias: bool = False
    """Whether a Mamba-2's last map has a bias; `net_bias` states it for the other maps."""
    mlp_bias: bool = False
    """Whether the feed-forward layers' maps have biases."""
    eps: NotNegative = 1e-5
    max_seq: Length = 8192


def build_falcon_h1(config: FalconH1Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Falcon-H1 with random weights."""
    score_scale = config.head_size**-0.5 * config.key_scale
    net_options: dict[str, Any] = {"output_bias": config.output_bias, "multipliers": config.net_scales}
    net_options["gate_norm"] = GateNorm(config.eps, config.norm_first) if config.net_norm else None
    net_options["activation"] = activation_of(config)
    gate_scale, mlp_scale = config.mlp_scales
    mlp_options: dict[str, Any] = {"bias": config.mlp_bias}
    mlp_options["activation"] = ScaledActivation(activation_of(config), gate_scale)

    def block(_: None, key: Key[Array, ""]) -> Block:
        attended, recurrent, gated = jax.random.split(key, 3)
        attends = attention(config, scores=Scores(score_scale), bias=config.bias, key=attended)
        net = mamba2(config, recurrent, **net_options)
        mixers = (
            Residual(attends, scale=config.attention_scale, input_scale=config.attention_input_scale),
            Residual(net, scale=config.net_scale, input_scale=config.net_input_scale),
        )
        feed_forward = Residual(gated_mlp(config, **mlp_options, key=gated), norm(config), scale=mlp_scale)
        return Block(ParallelResidual(mixers, norm(config)), feed_forward)

    scales: dict[str, Any] = {"embedding_scale": config.embedding_scale, "logit_scale": config.logit_scale}
    return decoder(config, block, **scales, key=key)


def _falcon(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> FalconH1Config:
    fields: dict[str, Any] = {"head_dim": 128, "net_head_dim": 256, "net_v_dim": 128, "theta": 1e11, "max_seq": 262_144}
    fields |= {"embedding_scale": 2**2.5, "net_scales": (2**-1.5, 0.25, 2**-2.5, 0.5, 2**-1.5), "norm_first": False}
    return FalconH1Config(embed=embed, layers=layers, heads=heads, kv_heads=kv_heads, mlp=mlp, **fields | more)


_BYTE: dict[str, Any] = {"vocab": 256, "head_dim": 16, "net_head_dim": 16, "net_v_dim": 16, "net_heads": 8}
_BYTE |= {"net_kv_heads": 2, "net_norm": True, "key_scale": 0.5, "tied": True, "mlp_scales": (0.5, 0.5)}
_BYTE |= dict.fromkeys(("bias", "net_bias", "output_bias", "mlp_bias"), True)
_HALF: dict[str, Any] = {"vocab": 32_784, "head_dim": 64, "net_heads": 24, "net_head_dim": 128, "net_v_dim": 64}
_HALF |= {
    "net_scales": (2**-1.5, 0.25, 2**-1.5, 0.5, 2**-1.5),
    "key_scale": 0.39062499999999994,
    "attention_scale": 0.9375,
}
_HALF |= {"net_input_scale": 1.25, "net_scale": 2**0.5 / 6, "mlp_scales": (0.625 * 2**0.5, 0.5859375)}
_SEVEN: dict[str, Any] = {"vocab": 130_049, "net_heads": 24, "net_norm": True, "key_scale": 2**0.5 * 25 / 1152}
_SEVEN |= {"attention_scale": 5 / 48, "net_input_scale": 5 / 12, "net_scale": 2**0.5 / 12}
_SEVEN |= {"mlp_scales": (2**0.5 * 5 / 24, 25 / 768), "logit_scale": 5 / 384}
_LARGE: dict[str, Any] = {"vocab": 261_120, "net_heads": 32, "net_kv_heads": 2, "net_norm": True}
_LARGE |= {"key_scale": 2**0.5 / 128, "attention_scale": 0.0375, "net_input_scale": 0.25, "net_scale": 2**0.5 / 16}
_LARGE |= {"mlp_scales": (2**0.5 / 8, 5 / 448), "logit_scale": 1 / 128}
_PRESETS = {
    "falcon-h1-byte-500k": _falcon(64, 6, 4, 2, 160, **_BYTE),
    "falcon-h1-0.5b": _falcon(1024, 36, 8, 2, 2048, **_HALF, logit_scale=0.0390625, max_seq=16_384),
    "falcon-h1-7b": _falcon(3072, 44, 12, 2, 12_288, **_SEVEN),
    "falcon-h1-34b": _falcon(5120, 72, 20, 4, 21_504, **_LARGE),
}

FALCON_H1 = Family(
    "falcon_h1",
    FalconH1Config,
    build_falcon_h1,
    _PRESETS,
    "FalconH1ForCausalLM",
    "falcon_h1",
    ATTRIBUTES,
    WEIGHTS,
)
