"""Qwen3-Next (Qwen team 2025), and the text models of Qwen3.5 and 3.6 (Qwen team 2026).

They have gated delta nets, and in every fourth layer attention with gates. Qwen3-Next and the MoE variants have small
experts.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Attribute, Count, Entry, Expect, Ignore
from .._config_types import Length, Positive, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import every
from .._rotary_attributes import RotaryPositions
from .._weight_rules import NAMED_PREDICTOR
from . import _delta_nets as delta_nets, _mixtures as mixtures
from ._common import decoder_attributes, EDGES, GATED, head_norm_weights, PRE_NORMS
from ._decoder import decoder, gated_mlp, norm, pre_norm_block
from ._mixtures import FUSED, GATED_SHARED, MIXTURE, mixture_beside_gated_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(delta_nets.NetConfig, mixtures.QwenMoEConfig):
    """The config of a Qwen3-Next; `mlp` is the width of a dense layer."""

    shared_mlp: Size
    """Hidden features of the shared expert."""
    experts: Size = 512
    top_k: Size = 10
    normalize: bool = True
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
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = (delta_nets.gated_attention if is_attention else delta_nets.delta_net)(config, mixer_key)
        if is_mixture:
            return pre_norm_block(
                config, mixer, mixtures.mixture_beside_gated_shared(config, feed_forward_key), offset=1.0
            )
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key), offset=1.0)

    return decoder(config, block, config.kinds, final_norm=norm(config, offset=1.0), key=key)


_QWEN3_NEXT_PRESETS = {
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
    _QWEN3_NEXT_PRESETS,
    "Qwen3NextForCausalLM",
    "qwen3_next",
    (
        *decoder_attributes(head_dim=256, kv_heads=2, max_seq=32_768),
        *mixtures.mixture_attributes(512, 10, normalize=True),
        *delta_nets.NET_ATTRIBUTES,
        Attribute("shared_mlp", "shared_expert_intermediate_size", 512),
    ),
    (
        *EDGES,
        *delta_nets.GATED_ATTENTION,
        *head_norm_weights(),
        *delta_nets.NET_WEIGHTS,
        *PRE_NORMS,
        *GATED,
        *mixtures.MIXTURE,
        *mixtures.GATED_SHARED,
    ),
    predictor=NAMED_PREDICTOR,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config(delta_nets.NetConfig):
    """The config of a dense Qwen3.5."""


def build_qwen3_5(config: Qwen35Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a dense Qwen3.5 with random weights."""

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = (delta_nets.gated_attention if is_attention else delta_nets.delta_net)(config, mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key), offset=1.0)

    kinds = [layer in config.attention_layers for layer in range(config.layers)]
    return decoder(config, block, kinds, final_norm=norm(config, offset=1.0), key=key)


# Each part of an image has three positions (time, height, width), which are equal for text.
_POSITIONS = RotaryPositions(skipped=("mrope_section", "mrope_interleaved"))
_ATTRIBUTES: tuple[Entry, ...] = (
    *delta_nets.NET_ATTRIBUTES,
    Expect("attn_output_gate", True, written=False),
    Expect("mamba_ssm_dtype", "float32", written=False),
    Ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # attributes of layers for multi-token prediction
)
_WEIGHTS = (*EDGES, *delta_nets.GATED_ATTENTION, *head_norm_weights(), *delta_nets.SPLIT_NET_WEIGHTS, *PRE_NORMS)

_QWEN3_5_PRESETS = {
    "qwen3.5-byte-500k": Qwen35Config(
        *(256, 64, 4, 2, 1, 192),
        attention_layers=every(4, 4),
        net_heads=4,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        head_dim=32,
        theta=1e4,
        bias=True,
        tied=True,
    ),
    "qwen3.5-9b": Qwen35Config(248_320, 4096, 32, 16, 4, 12_288, attention_layers=every(4, 32)),
    "qwen3.5-27b": Qwen35Config(248_320, 5120, 64, 24, 4, 17_408, net_heads=48, attention_layers=every(4, 64)),
}

QWEN3_5 = Family(
    "qwen3_5",
    Qwen35Config,
    build_qwen3_5,
    _QWEN3_5_PRESETS,
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    (*decoder_attributes(_POSITIONS, head_dim=256, kv_heads=4, max_seq=32_768), *_ATTRIBUTES),
    (*_WEIGHTS, *GATED),
    predictor=NAMED_PREDICTOR,
    multimodal=(MultimodalModel("qwen3_5"),),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35MoEConfig(delta_nets.NetMixtureConfig):
    """The config of a Qwen3.5 with experts; `mlp` is the width of an expert."""

    experts: Size = 256
    top_k: Size = 8

    @property
    def normalize(self) -> bool:
        """Whether the weights of a token's experts are normalized to add up to 1."""
        return True


def build_qwen3_5_moe(config: Qwen35MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen3.5 with experts and random weights."""

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = (delta_nets.gated_attention if is_attention else delta_nets.delta_net)(config, mixer_key)
        return pre_norm_block(config, mixer, mixture_beside_gated_shared(config, feed_forward_key), offset=1.0)

    kinds = [layer in config.attention_layers for layer in range(config.layers)]
    return decoder(config, block, kinds, final_norm=norm(config, offset=1.0), key=key)


_MOE_PRESETS = {
    "qwen3.5-moe-byte-500k": Qwen35MoEConfig(
        *(256, 64, 4, 2, 1, 32),
        attention_layers=every(4, 4),
        net_heads=4,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        head_dim=32,
        shared_mlp=32,
        experts=12,
        top_k=4,
        theta=1e4,
        tied=True,
    ),
    "qwen3.5-35b-a3b": Qwen35MoEConfig(248_320, 2048, 40, 16, 2, 512, shared_mlp=512, attention_layers=every(4, 40)),
}

QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    Qwen35MoEConfig,
    build_qwen3_5_moe,
    _MOE_PRESETS,
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    (
        *decoder_attributes(_POSITIONS, head_dim=256, kv_heads=2, mlp="moe_intermediate_size", max_seq=32_768),
        *_ATTRIBUTES,
        Attribute("shared_mlp", "shared_expert_intermediate_size", 512),
        Count("experts", ("num_experts", "num_local_experts"), 256),
        Count("top_k", "num_experts_per_tok", 8),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Ignore("intermediate_size"),  # a width of dense layers, which the family lacks
    ),
    (*_WEIGHTS, *MIXTURE, *FUSED, *GATED_SHARED),
    predictor=NAMED_PREDICTOR,
    multimodal=(MultimodalModel("qwen3_5_moe"),),
)
