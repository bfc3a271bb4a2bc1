"""Kimi K3 (Kimi team 2026, arXiv:2607.24653): delta nets and latent attention, joined by attention residuals.

The experts are small, and read and write a latent. No layer has positions. The gates of all feed-forward layers, and
the products that they multiply, are bounded by `tanh`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, Nullable, Unpublished
from .._config_types import (
    Attributes,
    Index,
    Length,
    NotNegative,
    Number,
    OptionalSize,
    Positive,
    PublishedConfig,
    Size,
)
from .._family import Family, MultimodalModel
from .._layer_attributes import every, layers_of
from .._weight_rules import Rule
from ._common import gated_weights, LAYER, SIZES, WIDTH
from ._decoder import activation_of, damping, decoder, norm
from ._deepseek import EqualKeyHeads, latent_attention, LATENT_BYTE
from ._kimi_linear import IS_NET, KIMI_WEIGHTS, LatentNetConfig, unrotated
from ._mixtures import mixture, sigmoid_router


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiK3Config(LatentNetConfig):
    """The config of a Kimi K3.

    The model has no rotary positions, so `theta`, `scaling` and `temperature` have no effect.
    """

    net_heads: Size = 96
    lowest_log_decay: Number = -5.0
    """The lower bound of the logarithms of a delta net's decays, a negative number."""
    residual_layers: Size = 12
    """The number of layers whose outputs are summed in a block of the attention residuals."""
    q_latent: Size = 1536
    experts: Size = 896
    top_k: Size = 16
    shared: OptionalSize = 2
    expert_latent: Size = 3584
    """Channels that an expert reads and writes."""
    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 1.0
    balance: NotNegative = 0.0
    gate_softcap: Positive = 4.0
    """The bound of the linear factor of gates in feed-forward layers (`nn.SiTU`)."""
    up_softcap: Positive | None = 25.0
    """The bound of the factors that these gates multiply; None: no bound."""
    eps: NotNegative = 1e-5
    max_seq: Length = 1_048_576

    def __post_init__(self):
        if self.net_heads > self.net_head_dim:
            raise ValueError(
                f"KimiK3Config(net_heads={self.net_heads}, net_head_dim={self.net_head_dim}): the published array of "
                "the heads' rates has net_head_dim numbers, so there are at most as many heads."
            )


class _KimiK3Layer(NamedTuple):
    """A kind of layer."""

    is_attention: bool
    """Whether the layer has attention; False: it has a delta net."""
    is_mixture: bool
    """Whether the layer has a mixture of experts; False: it has a dense MLP."""


