"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and the text models of Gemma 3 (arXiv:2503.19786).

Gemma has scaled embeddings, norm weights added to 1, gated GELU and wide heads. Gemma 2 adds four norms a layer,
softcaps, and a window in every other layer. VaultGemma is a Gemma 2 with two norms a layer. Gemma 3 has five layers
with a window for each layer without a window, norms of queries and keys, and no softcaps.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, GatedMLP, LinearScaling, Mask, Mixer, RotaryScaling, Scores, Transformer
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore, Nullable, published_activations
from .._config_types import Attributes, Index, Length, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family, MultimodalModel
from .._layer_attributes import all_but_every, Period, Windows
from .._rotary_attributes import RotaryByType
from . import _decoder as decoders
from ._common import (
    ATTENTION,
    decoder_attributes,
    EDGES,
    FOUR_NORMS,
    GATED,
    head_norm_weights,
    LLAMA_WEIGHTS,
    norm_weights,
)
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
        mixer_key, feed_forward_key = jax.random.split(key)
        gated = gated_mlp(config, key=feed_forward_key)
        return pre_norm_block(config, attention(config, bias=config.bias, key=mixer_key), gated, offset=1.0)

    return decoder(config, block, final_norm=norm(config, offset=1.0), embedding_scale=config.embed**0.5, key=key)


class EitherActivation(Activation):
    """The activation. Older readers use only the attribute `hidden_activation`, newer readers only `hidden_act`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the name in `nn.ACTIVATIONS`; refuse two attributes that differ."""
        activation = super().read(published)[self.name]
        if published.text(self.published, self.default) == "gelu":
            activation = "gelu_tanh"  # Early checkpoints state gelu, but were trained with its tanh approximation.
        published.expect("hidden_activation", *published_activations(activation))
        return {self.name: activation}

    def write(self, config: object) -> Attributes:
        """Return `hidden_act` and, unless the activation is the default, `hidden_activation`."""
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
    """The indices of the layers that see a `window`; all other layers see whole rows."""
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
    return four_norm_block(config, *_sublayers(config, mask, key), offset=1.0)


def _sublayers(config: Gemma2Config, mask: Mask, key: Key[Array, ""]) -> tuple[Attention, GatedMLP]:
    mixer_key, feed_forward_key = jax.random.split(key)
    mixer = attention(config, mask=mask, bias=config.bias, output_std=None, scores=scores_of(config), key=mixer_key)
    return mixer, gated_mlp(config, output_std=None, key=feed_forward_key)


def scores_of(config: Gemma2Config) -> Scores:
    """Return the scale and the softcap of an attention's scores."""
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

_GEMMA2_ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(head_dim=256, kv_heads=4, tied=True, max_seq=8192),
    Windows(4096, Period(2, but=True)),
    Attribute("query_scalar", "query_pre_attn_scalar", 256),
    Nullable("score_softcap", "attn_logit_softcapping", 50.0),
    Nullable("logit_softcap", "final_logit_softcapping", 30.0),
    Activation("gelu_pytorch_tanh", "hidden_activation"),
    Attribute("bias", "attention_bias", False),
    Expect("use_bidirectional_attention", False, written=False),
    Ignore("hidden_act", "cache_implementation", "sliding_window_size"),  # Transformers does not read these attributes.
)

