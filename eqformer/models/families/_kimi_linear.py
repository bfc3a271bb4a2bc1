"""Kimi Linear (Kimi team 2025, arXiv:2510.26692): delta nets of decays by channel, and latent attention in between."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import Block, ChannelDeltaNet, ProportionalScaling, Transformer
from .._family import Family
from .._kinds import Index, Length, NotNegative, Number, Size
from .._layer_attributes import every
from ._decoder import bend, damping, decoder, gated_mlp, pre_norm_block
from ._deepseek import latent_attention, SigmoidLatentConfig
from ._kimi_linear_tables import KIMI_ATTRIBUTES, KIMI_WEIGHTS
from ._mixtures import BIASED_SIGMOIDS, mixture_beside_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(SigmoidLatentConfig):
    """The config of a Kimi Linear, which has no positions; `theta`, `scaling` and `temperature` are of no use."""

    attention_layers: tuple[Index, ...]
    """The numbers of the layers with latent attention; others have nets."""
    net_heads: Size = 32
    """Heads of a net."""
    net_head_dim: Size = 128
    """Channels of its queries, keys and values."""
    taps: Size = 4
    """Tokens that its convolutions see."""
    q_latent: Size | None = None
    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 2.446
    eps: NotNegative = 1e-5
    max_seq: Length = 1_048_576


def build_kimi_linear(config: KimiLinearConfig, *, key: Key[Array, ""]) -> Transformer:
    """A Kimi Linear with random weights."""
    router = {"normalise": config.normalise, **BIASED_SIGMOIDS}
    # Some channels of keys are one for all heads, as where they are rotated; here none turns.
    still = dataclasses.replace(config, scaling=ProportionalScaling(0.0))
    sizes: dict[str, Any] = {"heads": config.net_heads, "head_dim": config.net_head_dim, "taps": config.taps}
    sizes |= {
        "activation": bend(config),
        "eps": config.eps,
        "output_std": damping(config) * (config.net_heads * config.net_head_dim) ** -0.5,
    }

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> Block:
        (is_attention, is_mixture), (mixer, feed_forward) = kind, jax.random.split(key)
        net = lambda: ChannelDeltaNet(embed=config.embed, **sizes, key=mixer)
        mixed = latent_attention(still, mixer) if is_attention else net()
        if not is_mixture:
            return pre_norm_block(config, mixed, gated_mlp(config, key=feed_forward))
        fed = mixture_beside_shared(config, feed_forward, balance={"normalise": True}, **router)
        return pre_norm_block(config, mixed, fed)

    kinds = [(layer in config.attention_layers, is_mixture) for layer, is_mixture in enumerate(config.mixtures)]
    return decoder(config, block, kinds, key=key)


_BYTE: dict[str, Any] = {"latent": 32, "head_dim": 16, "rope_dim": 8, "v_dim": 16, "experts": 12, "top_k": 4}
_BYTE |= {"net_heads": 4, "net_head_dim": 16, "expert_mlp": 32, "attention_layers": (3,)}
_PRESETS = {
    "kimi-linear-byte-500k": KimiLinearConfig(256, 64, layers=4, heads=4, mlp=128, **_BYTE),
    "kimi-linear-48b-a3b": KimiLinearConfig(
        *(163_840, 2304),
        **{"layers": 27, "heads": 32, "mlp": 9216, "expert_mlp": 1024, "attention_layers": (*every(4, 24), 26)},
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