def build_kimi_k3(config: KimiK3Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Kimi K3 with random weights."""
    block_size = 2 * config.residual_layers
    residual = functools.partial(nn.AttentionResidual, embed=config.embed, block=block_size, eps=config.eps)

    def block(kind: _KimiK3Layer, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward = jax.random.split(key)
        mixer = _attention(config, mixer_key) if kind.is_attention else _net(config, mixer_key)
        layer = _mixture(config, feed_forward) if kind.is_mixture else _gated(config, config.mlp, feed_forward)
        return nn.Block(residual(nn.Residual(mixer, norm(config))), residual(nn.Residual(layer, norm(config))))

    kinds = [
        _KimiK3Layer(layer in config.attention_layers, is_mixture) for layer, is_mixture in enumerate(config.mixtures)
    ]
    return decoder(
        config,
        block,
        kinds,
        expand=nn.ExpandBlocks(sublayers=2 * config.layers, block=block_size),
        final_norm=nn.MergeBlocks(norm(config), embed=config.embed, block=block_size, eps=config.eps),
        key=key,
    )


def _attention(config: KimiK3Config, key: Key[Array, ""]) -> nn.LatentAttention:
    """Return latent attention whose output is multiplied by a gate for each channel.

    The norms of both latents add 1e-6, and not `eps`. One public source, llama.cpp's graph, adds `eps`.
    """
    attention_key, gate_key = jax.random.split(key)
    return latent_attention(unrotated(config), key=attention_key).with_gate(key=gate_key)


def _net(config: KimiK3Config, key: Key[Array, ""]) -> nn.ChannelDeltaNet:
    """Return the delta net of a layer; its gate has one projection, and its decay has two."""
    return nn.ChannelDeltaNet(
        embed=config.embed,
        heads=config.net_heads,
        head_dim=config.net_head_dim,
        gate_rank=0,
        lowest_log_decay=config.lowest_log_decay,
        taps=config.taps,
        activation=activation_of(config),
        eps=config.eps,
        output_std=damping(config) * (config.net_heads * config.net_head_dim) ** -0.5,
        key=key,
    )


def _gated(config: KimiK3Config, mlp: int, key: Key[Array, ""], embed: int | None = None) -> nn.GatedMLP:
    """Return a gated layer with smooth bounds."""
    return nn.GatedMLP(
        embed=config.embed if embed is None else embed,
        mlp=mlp,
        activation=nn.SiTU(config.gate_softcap),
        up_softcap=config.up_softcap,
        output_std=damping(config) * max(mlp, 1) ** -0.5,
        key=key,
    )


def _mixture(config: KimiK3Config, key: Key[Array, ""]) -> nn.MoE:
    """Return experts that read a latent, beside a shared expert that reads the stream."""
    router, experts, shared, down, up = jax.random.split(key, 5)
    embed, latent = config.embed, config.expert_latent
    return mixture(
        config,
        lambda key: _gated(config, config.expert_mlp, key, embed=latent),
        shared=_gated(config, config.shared * config.expert_mlp, shared),
        latent=(
            nn.Linear("embed -> latent", embed=embed, latent=latent, key=down),
            nn.Linear("latent -> embed", embed=embed, latent=latent, key=up),
        ),
        latent_norm=nn.RMSNorm("expert_latent", expert_latent=latent, eps=config.eps),
        router=router,
        experts=experts,
        **sigmoid_router(config),
    )


class _DeltaNets(Entry):
    """The entry for `linear_attn_config`: the layers with attention, and the sizes of the delta nets."""

    sizes = (("net_heads", "num_heads"), ("net_head_dim", "head_dim"), ("taps", "short_conv_kernel_size"))

    def read(self, published: PublishedConfig) -> Fields:
        """Return the fields; refuse lists of layers that do not have each layer once."""
        nested = PublishedConfig(published.nested("linear_attn_config"), f"{published.source}, linear_attn_config")
        fields: dict[str, object] = {field: nested.count(name) for field, name in self.sizes}
        layers, attention = layers_of(published), nested.listed("full_attn_layers", Size) or []
        nets = nested.listed("kda_layers", Size)
        if nets is None:
            nets = [number for number in range(1, layers + 1) if number not in attention]
        if sorted([*attention, *nets]) != list(range(1, layers + 1)):
            nested.refuse(
                f"full_attn_layers={attention} and kda_layers={nets} must have each of the layers 1 to {layers} once."
            )
        nested.expect("use_full_rank_gate", True)
        bound = nested.nullable("gate_lower_bound", -5.0)
        if bound is None or not nested.checked("gate_lower_bound", bound, Number) < 0:
            nested.refuse(
                f"gate_lower_bound={bound}: it must be negative, because it bounds the logarithms of decays, and the "
                "state would grow with a decay above 1."
            )
        nested.finish()
        return fields | {"attention_layers": tuple(number - 1 for number in attention), "lowest_log_decay": bound}

    def write(self, config: KimiK3Config) -> Attributes:
        """Return the object."""
        attention = [layer + 1 for layer in config.attention_layers]
        nets = [number for number in range(1, config.layers + 1) if number not in attention]
        sizes = {name: getattr(config, field) for field, name in self.sizes}
        return {
            "linear_attn_config": sizes
            | {"full_attn_layers": attention, "kda_layers": nets}
            | {"use_full_rank_gate": True, "gate_lower_bound": config.lowest_log_decay}
        }


class _Features(Entry):
    """The switches of parts that every Kimi K3 has. A missing switch is off in the publishers' own configuration."""

    names = ("mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm")

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse a switch that is missing or off."""
        for name in self.names:
            if published.take(name, None) is not True:
                published.refuse(f"{name} must be true: the family has no models without this part.")
        return {}

    def write(self, config: KimiK3Config) -> Attributes:
        """Return the switches."""
        return dict.fromkeys(self.names, True)


_ATTRIBUTES: tuple[Entry, ...] = (
    *(*SIZES, WIDTH, EqualKeyHeads(), _DeltaNets()),
    Count("residual_layers", "attn_res_block_size"),
    Attribute("first_dense", "first_k_dense_replace", 1),
    Unpublished("dense_layers", (), "only the first layers can be dense"),
    Count("expert_mlp", "moe_intermediate_size"),
    Count("expert_latent", "routed_expert_hidden_size"),
    Count("experts", "num_experts"),
    Count("top_k", "num_experts_per_token"),
    Count("shared", "num_shared_experts", 2, minimum=0),
    Attribute("scale", "routed_scaling_factor", 1.0),
    Count("groups", "num_expert_group", 1),
    Count("kept_groups", "topk_group", 1),
    Attribute("normalize", "moe_renormalize", True),
    Unpublished("balance", 0.0, "the router's bias balances the experts"),
    *(Count("latent", "kv_lora_rank", 512), Count("q_latent", "q_lora_rank", 1536)),
    Count("head_dim", "qk_nope_head_dim", 128),
    Count("rope_dim", "qk_rope_head_dim", 64),
    Count("v_dim", "v_head_dim", 128),
    Attribute("gate_softcap", "activation_situ_beta"),
    Nullable("up_softcap", "activation_situ_linear_beta", None),
    Attribute("eps", "rms_norm_eps", 1e-5),
    Attribute("tied", "tie_word_embeddings", False),
    Attribute("max_seq", "max_position_embeddings", 1_048_576),
    *(
        Unpublished(name, value, "no channel is rotated")
        for name, value in (("theta", 1e4), ("scaling", None), ("temperature", 0.0))
    ),
    *(Expect("hidden_act", "situ"), Unpublished("activation", "silu", "convolutions always have silu")),
    Unpublished("bias", False, "no map has a bias"),
    _Features(),
    Expect("moe_router_activation_func", "sigmoid"),
    Expect("use_grouped_topk", True, written=False),
    Expect("topk_method", "noaux_tc", written=False),
    Expect("moe_layer_freq", 1, written=False),
    Expect("num_nextn_predict_layers", 0, written=False),
    Ignore("head_dim", "rope_theta", "rope_scaling"),
)

_ATTENTION, _MIXER = f"{LAYER}self_attn.", "mixer.layer."
_MIXTURE, _FEED_FORWARD = f"{LAYER}block_sparse_moe.", "feed_forward.layer."
# The rules of Kimi Linear that differ: the final norm is within a `MergeBlocks`, the vector of rates is padded.
_CHANGED: dict[str, dict[str, Any]] = {
    "model.norm.weight": {"path": "norm.norm.weight"},
    f"{_ATTENTION}A_log": {"pattern": "", "padded": "net_head_dim"},
}


# The gates of delta nets have one map, and dense layers have the prefix of Kimi Linear's variant.
_ABSENT = ("g_a_proj.weight", "g_b_proj.weight", *(rule.name for rule in gated_weights(prefix=_MIXTURE)))


def _residual_weights(prefix: str, path: str) -> tuple[Rule, ...]:
    """Return the rules of `BlockScores`."""
    return (
        Rule(f"{prefix}_norm.weight", f"{path}.norm"),
        Rule(f"{prefix}_proj.weight", f"{path}.weight", "1 embed -> embed"),
    )


_WEIGHTS = (
    *(
        dataclasses.replace(rule, **_CHANGED.get(rule.name, {}))
        for rule in KIMI_WEIGHTS
        if not (rule.variant or rule.name.endswith(_ABSENT))
    ),
    *gated_weights(),
    Rule(
        f"{_ATTENTION}g_proj.weight",
        f"{_MIXER}gate_up.weight",
        "(heads dim) inputs -> heads dim inputs",
        needs=IS_NET,
    ),
    Rule(
        f"{_ATTENTION}g_proj.weight",
        f"{_MIXER}gate.weight",
        "(heads dim) inputs -> heads dim inputs",
        lacks=IS_NET,
    ),
    Rule(f"{_MIXTURE}routed_expert_down_proj.weight", f"{_FEED_FORWARD}to_latent.weight"),
    Rule(f"{_MIXTURE}routed_expert_norm.weight", f"{_FEED_FORWARD}latent_norm.weight"),
    Rule(f"{_MIXTURE}routed_expert_up_proj.weight", f"{_FEED_FORWARD}from_latent.weight"),
    *_residual_weights(f"{LAYER}self_attention_res", "mixer.scores"),
    *_residual_weights(f"{LAYER}mlp_res", "feed_forward.scores"),
    *_residual_weights("model.output_attn_res", "norm.scores"),
)

_PRESETS = {
    "kimi-k3-byte-500k": KimiK3Config(
        **LATENT_BYTE,
        q_latent=32,
        attention_layers=(3,),
        net_heads=4,
        net_head_dim=16,
        residual_layers=2,
        experts=12,
        top_k=4,
        shared=1,
        expert_latent=32,
    ),
    "kimi-k3": KimiK3Config(
        163_840,
        7168,
        layers=93,
        heads=96,
        mlp=33_792,
        expert_mlp=3072,
        attention_layers=(*every(4, 93), 92),
    ),
}

KIMI_K3 = Family(
    "kimi_k3",
    KimiK3Config,
    build_kimi_k3,
    _PRESETS,
    "KimiK3ForCausalLM",
    "kimi_k3_text",
    _ATTRIBUTES,
    _WEIGHTS,
    multimodal=(MultimodalModel("kimi_k3", "kimi_linear"),),
)
