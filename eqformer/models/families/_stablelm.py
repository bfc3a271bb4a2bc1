"""StableLM (Stability AI 2023) and StableLM 2 (Bellagente et al. 2024, arXiv:2402.17834): a Llama with `LayerNorm`s.

A part of each head's channels is rotated. In StableLM 2 12B, attention and feed-forward layer read the same input, and
each head has norms of its own.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, LayerNorm, ParallelResidual, Residual, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Fraction, Length, NotNegative
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryFraction
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, GATED, LAYER, weight_and_bias
from ._decoder import attention, decoder, gated_mlp, head_layer_norm, part_rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableLMConfig(DecoderConfig):
    """The config of a StableLM."""

    rotary_fraction: Fraction = 0.25
    """The fraction of a head's channels that is rotated."""
    parallel: bool = False
    """Whether attention and feed-forward layer read the same input."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    qk_norm: bool = False
    """Whether queries and keys have norms, with a scale for each head."""
    eps: NotNegative = 1e-5
    max_seq: Length = 4096


def build_stablelm(config: StableLMConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a StableLM with random weights."""
    rotary = part_rotary(config)
    norm = lambda: LayerNorm("embed", embed=config.embed, eps=config.eps)

    def block(key: Key[Array, ""]) -> Block | ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config,
            bias=config.bias,
            output_bias=False,
            query_norm=head_layer_norm(config, "heads") if config.qk_norm else None,
            key_norm=head_layer_norm(config, "kv_heads") if config.qk_norm else None,
            rotary=rotary,
            key=mixer_key,
        )
        gated = gated_mlp(config, key=feed_forward_key)
        if config.parallel:
            return ParallelResidual((Residual(mixer), Residual(gated)), norm())
        return Block(Residual(mixer, norm()), Residual(gated, norm()))

    return decoder(config, block, final_norm=norm(), key=key)


_PRESETS = {
    "stablelm-byte-500k": StableLMConfig(256, 96, 4, 6, 2, 256, bias=True, tied=True),
    "stablelm-3b-4e1t": StableLMConfig(50_304, 2560, 32, 32, 32, 6912),
    "stablelm-2-1.6b": StableLMConfig(100_352, 2048, 24, 32, 32, 5632, bias=True),
    "stablelm-2-12b": StableLMConfig(100_352, 5120, 40, 32, 8, 13_824, parallel=True, qk_norm=True),
}

_ATTENTION = f"{LAYER}self_attn."
STABLELM = Family(
    "stablelm",
    StableLMConfig,
    build_stablelm,
    _PRESETS,
    "StableLmForCausalLM",
    "stablelm",
    (
        *decoder_attributes(kv_heads=32, eps="layer_norm_eps", max_seq=4096),
        RotaryFraction(0.25),
        Attribute("parallel", "use_parallel_residual", False),
        Attribute("bias", "use_qkv_bias", False),
        Attribute("qk_norm", "qk_layernorm", False),
        Activation(),
    ),
    (
        *(*EDGES, Rule("model.norm.bias", "norm.bias"), *ATTENTION, *GATED),
        *weight_and_bias(f"{LAYER}input_layernorm", "mixer.norm"),
        *weight_and_bias(f"{LAYER}input_layernorm", "norm"),  # the norm before both sublayers, if `parallel`
        *weight_and_bias(f"{LAYER}post_attention_layernorm", "feed_forward.norm"),
        # Each head's scale is an array of its own, so that `{expert}` counts heads here.
        Rule(f"{_ATTENTION}q_layernorm.norms.{{expert}}.weight", "mixer.layer.query_norm.weight"),
        Rule(f"{_ATTENTION}k_layernorm.norms.{{expert}}.weight", "mixer.layer.key_norm.weight"),
    ),
)
