"""Granite 3 (Granite Team, IBM, 2024): a Llama with multipliers of embeddings, scores, sublayers and logits."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Scores, Transformer
from .._attributes import Activation, Attribute, Fields
from .._config_types import Length, NotNegative, Number, PublishedConfig
from .._family import DecoderConfig, Family
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """The config of a Granite."""

    embedding_scale: Number
    """A factor of the embeddings."""
    attention_scale: Number
    """A factor of the attention scores."""
    residual_scale: Number
    """A factor of what each sublayer adds to the residual stream."""
    logit_divisor: Number
    """A divisor of the logits."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    eps: NotNegative = 1e-5
    tied: bool = True
    max_seq: Length = 4096


def build_granite(config: GraniteConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Granite with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(
            config, bias=config.bias, scores=Scores(config.attention_scale), output_std=None, key=mixer
        )
        gated = gated_mlp(config, bias=config.mlp_bias, output_std=None, key=feed_forward)
        return pre_norm_block(config, attended, gated, residual_scale=config.residual_scale)

    return decoder(config, block, embedding_scale=config.embedding_scale, logit_scale=1 / config.logit_divisor, key=key)


def _granite(embed: int, heads: int, mlp: int, head_dim: int, logit_divisor: float) -> GraniteConfig:
    return GraniteConfig(
        vocab=49_155,
        embed=embed,
        layers=40,
        heads=heads,
        kv_heads=8,
        mlp=mlp,
        embedding_scale=12.0,
        attention_scale=1 / head_dim,
        residual_scale=0.22,
        logit_divisor=logit_divisor,
    )


_2B = _granite(2048, 32, 8192, 64, 8.0)
_8B = _granite(4096, 32, 12_800, 128, 16.0)
_PRESETS = {
    "granite-byte-500k": GraniteConfig(
        vocab=256,
        embed=96,
        layers=4,
        heads=6,
        kv_heads=2,
        mlp=320,
        embedding_scale=12.0,
        attention_scale=1 / 16,
        residual_scale=0.22,
        logit_divisor=8.0,
        max_seq=512,
    ),
    "granite-3.0-2b": _2B,
    "granite-3.0-8b": _8B,
    "granite-3.1-2b": dataclasses.replace(_2B, theta=5_000_000.0, max_seq=131_072),
    "granite-3.1-8b": dataclasses.replace(_8B, theta=10_000_000.0, max_seq=131_072),
}


class _Divisor(Attribute):
    """A number that is not 0."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value."""
        fields = super().read(published)
        if fields[self.name] == 0:
            published.refuse(f"{self.published}={fields[self.name]}: logits are divided by it; give another number.")
        return fields


SCALES = (
    Attribute("embedding_scale", "embedding_multiplier", 1.0),
    Attribute("attention_scale", "attention_multiplier", 1.0),
    Attribute("residual_scale", "residual_multiplier", 1.0),
    _Divisor("logit_divisor", "logits_scaling", 1.0),
)
GRANITE = Family(
    "granite",
    GraniteConfig,
    build_granite,
    _PRESETS,
    "GraniteForCausalLM",
    "granite",
    (
        *decoder_attributes(),
        *SCALES,
        Activation(),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    LLAMA_WEIGHTS,
)