GEMMA2 = Family(
    "gemma2",
    Gemma2Config,
    build_gemma2,
    GEMMA2_PRESETS,
    "Gemma2ForCausalLM",
    "gemma2",
    _GEMMA2_ATTRIBUTES,
    (*EDGES, *ATTENTION, *GATED, *FOUR_NORMS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VaultGemmaConfig(Gemma2Config):
    """The config of a VaultGemma."""


def build_vaultgemma(config: VaultGemmaConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a VaultGemma with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        return pre_norm_block(config, *_sublayers(config, causal_mask(window), key), offset=1.0)

    return gemma2_model(config, block, key=key)


_VAULTGEMMA_PRESETS = {
    "vaultgemma-byte-500k": VaultGemmaConfig(
        256, 96, 4, 4, 2, 256, window_layers=(0, 2), window=128, head_dim=32, query_scalar=32, max_seq=512
    ),
    "vaultgemma-1b": VaultGemmaConfig(256_000, 1152, 26, 4, 4, 6912, window_layers=(), max_seq=1024),
}

VAULTGEMMA = Family(
    "vaultgemma",
    VaultGemmaConfig,
    build_vaultgemma,
    _VAULTGEMMA_PRESETS,
    "VaultGemmaForCausalLM",
    "vaultgemma",
    _GEMMA2_ATTRIBUTES,
    (*EDGES, *ATTENTION, *GATED, *norm_weights(mixer="input_layernorm", feed_forward="pre_feedforward_layernorm")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """The config of a Gemma 3."""

    window_layers: tuple[Index, ...]
    """The indices of the layers with a sliding `window`; `theta` and `scaling` are for the other layers."""
    window: Length = 1024
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 256
    activation: str = "gelu_tanh"
    bias: bool = False
    """Whether the attention's four projections have biases."""
    query_scalar: Size = 256
    """Attention scores are divided by the root of this number."""
    logit_softcap: Positive | None = None
    """The softcap of the logits."""
    theta: Positive = 1_000_000.0
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    tied: bool = True
    max_seq: Length = 131_072
    bidirectional: bool = False
    """Whether tokens see later tokens too, as in EmbeddingGemma; a window then has half its tokens on either side."""


def build_gemma3(config: Gemma3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Gemma 3 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mask = decoders.causal_mask(window)
        if config.bidirectional:
            mask = Mask(is_causal=False, window=None if window is None else window // 2 + 1)
        return gemma3_block(config, window, mask, key=key)

    return gemma3_model(config, block, key=key)


def gemma3_model(
    config: Gemma3Config, block: Callable[[int | None, Key[Array, ""]], Block], *, key: Key[Array, ""]
) -> Transformer:
    """Return a Gemma 3 with the layers that `block(window, key)` builds."""
    return decoders.decoder(
        config,
        block,
        decoders.layer_windows(config),
        final_norm=decoders.norm(config, offset=1.0),
        embedding_scale=config.embed**0.5,
        logit_softcap=config.logit_softcap,
        key=key,
    )


def gemma3_block(
    config: Gemma3Config,
    window: int | None,
    mask: Mask,
    *,
    as_mixer: Callable[[Attention], Mixer] | None = None,
    reads: str | None = None,
    key: Key[Array, ""],
) -> Block:
    """Return a layer, which has the local rotary positions if it has a window.

    `as_mixer` turns the layer's attention into another mixer. `reads` names one more input (`Residual.reads`).
    """
    mixer_key, feed_forward_key = jax.random.split(key)
    if window is None:
        rotary = decoders.rotary_of(config, config.head_size, scaling=config.scaling)
    else:
        rotary = decoders.rotary_of(config, config.head_size, theta=config.local_theta, scaling=config.local_scaling)
    attention = decoders.attention(
        config,
        mask=mask,
        rotary=rotary,
        **decoders.head_norms(config, offset=1.0),
        scores=Scores(config.query_scalar**-0.5),
        bias=config.bias,
        output_std=None,
        key=mixer_key,
    )
    mixer = attention if as_mixer is None else as_mixer(attention)
    gated = decoders.gated_mlp(config, output_std=None, key=feed_forward_key)
    return decoders.four_norm_block(config, mixer, gated, reads=reads, offset=1.0)


def _gemma3(
    embed: int, layers: int, heads: int, kv_heads: int, mlp: int, scaling: RotaryScaling | None = None
) -> Gemma3Config:
    windows = all_but_every(6, layers)
    return Gemma3Config(262_208, embed, layers, heads, kv_heads, mlp, window_layers=windows, scaling=scaling)


_LONG = LinearScaling(8.0)
GEMMA3_PRESETS = {
    "gemma3-byte-500k": Gemma3Config(
        256,
        64,
        12,
        4,
        2,
        128,
        window_layers=all_but_every(6, 12),
        window=64,
        head_dim=16,
        query_scalar=16,
        theta=1e5,
        max_seq=512,
    ),
    "gemma3-270m": dataclasses.replace(_gemma3(640, 18, 4, 1, 2048), vocab=262_144, window=512, max_seq=32_768),
    "gemma3-1b": dataclasses.replace(_gemma3(1152, 26, 4, 1, 6912), vocab=262_144, window=512, max_seq=32_768),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10_240, scaling=_LONG),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15_360, scaling=_LONG),
    "gemma3-27b": dataclasses.replace(_gemma3(5376, 62, 32, 16, 21_504, scaling=_LONG), head_dim=128, query_scalar=168),
}

# Attributes that the configurations of the smaller models leave out.
GEMMA3_MISSING = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
GEMMA3_MISSING |= {"num_attention_heads": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072}

GEMMA3 = Family(
    "gemma3",
    Gemma3Config,
    build_gemma3,
    GEMMA3_PRESETS,
    "Gemma3ForCausalLM",
    "gemma3_text",
    (
        *decoder_attributes(RotaryByType(1e6, 10_000.0), head_dim=256, kv_heads=4, tied=True, max_seq=131_072),
        Windows(4096, Period(6, ("sliding_window_pattern",), but=True)),
        Attribute("query_scalar", "query_pre_attn_scalar", 256),
        Attribute("logit_softcap", "final_logit_softcapping", None),
        Activation("gelu_pytorch_tanh", "hidden_activation"),
        Attribute("bias", "attention_bias", False),
        Attribute("bidirectional", "use_bidirectional_attention", False),
        # The model does not depend on these attributes; transformers derives the last one from `layer_types`.
        Ignore("hidden_act", "cache_implementation", "attn_logit_softcapping", "_sliding_window_pattern"),
    ),
    (*EDGES, *ATTENTION, *head_norm_weights(), *GATED, *FOUR_NORMS),
    multimodal=(MultimodalModel("gemma3", defaults=GEMMA3_MISSING),),
)
