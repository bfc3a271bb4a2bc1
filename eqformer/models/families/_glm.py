"""GLM-4 (GLM team 2024, arXiv:2406.12793; 2025), GLM-4.5 to 4.7 (arXiv:2508.06471) and GLM-5 (GLM-5 team 2026).

GLM-4 and GLM-4.5 rotate half of each head. The GLM-4 of 2024 has norms before sublayers, and GLM-4-0414 also has norms
after sublayers. GLM-4.5 has DeepSeek-V3's mixtures of experts, and Solar Open (Upstage 2025) has such mixtures in all
layers. GLM-4.7-Flash is a DeepSeek-V3 of other sizes. GLM-5 is a DeepSeek-V3.2 with wider heads; some of its layers see
the keys that an earlier layer selected.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer, YarnScaling
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Fraction, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import layers_of
from .._rotary_attributes import RotaryFraction, RotaryPositions
from .._weight_rules import NUMBERED_PREDICTOR
from ._common import ATTENTION, decoder_attributes, EDGES, JOINED_GATED, LLAMA_WEIGHTS, norm_weights, PRE_NORMS
from ._decoder import attention, decoder, four_norm_block, gated_mlp, norm, part_rotary, pre_norm_block, Together
from ._deepseek import latent_attributes, LATENT_BYTE, LATENT_WEIGHTS, LatentKind
from ._deepseek_v3 import (
    build_deepseek_v3,
    build_deepseek_v32,
    DeepSeekV3Config,
    DeepSeekV32Config,
    DSA_ATTRIBUTES,
    DSA_WEIGHTS,
)
from ._mixtures import (
    ExpertGroupCount,
    FIRST_DENSE,
    LayerMixtures,
    MIXTURE,
    SELECTION_BIAS,
    SHARED,
    SHARED_ATTRIBUTES,
    sigmoid_mixture_beside_shared,
    SigmoidMixtureConfig,
    SigmoidMoEConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM4Config(DecoderConfig):
    """The config of a GLM-4."""

    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether queries, keys and values have biases."""


