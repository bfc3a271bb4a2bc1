"""OLMo 2 (OLMo team 2024, arXiv:2501.00656): norms of what sublayers give, queries and keys normed over all heads."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Length, Positive
from .._family import DecoderConfig, Family
from ._common import ATTENTION, decoder_attributes, EDGES, GATED, head_norm_weights, OF_HEADS, POST_NORMS
from ._decoder import attention, decoder, gated_mlp, head_norms, post_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """The config of an OLMo 2."""

    theta: Positive = 500_000.0
    bias: bool = False
    """Whether the attention's four projections have biases."""
    max_seq: Length = 4096


def build_olmo2(config: Olmo2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an OLMo 2 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=config.bias, output_std=None, **head_norms(config, all_heads=True), key=mixer)
        return post_norm_block(config, attended, gated_mlp(config, output_std=None, key=feed_forward))

    return decoder(config, block, key=key)


_PRESETS = {
    "olmo2-byte-500k": Olmo2Config(vocab=256, embed=96, layers=4, heads=6, kv_heads=6, mlp=256, theta=10_000.0),
    "olmo2-1b": Olmo2Config(vocab=100_352, embed=2048, layers=16, heads=16, kv_heads=16, mlp=8192),
    "olmo2-7b": Olmo2Config(vocab=100_352, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11_008),
    "olmo2-13b": Olmo2Config(vocab=100_352, embed=5120, layers=40, heads=40, kv_heads=40, mlp=13_824),
    "olmo2-32b": Olmo2Config(vocab=100_352, embed=5120, layers=64, heads=40, kv_heads=8, mlp=27_648),
}

OLMO2_WEIGHTS = (*EDGES, *ATTENTION, *head_norm_weights(OF_HEADS), *GATED, *POST_NORMS)
OLMO2 = Family(
    "olmo2",
    Olmo2Config,
    build_olmo2,
    _PRESETS,
    "Olmo2ForCausalLM",
    "olmo2",
    (*decoder_attributes(), Attribute("bias", "attention_bias", False), Activation()),
    OLMO2_WEIGHTS,
)
