"""Qwen3-Next (Qwen team 2025): gated delta nets, and in each fourth layer an attention with gates; small experts."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Attribute
from .._config_types import Length, Positive, Size
from .._family import Family
from .._layer_attributes import every
from .._weight_rules import NAMED_PREDICTOR
from . import _mixtures as mixtures
from ._common import decoder_attributes, EDGES, GATED, head_norm_weights, PRE_NORMS
from ._decoder import decoder, gated_mlp, norm, pre_norm_block
from ._delta_nets import delta_net, GATED_ATTENTION, gated_attention, NET_ATTRIBUTES, NET_WEIGHTS, NetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(NetConfig, mixtures.QwenMoEConfig):
    """The config of a Qwen3-Next; `mlp` is a dense layer's width, `expert_mlp` and `shared_mlp` the experts'."""

    shared_mlp: Size
    """Hidden features of the shared expert."""
    experts: Size = 512
    top_k: Size = 10
    normalise: bool = True
    theta: Positive = 10_000_000.0
    max_seq: Length = 262_144

    @property
    def kinds(self) -> tuple[tuple[bool, bool], ...]:
        """For each layer, whether it has an attention, and whether it has experts."""
        return tuple(
            (layer in self.attention_layers, mixture) for layer, mixture in enumerate(mixtures.mixture_flags(self))
        )


def build_qwen3_next(config: Qwen3NextConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen3-Next with random weights."""

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> Block:
        is_attention, is_mixture = kind
        mixer, feed_forward = jax.random.split(key)
        mixed = (gated_attention if is_attention else delta_net)(config, mixer)
        if is_mixture:
            return pre_norm_block(config, mixed, mixtures.mixture_beside_gated_shared(config, feed_forward), offset=1.0)
        return pre_norm_block(config, mixed, gated_mlp(config, key=feed_forward), offset=1.0)

    return decoder(config, block, config.kinds, final_norm=norm(config, offset=1.0), key=key)


_PRESETS = {
    "qwen3-next-byte-500k": Qwen3NextConfig(
        *(256, 64, 4, 2, 1, 128),
        attention_layers=every(4, 4),
        net_heads=4,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        head_dim=32,
        expert_mlp=32,
        shared_mlp=32,
        experts=12,
        top_k=4,
        theta=1e4,
        tied=True,
    ),
    "qwen3-next-80b-a3b": Qwen3NextConfig(
        151_936, 2048, 48, 16, 2, 5120, expert_mlp=512, shared_mlp=512, attention_layers=every(4, 48)
    ),
}

QWEN3_NEXT = Family(
    "qwen3_next",
    Qwen3NextConfig,
    build_qwen3_next,
    _PRESETS,
    "Qwen3NextForCausalLM",
    "qwen3_next",
    (
        *decoder_attributes(head_dim=256, kv_heads=2, max_seq=32_768),
        *mixtures.mixture_attributes(512, 10, normalise=True),
        *NET_ATTRIBUTES,
        Attribute("shared_mlp", "shared_expert_intermediate_size", 512),
    ),
    (
        *EDGES,
        *GATED_ATTENTION,
        *head_norm_weights(),
        *NET_WEIGHTS,
        *PRE_NORMS,
        *GATED,
        *mixtures.MIXTURE,
        *mixtures.GATED_SHARED,
    ),
    predictor=NAMED_PREDICTOR,
)
