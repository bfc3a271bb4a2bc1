"""Mamba-2 (Dao and Gu 2024) and Bamba (IBM et al. 2024), and the parts that hybrids with Mamba-2 share.

Mamba-2 has a recurrence in each layer and nothing else. Bamba adds gated layers, and attention in a few of the layers.
The shared parts are config fields, the mixer, and tables.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated

import jax
from jaxtyping import Array, Key

from ... import nn
from ..._annotation_checks import fits
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import (
    Attributes,
    Fraction,
    Index,
    LayerCount,
    Length,
    NotNegative,
    Positive,
    PublishedConfig,
    Range,
    Size,
)
from .._family import DecoderConfig, Family, ModelConfig
from .._layer_attributes import ListedLayers
from .._rotary_attributes import RotaryFraction
from .._rotary_scaling import either_rotary_parameters
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, gated_weights, LAYER, leaf_paths, norm_weights
from ._decoder import activation_of, attention, damping, decoder, gated_mlp, norm, part_rotary, pre_norm_block


STEP_LIMITS = tuple[NotNegative, Annotated[float, Range(0.0, math.inf)]]  # least and greatest, which may be infinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetSizes(ModelConfig):
    """Base class of configs with a `Mamba2Mixer`, which names of fields call `net`."""

    net_heads: Size
    """The number of value heads."""
    net_kv_heads: Size = 1
    """The number of key heads, and of query heads, which Mamba calls groups."""
    net_head_dim: Size = 128
    """Channels of a key or query head: the size of the state."""
    net_v_dim: Size = 64
    """Channels of a value head."""
    taps: Size = 4
    """The number of tokens that the convolutions read."""
    net_bias: bool = False
    """Whether the maps have biases."""
    conv_bias: bool = True
    """Whether the convolutions have biases."""
    step_limits: STEP_LIMITS = (0.0, math.inf)
    """The bounds of a token's time step."""

    @property
    def net_width(self) -> int:
        """Channels of all value heads."""
        return self.net_heads * self.net_v_dim


def mamba2(
    config: NetSizes,
    *,
    activation: Callable[[Array], Array],
    gate_norm: nn.GateNorm | None,
    output_std: float | None,
    output_bias: bool | None = None,
    multipliers: tuple[float, float, float, float, float] | None = None,
    key: Key[Array, ""],
) -> nn.Mamba2Mixer:
    """Return a `Mamba2Mixer` of the config's sizes; the other arguments are passed to `Mamba2Mixer`."""
    return nn.Mamba2Mixer(
        embed=config.embed,
        heads=config.net_heads,
        kv_heads=config.net_kv_heads,
        head_dim=config.net_head_dim,
        v_dim=config.net_v_dim,
        taps=config.taps,
        bias=config.net_bias,
        conv_bias=config.conv_bias,
        step_limits=config.step_limits,
        output_bias=output_bias,
        multipliers=multipliers,
        gate_norm=gate_norm,
        output_std=output_std,
        activation=activation,
        key=key,
    )


@dataclasses.dataclass(frozen=True)
class StepLimits(Entry):
    """`time_step_limit`, the bounds of a token's time step; a missing or null attribute means no bounds."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `step_limits`; refuse anything but two numbers; the second number may be infinite."""
        stated = published.listed("time_step_limit")
        limits = (0.0, math.inf) if stated is None else tuple(math.inf if end == _INFINITE else end for end in stated)
        if not fits(limits, STEP_LIMITS) or limits[0] > limits[1]:
            published.refuse(f"time_step_limit={stated}: it must be a least and a greatest step, both at least 0.")
        return {"step_limits": limits}

    def write(self, config: NetSizes) -> Attributes:
        """Return the pair as transformers writes it, or nothing if steps have no bounds."""
        min_step, max_step = config.step_limits
        bound = {"time_step_limit": [min_step, _INFINITE if math.isinf(max_step) else max_step]}
        return {} if (min_step, max_step) == (0.0, math.inf) else bound


_INFINITE = {"__float__": "Infinity"}


@dataclasses.dataclass(frozen=True)
class ValueChannels(Entry):
    """Channels of a value head. Configurations state them twice: for one head, and for all heads together.

    The attribute `channels` has the channels of one head. The attribute `expand` has the channels of all heads, as a
    multiple of the model's width. Some families have the channels of all heads as an attribute `inner`; `expand` is
    then read only if `inner` is null.
    """

    heads: str
    channels: str
    expand: str
    default: int | str
    inner: tuple[str, int] | None = None
    """The attribute, and its default."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `net_v_dim`; refuse two attributes that contradict each other."""
        heads, width = published.read(self.heads, Size, 128), published.read("hidden_size", Size)
        inner = int(published.read(self.expand, Positive, 2) * width)
        expected = f"{inner} channels, {self.expand} * {width}"
        if self.inner is not None and (stated := published.nullable(*self.inner)) is not None:
            inner, expected = published.checked(self.inner[0], stated, Size), f"{self.inner[0]}={stated} channels"
        value = published.take(self.channels, self.default)
        channels = inner // heads if value == "auto" else published.checked(self.channels, value, Size)
        if channels * heads != inner:
            published.refuse(f"{self.channels}={value}: {heads} heads ({self.heads}) must together have {expected}.")
        return {"net_v_dim": channels}

    def write(self, config: NetSizes) -> Attributes:
        """Return both attributes."""
        inner = config.net_width
        if self.inner is not None:
            return {self.channels: config.net_v_dim, self.inner[0]: inner}
        expand = inner / config.embed if inner % config.embed else inner // config.embed
        return {self.channels: config.net_v_dim, self.expand: expand}


