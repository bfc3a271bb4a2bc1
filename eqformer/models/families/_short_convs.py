"""Configs, mixers and tables that hybrids of attention and short convolutions share."""

import dataclasses
from collections.abc import Iterable

from jaxtyping import Array, Key

from ...nn import Attention, GatedShortConv
from .._attributes import Attribute, Entry, Expect, Ignore, Unpublished
from .._config_types import Index, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig
from .._layer_attributes import LayerTypes
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import attention_weights, EDGES, gated_weights, HeadSize, KeyHeads, LAYER, norm_weights, SIZES
from ._decoder import attention, damping, head_norms


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


def conv_or_attention(config: ConvConfig, is_attention: bool, key: Key[Array, ""]) -> Attention | GatedShortConv:
    """Return an attention with norms of queries and keys, or a convolution."""
    if is_attention:
        return attention(config, **head_norms(config), key=key)
    std = damping(config) * config.embed**-0.5
    return GatedShortConv(embed=config.embed, taps=config.taps, bias=config.bias, output_std=std, key=key)


def _listed(published: PublishedConfig, layers: int) -> Iterable[int]:
    """Return the layers with attention where no types are listed; by default all."""
    numbers = published.listed("full_attn_idxs", Index)
    return range(layers) if numbers is None else numbers


CONV_ATTRIBUTES: tuple[Entry, ...] = (
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
_OF_CONVS = (
    *(Rule(f"{_CONV}in_proj.{part}", tuple(f"{_MIXER}{name}.{part}" for name in _INPUT_MAPS)) for part in _PARTS),
    *(Rule(f"{_CONV}out_proj.{part}", f"{_MIXER}output.{part}") for part in _PARTS),
    Rule(f"{_CONV}conv.weight", f"{_MIXER}conv.weight", "mlp 1 taps -> mlp taps"),
    Rule(f"{_CONV}conv.bias", f"{_MIXER}conv.bias"),
)
CONV_WEIGHTS: tuple[Rule, ...] = (
    *(dataclasses.replace(rule, name=rule.name.replace(".norm.", ".embedding_norm.")) for rule in EDGES),
    *(dataclasses.replace(rule, needs=f"{_MIXER}conv") for rule in _OF_CONVS),
    *(dataclasses.replace(rule, lacks=f"{_MIXER}conv") for rule in attention_weights(output="out")),
    Rule(f"{LAYER}self_attn.q_layernorm.weight", f"{_MIXER}query_norm.weight"),
    Rule(f"{LAYER}self_attn.k_layernorm.weight", f"{_MIXER}key_norm.weight"),
    *norm_weights(mixer="operator_norm", feed_forward="ffn_norm"),
    *gated_weights(prefix=f"{LAYER}feed_forward.", names=("w1", "w3", "w2")),
)
