"""Command R (Cohere 2024): attention and feed-forward side by side after one norm, scaled logits."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import LayerNorm, ParallelResidual, Residual, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Length, NotNegative, Number, Positive
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import decoder_attributes, LAYER, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """The config of a Command R."""

    theta: Positive = 8_000_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    qk_norm: bool = False
    """Whether queries and keys have norms, with a scale for each head."""
    logit_scale: Number = 0.0625
    """A factor of the logits."""
    tied: bool = True
    max_seq: Length = 8192


def build_cohere(config: CohereConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Command R with random weights."""
    size = config.head_size

    def norm() -> LayerNorm:
        return LayerNorm("embed", embed=config.embed, bias=False, eps=config.eps)

    def head_norm(heads: str, count: int) -> LayerNorm | None:
        if not config.qk_norm:
            return None
        sizes = {heads: count, "head_dim": size}
        return LayerNorm(f"{heads} head_dim", over="head_dim", scale=True, bias=False, eps=config.eps, **sizes)

    def block(key: Key[Array, ""]) -> ParallelResidual:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(
            config,
            bias=config.bias,
            query_norm=head_norm("heads", config.heads),
            key_norm=head_norm("kv_heads", config.kv_heads),
            rotary=rotary_of(config, size, interleaved=True, scaling=config.scaling),
            key=mixer,
        )
        gated = gated_mlp(config, key=feed_forward)
        return ParallelResidual((Residual(attended), Residual(gated)), norm())

    return decoder(config, block, final_norm=norm(), logit_scale=config.logit_scale, key=key)


_PRESETS = {
    "cohere-byte-500k": CohereConfig(256, 96, 4, 6, 2, 256, theta=10_000.0),
    "command-r": CohereConfig(256_000, 8192, 40, 64, 64, 22_528),
    "command-r-plus": CohereConfig(
        256_000, 12_288, 64, 96, 8, 33_792, theta=75_000_000.0, qk_norm=True, logit_scale=0.8333333
    ),
}

COHERE = Family(
    "cohere",
    CohereConfig,
    build_cohere,
    _PRESETS,
    "CohereForCausalLM",
    "cohere",
    (
        *decoder_attributes(RotaryPositions(500_000.0), eps="layer_norm_eps", tied=True, max_seq=8192),
        Attribute("bias", "attention_bias", False),
        Attribute("qk_norm", "use_qk_norm", False),
        Attribute("logit_scale", "logit_scale", 0.0625),
        Activation(),
    ),
    (*LLAMA_WEIGHTS, Rule(f"{LAYER}input_layernorm.weight", "norm.weight")),
)
