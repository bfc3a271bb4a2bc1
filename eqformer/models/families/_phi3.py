"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): a Llama with joined projections and LongRoPE."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute, Expect
from .._family import DecoderConfig, Family
from .._kinds import Fraction, Length, NotNegative
from .._rotary_attributes import LongRotaryPositions, RotaryFraction
from .._weights import Rule
from ._common import decoder_attributes, EDGES, INTO_HEADS, JOINED_GATED, LAYER, OUT_OF_HEADS, PRE_NORMS
from ._decoder import attention, decoder, gated_mlp, part_rotary, pre_norm_block
from ._phi3_divisors import PHI3_MINI, PHI4_MINI, PHI35_MINI


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """The config of a Phi-3."""

    rotary_fraction: Fraction = 1.0
    """The part of a head's channels that has rotary positions."""
    window: Length | None = None
    """The tokens that every layer sees; None: all."""
    eps: NotNegative = 1e-5
    max_seq: Length = 4096


def build_phi3(config: Phi3Config, *, key: Key[Array, ""]) -> Transformer:
    """A Phi-3 with random weights."""

    def block(_: None, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        rotary = part_rotary(config)
        attended = attention(config, window=config.window, rotary=rotary, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, key=key)


_PRESETS = {
    "phi3-byte-500k": Phi3Config(256, 96, 4, 6, 2, 256, window=64),
    "phi3-mini-4k": Phi3Config(32_064, 3072, 32, 32, 32, 8192, window=2047),
    "phi3-mini-128k": Phi3Config(32_064, 3072, 32, 32, 32, 8192, scaling=PHI3_MINI, window=262_144, max_seq=131_072),
    "phi3.5-mini": Phi3Config(32_064, 3072, 32, 32, 32, 8192, scaling=PHI35_MINI, window=262_144, max_seq=131_072),
    "phi3-medium-4k": Phi3Config(32_064, 5120, 40, 40, 10, 17_920, window=2047),
    "phi4": Phi3Config(100_352, 5120, 40, 40, 10, 17_920, theta=250_000.0, max_seq=16_384),
    "phi4-mini": Phi3Config(
        200_064,
        3072,
        32,
        24,
        8,
        8192,
        rotary_fraction=0.75,
        scaling=PHI4_MINI,
        window=262_144,
        tied=True,
        max_seq=131_072,
    ),  # fmt: skip
}

_ATTENTION = (
    Rule(
        f"{LAYER}self_attn.qkv_proj.weight",
        ("mixer.layer.query.weight", "mixer.layer.key.weight", "mixer.layer.value.weight"),
        INTO_HEADS,
    ),
    Rule(f"{LAYER}self_attn.o_proj.weight", "mixer.layer.output.weight", OUT_OF_HEADS),
)
PHI3 = Family(
    "phi3",
    Phi3Config,
    build_phi3,
    _PRESETS,
    "Phi3ForCausalLM",
    "phi3",
    (
        *decoder_attributes(LongRotaryPositions(), max_seq=4096),
        RotaryFraction(),
        Attribute("window", "sliding_window", None),
        Activation(),
        Expect("full_attn_mod", 1, written=False),
        Expect("interpolate_factor", 1, written=False),
    ),
    (*EDGES, *_ATTENTION, *JOINED_GATED, *PRE_NORMS),
)
