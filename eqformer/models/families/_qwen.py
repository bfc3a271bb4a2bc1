"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115), Qwen3 (arXiv:2505.09388), and their mixtures of experts.

Qwen2 is a Llama with biased queries, keys and values; Qwen2-MoE has small experts beside a shared expert with a gate.
Qwen3 is a Llama with norms of each head's queries and keys; Qwen3-MoE has mixtures in chosen layers. Flint (RecursiveSI
2026) is a Qwen3-MoE with windows, sinks, an ungated shared expert, and experts chosen by sigmoids; only its layers with
a window have rotary positions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import Block, GatedMLP, MoE, Scores, Transformer
from .._attributes import Activation, Attribute, Count, Expect, Fields
from .._config_types import Index, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family, MultimodalModel
from .._layer_attributes import LaterLayers, LateWindows, NullableWindows, SwitchedWindow, SwitchedWindows, Windows
from .._weight_rules import Rule
from . import _mixtures as mixtures
from ._common import decoder_attributes, gated_weights, LAYER, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, head_norms, layer_windows, pre_norm_block, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """The config of a Qwen2."""

    theta: Positive = 1_000_000.0
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`; all other layers see whole rows."""


def build_qwen2(config: Qwen2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen2 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=window, bias=True, output_bias=False, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, layer_windows(config), key=key)


_QWEN2_05B = Qwen2Config(vocab=151_936, embed=896, layers=24, heads=14, kv_heads=2, mlp=4864, tied=True)
_QWEN2_15B = Qwen2Config(vocab=151_936, embed=1536, layers=28, heads=12, kv_heads=2, mlp=8960, tied=True)
_QWEN2_7B = Qwen2Config(vocab=152_064, embed=3584, layers=28, heads=28, kv_heads=4, mlp=18_944)
_QWEN2_72B = Qwen2Config(vocab=152_064, embed=8192, layers=80, heads=64, kv_heads=8, mlp=29_568, eps=1e-5)
_QWEN2_PRESETS = {
    "qwen2-byte-500k": Qwen2Config(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, theta=10_000.0, tied=True
    ),
    "qwen2-0.5b": _QWEN2_05B,
    "qwen2-1.5b": _QWEN2_15B,
    "qwen2-7b": _QWEN2_7B,
    "qwen2-72b": _QWEN2_72B,
    "qwen2.5-0.5b": _QWEN2_05B,
    "qwen2.5-1.5b": _QWEN2_15B,
    "qwen2.5-3b": Qwen2Config(vocab=151_936, embed=2048, layers=36, heads=16, kv_heads=2, mlp=11_008, tied=True),
    "qwen2.5-7b": _QWEN2_7B,
    "qwen2.5-14b": Qwen2Config(vocab=152_064, embed=5120, layers=48, heads=40, kv_heads=8, mlp=13_824, eps=1e-5),
    "qwen2.5-32b": Qwen2Config(vocab=152_064, embed=5120, layers=64, heads=40, kv_heads=8, mlp=27_648, eps=1e-5),
    "qwen2.5-72b": _QWEN2_72B,
}

QWEN2 = Family(
    "qwen2",
    Qwen2Config,
    build_qwen2,
    _QWEN2_PRESETS,
    "Qwen2ForCausalLM",
    "qwen2",
    (*decoder_attributes(kv_heads=32, max_seq=32_768), LateWindows(4096, 28), Activation()),
    LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2MoEConfig(mixtures.QwenMoEConfig):
    """The config of a Qwen2-MoE; `mlp` is the width of a dense layer."""

    shared_mlp: Size
    """Hidden features of the shared expert."""
    experts: Size = 60
    top_k: Size = 4
    normalize: bool = False
    bias: bool = True
    """Whether queries, keys and values have biases."""
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`; all other layers see whole rows."""


def build_qwen2_moe(config: Qwen2MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen2-MoE with random weights."""

    def block(kind: tuple[bool, int | None], key: Key[Array, ""]) -> Block:
        is_mixture, window = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=window, bias=config.bias, output_bias=False, key=mixer_key)
        if is_mixture:
            return pre_norm_block(config, mixer, mixtures.mixture_beside_gated_shared(config, feed_forward_key))
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(
        config, block, list(zip(mixtures.mixture_flags(config), layer_windows(config), strict=True)), key=key
    )


