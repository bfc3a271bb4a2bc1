"""Ministral 3 (Mistral AI 2025): a Mistral whose queries grow with their positions, beside YaRN."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, LogTemperature, RotaryScaling, Scores, Transformer, YarnScaling
from .._attributes import Activation, Attribute
from .._config_types import Length, NotNegative, Number, Positive, Size
from .._family import DecoderConfig, Family, MultimodalModel
from .._rotary_attributes import RotaryWithGrowth
from ._common import decoder_attributes, LLAMA_WEIGHTS, StatedHeadSize
from ._decoder import attention, decoder, gated_mlp, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """The config of a Ministral 3."""

    head_dim: Size = 128
    theta: Positive = 1_000_000.0
    scaling: RotaryScaling | None = YarnScaling(16.0, 16_384, magnitude=1.0)
    growth: Number = 0.1
    """The strength of `LogTemperature`; 0: none."""
    growth_every: Length = 16_384
    """The number of positions after which the scores grow."""
    window: Length | None = None
    """The tokens that every layer sees; None: all."""
    eps: NotNegative = 1e-5
    max_seq: Length = 262_144


def growth_of(config: Ministral3Config) -> LogTemperature | None:
    """Return the factor of queries, which grows with their position."""
    return LogTemperature(config.growth_every, config.growth, offset=0) if config.growth else None


def build_ministral3(config: Ministral3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Ministral 3 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, window=config.window, scores=Scores(temperature=growth_of(config)), key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, key=key)


_PRESETS = {
    "ministral3-byte-500k": Ministral3Config(
        256, 96, 4, 6, 2, 320, head_dim=16, theta=1e4, scaling=None, growth_every=64, tied=True, max_seq=512
    ),
    "ministral3-3b": Ministral3Config(131_072, 3072, 26, 32, 8, 9216, tied=True),
    "ministral3-8b": Ministral3Config(131_072, 4096, 34, 32, 8, 14_336),
    "ministral3-14b": Ministral3Config(131_072, 5120, 40, 32, 8, 16_384, theta=1e9),
}

MINISTRAL3 = Family(
    "ministral3",
    Ministral3Config,
    build_ministral3,
    _PRESETS,
    "Ministral3ForCausalLM",
    "ministral3",
    (
        *decoder_attributes(RotaryWithGrowth(), kv_heads=8, max_seq=262_144),
        StatedHeadSize(128),
        Attribute("window", "sliding_window", None),
        Activation(),
    ),
    LLAMA_WEIGHTS,
    multimodal=(MultimodalModel("mistral3"),),
)
