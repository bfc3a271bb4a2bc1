"""Mamba-2 (Dao and Gu 2024), with a recurrence in each layer and nothing else, and Bamba (IBM et al. 2024).

Bamba adds gated layers to Mamba-2, and attention in a few of the layers.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, GateNorm, Mamba2Mixer, Residual, Transformer
from .._attributes import Activation, Attribute, Count, Expect, Ignore
from .._config_types import Fraction, Index, LayerCount, Length, NotNegative
from .._family import DecoderConfig, Family
from .._layer_attributes import ListedLayers
from .._rotary_attributes import RotaryFraction
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, gated_weights, LAYER, norm_weights
from ._decoder import activation_of, attention, damping, decoder, gated_mlp, norm, part_rotary, pre_norm_block
from ._state_spaces import beside_mamba, mamba2, MAMBA_ATTRIBUTES, mamba_weights, NetSizes, StepLimits, ValueChannels


@dataclasses.dataclass(frozen=True)
class Mamba2Config(NetSizes):
    """The config of a Mamba-2."""

    layers: LayerCount
    """Layers."""
    _: dataclasses.KW_ONLY
    eps: NotNegative = 1e-5
    """The number that norms add to the mean square before the root."""
    tied: bool = False
    """Whether the embedding's table is the head too."""
    activation: str = "silu"
    """The activation after the convolutions: a name of `nn.ACTIVATIONS`."""


def build_mamba2(config: Mamba2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mamba-2 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer = mamba2(
            config,
            activation=activation_of(config),
            gate_norm=GateNorm(config.eps),
            output_std=damping(config) * config.net_width**-0.5,
            key=key,
        )
        return Block(Residual(mixer, norm(config)))

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
