"""GLM-4-0414 (GLM team 2024, arXiv:2406.12793; 2025): norms before and after sublayers, half of each head rotated."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Fraction, NotNegative
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryFraction
from ._common import ATTENTION, decoder_attributes, EDGES, JOINED_GATED, norm_weights
from ._decoder import attention, decoder, four_norm_block, gated_mlp, part_rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM4Config(DecoderConfig):
    """The config of a GLM-4."""

    rotary_fraction: Fraction = 0.5
    """The part of a head's channels that has rotary positions."""
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether queries, keys and values have biases."""


def build_glm4(config: GLM4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a GLM-4 with random weights."""
    rotary = part_rotary(config, interleaved=True)

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=config.bias, output_bias=False, rotary=rotary, key=mixer)
        return four_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, key=key)


_PRESETS = {
    "glm4-byte-500k": GLM4Config(256, 96, 4, 6, 2, 256, head_dim=16, bias=True),
    "glm4-9b": GLM4Config(151_552, 4096, 40, 32, 2, 13_696, head_dim=128, bias=True),
    "glm4-32b": GLM4Config(151_552, 6144, 61, 48, 2, 23_040, head_dim=128),
}

_NORMS = norm_weights(
    mixer="input_layernorm",
    feed_forward="post_attention_layernorm",
    mixer_output="post_self_attn_layernorm",
    feed_forward_output="post_mlp_layernorm",
)
GLM4 = Family(
    "glm4",
    GLM4Config,
    build_glm4,
    _PRESETS,
    "Glm4ForCausalLM",
    "glm4",
    (
        *decoder_attributes(head_dim=128, kv_heads=2, max_seq=131_072),
        RotaryFraction(0.5),
        Attribute("bias", "attention_bias", True),
        Activation(),
    ),
    (*EDGES, *ATTENTION, *JOINED_GATED, *_NORMS),
)
