"""Seed-OSS (ByteDance Seed 2025): a Llama with biased queries, keys and values."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute, Ignore
from .._config_types import Length, Positive
from .._family import DecoderConfig, Family
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, PRE_NORMS, StatedHeadSize
from ._decoder import attention, decoder, gated_mlp, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedOSSConfig(DecoderConfig):
    """The config of a Seed-OSS."""

    theta: Positive = 10_000_000.0
    bias: bool = True
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the attention's output has a bias."""
    mlp_bias: bool = False
    """Whether the feed-forward layers' maps have biases."""
    max_seq: Length = 524_288


def build_seed_oss(config: SeedOSSConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Seed-OSS with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=config.bias, output_bias=config.output_bias, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, bias=config.mlp_bias, key=feed_forward))

    return decoder(config, block, key=key)


_PRESETS = {
    "seed-oss-byte-500k": SeedOSSConfig(
        256, 96, 4, 6, 2, 256, head_dim=16, theta=1e4, output_bias=True, mlp_bias=True, tied=True
    ),
    "seed-oss-36b": SeedOSSConfig(155_136, 5120, 64, 80, 8, 27_648, head_dim=128),
}

SEED_OSS = Family(
    "seed_oss",
    SeedOSSConfig,
    build_seed_oss,
    _PRESETS,
    "SeedOssForCausalLM",
    "seed_oss",
    (
        *decoder_attributes(kv_heads=8, max_seq=524_288),
        StatedHeadSize(128),
        Attribute("bias", "attention_bias", True),
        Attribute("output_bias", "attention_out_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
        Activation(),
        Ignore("residual_dropout"),  # a setting of training
    ),
    (*EDGES, *ATTENTION, *PRE_NORMS, *gated_weights(bias=True)),
)
