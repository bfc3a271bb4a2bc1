"""Configs, mixers and tables that hybrids of attention and gated delta nets share."""

import dataclasses
from typing import Any

from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Entry
from .._config_types import Fraction, Index, Length, NotNegative, Positive, Size
from .._family import DecoderConfig
from .._layer_attributes import LayerTypes, Period
from .._rotary_attributes import RotaryFraction
from .._weight_rules import Rule
from ._common import attention_weights, LAYER, leaf_paths
from ._decoder import activation_of, attention, damping, head_norms, part_rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetSizesConfig(DecoderConfig):
    """Base class of the configs of hybrids of attention and gated delta nets, with the sizes of the delta nets."""

    attention_layers: tuple[Index, ...]
    """The indices of the layers with attention; all other layers have gated delta nets."""
    net_heads: Size
    """The number of value heads of a delta net."""
    net_kv_heads: Size
    """The number of key heads, and of query heads, of a delta net."""
    net_head_dim: Size
    """Channels of a query or key head of a delta net."""
    net_v_dim: Size
    """Channels of a value head of a delta net."""
    taps: Size = 4
    """The number of tokens that a delta net's convolutions read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetConfig(NetSizesConfig):
    """Base class of the configs of Qwen's hybrids, whose attention has gates."""

    net_heads: Size = 32
    net_kv_heads: Size = 16
    net_head_dim: Size = 128
    net_v_dim: Size = 128
    head_dim: Size = 256
    rotary_fraction: Fraction = 0.25
    """The fraction of a head's channels that is rotated."""
    bias: bool = False
    """Whether the attention's maps have biases."""
    theta: Positive = 10_000_000.0
    max_seq: Length = 262_144


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetMixtureConfig(NetConfig):
    """Base class of the configs of Qwen's hybrids in which all layers have experts; `mlp` is the width of an expert."""

    shared_mlp: Size
    """Hidden features of the shared expert."""
    experts: Size
    """The number of experts of a layer."""
    top_k: Size
    """The number of experts that each token chooses."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""

    @property
    def expert_mlp(self) -> int:
        """Hidden features of an expert."""
        return self.mlp


def gated_attention(config: NetConfig, key: Key[Array, ""]) -> nn.Attention:
    """Return an attention with a gate for each head, and with norms of queries and keys."""
    rotary = part_rotary(config)
    return attention(config, rotary=rotary, gate=True, bias=config.bias, **head_norms(config, offset=1.0), key=key)


def delta_net(config: NetSizesConfig, key: Key[Array, ""], **options: Any) -> nn.GatedDeltaNet:
    """Return a gated delta net of the config's sizes; `options` are further arguments of `nn.GatedDeltaNet`."""
    output_std = damping(config) * (config.net_heads * config.net_v_dim) ** -0.5
    return nn.GatedDeltaNet(
        embed=config.embed,
        heads=config.net_heads,
        kv_heads=config.net_kv_heads,
        head_dim=config.net_head_dim,
        v_dim=config.net_v_dim,
        taps=config.taps,
        activation=activation_of(config),
        key=key,
        **{"eps": config.eps, "output_std": output_std} | options,
    )


NET_SIZE_ATTRIBUTES: tuple[Entry, ...] = (
    Attribute("net_heads", "linear_num_value_heads", 32),
    Attribute("net_kv_heads", "linear_num_key_heads", 16),
    Attribute("net_head_dim", "linear_key_head_dim", 128),
    Attribute("net_v_dim", "linear_value_head_dim", 128),
    Attribute("taps", "linear_conv_kernel_dim", 4),
    Activation(),
    Attribute("bias", "attention_bias", False),
)
NET_ATTRIBUTES: tuple[Entry, ...] = (
    *NET_SIZE_ATTRIBUTES,
    LayerTypes("attention_layers", ("full_attention", "linear_attention"), Period(4, ("full_attention_interval",))),
    RotaryFraction(0.25),
)

GATED_ATTENTION = tuple(
    dataclasses.replace(rule, lacks="mixer.layer.log_rate") for rule in attention_weights(gated="heads")
)
_NET, _HEADS = f"{LAYER}linear_attn.", "(heads dim) embed -> heads dim embed"
_CONVOLUTIONS = leaf_paths(("query_conv", "key_conv", "value_conv"), "weight")


def _net_weights(*maps: Rule) -> tuple[Rule, ...]:
    """Return the rules for a `GatedDeltaNet` whose input maps have these rules."""
    rules = (
        *maps,
        Rule(f"{_NET}conv1d.weight", _CONVOLUTIONS, "(heads dim) 1 taps -> heads dim taps"),
        Rule(f"{_NET}A_log", "mixer.layer.log_rate"),
        Rule(f"{_NET}dt_bias", "mixer.layer.decay_bias"),
        Rule(f"{_NET}norm.weight", "mixer.layer.norm.weight"),
        Rule(f"{_NET}out_proj.weight", "mixer.layer.output.weight", "embed (heads dim) -> embed heads dim"),
    )
    return tuple(dataclasses.replace(rule, needs="mixer.layer.log_rate") for rule in rules)


# The input maps are published key head by key head (Qwen3-Next).
NET_WEIGHTS = _net_weights(
    Rule(
        f"{_NET}in_proj_qkvz.weight",
        leaf_paths(("query", "key", "value", "gate"), "weight"),
        _HEADS,
        groups="net_kv_heads",
    ),
    Rule(f"{_NET}in_proj_ba.weight", leaf_paths(("rate", "decay"), "weight"), groups="net_kv_heads"),
    # GGUF files have gates as an array of their own; in the other array, all queries come first.
    Rule(f"{_NET}in_proj_qkv.weight", leaf_paths(("query", "key", "value"), "weight"), _HEADS, variant=True),
    Rule(f"{_NET}in_proj_z.weight", "mixer.layer.gate.weight", _HEADS, variant=True),
)
# The input maps are published one after another (Qwen3.5).
SPLIT_NET_WEIGHTS = _net_weights(
    Rule(f"{_NET}in_proj_qkv.weight", leaf_paths(("query", "key", "value"), "weight"), _HEADS),
    Rule(f"{_NET}in_proj_z.weight", "mixer.layer.gate.weight", _HEADS),
    Rule(f"{_NET}in_proj_b.weight", "mixer.layer.rate.weight"),
    Rule(f"{_NET}in_proj_a.weight", "mixer.layer.decay.weight"),
)
