"""Qwen3-MoE (Qwen team 2025, arXiv:2505.09388): norms of each head's queries and keys, mixtures in chosen layers."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Length, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import SwitchedWindow
from . import _mixtures as mixtures
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, head_norms, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(mixtures.QwenMoEConfig):
    """The config of a Qwen3-MoE; `mlp` is a dense layer's width, `expert_mlp` an expert's."""

    experts: Size = 128
    top_k: Size = 8
    normalise: bool = True
    bias: bool = False
    """Whether the attention's four projections have biases."""
    window: Length | None = None
    """The tokens that every layer sees; None: all."""
    max_seq: Length = 40_960


def build_qwen3_moe(config: Qwen3MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen3-MoE with random weights."""

    def block(is_mixture: bool, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, window=config.window, bias=config.bias, **head_norms(config), key=mixer)
        if not is_mixture:
            return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))
        router, experts = jax.random.split(feed_forward)
        expert = functools.partial(mixtures.small_expert, config)
        mixed = mixtures.mixture(config, expert, normalise=config.normalise, router=router, experts=experts)
        return pre_norm_block(config, attended, mixed)

    return decoder(config, block, mixtures.mixture_flags(config), key=key)


_PRESETS = {
    "qwen3-moe-byte-500k": Qwen3MoEConfig(
        256, 64, 4, heads=4, kv_heads=2, mlp=128, expert_mlp=32, experts=16, top_k=4, theta=10_000.0, tied=True
    ),
    "qwen3-30b-a3b": Qwen3MoEConfig(151_936, 2048, 48, heads=32, kv_heads=4, mlp=6144, expert_mlp=768, head_dim=128),
    "qwen3-235b-a22b": Qwen3MoEConfig(
        151_936, 4096, 94, heads=64, kv_heads=4, mlp=12_288, expert_mlp=1536, head_dim=128
    ),
}

# Transformers' defaults for the text model of Qwen3-VL's mixtures.
_MISSING = {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_local_experts": 60, "num_experts_per_tok": 4}
_MISSING |= {"rope_theta": 500_000.0, "max_position_embeddings": 128_000, "head_dim": 128}
QWEN3_MOE = Family(
    "qwen3_moe",
    Qwen3MoEConfig,
    build_qwen3_moe,
    _PRESETS,
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (
        *decoder_attributes(kv_heads=4, max_seq=32_768),
        *mixtures.mixture_attributes(128, 8),
        SwitchedWindow(4096),
        Attribute("bias", "attention_bias", False),
        Activation(),
    ),
    (*LLAMA_WEIGHTS, *mixtures.MIXTURE),
    multimodal=(
        MultimodalModel(
            "qwen3_vl_moe",
            "qwen3_vl_moe_text",
            _MISSING,
            {"norm_topk_prob": True},
            (*mixtures.FUSED, *mixtures.TRANSPOSED),
        ),
    ),
)
