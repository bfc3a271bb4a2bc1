"""Gemma (Mesnard et al. 2024, arXiv:2403.08295) and Gemma 2 (Riviere et al. 2024, arXiv:2408.00118).

Gemma has scaled embeddings, norm weights added to 1, gated GELU and wide heads. Gemma 2 adds four norms a layer,
softcaps, and a window in every other layer.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Key

from ...nn import Block, Mask, Scores, Transformer
from .._attributes import Activation, Attribute, Expect, Fields, Ignore, Nullable, published_activations
from .._config_types import Attributes, Index, Length, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import all_but_every, Period, Windows
from ._common import ATTENTION, decoder_attributes, EDGES, FOUR_NORMS, GATED, LLAMA_WEIGHTS
from ._decoder import attention, causal_mask, decoder, four_norm_block, gated_mlp, layer_windows, norm, pre_norm_block


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


_GEMMA_PRESETS = {
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
    _GEMMA_PRESETS,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """The config of a Gemma 2."""

    window_layers: tuple[Index, ...]
    """The numbers of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 4096
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 256
    activation: str = "gelu_tanh"
    bias: bool = False
    """Whether the attention's four projections have biases."""
    query_scalar: Size = 256
    """Attention scores are divided by the root of this number."""
    score_softcap: Positive | None = 50.0
    """The softcap of the attention scores."""
    logit_softcap: Positive | None = 30.0
    """The softcap of the logits."""
    tied: bool = True
    max_seq: Length = 8192


def build_gemma2(config: Gemma2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Gemma 2 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        return gemma2_block(config, causal_mask(window), key)

    return gemma2_model(config, block, key=key)


def gemma2_model(
    config: Gemma2Config, block: Callable[[int | None, Key[Array, ""]], Block], *, key: Key[Array, ""]
) -> Transformer:
    """Return a Gemma 2 with the layers that `block(window, key)` builds."""
    return decoder(
        config,
        block,
        layer_windows(config),
        final_norm=norm(config, offset=1.0),
        embedding_scale=config.embed**0.5,
        logit_softcap=config.logit_softcap,
        key=key,
    )


def gemma2_block(config: Gemma2Config, mask: Mask, key: Key[Array, ""]) -> Block:
    """Return a layer whose attention has this mask."""
    mixer, feed_forward = jax.random.split(key)
    attended = attention(config, mask=mask, bias=config.bias, output_std=None, scores=scores_of(config), key=mixer)
    gated = gated_mlp(config, output_std=None, key=feed_forward)
    return four_norm_block(config, attended, gated, offset=1.0)


def scores_of(config: Gemma2Config) -> Scores:
    """Return the scale and the bound of an attention's scores."""
    return Scores(config.query_scalar**-0.5, softcap=config.score_softcap)


def _gemma2(embed: int, layers: int, heads: int, kv_heads: int, mlp: int) -> Gemma2Config:
    return Gemma2Config(256_000, embed, layers, heads, kv_heads, mlp, window_layers=all_but_every(2, layers))


GEMMA2_PRESETS = {
    "gemma2-byte-500k": Gemma2Config(
        256, 96, 4, 4, 2, 256, window_layers=(0, 2), window=128, head_dim=32, query_scalar=32, max_seq=512
    ),
    "gemma2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma2-9b": _gemma2(3584, 42, 16, 8, 14_336),
    "gemma2-27b": dataclasses.replace(_gemma2(4608, 46, 32, 16, 36_864), head_dim=128, query_scalar=144),
}

GEMMA2 = Family(
    "gemma2",
    Gemma2Config,
    build_gemma2,
    GEMMA2_PRESETS,
    "Gemma2ForCausalLM",
    "gemma2",
    (
        *decoder_attributes(head_dim=256, kv_heads=4, tied=True, max_seq=8192),
        Windows(4096, Period(2, but=True)),
        Attribute("query_scalar", "query_pre_attn_scalar", 256),
        Nullable("score_softcap", "attn_logit_softcapping", 50.0),
        Nullable("logit_softcap", "final_logit_softcapping", 30.0),
        Activation("gelu_pytorch_tanh", "hidden_activation"),
        Attribute("bias", "attention_bias", False),
        Expect("use_bidirectional_attention", False, written=False),
        Ignore("hidden_act", "cache_implementation", "sliding_window_size"),  # nothing reads these
    ),
    (*EDGES, *ATTENTION, *GATED, *FOUR_NORMS),
)
