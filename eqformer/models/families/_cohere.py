"""Command R (Cohere 2024): parallel attention and feed-forward layers that share one norm, and scaled logits.

Command R7B and Command A (Cohere 2025) have windows and rotary positions in most layers, and neither in the others.
Command A+ and North Mini Code (Cohere 2026) are Command A with mixtures of experts, which may follow dense layers.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Attention, GatedMLP, LayerNorm, MoE, ParallelResidual, Residual, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import (
    Attributes,
    Index,
    Length,
    NotNegative,
    Number,
    OptionalSize,
    Positive,
    PublishedConfig,
    Size,
)
from .._family import DecoderConfig, Family, MultimodalModel
from .._layer_attributes import all_but_every, Period, Windows
from .._rotary_attributes import RotaryPositions
from .._rotary_scaling import scaling_attributes, WithRotary
from .._weight_rules import Rule
from ._common import decoder_attributes, LAYER, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, head_layer_norm, layer_windows, norm as rms_norm, rotary_of
from ._mixtures import DenseLayersConfig, LayerMixtures, MIXTURE, mixture, SHARED


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

    def block(key: Key[Array, ""]) -> ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config,
            bias=config.bias,
            query_norm=head_layer_norm(config, "heads") if config.qk_norm else None,
            key_norm=head_layer_norm(config, "kv_heads") if config.qk_norm else None,
            rotary=rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling),
            key=mixer_key,
        )
        return _parallel(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, final_norm=_norm(config), logit_scale=config.logit_scale, key=key)


def _norm(config: DecoderConfig) -> LayerNorm:
    return LayerNorm("embed", embed=config.embed, bias=False, eps=config.eps)


def _parallel(config: DecoderConfig, mixer: Attention, gated: GatedMLP) -> ParallelResidual:
    """Return a layer whose attention and feed-forward layer both read the output of one norm."""
    return ParallelResidual((Residual(mixer), Residual(gated)), _norm(config))


_PRESETS = {
    "cohere-byte-500k": CohereConfig(256, 96, 4, 6, 2, 256, theta=10_000.0),
    "command-r": CohereConfig(256_000, 8192, 40, 64, 64, 22_528),
    "command-r-plus": CohereConfig(
        256_000, 12_288, 64, 96, 8, 33_792, theta=75_000_000.0, qk_norm=True, logit_scale=0.8333333
    ),
}

_WEIGHTS = (*LLAMA_WEIGHTS, Rule(f"{LAYER}input_layernorm.weight", "norm.weight"))
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
    _WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2Config(DecoderConfig):
    """The config of a Command R7B or Command A."""

    window_layers: tuple[Index, ...]
    """The indices of the layers with a `window` and rotary positions; the other layers have neither."""
    window: Length = 4096
    """The number of tokens that the layers of `window_layers` see."""
    theta: Positive = 50_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    logit_scale: Number = 0.25
    """A factor of the logits."""
    tied: bool = True
    max_seq: Length = 131_072


def build_cohere2(config: Cohere2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Command R7B or Command A with random weights."""
    rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)

    def block(window: int | None, key: Key[Array, ""]) -> ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        is_rotated = window is not None
        mixer = attention(config, window=window, bias=config.bias, rotary=rotary if is_rotated else None, key=mixer_key)
        return _parallel(config, mixer, gated_mlp(config, key=feed_forward_key))

    ends = {"final_norm": _norm(config), "logit_scale": config.logit_scale}
    return decoder(config, block, layer_windows(config), **ends, key=key)


_COHERE2_PRESETS = {
    "cohere2-byte-500k": Cohere2Config(
        256, 96, 4, 6, 2, 256, window_layers=all_but_every(4, 4), window=64, theta=10_000.0
    ),
    "command-r7b": Cohere2Config(256_000, 4096, 32, 32, 8, 14_336, window_layers=all_but_every(4, 32)),
    "command-a": Cohere2Config(256_000, 12_288, 64, 96, 8, 36_864, window_layers=all_but_every(4, 64)),
}

