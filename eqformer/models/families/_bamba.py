"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 with gated layers, and attention in a few of the layers."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, GateNorm, Mamba2Mixer, Transformer
from .._attributes import Activation, Attribute, Ignore
from .._config_types import Fraction, Index, Length, NotNegative
from .._family import DecoderConfig, Family
from .._layer_attributes import ListedLayers
from .._rotary_attributes import RotaryFraction
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, gated_weights, LAYER, norm_weights
from ._decoder import activation_of, attention, damping, decoder, gated_mlp, part_rotary, pre_norm_block
from ._state_spaces import beside_mamba, mamba2, MAMBA_ATTRIBUTES, mamba_weights, NetSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BambaConfig(NetSizes, DecoderConfig):
    """The config of a Bamba."""

    attention_layers: tuple[Index, ...]
    """The numbers of the layers with attention."""
    rotary_fraction: Fraction = 0.5
    """The part of a head's channels that has rotary positions."""
    bias: bool = False
    """Whether the attention's maps have biases."""
    mlp_bias: bool = False
    """Whether the feed-forward layers' maps have biases."""
    eps: NotNegative = 1e-5
    max_seq: Length = 262_144


def build_bamba(config: BambaConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Bamba with random weights."""
    rotary = part_rotary(config)

    def mixer(is_attention: bool, key: Key[Array, ""]) -> Attention | Mamba2Mixer:
        if is_attention:
            return attention(config, rotary=rotary, bias=config.bias, key=key)
        return mamba2(
            config,
            activation=activation_of(config),
            gate_norm=GateNorm(config.eps),
            output_std=damping(config) * config.net_width**-0.5,
            key=key,
        )

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward = jax.random.split(key)
        gated = gated_mlp(config, bias=config.mlp_bias, key=feed_forward)
        return pre_norm_block(config, mixer(is_attention, mixer_key), gated)

    return decoder(config, block, [layer in config.attention_layers for layer in range(config.layers)], key=key)


_PRESETS = {
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

BAMBA = Family(
    "bamba",
    BambaConfig,
    build_bamba,
    _PRESETS,
    "BambaForCausalLM",
    "bamba",
    (
        *decoder_attributes(kv_heads=8, max_seq=262_144),
        *MAMBA_ATTRIBUTES,
        ListedLayers("attention_layers", "attn_layer_indices", lambda published, layers: ()),
        RotaryFraction(0.5, inside=True),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
        Activation(),
        # Settings of running and of training, and attributes that transformers never reads.
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