# Falcon-H1's attributes. Bamba and its successors have the same attributes without `mamba_d_ssm`, the channels of all
# heads.
_VALUES = ("mamba_n_heads", "mamba_d_head", "mamba_expand", "auto")
STATED_MAMBA_ATTRIBUTES: tuple[Entry, ...] = (
    Count("net_heads", "mamba_n_heads", 128),
    Count("net_kv_heads", "mamba_n_groups", 1),
    Count("net_head_dim", "mamba_d_state", 256),
    Count("taps", "mamba_d_conv", 4),
    Attribute("net_bias", "mamba_proj_bias", False),
    Attribute("conv_bias", "mamba_conv_bias", True),
    StepLimits(),
    ValueChannels(*_VALUES, ("mamba_d_ssm", 1024)),
)
MAMBA_ATTRIBUTES = (*STATED_MAMBA_ATTRIBUTES[:-1], ValueChannels(*_VALUES))


def mamba_weights(prefix: str, path: str = "mixer.layer.") -> tuple[Rule, ...]:
    """Return the rules for a `Mamba2Mixer`: its input maps are published as one array, its convolutions as another."""
    parts = ("gate", "value", "key", "query", "step")
    convolutions = tuple(f"{part}_conv" for part in parts[1:4])
    rules = (
        Rule(
            f"{prefix}in_proj.weight",
            leaf_paths(parts, "weight", path),
            (_INTO_HEADS,) * 4 + ("",),
        ),
        Rule(f"{prefix}in_proj.bias", leaf_paths(parts, "bias", path), (_OF_HEADS,) * 4 + ("",)),
        Rule(f"{prefix}conv1d.weight", leaf_paths(convolutions, "weight", path), _TAPS_OF_HEADS),
        Rule(f"{prefix}conv1d.bias", leaf_paths(convolutions, "bias", path), _OF_HEADS),
        Rule(f"{prefix}A_log", f"{path}log_rate"),
        Rule(f"{prefix}dt_bias", f"{path}step_bias"),
        Rule(f"{prefix}D", f"{path}skip"),
        Rule(f"{prefix}norm.weight", f"{path}scale", _OF_HEADS),
        Rule(f"{prefix}out_proj.weight", f"{path}output.weight", "embed (heads dim) -> embed heads dim"),
        Rule(f"{prefix}out_proj.bias", f"{path}output.bias"),
    )
    return tuple(dataclasses.replace(rule, needs=f"{path}log_rate") for rule in rules)


