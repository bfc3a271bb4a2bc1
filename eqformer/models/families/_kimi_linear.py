"""Kimi Linear (Kimi team 2025, arXiv:2510.26692): delta nets with a decay per channel, and latent attention."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
from jaxtyping import Array, Key

from ...nn import Block, ChannelDeltaNet, LatentAttention, ProportionalScaling, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore, Nullable, Unpublished
from .._config_types import Attributes, Index, Length, NotNegative, Number, PublishedConfig, Size
from .._family import Family
from .._layer_attributes import every, LayerTypes
from .._weight_rules import Rule
from ._common import gated_weights, LAYER, SIZES, WIDTH
from ._decoder import activation_of, damping, decoder, gated_mlp, pre_norm_block
from ._deepseek import EqualKeyHeads, latent_attention, LATENT_BYTE, LATENT_WEIGHTS, LatentConfig, SigmoidLatentConfig
from ._mixtures import LayerMixtures, sigmoid_mixture_beside_shared


Config = TypeVar("Config", bound=LatentConfig)


def _of_nets(published: PublishedConfig) -> PublishedConfig:
    """Return the nested `linear_attn_config` of older configurations; transformers writes top-level attributes."""
    return PublishedConfig(published.nested("linear_attn_config"), f"{published.source}, linear_attn_config")


class _Net(Entry):
    """The heads of a delta net, their channels, and the tokens that its convolutions read."""

    names = (
        ("net_heads", "linear_num_heads", "num_heads", 32),
        ("net_head_dim", "linear_head_dim", "head_dim", 128),
        ("taps", "linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    )

    def read(self, published: PublishedConfig) -> Fields:
        """Return the three fields."""
        nested = _of_nets(published)
        for name in (
            "full_attn_layers",
            "kda_layers",
        ):  # The lists are read only because `finish` refuses unread attributes.
            nested.listed(name, Size)
        fields = {
            field: nested.count(inner, published.count(name, default)) for field, name, inner, default in self.names
        }
        nested.finish()
        return fields

    def write(self, config: "KimiLinearConfig") -> Attributes:
        """Return the attributes of transformers."""
        return {name: getattr(config, field) for field, name, _, _ in self.names}


def _attention(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    """Return the attention layers of a configuration without layer types: an older list, or layers 4, 8 and so on."""
    numbers = _of_nets(published).listed("full_attn_layers", Size)
    return tuple(range(4, layers, 4)) if numbers is None else tuple(number - 1 for number in numbers)


KIMI_ATTRIBUTES: tuple[Entry, ...] = (
    *(*SIZES, WIDTH, EqualKeyHeads(), _Net()),
    *(Attribute("first_dense", "first_k_dense_replace", 1), LayerMixtures()),
    LayerTypes("attention_layers", ("full_attention", "linear_attention"), _attention),
    Count("expert_mlp", "moe_intermediate_size", 1024),
    Count("experts", ("num_experts", "num_local_experts"), 256),
    Count("top_k", ("num_experts_per_token", "num_experts_per_tok"), 8),
    Count("shared", ("num_shared_experts", "n_shared_experts"), 1, minimum=0),
    Attribute("scale", "routed_scaling_factor", 2.446),
    Count("groups", ("num_expert_group", "n_group"), 1),
    Count("kept_groups", "topk_group", 1),
    Attribute("normalize", ("moe_renormalize", "norm_topk_prob"), True),
    Attribute("balance", "router_aux_loss_coef", 0.0001),
    *(Count("latent", "kv_lora_rank", 512), Nullable("q_latent", "q_lora_rank", None)),
    Count("head_dim", "qk_nope_head_dim", 128),
    Count("rope_dim", "qk_rope_head_dim", 64),
    Count("v_dim", "v_head_dim", 128),
    Attribute("eps", "rms_norm_eps", 1e-5),
    *(Unpublished("tied", False, "transformers never ties the head"), Expect("tie_word_embeddings", False)),
    Attribute("max_seq", ("model_max_length", "max_position_embeddings"), 1_048_576),
    *(
        Unpublished(name, value, "no channel is rotated")
        for name, value in (("theta", 1e4), ("scaling", None), ("temperature", 0.0))
    ),
    *(Activation(), Attribute("bias", "attention_bias", False), Expect("moe_layer_freq", 1)),
    *(Expect(name, True, written=False) for name in ("mla_use_nope", "use_grouped_topk")),
    Expect("moe_router_activation_func", "sigmoid", written=False),
    Ignore("head_dim", "qk_head_dim", "rope_theta", "num_nextn_predict_layers"),
)

# Prefixes of published names, and of paths in a layer.
_NETS, _MIXTURE = f"{LAYER}self_attn.", f"{LAYER}block_sparse_moe."
_MIXER, _FEED_FORWARD = "mixer.layer.", "feed_forward.layer."
_INTO, _TAPS = "(heads dim) inputs -> heads dim inputs", "(heads dim) 1 taps -> heads dim taps"
_QKV = (("q", "query"), ("k", "key"), ("v", "value"))
_NET_RULES = (
    *(Rule(f"{_NETS}{name}_proj.weight", f"{_MIXER}{leaf}.weight", _INTO) for name, leaf in _QKV),
    *(Rule(f"{_NETS}{name}_conv1d.weight", f"{_MIXER}{leaf}_conv.weight", _TAPS) for name, leaf in _QKV),
    Rule(f"{_NETS}b_proj.weight", f"{_MIXER}rate.weight"),
    Rule(f"{_NETS}f_a_proj.weight", f"{_MIXER}decay_down.weight"),
    Rule(f"{_NETS}f_b_proj.weight", f"{_MIXER}decay_up.weight", _INTO),
    Rule(f"{_NETS}g_a_proj.weight", f"{_MIXER}gate_down.weight"),
    Rule(f"{_NETS}g_b_proj.weight", f"{_MIXER}gate_up.weight", _INTO),
    Rule(f"{_NETS}A_log", f"{_MIXER}log_rate", "1 1 heads 1 -> heads"),
    Rule(f"{_NETS}dt_bias", f"{_MIXER}decay_bias", "(heads dim) -> heads dim"),
    Rule(f"{_NETS}o_norm.weight", f"{_MIXER}norm.weight"),
    Rule(f"{_NETS}o_proj.weight", f"{_MIXER}output.weight", "embed (heads dim) -> embed heads dim"),
)
IS_NET = f"{_MIXER}log_rate"
NET_WEIGHTS = tuple(dataclasses.replace(rule, needs=IS_NET) for rule in _NET_RULES)
_OUTSIDE_MIXTURES = tuple(rule for rule in LATENT_WEIGHTS if ".mlp." not in rule.name)
KIMI_WEIGHTS = (
    *NET_WEIGHTS,
    *(dataclasses.replace(rule, lacks=IS_NET) if "o_proj" in rule.name else rule for rule in _OUTSIDE_MIXTURES),
    *gated_weights(prefix=_MIXTURE),
    # The first published folders name dense layers differently; transformers gives them the prefix of mixtures.
    *(dataclasses.replace(rule, variant=True) for rule in gated_weights()),
    *gated_weights(f"{_FEED_FORWARD}experts.mlps", prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    *gated_weights(f"{_FEED_FORWARD}shared", prefix=f"{_MIXTURE}shared_experts."),
    Rule(f"{_MIXTURE}gate.weight", f"{_FEED_FORWARD}router.linear.weight"),
    Rule(f"{_MIXTURE}gate.e_score_correction_bias", f"{_FEED_FORWARD}router.selection_bias"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentNetConfig(SigmoidLatentConfig):
    """The config of a model whose layers have latent attention or a `ChannelDeltaNet`, and mixtures or dense MLPs."""

    attention_layers: tuple[Index, ...]
    """The indices of the layers with latent attention; all other layers have delta nets."""
    net_heads: Size = 32
    """The number of heads of a delta net."""
    net_head_dim: Size = 128
    """Channels of a query, key or value head of a delta net."""
    taps: Size = 4
    """The number of tokens that a delta net's convolutions read."""
    q_latent: Size | None = None


