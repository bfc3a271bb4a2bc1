"""HyperCLOVA X SEED Think (NAVER Cloud 2025): a Llama with multipliers, and with norms before and after sublayers.

Multipliers scale embeddings, attention scores, outputs of sublayers, and logits.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Mixer, Residual, Scores, Transformer
from .._attributes import Activation, Attribute, Entry, Fields
from .._config_types import Attributes, Length, NotNegative, Number, PublishedConfig, Size
from .._family import DecoderConfig, Family
from ._common import decoder_attributes, LLAMA_WEIGHTS, norm_weights, StatedHeadSize
from ._decoder import attention, decoder, FeedForwardLayer, gated_mlp, norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperCLOVAXConfig(DecoderConfig):
    """The config of a HyperCLOVA X."""

    attention_scale: Number
    """A factor of the attention scores."""
    embedding_scale: Number = 1.0
    """A factor of the embeddings."""
    residual_scale: Number = 1.0
    """A factor of the output of each sublayer."""
    logit_scale: Number = 1.0
    """A factor of the logits."""
    post_norms: bool = True
    """Whether there are norms after sublayers too."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    eps: NotNegative = 1e-5
    max_seq: Length = 131_072


def build_hyperclovax(config: HyperCLOVAXConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a HyperCLOVA X with random weights."""

    def sublayer(layer: Mixer | FeedForwardLayer) -> Residual:
        output_norm = norm(config) if config.post_norms else None
        return Residual(layer, norm(config), output_norm=output_norm, scale=config.residual_scale)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config, bias=config.bias, scores=Scores(config.attention_scale), output_std=None, key=mixer_key
        )
        gated = gated_mlp(config, bias=config.mlp_bias, output_std=None, key=feed_forward_key)
        return Block(sublayer(mixer), sublayer(gated))

    return decoder(config, block, embedding_scale=config.embedding_scale, logit_scale=config.logit_scale, key=key)


class _AttentionScale(Entry):
    """The factor of the scores; null, or a missing attribute, means one over the root of a head's channels."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `attention_scale`."""
        heads, embed = published.read("num_attention_heads", Size), published.read("hidden_size", Size)
        head_dim = published.read("head_dim", Size, max(embed // heads, 1))
        return {"attention_scale": published.read("attention_multiplier", Number, head_dim**-0.5)}

    def write(self, config: HyperCLOVAXConfig) -> Attributes:
        """Return the attribute."""
        return {"attention_multiplier": config.attention_scale}


_PRESETS = {
    "hyperclovax-byte-500k": HyperCLOVAXConfig(
        256, 96, 4, 6, 2, 256, head_dim=16, embedding_scale=10.0, attention_scale=1 / 16, logit_scale=0.125, tied=True
    ),
    "hyperclovax-seed-think-14b": HyperCLOVAXConfig(
        *(110_592, 6144, 38, 48, 8, 14_336),
        head_dim=128,
        theta=100_000_000.0,
        embedding_scale=10.0,
        attention_scale=1 / 128,
        logit_scale=0.125,
    ),
}

HYPERCLOVAX = Family(
    "hyperclovax",
    HyperCLOVAXConfig,
    build_hyperclovax,
    _PRESETS,
    "HyperCLOVAXForCausalLM",
    "hyperclovax",
    (
        *(*decoder_attributes(), StatedHeadSize(), _AttentionScale(), Activation()),
        Attribute("embedding_scale", "embedding_multiplier", 1.0),
        Attribute("residual_scale", "residual_multiplier", 1.0),
        Attribute("logit_scale", "logits_scaling", 1.0),
        Attribute("post_norms", "use_post_norm", True),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    (*LLAMA_WEIGHTS, *norm_weights(mixer_output="post_norm1", feed_forward_output="post_norm2")),
)
