"""LFM2's mixtures (Liquid AI 2025, arXiv:2511.23404): the same layers, with small experts chosen as DeepSeek-V3's."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ...nn import Block, MoE, Transformer
from .._attributes import Attribute, Count
from .._config_types import Index, NotNegative, Number, Size
from .._family import Family
from .._weight_rules import Rule
from ._common import gated_weights, LAYER, WIDTH
from ._decoder import decoder, gated_mlp, pre_norm_block
from ._mixtures import mixture, small_expert
from ._short_convs import CONV_ATTRIBUTES, conv_or_attention, CONV_WEIGHTS, ConvConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LFM2MoEConfig(ConvConfig):
    """The config of an LFM2 with experts; `mlp` is a dense layer's width, `expert_mlp` an expert's."""

    expert_mlp: Size
    """Hidden features of an expert."""
    experts: Size = 32
    """The number of experts of a layer."""
    top_k: Size = 4
    """The number of experts that each token chooses."""
    first_dense: Index = 2
    """The number of layers at the beginning without experts."""
    normalise: bool = True
    """Whether a token's weights are divided by their sum."""
    scale: Number = 1.0
    """A factor of the weights of a token's experts."""
    biased: bool = True
    """Whether the choice of experts has a bias."""
    balance: NotNegative = 0.0
    """The weight of `LoadBalance`, over the batch."""


def build_lfm2_moe(config: LFM2MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an LFM2 with experts, with random weights."""

    def routed(key: Key[Array, ""]) -> MoE:
        router, experts = jax.random.split(key)
        return mixture(
            config,
            functools.partial(small_expert, config),
            score="sigmoid",
            normalise=config.normalise,
            normalise_eps=1e-6,
            scale=config.scale,
            balanced=config.biased,
            router=router,
            experts=experts,
        )

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> Block:
        is_attention, is_mixture = kind
        mixer_key, feed_forward = jax.random.split(key)
        layer = routed(feed_forward) if is_mixture else gated_mlp(config, key=feed_forward)
        return pre_norm_block(config, conv_or_attention(config, is_attention, mixer_key), layer)

    kinds = [(layer in config.attention_layers, layer >= config.first_dense) for layer in range(config.layers)]
    return decoder(config, block, kinds, key=key)


_PRESETS = {
    "lfm2-moe-byte-300k": LFM2MoEConfig(
        *(256, 64, 4, 4, 2, 160),
        expert_mlp=32,
        attention_layers=(2,),
        experts=12,
        first_dense=1,
        bias=True,
        theta=1e4,
    ),
    "lfm2-8b-a1b": LFM2MoEConfig(
        65_536, 2048, 24, 32, 8, 7168, expert_mlp=1792, attention_layers=(2, 6, 10, 14, 18, 21)
    ),
}

_MIXTURE, _EXPERTS = f"{LAYER}feed_forward.", "feed_forward.layer.experts.mlps"
LFM2_MOE = Family(
    "lfm2_moe",
    LFM2MoEConfig,
    build_lfm2_moe,
    _PRESETS,
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    (
        *(*CONV_ATTRIBUTES, WIDTH),
        Count("expert_mlp", "moe_intermediate_size", 1792),
        Count("experts", "num_experts", 32),
        Count("top_k", "num_experts_per_tok", 4),
        Attribute("first_dense", "num_dense_layers", 2),
        Attribute("normalise", "norm_topk_prob", True),
        Attribute("scale", "routed_scaling_factor", 1.0),
        Attribute("biased", "use_expert_bias", True),
        Attribute("balance", "router_aux_loss_coef", 0.0),
    ),
    (
        *CONV_WEIGHTS,
        Rule(f"{_MIXTURE}gate.weight", "feed_forward.layer.router.linear.weight"),
        Rule(f"{_MIXTURE}expert_bias", "feed_forward.layer.router.selection_bias"),
        *gated_weights(_EXPERTS, prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    ),
)