# Cohere's own program reads these attributes. All models of both families have these values.
_PUBLISHERS_ATTRIBUTES = (
    Expect("order_of_interleaved_layers", "local_attn_first", written=False),
    Expect("position_embedding_type", "rope_gptj", written=False),
    Expect("rotary_pct", 1.0, written=False),
    *(Expect(f"use_{name}", True, written=False) for name in ("gated_activation", "parallel_block")),
    Expect("use_qk_norm", False, written=False),
    Ignore("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),  # repeated, or without effect
)

COHERE2 = Family(
    "cohere2",
    Cohere2Config,
    build_cohere2,
    _COHERE2_PRESETS,
    "Cohere2ForCausalLM",
    "cohere2",
    (
        *decoder_attributes(eps="layer_norm_eps", tied=True, max_seq=8192),
        Windows(4096, Period(4, ("sliding_window_pattern",), but=True)),
        Attribute("bias", "attention_bias", False),
        Attribute("logit_scale", "logit_scale", 0.0625),
        Activation(),
        *_PUBLISHERS_ATTRIBUTES,
    ),
    _WEIGHTS,
    multimodal=(MultimodalModel("cohere2_vision"),),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2MoEConfig(Cohere2Config, DenseLayersConfig):
    """The config of a Command A+ or North Mini Code; `mlp` is the width of an expert."""

    experts: Size = 8
    """The number of experts of a layer."""
    top_k: Size = 2
    """The number of experts that each token chooses."""
    shared: OptionalSize = 0
    """The number of shared experts."""
    averages: bool = True
    """Whether shared experts and chosen experts are averaged instead of summed."""
    score: str = "softmax"
    """The function of the router's logits: "softmax" or "sigmoid"."""
    normalize: bool = True
    """Whether sigmoid weights of a token's experts are divided by their sum; softmax weights always add up to 1."""
    dense_mlp: Size | None = None
    """Hidden features of a dense layer; None: as many as of an expert."""
    dense_period: Size = 1
    """The period of full attention in the first dense layers; with 1, all have full attention and rotary positions."""
    rms_eps: NotNegative | None = None
    """The epsilon of norms that divide by the root mean square; None: the norms are `LayerNorm`s, with `eps`."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""


def build_cohere2_moe(config: Cohere2MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Command A+ or a North Mini Code with random weights."""
    rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)
    norm = lambda: _norm(config) if config.rms_eps is None else rms_norm(config, eps=config.rms_eps)

    def mixture_of(key: Key[Array, ""]) -> MoE:
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        return mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            shared=gated_mlp(config, mlp=config.mlp * config.shared, key=shared_key) if config.shared else None,
            score=config.score,
            normalize=config.normalize or config.score == "softmax",
            router=router_key,
            experts=experts_key,
        )

    def block(kind: tuple[int | None, bool], key: Key[Array, ""]) -> ParallelResidual:
        window, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        is_rotated = window is not None or (config.dense_period == 1 and not is_mixture)
        mixer = attention(config, window=window, bias=config.bias, rotary=rotary if is_rotated else None, key=mixer_key)
        if is_mixture:
            scale = 0.5 if config.averages and config.shared else None
            feed_forward = Residual(mixture_of(feed_forward_key), scale=scale)
        else:
            feed_forward = Residual(gated_mlp(config, mlp=config.dense_mlp, key=feed_forward_key))
        return ParallelResidual((Residual(mixer), feed_forward), norm())

    kinds = list(zip(layer_windows(config), config.mixtures, strict=True))
    return decoder(config, block, kinds, final_norm=norm(), logit_scale=config.logit_scale, key=key)


