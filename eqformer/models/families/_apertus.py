"""Apertus (Swiss AI 2025): a Llama with norms of queries and keys, whose feed-forward layers have no gates.

The activation has parameters (`XIELU`).
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Llama3Scaling, MLP, Transformer, XIELU
from .._attributes import Attribute, Expect, Unpublished
from .._config_types import Length, NotNegative, Positive
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, head_norm_weights, LAYER, norm_weights
from ._decoder import attention, damping, decoder, head_norms, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    """The config of an Apertus."""

    activation: str = "xielu"
    theta: Positive = 12_000_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    max_seq: Length = 65_536


def build_apertus(config: ApertusConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an Apertus with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mlp = MLP(
            embed=config.embed,
            mlp=config.mlp,
            activation=XIELU(),
            output_std=damping(config) * config.mlp**-0.5,
            key=feed_forward_key,
        )
        return pre_norm_block(config, attention(config, bias=config.bias, **head_norms(config), key=mixer_key), mlp)

    return decoder(config, block, key=key)


_SCALING = Llama3Scaling(8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
_PRESETS = {
    "apertus-byte-500k": ApertusConfig(256, 96, 4, 6, 2, 384, theta=10_000.0, tied=True),
    "apertus-8b": ApertusConfig(131_072, 4096, 32, 32, 8, 21_504, scaling=_SCALING),
    "apertus-70b": ApertusConfig(131_072, 8192, 80, 64, 8, 43_008, scaling=_SCALING),
}

_ACTIVATION = "feed_forward.layer.activation."
APERTUS = Family(
    "apertus",
    ApertusConfig,
    build_apertus,
    _PRESETS,
    "ApertusForCausalLM",
    "apertus",
    (
        *decoder_attributes(RotaryPositions(12_000_000.0, required=True), max_seq=65_536),
        Attribute("bias", "attention_bias", False),
        Expect("hidden_act", "xielu"),
        Unpublished("activation", "xielu", "all layers use xielu, whose parameters are published"),
        # The publisher's own program reads these attributes. All models of this family have these values.
        *(Expect(name, False, written=False) for name in ("mlp_bias", "post_norm")),
        Expect("qk_norm", True, written=False),
    ),
    (
        *(*EDGES, *ATTENTION, *head_norm_weights()),
        *norm_weights(mixer="attention_layernorm", feed_forward="feedforward_layernorm"),
        Rule(f"{LAYER}mlp.up_proj.weight", "feed_forward.layer.up.weight"),
        Rule(f"{LAYER}mlp.down_proj.weight", "feed_forward.layer.down.weight"),
        *(Rule(f"{LAYER}mlp.act_fn.{name}", f"{_ACTIVATION}{name}", "1 -> ") for name in ("alpha_p", "alpha_n")),
        *(Rule(f"{LAYER}mlp.act_fn.{name}", f"{_ACTIVATION}{name}") for name in ("beta", "eps")),
    ),
)
