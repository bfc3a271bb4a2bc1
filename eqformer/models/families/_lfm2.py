"""LFM2 and 2.5 (Liquid AI 2025, arXiv:2511.23404): short convolutions, attention in some layers, and mixtures.

LFM3 (Liquid AI 2026) has attention with windows and gates too, and norms before and after sublayers.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, GatedShortConv, MoE, ProportionalScaling, RotaryScaling, Transformer
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import Attributes, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import check_layer_types, layers_of, LayerTypes
from .._rotary_attributes import ProportionalRotaryByType, RotaryPositions
from .._weight_rules import Rule
from ._common import (
    attention_weights,
    EDGES,
    gated_weights,
    head_norm_weights,
    HeadSize,
    KeyHeads,
    LAYER,
    norm_weights,
    SIZES,
    WIDTH,
)
from ._decoder import attention, damping, decoder, four_norm_block, gated_mlp, head_norms, pre_norm_block, rotary_of
from ._mixtures import mixture, small_expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig(DecoderConfig):
    """Base class of the configs of hybrids of attention and short convolutions."""

    attention_layers: tuple[Index, ...]
    """The indices of the layers with attention; all other layers have convolutions."""
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
    """Return the layers with attention, for a configuration without `layer_types`; by default all layers."""
    indices = published.listed("full_attn_idxs", Index)
    return range(layers) if indices is None else indices


_ATTRIBUTES: tuple[Entry, ...] = (
    *(*SIZES, KeyHeads(8), HeadSize(), RotaryPositions(1_000_000.0)),
    Attribute("eps", "norm_eps", 1e-5),
    Attribute("tied", ("tie_embedding", "tie_word_embeddings"), True, written=("tie_word_embeddings",)),
    Attribute("max_seq", "max_position_embeddings", 128_000),
    LayerTypes("attention_layers", ("full_attention", "conv"), _listed),
    Attribute("taps", "conv_L_cache", 3),
    Attribute("bias", "conv_bias", False),
    *(Expect("hidden_act", "silu", written=False), Unpublished("activation", "silu", "all layers use silu")),
    Expect("block_use_swiglu", True, written=False),
    Expect("use_pos_enc", True, written=False),
    Expect("theta", 1_000_000.0, written=False),
    # Attributes that only the first published configurations have: copies of other attributes, and settings of
    # initialization.
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
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = _mixer(config, is_attention, mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, [layer in config.attention_layers for layer in range(config.layers)], key=key)


class _Width(Entry):
    """The number of hidden features.

    Configurations may state the width of a layer without gates. A gated layer with as many parameters then has about
    two thirds of this width.
    """

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
    """The config of an LFM2 with experts; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    expert_mlp: Size
    """Hidden features of an expert."""
    experts: Size = 32
    """The number of experts of a layer."""
    top_k: Size = 4
    """The number of experts that each token chooses."""
    first_dense: Index = 2
    """The number of layers before the first layer with experts."""
    normalize: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    scale: Number = 1.0
    """A factor of the weights of a token's experts."""
    biased: bool = True
    """Whether the choice of experts has a bias."""
    balance: NotNegative = 0.0
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""


