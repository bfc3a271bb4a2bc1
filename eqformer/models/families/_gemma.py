"""Gemma (Mesnard et al. 2024, arXiv:2403.08295): scaled embeddings, norm weights added to 1, gated GELU, wide heads."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute, Expect, Fields, published_activations
from .._config_types import Attributes, Length, PublishedConfig, Size
from .._family import DecoderConfig, Family
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, norm, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """The config of a Gemma."""

    head_dim: Size = 256
    activation: str = "gelu_tanh"
    bias: bool = False
    """Whether the attention's four projections have biases."""
    tied: bool = True
    max_seq: Length = 8192


def build_gemma(config: GemmaConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Gemma with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        gated = gated_mlp(config, key=feed_forward)
        return pre_norm_block(config, attention(config, bias=config.bias, key=mixer), gated, offset=1.0)

    return decoder(config, block, final_norm=norm(config, offset=1.0), embedding_scale=config.embed**0.5, key=key)


class EitherActivation(Activation):
    """An activation in two attributes, since older readers use `hidden_activation` alone, and newer ones ignore it."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the name in `nn.ACTIVATIONS`; refuse two attributes that differ."""
        activation = super().read(published)[self.name]
        if published.text(self.published, self.default) == "gelu":
            activation = "gelu_tanh"  # Early checkpoints state gelu, but mean its approximation.
        published.expect("hidden_activation", *published_activations(activation))
        return {self.name: activation}

    def write(self, config: object) -> Attributes:
        """Return both attributes, or only one if the other has the default of older readers."""
        (name,) = super().write(config).values()
        name = "gelu_python" if name == "gelu" else name
        return {self.published: name} | ({} if name == self.default else {"hidden_activation": name})


_PRESETS = {
    "gemma-byte-500k": GemmaConfig(
        vocab=256, embed=96, layers=4, heads=4, kv_heads=2, mlp=256, head_dim=32, max_seq=512
    ),
    "gemma-2b": GemmaConfig(vocab=256_000, embed=2048, layers=18, heads=8, kv_heads=1, mlp=16_384),
    "gemma-7b": GemmaConfig(vocab=256_000, embed=3072, layers=28, heads=16, kv_heads=16, mlp=24_576),
}

GEMMA = Family(
    "gemma",
    GemmaConfig,
    build_gemma,
    _PRESETS,
    "GemmaForCausalLM",
    "gemma",
    (
        *decoder_attributes(head_dim=256, tied=True, kv_heads=16, max_seq=8192),
        EitherActivation("gelu_pytorch_tanh"),
        Attribute("bias", "attention_bias", False),
        Expect("use_bidirectional_attention", False, written=False),
    ),
    LLAMA_WEIGHTS,
)