def beside_mamba(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return an attention's rules, limited to layers that have no `Mamba2Mixer`."""
    return tuple(dataclasses.replace(rule, lacks="mixer.layer.log_rate") for rule in rules)


_INTO_HEADS = "(heads dim) embed -> heads dim embed"
_TAPS_OF_HEADS = "(heads dim) 1 taps -> heads dim taps"
_OF_HEADS = "(heads dim) -> heads dim"


# The families.


@dataclasses.dataclass(frozen=True)
class Mamba2Config(NetSizes):
    """The config of a Mamba-2."""

    layers: LayerCount
    """The number of layers."""
    _: dataclasses.KW_ONLY
    eps: NotNegative = 1e-5
    """The epsilon of norms, which is added to the mean square before the root."""
    tied: bool = False
    """Whether the embedding's table is the head too."""
    activation: str = "silu"
    """The activation after the convolutions: a name of `nn.ACTIVATIONS`."""


def build_mamba2(config: Mamba2Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Mamba-2 with random weights."""

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer = mamba2(
            config,
            activation=activation_of(config),
            gate_norm=nn.GateNorm(config.eps),
            output_std=damping(config) * config.net_width**-0.5,
            key=key,
        )
        return nn.Block(nn.Residual(mixer, norm(config)))

    return decoder(config, block, key=key)


def _mamba2(embed: int, layers: int) -> Mamba2Config:
    return Mamba2Config(50_288, embed, layers, net_heads=2 * embed // 64, tied=True)


_PRESETS = {
    "mamba2-byte-500k": Mamba2Config(
        256, 96, 6, net_heads=12, net_kv_heads=2, net_head_dim=32, net_v_dim=16, net_bias=True, tied=True
    ),
    "mamba2-130m": _mamba2(768, 24),
    "mamba2-370m": _mamba2(1024, 48),
    "mamba2-780m": _mamba2(1536, 48),
    "mamba2-1.3b": _mamba2(2048, 48),
    "mamba2-2.7b": _mamba2(2560, 64),
    "mamba-codestral-7b": Mamba2Config(32_768, 4096, 64, net_heads=128, net_kv_heads=8),
}

_LAYER = "backbone.layers.{layer}."
MAMBA2 = Family(
    "mamba2",
    Mamba2Config,
    build_mamba2,
    _PRESETS,
    "Mamba2ForCausalLM",
    "mamba2",
    (
        *(Count("vocab", "vocab_size"), Count("embed", "hidden_size"), Count("layers", "num_hidden_layers")),
        Count("net_heads", "num_heads", 128),
        Count("net_kv_heads", "n_groups", 8),
        Count("net_head_dim", "state_size", 128),
        Count("taps", "conv_kernel", 4),
        Attribute("net_bias", "use_bias", False),
        Attribute("conv_bias", "use_conv_bias", True),
        ValueChannels("num_heads", "head_dim", "expand", 64),
        StepLimits(),
        Attribute("eps", "layer_norm_epsilon", 1e-5),
        Attribute("tied", "tie_word_embeddings", False),
        Activation(),
        Expect("rms_norm", True, written=False),
        # Settings of initialization, rounding and kernels, and attributes that transformers never reads.
        # With rescale_prenorm_residual, transformers 5.24 initializes weights smaller, and by mistake changes loaded
        # weights too.
        Ignore("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_min"),
        Ignore("time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme", "norm_before_gate"),
        Ignore("intermediate_size"),
    ),
    (
        Rule("backbone.embeddings.weight", "embedding.weight"),
        Rule("backbone.norm_f.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight"),
        Rule(f"{_LAYER}norm.weight", "mixer.norm.weight"),
        *mamba_weights(f"{_LAYER}mixer."),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BambaConfig(NetSizes, DecoderConfig):
    """The config of a Bamba."""

    attention_layers: tuple[Index, ...]
    """The indices of the layers with attention."""
    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    bias: bool = False
    """Whether the attention's maps have biases."""
    mlp_bias: bool = False
    """Whether the feed-forward layers' maps have biases."""
    eps: NotNegative = 1e-5
    max_seq: Length = 262_144


def build_bamba(config: BambaConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Bamba with random weights."""
    rotary = part_rotary(config)

    def mixer(is_attention: bool, key: Key[Array, ""]) -> nn.Attention | nn.Mamba2Mixer:
        if is_attention:
            return attention(config, rotary=rotary, bias=config.bias, key=key)
        return mamba2(
            config,
            activation=activation_of(config),
            gate_norm=nn.GateNorm(config.eps),
            output_std=damping(config) * config.net_width**-0.5,
            key=key,
        )

    def block(is_attention: bool, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        gated = gated_mlp(config, bias=config.mlp_bias, key=feed_forward_key)
        return pre_norm_block(config, mixer(is_attention, mixer_key), gated)

    return decoder(config, block, [layer in config.attention_layers for layer in range(config.layers)], key=key)


_BAMBA_PRESETS = {
    "bamba-byte-500k": BambaConfig(
        256,
        64,
        6,
        4,
        2,
        160,
        attention_layers=(2, 5),
        net_heads=8,
        net_head_dim=16,
        net_v_dim=16,
        mlp_bias=True,
        tied=True,
    ),
    "bamba-9b": BambaConfig(128_256, 4096, 32, 32, 8, 14_336, net_heads=128, attention_layers=(9, 18, 27)),
}


@dataclasses.dataclass(frozen=True)
class _StatedInside(RotaryFraction):
    """The rotated fraction of a head, which transformers reads from `rope_parameters` alone."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `rotary_fraction`; refuse a fraction outside of `rope_parameters` that transformers would replace."""
        fields, fraction = super().read(published), self.default
        if either_rotary_parameters(published).get(self.published) is None and fields["rotary_fraction"] != fraction:
            published.refuse(
                f"{self.published}={fields['rotary_fraction']}: transformers takes {fraction} unless rope_parameters "
                "state another fraction; state it there."
            )
        return fields


BAMBA = Family(
    "bamba",
    BambaConfig,
    build_bamba,
    _BAMBA_PRESETS,
    "BambaForCausalLM",
    "bamba",
    (
        *decoder_attributes(kv_heads=8, max_seq=262_144),
        *MAMBA_ATTRIBUTES,
        ListedLayers("attention_layers", "attn_layer_indices", lambda published, layers: ()),
        _StatedInside(0.5, inside=True),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
        Activation(),
        # Settings of how a program runs or trains the model, and attributes that transformers never reads.
        Ignore("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb"),
    ),
    (
        Rule("model.embed_tokens.weight", "embedding.weight"),
        Rule("model.final_layernorm.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight"),
        *beside_mamba(ATTENTION),
        *mamba_weights(f"{LAYER}mamba."),
        *norm_weights(mixer="input_layernorm", feed_forward="pre_ff_layernorm"),
        *gated_weights(prefix=f"{LAYER}feed_forward.", bias=True),
    ),
)