def build_glm4(config: GLM4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a GLM-4 with random weights."""
    return _build(config, four_norm_block, key=key)


def _build(config: GLM4Config, add_norms: Callable[..., Block], *, key: Key[Array, ""]) -> Transformer:
    """Return a GLM-4; `add_norms` makes a block of an attention and a feed-forward layer."""
    rotary = part_rotary(config, interleaved=True)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, output_bias=False, rotary=rotary, key=mixer_key)
        return add_norms(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, key=key)


_GLM4_PRESETS = {
    "glm4-byte-500k": GLM4Config(256, 96, 4, 6, 2, 256, head_dim=16, bias=True),
    "glm4-9b": GLM4Config(151_552, 4096, 40, 32, 2, 13_696, head_dim=128, bias=True),
    "glm4-32b": GLM4Config(151_552, 6144, 61, 48, 2, 23_040, head_dim=128),
}

_NORMS = norm_weights(
    mixer="input_layernorm",
    feed_forward="post_attention_layernorm",
    mixer_output="post_self_attn_layernorm",
    feed_forward_output="post_mlp_layernorm",
)
_GLM4_ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(head_dim=128, kv_heads=2, max_seq=131_072),
    RotaryFraction(0.5),
    Attribute("bias", "attention_bias", True),
    Activation(),
)
GLM4 = Family(
    "glm4",
    GLM4Config,
    build_glm4,
    _GLM4_PRESETS,
    "Glm4ForCausalLM",
    "glm4",
    _GLM4_ATTRIBUTES,
    (*EDGES, *ATTENTION, *JOINED_GATED, *_NORMS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMConfig(GLM4Config):
    """The config of a GLM-4 of 2024."""

    eps: NotNegative = 1.5625e-07
    max_seq: Length = 131_072


def build_glm(config: GLMConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a GLM-4 of 2024 with random weights."""
    return _build(config, pre_norm_block, key=key)


_GLM_PRESETS = {
    "glm-byte-500k": GLMConfig(256, 96, 4, 6, 2, 256, head_dim=16, bias=True),
    "glm-4-9b": GLMConfig(151_552, 4096, 40, 32, 2, 13_696, head_dim=128, bias=True),
}

GLM = Family(
    "glm",
    GLMConfig,
    build_glm,
    _GLM_PRESETS,
    "GlmForCausalLM",
    "glm",
    _GLM4_ATTRIBUTES,
    (*EDGES, *ATTENTION, *JOINED_GATED, *PRE_NORMS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM4MoEConfig(SigmoidMoEConfig):
    """The config of a GLM-4.5; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    qk_norm: bool = False
    """Whether each head's queries and keys have norms."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    max_seq: Length = 131_072


def build_glm4_moe(config: GLM4MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a GLM-4.5 with random weights."""
    rotary = part_rotary(config)

    def block(is_mixture: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config,
            bias=config.bias,
            output_bias=False,
            query_norm=norm(config, "head_dim") if config.qk_norm else None,
            key_norm=norm(config, "head_dim") if config.qk_norm else None,
            rotary=rotary,
            key=mixer_key,
        )
        return pre_norm_block(config, mixer, config.feed_forward(is_mixture, feed_forward_key))

    return decoder(config, block, [layer >= config.first_dense for layer in range(config.layers)], key=key)


_GLM4_MOE_PRESETS = {
    "glm4-moe-byte-500k": GLM4MoEConfig(
        256, 64, 4, 4, 2, 128, expert_mlp=32, experts=12, top_k=4, bias=True, qk_norm=True, theta=1e4, tied=True
    ),
    "glm-4.5-air": GLM4MoEConfig(151_552, 4096, 46, 96, 8, 10_944, expert_mlp=1408, head_dim=128, bias=True),
    "glm-4.5": GLM4MoEConfig(
        *(151_552, 5120, 92, 96, 8, 12_288),
        expert_mlp=1536,
        experts=160,
        first_dense=3,
        scale=2.5,
        head_dim=128,
        qk_norm=True,
        bias=True,
    ),
}

GLM4_MOE = Family(
    "glm4_moe",
    GLM4MoEConfig,
    build_glm4_moe,
    _GLM4_MOE_PRESETS,
    "Glm4MoeForCausalLM",
    "glm4_moe",
    (
        *decoder_attributes(kv_heads=8, max_seq=131_072),
        *(*SHARED_ATTRIBUTES, FIRST_DENSE),
        RotaryFraction(0.5),
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("qk_norm", "use_qk_norm", False),
        Attribute("bias", "attention_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Activation(),
        Ignore("num_mtp_layers", num_nextn_predict_layers=0),  # layers for multi-token prediction
    ),
    (*LLAMA_WEIGHTS, *MIXTURE, *SHARED, SELECTION_BIAS),
    predictor=NUMBERED_PREDICTOR,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM4MoELiteConfig(DeepSeekV3Config):
    """The config of a GLM-4.7-Flash."""

    head_dim: Size = 192
    v_dim: Size = 256
    experts: Size = 64
    top_k: Size = 4
    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 1.8
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 202_752


class _MixturesOrOneDense(Entry):
    """`mlp_layer_types`; without this list, the first layer is dense, and `first_k_dense_replace` must be 1."""

    _types = LayerMixtures()

    def read(self, published: PublishedConfig) -> Fields:
        """Return `first_dense` and `dense_layers`."""
        if fields := self._types.read(published):
            published.take("first_k_dense_replace", None)
            return fields
        published.expect("first_k_dense_replace", 1)
        return {"first_dense": 1, "dense_layers": ()}

    def write(self, config: GLM4MoELiteConfig) -> Attributes:
        """Return the list."""
        return self._types.write(config)


_GLM4_MOE_LITE_PRESETS = {
    "glm4-moe-lite-byte-500k": GLM4MoELiteConfig(**LATENT_BYTE, q_latent=32, experts=12, theta=1e4, tied=True),
    "glm-4.7-flash": GLM4MoELiteConfig(154_880, 2048, layers=47, heads=20, mlp=10_240, expert_mlp=1536, q_latent=768),
}

GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    GLM4MoELiteConfig,
    build_deepseek_v3,
    _GLM4_MOE_LITE_PRESETS,
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    (
        *latent_attributes(mixtures=(_MixturesOrOneDense(),), max_seq=202_752),
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("interleaved", "rope_interleave", True),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Expect("topk_method", "noaux_tc", written=False),
        Expect("partial_rotary_factor", 1.0, written=False),
        Ignore("num_mtp_layers", num_nextn_predict_layers=0),  # layers for multi-token prediction
    ),
    (*LATENT_WEIGHTS, SELECTION_BIAS),
    predictor=NUMBERED_PREDICTOR,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolarOpenConfig(SigmoidMixtureConfig):
    """The config of a Solar Open, whose layers all have experts; `mlp` is an expert's width."""

    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether queries, keys and values have biases."""
    max_seq: Length = 131_072

    @property
    def expert_mlp(self) -> int:
        """Hidden features of an expert."""
        return self.mlp


def build_solar_open(config: SolarOpenConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Solar Open with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, output_bias=False, key=mixer_key)
        mixture = sigmoid_mixture_beside_shared(config, feed_forward_key, normalize=config.normalize)
        return pre_norm_block(config, mixer, mixture)

    return decoder(config, block, key=key)


_SOLAR_OPEN_PRESETS = {
    "solar-open-byte-500k": SolarOpenConfig(
        256, 64, 4, 4, 2, 32, experts=12, top_k=4, head_dim=16, bias=True, theta=1e4, tied=True
    ),
    "solar-open-100b": SolarOpenConfig(196_608, 4096, 48, 64, 8, 1280, head_dim=128, scaling=YarnScaling(2.0, 65_536)),
}

SOLAR_OPEN = Family(
    "solar_open",
    SolarOpenConfig,
    build_solar_open,
    _SOLAR_OPEN_PRESETS,
    "SolarOpenForCausalLM",
    "solar_open",
    (
        *decoder_attributes(
            RotaryPositions(1_000_000.0), head_dim=128, kv_heads=8, mlp="moe_intermediate_size", max_seq=131_072
        ),
        Count("experts", "n_routed_experts", 128),
        Count("top_k", "num_experts_per_tok", 8),
        Count("shared", "n_shared_experts", 1, minimum=0),
        Attribute("scale", "routed_scaling_factor", 1.0),
        ExpertGroupCount("groups", "n_group", 1),
        ExpertGroupCount("kept_groups", "topk_group", 1),
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("bias", "attention_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Activation(),
        Expect("partial_rotary_factor", 1.0, written=False),
        Expect("first_k_dense_replace", 0, written=False),
        Ignore("intermediate_size"),  # the width of dense layers; this family has none
    ),
    (*LLAMA_WEIGHTS, *MIXTURE, *SHARED, SELECTION_BIAS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMMoEDSAConfig(DeepSeekV32Config):
    """The config of a GLM-5."""

    head_dim: Size = 192
    v_dim: Size = 256
    index_heads: Size = 32
    reading_layers: tuple[Index, ...] = ()
    """The indices of the layers without an indexer. Such a layer uses the keys that the last layer before it with an
    indexer selected."""
    groups: Size = 1
    kept_groups: Size = 1
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 202_752


def build_glm_moe_dsa(config: GLMMoEDSAConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a GLM-5 with random weights; its indexers rotate neighboring channels together."""
    return build_deepseek_v32(config, index_interleaved=True, kinds=reading_kinds(config), key=key)


@runtime_checkable
class WithReadingLayers(Protocol):
    """Fields of a config in which some layers have no indexer."""

    @property
    def layers(self) -> int: ...
    @property
    def reading_layers(self) -> tuple[int, ...]: ...


def reading_kinds(config: GLMMoEDSAConfig) -> list[LatentKind | Together[LatentKind]]:
    """Return the kinds of layers; a layer with an indexer is joined to the layers that read its selected keys."""
    groups: list[list[LatentKind]] = []  # each begins with a layer that has an indexer
    for layer, is_mixture in enumerate(config.mixtures):
        if layer not in config.reading_layers:
            groups.append([LatentKind(is_mixture)])
        elif groups:
            groups[-1][0] = groups[-1][0]._replace(shares="choice")
            groups[-1].append(LatentKind(is_mixture, reads="choice"))
        else:
            raise ValueError(
                f"{type(config).__name__}(reading_layers={config.reading_layers}): layer 0 has no earlier layer whose "
                "keys it could read; remove 0 from reading_layers."
            )
    return [group[0] if len(group) == 1 else Together(tuple(group)) for group in groups]


class ReadingLayers(Entry):
    """The entry for `indexer_types`; a configuration may have a pattern of letters or a period instead of this list."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `reading_layers`; refuse unknown types, a wrong length, and a layer 0 without an indexer."""
        return check_indexer_types(published, published_indexer_types(published))

    def write(self, config: WithReadingLayers) -> Attributes:
        """Return the list."""
        return {"indexer_types": indexer_types(config)}


def published_indexer_types(published: PublishedConfig) -> list[str]:
    """Return `indexer_types`; without this list, make it from `index_topk_pattern` or from `index_topk_freq`.

    With a period `index_topk_freq`, the first `index_skip_topk_offset` layers have indexers, and after them every
    `index_topk_freq`-th layer.
    """
    layers, types = layers_of(published), published.listed("indexer_types", str)
    pattern = published.read("index_topk_pattern", str | list[str], None)
    period = published.count("index_topk_freq", 1, minimum=0)
    first = published.count("index_skip_topk_offset", 2, minimum=0)
    if types is None and isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if types is None and isinstance(pattern, list):
        types = pattern
    if types is None:
        has_indexer = [max(layer - first + 1, 0) % max(period, 1) == 0 for layer in range(layers)]
        types = ["full" if layer_has_indexer else "shared" for layer_has_indexer in has_indexer]
    return types


def check_indexer_types(published: PublishedConfig, types: list[str]) -> Fields:
    """Return `reading_layers`; refuse unknown types, a wrong length, and a layer 0 without an indexer."""
    layers = layers_of(published)
    if len(types) != layers or {*types} - {"full", "shared"} or types[0] != "full":
        published.refuse(f"indexer_types={types} must have {layers} items, 'full' or 'shared', and begin with 'full'.")
    return {"reading_layers": tuple(layer for layer, kind in enumerate(types) if kind == "shared")}


def indexer_types(config: WithReadingLayers) -> list[str]:
    """Return the list `indexer_types`."""
    return ["shared" if layer in config.reading_layers else "full" for layer in range(config.layers)]


_PRESETS = {
    "glm-5-byte-500k": GLMMoEDSAConfig(
        **LATENT_BYTE,
        q_latent=32,
        index_heads=4,
        index_dim=16,
        index_top_k=64,
        experts=12,
        top_k=4,
        first_dense=1,
        tied=True,
    ),
    "glm-5": GLMMoEDSAConfig(154_880, 6144, layers=78, heads=64, mlp=12_288, expert_mlp=2048, q_latent=2048),
}

GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    GLMMoEDSAConfig,
    build_glm_moe_dsa,
    _PRESETS,
    "GlmMoeDsaForCausalLM",
    "glm_moe_dsa",
    (
        *latent_attributes(mixtures=(FIRST_DENSE, LayerMixtures()), max_seq=202_752),
        *DSA_ATTRIBUTES,
        ReadingLayers(),
        Expect("indexer_rope_interleave", True, written=False),
    ),
    DSA_WEIGHTS,
    predictor=NUMBERED_PREDICTOR,
)
