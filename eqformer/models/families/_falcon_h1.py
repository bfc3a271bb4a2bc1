"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and a Mamba-2 side by side, with a multiplier for each map."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, GateNorm, ParallelResidual, Residual, ScaledActivation, Scores, Transformer
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Length, NotNegative, Number, PublishedConfig
from .._family import DecoderConfig, Family
from .._weight_rules import Rule
from ._common import attention_weights, decoder_attributes, gated_weights, LAYER
from ._decoder import activation_of, attention, damping, decoder, gated_mlp, norm
from ._mamba2 import mamba2, mamba_weights, NetSizes, STATED_MAMBA_ATTRIBUTES


@dataclasses.dataclass(frozen=True)
class Scales(Entry):
    """A list of factors; all are 1 if the attribute is missing or null."""

    name: str
    published: str
    count: int

    def read(self, published: PublishedConfig) -> Fields:
        """Return the factors; refuse a list of another length, and items that are not numbers."""
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
    # Settings of how a program runs the model, and attributes that transformers never reads.
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
    """The config of a Falcon-H1; names of fields call its Mamba-2 `net`."""

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
    """Whether a Mamba-2's last map has a bias; `net_bias` is for its other maps."""
    mlp_bias: bool = False
    """Whether the feed-forward layers' maps have biases."""
    eps: NotNegative = 1e-5
    max_seq: Length = 8192


def build_falcon_h1(config: FalconH1Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Falcon-H1 with random weights."""
    score_scale = config.head_size**-0.5 * config.key_scale
    gates, values, keys, queries, steps = config.net_scales
    gate_scale, mlp_scale = config.mlp_scales

    def block(key: Key[Array, ""]) -> Block:
        attention_key, net_key, mlp_key = jax.random.split(key, 3)
        mixer = attention(config, scores=Scores(score_scale), bias=config.bias, key=attention_key)
        net = mamba2(
            config,
            activation=activation_of(config),
            gate_norm=GateNorm(config.eps, config.norm_first) if config.net_norm else None,
            output_std=damping(config) * config.net_width**-0.5,
            output_bias=config.output_bias,
            multipliers=(gates, values, keys, queries, steps),
            key=net_key,
        )
        activation = ScaledActivation(activation_of(config), gate_scale)
        gated = gated_mlp(config, activation=activation, bias=config.mlp_bias, key=mlp_key)
        mixers = (
            Residual(mixer, scale=config.attention_scale, input_scale=config.attention_input_scale),
            Residual(net, scale=config.net_scale, input_scale=config.net_input_scale),
        )
        return Block(ParallelResidual(mixers, norm(config)), Residual(gated, norm(config), scale=mlp_scale))

    return decoder(config, block, embedding_scale=config.embedding_scale, logit_scale=config.logit_scale, key=key)


_34B = FalconH1Config(
    *(261_120, 5120, 72, 20, 4, 21_504),
    head_dim=128,
    net_heads=32,
    net_kv_heads=2,
    net_head_dim=256,
    net_v_dim=128,
    net_norm=True,
    norm_first=False,
    theta=1e11,
    embedding_scale=2**2.5,
    key_scale=2**0.5 / 128,
    attention_scale=0.0375,
    net_input_scale=0.25,
    net_scales=(2**-1.5, 0.25, 2**-2.5, 0.5, 2**-1.5),
    net_scale=2**0.5 / 16,
    mlp_scales=(2**0.5 / 8, 5 / 448),
    logit_scale=1 / 128,
    max_seq=262_144,
)
_PRESETS = {
    "falcon-h1-byte-500k": FalconH1Config(
        *(256, 64, 6, 4, 2, 160),
        head_dim=16,
        net_heads=8,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        net_norm=True,
        norm_first=False,
        bias=True,
        net_bias=True,
        output_bias=True,
        mlp_bias=True,
        theta=1e11,
        embedding_scale=2**2.5,
        key_scale=0.5,
        net_scales=(2**-1.5, 0.25, 2**-2.5, 0.5, 2**-1.5),
        mlp_scales=(0.5, 0.5),
        tied=True,
        max_seq=262_144,
    ),
    "falcon-h1-0.5b": FalconH1Config(
        *(32_784, 1024, 36, 8, 2, 2048),
        head_dim=64,
        net_heads=24,
        net_head_dim=128,
        net_v_dim=64,
        norm_first=False,
        theta=1e11,
        embedding_scale=2**2.5,
        key_scale=0.39062499999999994,
        attention_scale=0.9375,
        net_input_scale=1.25,
        net_scales=(2**-1.5, 0.25, 2**-1.5, 0.5, 2**-1.5),
        net_scale=2**0.5 / 6,
        mlp_scales=(0.625 * 2**0.5, 0.5859375),
        logit_scale=0.0390625,
        max_seq=16_384,
    ),
    "falcon-h1-7b": dataclasses.replace(
        _34B,
        vocab=130_049,
        embed=3072,
        layers=44,
        heads=12,
        kv_heads=2,
        mlp=12_288,
        net_heads=24,
        net_kv_heads=1,
        key_scale=2**0.5 * 25 / 1152,
        attention_scale=5 / 48,
        net_input_scale=5 / 12,
        net_scale=2**0.5 / 12,
        mlp_scales=(2**0.5 * 5 / 24, 25 / 768),
        logit_scale=5 / 384,
    ),
    "falcon-h1-34b": _34B,
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
