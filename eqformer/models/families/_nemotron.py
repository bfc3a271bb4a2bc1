"""Nemotron (Parmar et al. 2024, arXiv:2402.16819) and Minitron (Muralidharan et al. 2024, arXiv:2407.14679).

The norms are `LayerNorm`s that add 1 to the published weight, the feed-forward layers have no gates, and a part of each
head's channels is rotated.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, LayerNorm, Residual, Transformer
from .._attributes import Activation, Attribute, Expect
from .._config_types import Fraction, Length, NotNegative
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryFraction
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, LAYER, weight_and_bias
from ._decoder import attention, decoder, mlp, part_rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronConfig(DecoderConfig):
    """The config of a Nemotron or a Minitron."""

    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    activation: str = "relu_squared"
    eps: NotNegative = 1e-5
    max_seq: Length = 4096


def build_nemotron(config: NemotronConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Nemotron with random weights."""
    rotary = part_rotary(config)
    norm = lambda: LayerNorm("embed", embed=config.embed, eps=config.eps, offset=1.0)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, rotary=rotary, key=mixer_key)
        feed_forward = mlp(config, config.mlp, bias=config.mlp_bias, key=feed_forward_key)
        return Block(Residual(mixer, norm()), Residual(feed_forward, norm()))

    return decoder(config, block, final_norm=norm(), key=key)


_PRESETS = {
    "nemotron-byte-500k": NemotronConfig(256, 96, 4, 6, 2, 384, tied=True),
    "minitron-4b": NemotronConfig(256_000, 3072, 32, 24, 8, 9216, head_dim=128),
    "minitron-8b": NemotronConfig(256_000, 4096, 32, 48, 8, 16_384, head_dim=128),
    "nemotron-4-15b": NemotronConfig(256_000, 6144, 32, 48, 8, 24_576),
    "nemotron-4-340b": NemotronConfig(256_000, 18_432, 96, 96, 8, 73_728),
}

NEMOTRON = Family(
    "nemotron",
    NemotronConfig,
    build_nemotron,
    _PRESETS,
    "NemotronForCausalLM",
    "nemotron",
    (
        *decoder_attributes(eps="norm_eps", max_seq=4096),
        RotaryFraction(0.5),
        # Other programs read the fraction under these names too. Transformers does not.
        *(Expect(name, 0.5, written=False) for name in ("rope_percent", "rope_percentage")),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
        Activation("relu2"),
    ),
    (
        *(*EDGES, *ATTENTION),
        Rule("model.norm.bias", "norm.bias"),
        *weight_and_bias(f"{LAYER}input_layernorm", "mixer.norm"),
        *weight_and_bias(f"{LAYER}post_attention_layernorm", "feed_forward.norm"),
        *weight_and_bias(f"{LAYER}mlp.up_proj", "feed_forward.layer.up"),
        *weight_and_bias(f"{LAYER}mlp.down_proj", "feed_forward.layer.down"),
    ),
)