def _every_other(published: PublishedConfig, layers: int) -> range:
    """Return the first, the third and so on of the first `max_window_layers` layers."""
    return range(0, min(layers, published.count("max_window_layers", 28, minimum=0)), 2)


_QWEN2_MOE_PRESETS = {
    "qwen2-moe-byte-500k": Qwen2MoEConfig(
        256, 64, 4, 4, 4, mlp=128, expert_mlp=32, shared_mlp=64, experts=12, theta=10_000.0, tied=True
    ),
    "qwen1.5-moe-a2.7b": Qwen2MoEConfig(151_936, 2048, 24, 16, 16, mlp=5632, expert_mlp=1408, shared_mlp=5632),
    "qwen2-57b-a14b": Qwen2MoEConfig(
        151_936, 3584, 28, 28, 4, mlp=18_944, expert_mlp=2560, shared_mlp=20_480, experts=64, top_k=8
    ),
}

QWEN2_MOE = Family(
    "qwen2_moe",
    Qwen2MoEConfig,
    build_qwen2_moe,
    _QWEN2_MOE_PRESETS,
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    (
        *decoder_attributes(kv_heads=16, max_seq=32_768),
        *mixtures.mixture_attributes(60, 4),
        SwitchedWindows(4096, _every_other),
        Attribute("bias", "qkv_bias", True),
        Attribute("shared_mlp", "shared_expert_intermediate_size"),
        Activation(),
    ),
    (*LLAMA_WEIGHTS, *mixtures.MIXTURE, *mixtures.GATED_SHARED),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """The config of a Qwen3."""

    head_dim: Size = 128
    theta: Positive = 1_000_000.0
    bias: bool = False
    """Whether the attention's four projections have biases."""
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`; all other layers see whole rows."""


def build_qwen3(config: Qwen3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen3 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=window, bias=config.bias, **head_norms(config), key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, layer_windows(config), key=key)


def _qwen3(embed: int, layers: int, heads: int, mlp: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        vocab=151_936, embed=embed, layers=layers, heads=heads, kv_heads=8, mlp=mlp, tied=tied, max_seq=40_960
    )


_QWEN3_PRESETS = {
    "qwen3-byte-500k": Qwen3Config(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, head_dim=16, theta=10_000.0, tied=True
    ),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600),
}

QWEN3 = Family(
    "qwen3",
    Qwen3Config,
    build_qwen3,
    _QWEN3_PRESETS,
    "Qwen3ForCausalLM",
    "qwen3",
    (
        *decoder_attributes(head_dim=128, kv_heads=32, max_seq=32_768),
        Attribute("bias", "attention_bias", False),
        LateWindows(4096, 28),
        Activation(),
    ),
    LLAMA_WEIGHTS,
    multimodal=(
        MultimodalModel("qwen3_vl", "qwen3_vl_text", {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(mixtures.QwenMoEConfig):
    """The config of a Qwen3-MoE; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    experts: Size = 128
    top_k: Size = 8
    normalize: bool = True
    bias: bool = False
    """Whether the attention's four projections have biases."""
    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""
    max_seq: Length = 40_960


def build_qwen3_moe(config: Qwen3MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen3-MoE with random weights."""

    def block(is_mixture: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=config.window, bias=config.bias, **head_norms(config), key=mixer_key)
        if not is_mixture:
            return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))
        router_key, experts_key = jax.random.split(feed_forward_key)
        expert = functools.partial(mixtures.small_expert, config)
        feed_forward = mixtures.mixture(
            config, expert, normalize=config.normalize, router=router_key, experts=experts_key
        )
        return pre_norm_block(config, mixer, feed_forward)

    return decoder(config, block, mixtures.mixture_flags(config), key=key)


_QWEN3_MOE_PRESETS = {
    "qwen3-moe-byte-500k": Qwen3MoEConfig(
        256, 64, 4, heads=4, kv_heads=2, mlp=128, expert_mlp=32, experts=16, top_k=4, theta=10_000.0, tied=True
    ),
    "qwen3-30b-a3b": Qwen3MoEConfig(151_936, 2048, 48, heads=32, kv_heads=4, mlp=6144, expert_mlp=768, head_dim=128),
    "qwen3-235b-a22b": Qwen3MoEConfig(
        151_936, 4096, 94, heads=64, kv_heads=4, mlp=12_288, expert_mlp=1536, head_dim=128
    ),
}

# Transformers' defaults for the text model of Qwen3-VL's mixtures.
_MISSING = {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_local_experts": 60, "num_experts_per_tok": 4}
_MISSING |= {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}
QWEN3_MOE = Family(
    "qwen3_moe",
    Qwen3MoEConfig,
    build_qwen3_moe,
    _QWEN3_MOE_PRESETS,
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (
        *decoder_attributes(kv_heads=4, max_seq=32_768),
        *mixtures.mixture_attributes(128, 8, local_first=True),
        SwitchedWindow(4096),
        Attribute("bias", "attention_bias", False),
        Activation(),
    ),
    (*LLAMA_WEIGHTS, *mixtures.MIXTURE),
    multimodal=(
        MultimodalModel(
            "qwen3_vl_moe",
            "qwen3_vl_moe_text",
            _MISSING,
            {"norm_topk_prob": True},
            (*mixtures.FUSED, *mixtures.TRANSPOSED),
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dots1Config(mixtures.SigmoidMoEConfig):
    """The config of a dots.llm1; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    normalize: bool = False
    max_seq: Length = 32_768


def build_dots1(config: Dots1Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a dots.llm1 with random weights."""

    def block(kind: tuple[int | None, bool], key: Key[Array, ""]) -> Block:
        window, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=window, bias=config.bias, **head_norms(config), key=mixer_key)
        return pre_norm_block(config, mixer, config.feed_forward(is_mixture, feed_forward_key))

    kinds = [(window, layer >= config.first_dense) for layer, window in enumerate(layer_windows(config))]
    return decoder(config, block, kinds, key=key)


_DOTS1_PRESETS = {
    "dots1-byte-500k": Dots1Config(
        256, 64, 4, 4, 2, 128, expert_mlp=32, experts=12, top_k=4, bias=True, normalize=True, theta=1e4, tied=True
    ),
    "dots.llm1": Dots1Config(
        *(152_064, 4096, 62, 32, 32, 10_944),
        expert_mlp=1408,
        top_k=6,
        shared=2,
        scale=2.5,
        head_dim=128,
        normalize=True,
        theta=10_000_000.0,
        eps=1e-5,
    ),
}

DOTS1 = Family(
    "dots1",
    Dots1Config,
    build_dots1,
    _DOTS1_PRESETS,
    "Dots1ForCausalLM",
    "dots1",
    (
        *decoder_attributes(kv_heads=32),
        *(*mixtures.SHARED_ATTRIBUTES, mixtures.FIRST_DENSE),
        NullableWindows(4096, LaterLayers(62)),
        Attribute("normalize", "norm_topk_prob", False),
        Attribute("bias", "attention_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Activation(),
        # The publisher's own program reads these attributes. All models of this family have these values.
        Expect("scoring_func", "noaux_tc", "sigmoid", written=False),
        Expect("topk_method", "noaux_tc", written=False),
        Expect("moe_layer_freq", 1, written=False),
    ),
    (*LLAMA_WEIGHTS, *mixtures.MIXTURE, *mixtures.SHARED, mixtures.SELECTION_BIAS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlintConfig(mixtures.QwenMoEConfig):
    """The config of a Flint; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    window_layers: tuple[Index, ...]
    """The indices of the layers with a `window` and rotary positions; the other layers have neither."""
    window: Length = 513
    """The number of tokens that the layers of `window_layers` see."""
    shared_mlp: Size = 1024
    """Hidden features of the shared expert."""
    experts: Size = 256
    top_k: Size = 6
    normalize: bool = True
    dense_layers: tuple[Index, ...] = (0, 1)
    theta: Positive = 10_000.0
    bias: bool = False
    """Whether the attention's four projections have biases."""
    balance: NotNegative = 0.0005
    max_seq: Length = 262_144


def build_flint(config: FlintConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Flint with random weights."""
    rotary = rotary_of(config, config.head_size, scaling=config.scaling)

    def dense_or_mixture(is_mixture: bool, key: Key[Array, ""]) -> MoE | GatedMLP:
        if not is_mixture:
            return gated_mlp(config, key=key)
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        return mixtures.mixture(
            config,
            functools.partial(mixtures.small_expert, config),
            shared=gated_mlp(config, mlp=config.shared_mlp, key=shared_key),
            score="sigmoid",
            normalize=config.normalize,
            router=router_key,
            experts=experts_key,
        )

    def block(kind: tuple[int | None, bool], key: Key[Array, ""]) -> Block:
        window, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config,
            window=window,
            bias=config.bias,
            rotary=None if window is None else rotary,
            scores=Scores(sinks=jnp.zeros(config.heads, jnp.float32)),
            **head_norms(config),
            key=mixer_key,
        )
        return pre_norm_block(config, mixer, dense_or_mixture(is_mixture, feed_forward_key))

    kinds = list(zip(layer_windows(config), mixtures.mixture_flags(config), strict=True))
    return decoder(config, block, kinds, key=key)


def _flint_windows(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    """Return all layers except the first two, every fourth and the last, if `layer_types` is missing."""
    return tuple(layer for layer in range(2, layers - 1) if layer % 4 != 1)


class _FirstTwoDense(mixtures.DenseLayers):
    """The indices of the layers without experts; the first two if the attribute is missing."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `dense_layers`."""
        stated = published.listed("mlp_only_layers", Index)
        return {"dense_layers": (0, 1) if stated is None else tuple(stated)}


_FLINT_PRESETS = {
    "flint-byte-500k": FlintConfig(
        *(256, 64, 4, 4, 2, 96),
        head_dim=16,
        expert_mlp=32,
        shared_mlp=48,
        experts=12,
        top_k=4,
        dense_layers=(0,),
        window_layers=(1, 2),
        window=64,
        tied=True,
    ),
    "flint": FlintConfig(
        *(150_144, 2048, 49, 32, 4, 6144),
        head_dim=128,
        expert_mlp=512,
        window_layers=tuple(layer for layer in range(2, 48) if layer % 4 != 1),
    ),
}

FLINT = Family(
    "flint",
    FlintConfig,
    build_flint,
    _FLINT_PRESETS,
    "FlintForCausalLM",
    "flint",
    (
        *decoder_attributes(head_dim=128, kv_heads=4, max_seq=262_144),
        *mixtures.router_attributes(256, 6, normalize=True, balance=0.0005),
        Windows(513, _flint_windows),
        _FirstTwoDense(),
        Count("expert_mlp", "moe_intermediate_size", 512),
        Count("shared_mlp", "shared_expert_intermediate_size", 1024),
        Count("moe_every", "decoder_sparse_step", 1),
        Attribute("bias", "attention_bias", False),
        Activation(),
    ),
    (
        *(
            *LLAMA_WEIGHTS,
            *mixtures.MIXTURE,
            *gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_expert."),
        ),
        Rule(f"{LAYER}self_attn.softmax_offset", "mixer.layer.scores.sinks"),
    ),
)
