"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): 64 small experts, queries and keys normed over all heads."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, ClippedNorm, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Length, NotNegative, Positive, Size
from .._family import DecoderConfig, Family
from ._common import ATTENTION, decoder_attributes, EDGES, head_norm_weights, OF_HEADS, PRE_NORMS
from ._decoder import attention, decoder, gated_mlp, head_norms, pre_norm_block
from ._mixtures import choice_attributes, MIXTURE, mixture


@dataclasses.dataclass(frozen=True, kw_only=True)
class OLMoEConfig(DecoderConfig):
    """The config of an OLMoE; `mlp` is one expert's."""

    experts: Size = 64
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    normalise: bool = False
    """Whether the weights of a token's experts are normalized to add up to 1."""
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    clip: Positive | None = None
    """The bound of the magnitudes of queries, keys (both after their norms) and values; None: none."""
    balance: NotNegative = 0.01
    """The weight of `LoadBalance`, over the batch."""
    max_seq: Length = 4096


def build_olmoe(config: OLMoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an OLMoE with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        router, experts = jax.random.split(feed_forward)
        mixed = mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            normalise=config.normalise,
            router=router,
            experts=experts,
        )
        norms = head_norms(config, all_heads=True)
        if config.clip is None:
            attended = attention(config, bias=config.bias, **norms, key=mixer)
        else:
            attended = attention(
                config,
                bias=config.bias,
                query_norm=ClippedNorm(norms["query_norm"], config.clip),
                key_norm=ClippedNorm(norms["key_norm"], config.clip),
                value_norm=ClippedNorm(None, config.clip),
                key=mixer,
            )
        return pre_norm_block(config, attended, mixed)

    return decoder(config, block, key=key)


_PRESETS = {
    "olmoe-byte-500k": OLMoEConfig(256, 64, 4, heads=4, kv_heads=4, mlp=32, experts=16, top_k=4, tied=True),
    "olmoe-1b-7b": OLMoEConfig(50_304, 2048, 16, heads=16, kv_heads=16, mlp=1024),
}

OLMOE = Family(
    "olmoe",
    OLMoEConfig,
    build_olmoe,
    _PRESETS,
    "OlmoeForCausalLM",
    "olmoe",
    (
        *decoder_attributes(max_seq=4096),
        *choice_attributes(64, 8, balance=0.01),
        Attribute("bias", "attention_bias", False),
        Activation(),
        Attribute("clip", "clip_qkv", None),
    ),
    (*EDGES, *ATTENTION, *head_norm_weights(OF_HEADS), *PRE_NORMS, *MIXTURE),
)