def _default_window_layers(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    """Return the layers with a window if `layer_types` is missing; the first dense layers have their own period."""
    first = min(published.read("first_k_dense_replace", Index, 0), layers)
    dense, others = published.count(_DENSE_PERIOD, 1), published.count("sliding_window_pattern", 4)
    return (*all_but_every(dense, first), *(first + layer for layer in all_but_every(others, layers - first)))


class _RotaryWithoutRopeScaling(RotaryPositions):
    """Rotary positions with the scaling of `rope_parameters`; transformers ignores this family's `rope_scaling`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta` and `scaling`; refuse a scaling that only `rope_scaling` states."""
        fields = super().read(published)
        if fields["scaling"] is not None and published.take("rope_parameters", None) is None:
            scaling = published.take("rope_scaling")
            published.refuse(f"rope_scaling={scaling}: transformers ignores it in this family; state rope_parameters.")
        return fields

    def write(self, config: WithRotary) -> Attributes:
        """Return `rope_theta` and, if there is a scaling, `rope_parameters`."""
        attributes, scaling = {"rope_theta": config.theta}, scaling_attributes(config).get("rope_scaling")
        return attributes if scaling is None else {"rope_parameters": scaling | attributes}


class _Combination(Entry):
    """The way in which shared experts and chosen experts are combined."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `averages`; refuse other ways."""
        published.expect(_COMBINATION, "average", "sum")
        return {"averages": published.text(_COMBINATION, "average") == "average"}

    def write(self, config: Cohere2MoEConfig) -> Attributes:
        """Return the attribute."""
        return {_COMBINATION: "average" if config.averages else "sum"}


class _NormType(Entry):
    """The type of the norms, which `rms_norm_eps` states too; transformers reads only `rms_norm_eps`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse a type that contradicts `rms_norm_eps`."""
        published.expect("norm_type", "layer_norm" if published.take("rms_norm_eps", None) is None else "rms_norm")
        return {}

    def write(self, config: Cohere2MoEConfig) -> Attributes:
        """Return no attribute."""
        return {}


_DENSE_PERIOD, _COMBINATION = "prefix_dense_sliding_window_pattern", "shared_expert_combination_strategy"
_COHERE2_MOE_PRESETS = {
    "cohere2-moe-byte-500k": Cohere2MoEConfig(
        *(256, 64, 4, 4, 2, 32),
        head_dim=16,
        window_layers=(0, 1, 2),
        window=64,
        theta=10_000.0,
        experts=12,
        top_k=4,
        shared=2,
        first_dense=1,
        dense_mlp=96,
    ),
    "command-a-plus": Cohere2MoEConfig(
        *(262_144, 4096, 32, 128, 8, 4096),
        head_dim=128,
        window_layers=all_but_every(4, 32),
        logit_scale=1.0,
        max_seq=200_000,
        experts=128,
        top_k=8,
        shared=4,
        score="sigmoid",
    ),
    "north-mini-code-1.0": Cohere2MoEConfig(
        *(262_144, 2048, 49, 32, 4, 768),
        head_dim=128,
        window_layers=tuple(layer for layer in range(49) if layer % 4 != 0),
        logit_scale=1.0,
        rms_eps=1e-6,
        max_seq=500_000,
        experts=128,
        top_k=8,
        score="sigmoid",
        normalize=False,
        first_dense=1,
        dense_mlp=3072,
    ),
}

COHERE2_MOE = Family(
    "cohere2_moe",
    Cohere2MoEConfig,
    build_cohere2_moe,
    _COHERE2_MOE_PRESETS,
    "Cohere2MoeForCausalLM",
    "cohere2_moe",
    (
        *decoder_attributes(_RotaryWithoutRopeScaling(), head_dim=128, eps="layer_norm_eps", tied=True, max_seq=8192),
        *(Windows(4096, _default_window_layers), Attribute("first_dense", "first_k_dense_replace", 0), LayerMixtures()),
        Attribute("bias", "attention_bias", False),
        Attribute("logit_scale", "logit_scale", 0.0625),
        Count("experts", "num_experts", 8),
        Count("top_k", "num_experts_per_tok", 2),
        Count("shared", "num_shared_experts", 0, minimum=0),
        _Combination(),
        *(Expect("expert_selection_fn", "softmax", "sigmoid"), Attribute("score", "expert_selection_fn", "softmax")),
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("dense_mlp", "prefix_dense_intermediate_size", None),
        Count("dense_period", _DENSE_PERIOD, 1),
        Attribute("rms_eps", "rms_norm_eps", None),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        *(Activation(), _NormType(), Expect("transformer_block_type", "parallel", written=False)),
        Expect("layer_norm_bias", False, written=False),
        *(*_PUBLISHERS_ATTRIBUTES, Ignore("num_nextn_predict_layers")),
    ),
    (*_WEIGHTS, *MIXTURE, *SHARED),
    multimodal=(MultimodalModel("cohere2_vision"),),
)
