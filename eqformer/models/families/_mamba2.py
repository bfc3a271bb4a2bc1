"""Mamba-2 (Dao and Gu 2024): a recurrence in each layer, and nothing else."""

import dataclasses

from jaxtyping import Array, Key

from ...nn import Block, GateNorm, Residual, Transformer
from .._attributes import Activation, Attribute, Count, Expect, Ignore
from .._config_types import LayerCount, NotNegative
from .._family import Family
from .._weight_rules import Rule
from ._decoder import activation_of, damping, decoder, norm
from ._state_spaces import mamba2, mamba_weights, NetSizes, StepLimits, ValueChannels


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
