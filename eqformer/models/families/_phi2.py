"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv:2306.11644; Microsoft 2023).

Attention and feed-forward layer read the same input, a part of each head's channels is rotated, and all maps have
biases, the head too.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import LayerNorm, ParallelResidual, Residual, Transformer
from .._attributes import Activation, Expect, Ignore
from .._config_types import Fraction, Length, NotNegative
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryFraction
from ._common import attention_weights, decoder_attributes, EDGES, LAYER, LOGIT_BIAS, OUT_OF_HEADS, weight_and_bias
from ._decoder import attention, decoder, mlp, part_rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi2Config(DecoderConfig):
    """The config of a Phi-1, a Phi-1.5 or a Phi-2."""

    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    activation: str = "gelu_tanh"
    eps: NotNegative = 1e-5
    max_seq: Length = 2048


def build_phi2(config: Phi2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Phi-2 with random weights."""
    rotary = part_rotary(config)
    norm = lambda: LayerNorm("embed", embed=config.embed, eps=config.eps)

    def block(key: Key[Array, ""]) -> ParallelResidual:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=True, rotary=rotary, key=mixer)
        branches = attended, mlp(config, config.mlp, bias=True, key=feed_forward)
        return ParallelResidual(tuple(map(Residual, branches)), norm())

    return decoder(config, block, final_norm=norm(), logit_bias=True, key=key)


_PRESETS = {
    "phi2-byte-500k": Phi2Config(256, 96, 4, 6, 6, 384),
    "phi-1.5": Phi2Config(51_200, 2048, 24, 32, 32, 8192),
    "phi-2": Phi2Config(51_200, 2560, 32, 32, 32, 10_240, rotary_fraction=0.4),
}

PHI2 = Family(
    "phi2",
    Phi2Config,
    build_phi2,
    _PRESETS,
    "PhiForCausalLM",
    "phi",
    (
        *decoder_attributes(eps="layer_norm_eps"),
        RotaryFraction(0.5),
        Activation("gelu_new"),
        Expect("qk_layernorm", False),
        Ignore("embd_pdrop", "resid_pdrop"),  # rates of dropout in training
    ),
    (
        *(EDGES[0], EDGES[2], *LOGIT_BIAS),
        *weight_and_bias("model.final_layernorm", "norm"),
        *(rule for rule in attention_weights() if "o_proj" not in rule.name),
        *weight_and_bias(f"{LAYER}self_attn.dense", "mixer.layer.output", OUT_OF_HEADS),
        *weight_and_bias(f"{LAYER}mlp.fc1", "feed_forward.layer.up"),
        *weight_and_bias(f"{LAYER}mlp.fc2", "feed_forward.layer.down"),
        *weight_and_bias(f"{LAYER}input_layernorm", "norm"),
    ),
)
