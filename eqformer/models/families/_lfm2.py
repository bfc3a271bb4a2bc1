"""LFM2 and 2.5 (Liquid AI 2025, arXiv:2511.23404): short convolutions, and attention in some layers; mixtures too."""

import dataclasses
import functools
from collections.abc import Iterable

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, GatedShortConv, MoE, Transformer
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import Attributes, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import LayerTypes
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import attention_weights, EDGES, gated_weights, HeadSize, KeyHeads, LAYER, norm_weights, SIZES, WIDTH
from ._decoder import attention, damping, decoder, gated_mlp, head_norms, pre_norm_block
from ._mixtures import mixture, small_expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig(DecoderConfig):
    """Base class of the configs of hybrids of attention and short convolutions."""

    attention_layers: tuple[Index, ...]
    """The numbers of the layers with attention; all other layers have convolutions."""
    taps: Size = 3
    """The number of tokens that a convolution reads."""
    bias: bool = False
    """Whether convolutions, and the maps around them, have biases."""
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    tied: bool = True
    max_seq: Length = 128_000


def _mixer(config: ConvConfig, is_attention: bool, key: Key[Array, ""]) -> Attention | GatedShortConv:
    """Return an attention with norms of queries and keys, or a convolution."""
    if is_attention:
        return attention(config, **head_norms(config), key=key)
    std = damping(config) * config.embed**-0.5
    return GatedShortConv(embed=config.embed, taps=config.taps, bias=config.bias, output_std=std, key=key)


def _listed(published: PublishedConfig, layers: int) -> Iterable[int]:
    """Return the layers with attention where no types are listed; by default all."""
    numbers = published.listed("full_attn_idxs", Index)
    return range(layers) if numbers is None else numbers


_ATTRIBUTES: tuple[Entry, ...] = (
    *(*SIZES, KeyHeads(8), HeadSize(), RotaryPositions(1_000_000.0)),
    Attribute("eps", "norm_eps", 1e-5),
    Attribute("tied", ("tie_embedding", "tie_word_embeddings"), True, written=("tie_word_embeddings",)),
    Attribute("max_seq", "max_position_embeddings", 128_000),
    LayerTypes("attention_layers", ("full_attention", "conv"), _listed),
    Attribute("taps", "conv_L_cache", 3),
    Attribute("bias", "conv_bias", False),
    *(Expect("hidden_act", "silu", written=False), Unpublished("activation", "silu", "all layers have it")),
    Expect("block_use_swiglu", True, written=False),
    Expect("use_pos_enc", True, written=False),
    Expect("theta", 1_000_000.0, written=False),
    # Attributes of the first configurations: copies of others, and settings of initialization.
    Ignore("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps", "block_mlp_init_scale"),
    Ignore("block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
)

_MIXER, _CONV, _INPUT_MAPS = "mixer.layer.", f"{LAYER}conv.", ("input_gate", "output_gate", "value")
_PARTS = ("weight", "bias")
_CONV_WEIGHTS = (
    *(Rule(f"{_CONV}in_proj.{part}", tuple(f"{_MIXER}{name}.{part}" for name in _INPUT_MAPS)) for part in _PARTS),
    *(Rule(f"{_CONV}out_proj.{part}", f"{_MIXER}output.{part}") for part in _PARTS),
    Rule(f"{_CONV}conv.weight", f"{_MIXER}conv.weight", "mlp 1 taps -> mlp taps"),
    Rule(f"{_CONV}conv.bias", f"{_MIXER}conv.bias"),
)
_WEIGHTS: tuple[Rule, ...] = (
    *(dataclasses.replace(rule, name=rule.name.replace(".norm.", ".embedding_norm.")) for rule in EDGES),
    *(dataclasses.replace(rule, needs=f"{_MIXER}conv") for rule in _CONV_WEIGHTS),
    *(dataclasses.replace(rule, lacks=f"{_MIXER}conv") for rule in attention_weights(output="out")),
    Rule(f"{LAYER}self_attn.q_layernorm.weight", f"{_MIXER}query_norm.weight"),
    Rule(f"{LAYER}self_attn.k_layernorm.weight", f"{_MIXER}key_norm.weight"),
    *norm_weights(mixer="operator_norm", feed_forward="ffn_norm"),
    *gated_weights(prefix=f"{LAYER}feed_forward.", names=("w1", "w3", "w2")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LFM2Config(ConvConfig):
    """The config of an LFM2."""


def build_lfm2(config: LFM2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an LFM2 with random weights."""

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        mixed = _mixer(config, is_attention, mixer)
        return pre_norm_block(config, mixed, gated_mlp(config, key=feed_forward))

    return decoder(config, block, [layer in config.attention_layers for layer in range(config.layers)], key=key)


class _Width(Entry):
    """Hidden features; configurations may state those of a layer without gates, of which two thirds are used."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `mlp`."""
        width = published.read("block_ff_dim", Size, published.read("intermediate_size", Size, 12_288))
        multiple = published.count("block_multiple_of", 256)
        factor = published.nullable("block_ffn_dim_multiplier", 1.0)
        factor = published.checked("block_ffn_dim_multiplier", factor, Positive | None)
        if published.flag("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            width = width if factor is None else -(-int(factor * width) // multiple) * multiple
        return {"mlp": published.checked("block_ffn_dim_multiplier: hidden features", width, Size)}

    def write(self, config: LFM2Config) -> Attributes:
        """Return the width as it is."""
        return {"intermediate_size": config.mlp, "block_auto_adjust_ff_dim": False}


_ATTENTION_LAYERS = (2, 5, 8, 10, 12, 14)
_PRESETS = {
    "lfm2-byte-200k": LFM2Config(256, 64, 4, 4, 2, 160, attention_layers=(2,), bias=True, theta=1e4),
    "lfm2-byte-500k": LFM2Config(256, 96, 4, 4, 4, 288, attention_layers=(1, 3), theta=1e4),
    "lfm2-350m": LFM2Config(65_536, 1024, 16, 16, 8, 4608, attention_layers=_ATTENTION_LAYERS),
    "lfm2-700m": LFM2Config(65_536, 1536, 16, 24, 8, 6912, attention_layers=_ATTENTION_LAYERS),
    "lfm2-1.2b": LFM2Config(65_536, 2048, 16, 32, 8, 8192, attention_layers=_ATTENTION_LAYERS),
}

LFM2 = Family(
    "lfm2",
    LFM2Config,
    build_lfm2,
    _PRESETS,
    "Lfm2ForCausalLM",
    "lfm2",
    (*_ATTRIBUTES, _Width()),
    _WEIGHTS,
)


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
        return pre_norm_block(config, _mixer(config, is_attention, mixer_key), layer)

    kinds = [(layer in config.attention_layers, layer >= config.first_dense) for layer in range(config.layers)]
    return decoder(config, block, kinds, key=key)


_MOE_PRESETS = {
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
    _MOE_PRESETS,
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    (
        *(*_ATTRIBUTES, WIDTH),
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
        *_WEIGHTS,
        Rule(f"{_MIXTURE}gate.weight", "feed_forward.layer.router.linear.weight"),
        Rule(f"{_MIXTURE}expert_bias", "feed_forward.layer.router.selection_bias"),
        *gated_weights(_EXPERTS, prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    ),
)