def build_latent_nets(
    config: LatentNetConfig,
    attention: Callable[[Key[Array, ""]], LatentAttention],
    *,
    rank: int | None = None,
    lowest_log_decay: float | None = None,
    key: Key[Array, ""],
) -> Transformer:
    """Return a model of latent attention and delta nets with random weights.

    Args:
        config: The config.
        attention: Returns the attention of a layer.
        rank: The `rank` of every `ChannelDeltaNet`.
        lowest_log_decay: The `lowest_log_decay` of every `ChannelDeltaNet`.
        key: The key of the weights.
    """

    def mixer(is_attention: bool, key: Key[Array, ""]) -> LatentAttention | ChannelDeltaNet:
        if is_attention:
            return attention(key)
        return ChannelDeltaNet(
            embed=config.embed,
            heads=config.net_heads,
            head_dim=config.net_head_dim,
            rank=rank,
            lowest_log_decay=lowest_log_decay,
            taps=config.taps,
            activation=activation_of(config),
            eps=config.eps,
            output_std=damping(config) * (config.net_heads * config.net_head_dim) ** -0.5,
            key=key,
        )

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> Block:
        is_attention, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        if is_mixture:
            layer = sigmoid_mixture_beside_shared(config, feed_forward_key, normalize=config.normalize)
        else:
            layer = gated_mlp(config, key=feed_forward_key)
        return pre_norm_block(config, mixer(is_attention, mixer_key), layer)

    kinds = [(layer in config.attention_layers, is_mixture) for layer, is_mixture in enumerate(config.mixtures)]
    return decoder(config, block, kinds, key=key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(LatentNetConfig):
    """The config of a Kimi Linear.

    The model has no rotary positions, so `theta`, `scaling` and `temperature` have no effect.
    """

    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 2.446
    eps: NotNegative = 1e-5
    max_seq: Length = 1_048_576


def unrotated(config: Config) -> Config:
    """Return the config with a scaling that sets all rotary frequencies to 0, so that no channel is rotated.

    DeepSeek-V3's latent attention rotates some channels of keys; Kimi's layers have these channels, but do not rotate
    them.
    """
    return dataclasses.replace(config, scaling=ProportionalScaling(0.0))


def build_kimi_linear(config: KimiLinearConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Kimi Linear with random weights."""
    return build_latent_nets(config, lambda key: latent_attention(unrotated(config), key=key), key=key)


_PRESETS = {
    "kimi-linear-byte-500k": KimiLinearConfig(
        **LATENT_BYTE, attention_layers=(3,), net_heads=4, net_head_dim=16, experts=12, top_k=4
    ),
    "kimi-linear-48b-a3b": KimiLinearConfig(
        163_840, 2304, layers=27, heads=32, mlp=9216, expert_mlp=1024, attention_layers=(*every(4, 24), 26)
    ),
}

KIMI_LINEAR = Family(
    "kimi_linear",
    KimiLinearConfig,
    build_kimi_linear,
    _PRESETS,
    "KimiLinearForCausalLM",
    "kimi_linear",
    KIMI_ATTRIBUTES,
    KIMI_WEIGHTS,
)