def build_lfm2_moe(config: LFM2MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an LFM2 with experts, with random weights."""

    def routed(key: Key[Array, ""]) -> MoE:
        router_key, experts_key = jax.random.split(key)
        return mixture(
            config,
            functools.partial(small_expert, config),
            score="sigmoid",
            normalize=config.normalize,
            normalize_eps=1e-6,
            scale=config.scale,
            balanced=config.biased,
            router=router_key,
            experts=experts_key,
        )

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> Block:
        is_attention, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        layer = routed(feed_forward_key) if is_mixture else gated_mlp(config, key=feed_forward_key)
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
        Attribute("normalize", "norm_topk_prob", True),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LFM3Config(ConvConfig):
    """The config of an LFM3."""

    window_layers: tuple[Index, ...]
    """The indices of further layers with attention, which see a `window`."""
    window: Length = 256
    """The number of tokens that the layers of `window_layers` see."""
    gated: bool = True
    """Whether each head's output is multiplied by a gate."""
    sandwich: bool = True
    """Whether sublayers have norms of their outputs too."""
    head_dim: Size = 128
    scaling: RotaryScaling | None = ProportionalScaling(0.5)
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    taps: Size = 7


def build_lfm3(config: LFM3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an LFM3 with random weights."""
    size = config.head_size
    rotary_by_type = {
        _FULL: rotary_of(config, size, scaling=config.scaling),
        _LOCAL: rotary_of(config, size, theta=config.local_theta, scaling=config.local_scaling),
    }

    def mixer(layer_type: str, key: Key[Array, ""]) -> Attention | GatedShortConv:
        if layer_type == _CONV_TYPE:
            return _mixer(config, False, key)
        return attention(
            config,
            window=config.window if layer_type == _LOCAL else None,
            gate="heads" if config.gated else False,
            rotary=rotary_by_type[layer_type],
            **head_norms(config),
            key=key,
        )

    def block(layer_type: str, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        make = four_norm_block if config.sandwich else pre_norm_block
        return make(config, mixer(layer_type, mixer_key), gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, _types_of(config), key=key)


_FULL, _LOCAL, _CONV_TYPE = "full_attention", "sliding_attention", "conv"


def _types_of(config: LFM3Config) -> list[str]:
    """Return the type of each layer, as it is published."""
    full, local = set(config.attention_layers), set(config.window_layers)
    return [_FULL if n in full else _LOCAL if n in local else _CONV_TYPE for n in range(config.layers)]


class _ThreeTypes(Entry):
    """The layers with attention.

    By default, layers 2, 6, 10 and so on attend to whole rows, and layers 4, 8, 12 and so on to windows.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `attention_layers` and `window_layers`; refuse lists of other lengths and types."""
        layers, types = layers_of(published), published.listed("layer_types", str)
        if types is None:
            types = [_FULL if n % 4 == 2 else _LOCAL if n % 4 == 0 and n else _CONV_TYPE for n in range(layers)]
        check_layer_types(published, "layer_types", types, (_FULL, _LOCAL, _CONV_TYPE))
        layers_of_type = lambda layer_type: tuple(n for n, name in enumerate(types) if name == layer_type)
        return {"attention_layers": layers_of_type(_FULL), "window_layers": layers_of_type(_LOCAL)}

    def write(self, config: LFM3Config) -> Attributes:
        """Return a type for each layer."""
        return {"layer_types": _types_of(config)}


_LFM3_PRESETS = {
    "lfm3-byte-500k": LFM3Config(
        256, 96, 5, 6, 2, 256, attention_layers=(2,), window_layers=(4,), window=64, head_dim=16, theta=1e4, bias=True
    ),
    "lfm3-1.7b": LFM3Config(
        128_000, 2048, 24, 16, 4, 7680, attention_layers=(*range(2, 24, 4),), window_layers=(*range(4, 24, 4),)
    ),
}

LFM3 = Family(
    "lfm3",
    LFM3Config,
    build_lfm3,
    _LFM3_PRESETS,
    "Lfm3ForCausalLM",
    "lfm3",
    (
        *(*SIZES, WIDTH, KeyHeads(4), HeadSize(128), ProportionalRotaryByType(0.5), _ThreeTypes()),
        Attribute("window", "sliding_window", 256),
        Attribute("eps", "norm_eps", 1e-5),
        Attribute("tied", "tie_word_embeddings", True),
        Attribute("max_seq", "max_position_embeddings", 128_000),
        Attribute("taps", "conv_L_cache", 7),
        Attribute("bias", "conv_bias", False),
        Expect("attention_bias", False),
        Attribute("gated", "use_attention_gate", True),
        Attribute("sandwich", "use_sandwich_norm", True),
        *(Expect("hidden_act", "silu", written=False), Unpublished("activation", "silu", "all layers use silu")),
    ),
    (
        *(dataclasses.replace(rule, name=rule.name.replace(".norm.", ".embedding_norm.")) for rule in EDGES),
        *(dataclasses.replace(rule, needs=f"{_MIXER}conv") for rule in _CONV_WEIGHTS),
        *(dataclasses.replace(rule, lacks=f"{_MIXER}conv") for rule in attention_weights()),
        *head_norm_weights(),
        Rule(f"{LAYER}self_attn.gate_proj.weight", f"{_MIXER}gate.weight"),
        *norm_weights(mixer="operator_norm", feed_forward="ffn_norm"),
        *norm_weights(mixer_output="post_operator_norm", feed_forward_output="post_ffn_norm"),
        *gated_weights(prefix=f"{LAYER}feed_forward.", names=("w1", "w3", "w2")),
    ),
)
