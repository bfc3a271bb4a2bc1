"""ERNIE 4.5, its dense models (Baidu 2025): a Llama whose neighbouring channels turn together."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Length, NotNegative, Positive
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryPositions
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, PRE_NORMS, StatedHeadSize
from ._decoder import attention, decoder, gated_mlp, pre_norm_block, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ernie45Config(DecoderConfig):
    """The config of a dense ERNIE 4.5."""

    theta: Positive = 500_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether all maps of attention and feed-forward layers have biases."""
    tied: bool = True
    max_seq: Length = 131_072


def build_ernie45(config: Ernie45Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a dense ERNIE 4.5 with random weights."""
    rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=config.bias, rotary=rotary, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, bias=config.bias, key=feed_forward))

    return decoder(config, block, key=key)


_PRESETS = {
    "ernie4.5-byte-500k": Ernie45Config(256, 96, 4, 6, 2, 256, head_dim=16, theta=1e4, bias=True),
    "ernie4.5-0.3b": Ernie45Config(103_424, 1024, 18, 16, 2, 3072, head_dim=128),
}

ERNIE45 = Family(
    "ernie4_5",
    Ernie45Config,
    build_ernie45,
    _PRESETS,
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    (
        *decoder_attributes(RotaryPositions(500_000.0), kv_heads=2, tied=True, max_seq=131_072),
        StatedHeadSize(128),
        Attribute("bias", "use_bias", False),
        Activation(),
    ),
    (*EDGES, *ATTENTION, *PRE_NORMS, *gated_weights(bias=True)),
)
