"""Granite 3 (Granite Team, IBM, 2024) and Granite 4 (IBM 2025).

Granite 3 is a Llama with multipliers of embeddings, scores, sublayers and logits; some models have experts. Granite 4
has Mamba-2 in most layers, and attention, usually without positions, in the others. Some of its models have experts
beside a dense layer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Key

from ...nn import Attention, Block, GatedMLP, GateNorm, Mamba2Mixer, Mixer, MoE, Scores, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import Attributes, Index, Length, NotNegative, Number, OptionalSize, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import every, LayerTypes
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, leaf_paths, LLAMA_WEIGHTS, PRE_NORMS
from ._decoder import (
    activation_of,
    attention,
    decoder,
    DecoderEnds,
    FeedForwardLayer,
    gated_mlp,
    pre_norm_block,
    rotary_of,
)
from ._mamba2 import beside_mamba, mamba2, MAMBA_ATTRIBUTES, mamba_weights, NetSizes
from ._mixtures import mixture


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """The config of a Granite."""

    embedding_scale: Number
    """A factor of the embeddings."""
    attention_scale: Number
    """A factor of the attention scores."""
    residual_scale: Number
    """A factor of what each sublayer adds to the residual stream."""
    logit_divisor: Number
    """A divisor of the logits."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    eps: NotNegative = 1e-5
    tied: bool = True
    max_seq: Length = 4096


def build_granite(config: GraniteConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Granite with random weights."""

    def layers(key: Key[Array, ""]) -> tuple[Attention, GatedMLP]:
        mixer_key, feed_forward_key = jax.random.split(key)
        gated = gated_mlp(config, bias=config.mlp_bias, output_std=None, key=feed_forward_key)
        return granite_attention(config, key=mixer_key), gated

    return granite_decoder(config, layers, key=key)


def granite_attention(
    config: GraniteConfig, *, sinks: Float[Array, "heads"] | None = None, key: Key[Array, ""], **options: Any
) -> Attention:
    """Return an attention with the config's factor of the scores; `options` are further arguments of `attention`."""
    scores = Scores(config.attention_scale, sinks=sinks)
    return attention(config, bias=config.bias, scores=scores, output_std=None, key=key, **options)


def granite_decoder(
    config: GraniteConfig,
    layers: Callable[..., tuple[Mixer, FeedForwardLayer]],
    kinds: Sequence[Any] | None = None,
    *,
    key: Key[Array, ""],
) -> Transformer:
    """Return a decoder with the config's factors of embeddings, sublayers and logits.

    Args:
        config: The config.
        layers: A function that builds the mixer and the feed-forward layer of a block: `layers(key)` or, with `kinds`,
            `layers(kind, key)`.
        kinds: The kind of each block; None: all blocks are alike.
        key: The key of the weights.
    """

    def block(*kind_and_key: Any) -> Block:
        return pre_norm_block(config, *layers(*kind_and_key), residual_scale=config.residual_scale)

    ends: DecoderEnds = {"embedding_scale": config.embedding_scale, "logit_scale": 1 / config.logit_divisor}
    return decoder(config, block, key=key, **ends) if kinds is None else decoder(config, block, kinds, key=key, **ends)


def _granite(embed: int, heads: int, mlp: int, head_dim: int, logit_divisor: float) -> GraniteConfig:
    return GraniteConfig(
        vocab=49_155,
        embed=embed,
        layers=40,
        heads=heads,
        kv_heads=8,
        mlp=mlp,
        embedding_scale=12.0,
        attention_scale=1 / head_dim,
        residual_scale=0.22,
        logit_divisor=logit_divisor,
    )


_2B = _granite(2048, 32, 8192, 64, 8.0)
_8B = _granite(4096, 32, 12_800, 128, 16.0)
_GRANITE_PRESETS = {
    "granite-byte-500k": GraniteConfig(
        vocab=256,
        embed=96,
        layers=4,
        heads=6,
        kv_heads=2,
        mlp=320,
        embedding_scale=12.0,
        attention_scale=1 / 16,
        residual_scale=0.22,
        logit_divisor=8.0,
        max_seq=512,
    ),
    "granite-3.0-2b": _2B,
    "granite-3.0-8b": _8B,
    "granite-3.1-2b": dataclasses.replace(_2B, theta=5_000_000.0, max_seq=131_072),
    "granite-3.1-8b": dataclasses.replace(_8B, theta=10_000_000.0, max_seq=131_072),
}


class _Divisor(Attribute):
    """A divisor of the logits, which must not be 0."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value."""
        fields = super().read(published)
        if fields[self.name] == 0:
            published.refuse(f"{self.published}={fields[self.name]}: logits are divided by it; give another number.")
        return fields


SCALES = (
    Attribute("embedding_scale", "embedding_multiplier", 1.0),
    Attribute("attention_scale", "attention_multiplier", 1.0),
    Attribute("residual_scale", "residual_multiplier", 1.0),
    _Divisor("logit_divisor", "logits_scaling", 1.0),
)
GRANITE = Family(
    "granite",
    GraniteConfig,
    build_granite,
    _GRANITE_PRESETS,
    "GraniteForCausalLM",
    "granite",
    (
        *decoder_attributes(),
        *SCALES,
        Activation(),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoEConfig(GraniteConfig):
    """The config of a Granite 3 with experts; `mlp` is an expert's width."""

    experts: Size = 32
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    eps: NotNegative = 1e-6
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoESharedConfig(GraniteMoEConfig):
    """The config of a Granite 3 with experts beside a shared expert; `mlp` is an expert's width."""

    shared_mlp: OptionalSize = 0
    """Hidden features of the shared expert; 0: there is no shared expert."""


def build_granite_moe(config: GraniteMoEConfig | GraniteMoESharedConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Granite 3 with experts, with random weights."""
    shared_mlp = config.shared_mlp if isinstance(config, GraniteMoESharedConfig) else 0

    def layers(key: Key[Array, ""]) -> tuple[Attention, MoE]:
        keys = jax.random.split(key, 4)
        return granite_attention(config, key=keys[0]), granite_mixture(config, shared_mlp, keys[1:])

    return granite_decoder(config, layers, key=key)


def granite_mixture(config: GraniteMoEConfig, shared_mlp: int, keys: Key[Array, "3"]) -> MoE:
    """Return experts beside a shared expert of `shared_mlp` hidden features; 0: there is no shared expert."""
    router, experts, shared = keys
    return mixture(
        config,
        lambda key: gated_mlp(config, output_std=None, key=key),
        shared=gated_mlp(config, mlp=shared_mlp, output_std=None, key=shared) if shared_mlp else None,
        normalize=True,
        router=router,
        experts=experts,
    )


def _granite_moe(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, experts: int) -> GraniteMoEConfig:
    return GraniteMoEConfig(
        *(49_155, embed, layers, heads, kv_heads, mlp),
        experts=experts,
        embedding_scale=12.0,
        attention_scale=1 / 64,
        residual_scale=0.22,
        logit_divisor=6.0,
    )


_MOE_BYTE = dataclasses.replace(_granite_moe(64, 4, 4, 2, 32, 12), vocab=256, top_k=4)
_GRANITE_MOE_PRESETS = {
    "granite-moe-byte-500k": _MOE_BYTE,
    "granite-3.0-1b-a400m": _granite_moe(1024, 24, 16, 8, 512, 32),
    "granite-3.0-3b-a800m": _granite_moe(1536, 32, 24, 8, 512, 40),
}
_GRANITE_MOE_SHARED_PRESETS = {
    "granite-moe-shared-byte-500k": GraniteMoESharedConfig(**vars(_MOE_BYTE), shared_mlp=48),
}


def joined_weights(name: str, path: str, axis: int = 0) -> tuple[Rule, ...]:
    """Return the rules for a gated layer, or gated experts, published with `gate` and `up` as one array.

    In GGUF files, each of the three maps is an array of its own, also for each expert.
    """
    apart = gated_weights(path[:-1], prefix=f"{name}experts.{{expert}}." if axis else name)
    return (
        Rule(f"{name}input_linear.weight", leaf_paths(("gate", "up"), "weight", path), axis=axis),
        Rule(f"{name}output_linear.weight", f"{path}down.weight"),
        *(dataclasses.replace(rule, variant=True) for rule in apart),
    )


_MIXED, _MOE, _DENSE = "feed_forward.layer.", f"{LAYER}block_sparse_moe.", f"{LAYER}shared_mlp."


def moe_attributes(rotary: Entry = RotaryPositions()) -> tuple[Entry, ...]:
    """Return the entries of a Granite 3 with experts, with this entry of rotary positions."""
    return (
        *(*decoder_attributes(rotary), *SCALES),
        Count("experts", "num_local_experts", 8),
        Count("top_k", "num_experts_per_tok", 2),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Activation(),
        Attribute("bias", "attention_bias", False),
        *(Unpublished("mlp_bias", False, "no MLP has a bias"), Expect("mlp_bias", False, written=False)),
    )


_ROUTED_WEIGHTS = (
    Rule(f"{_MOE}router.layer.weight", f"{_MIXED}router.linear.weight"),
    *joined_weights(_MOE, f"{_MIXED}experts.mlps.", axis=1),
)
_MOE_WEIGHTS = (*_ROUTED_WEIGHTS, *joined_weights(_DENSE, f"{_MIXED}shared."))
GRANITE_MOE = Family(
    "granitemoe",
    GraniteMoEConfig,
    build_granite_moe,
    _GRANITE_MOE_PRESETS,
    "GraniteMoeForCausalLM",
    "granitemoe",
    moe_attributes(),
    (*LLAMA_WEIGHTS, *_ROUTED_WEIGHTS),
)
GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    GraniteMoESharedConfig,
    build_granite_moe,
    _GRANITE_MOE_SHARED_PRESETS,
    "GraniteMoeSharedForCausalLM",
    "granitemoeshared",
    (*moe_attributes(), Count("shared_mlp", "shared_intermediate_size", 0, minimum=0)),
    (*LLAMA_WEIGHTS, *_MOE_WEIGHTS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(NetSizes, GraniteConfig):
    """The config of a Granite 4; `mlp` is an expert's width, which has no effect without experts."""

    attention_layers: tuple[Index, ...]
    """The indices of the layers with attention."""
    shared_mlp: Size
    """Hidden features of the dense feed-forward layer, through which every token passes."""
    rotary: bool = False
    """Whether the attention has rotary positions."""
    experts: OptionalSize = 0
    """The number of experts of a layer; 0: there are no experts."""
    top_k: OptionalSize = 2
    """The number of experts that each token chooses; no effect without experts."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    max_seq: Length = 131_072


def build_granite_hybrid(config: GraniteHybridConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Granite 4 with random weights."""
    rotary = rotary_of(config, config.head_size, scaling=config.scaling) if config.rotary else None

    def dense_or_mixture(key: Key[Array, ""]) -> MoE | GatedMLP:
        shared_key, router_key, experts_key = jax.random.split(key, 3)
        dense = gated_mlp(config, mlp=config.shared_mlp, output_std=None, key=shared_key)
        if not config.experts:
            return dense
        return mixture(
            config,
            lambda key: gated_mlp(config, output_std=None, key=key),
            shared=dense,
            normalize=True,
            router=router_key,
            experts=experts_key,
        )

    def mixer(is_attention: bool, key: Key[Array, ""]) -> Attention | Mamba2Mixer:
        if is_attention:
            return granite_attention(config, rotary=rotary, key=key)
        gate_norm = GateNorm(config.eps)
        return mamba2(config, activation=activation_of(config), gate_norm=gate_norm, output_std=None, key=key)

    def layers(is_attention: bool, key: Key[Array, ""]) -> tuple[Attention | Mamba2Mixer, MoE | GatedMLP]:
        mixer_key, feed_forward_key = jax.random.split(key)
        return mixer(is_attention, mixer_key), dense_or_mixture(feed_forward_key)

    kinds = [layer in config.attention_layers for layer in range(config.layers)]
    return granite_decoder(config, layers, kinds, key=key)


def _granite4(
    embed: int, heads: int, head_dim: int, kv_heads: int, mlp: int, *, shared_mlp: int, logit_divisor: float
) -> GraniteHybridConfig:
    return GraniteHybridConfig(
        *(100_352, embed, 40, heads, kv_heads, mlp),
        shared_mlp=shared_mlp,
        attention_layers=(5, 15, 25, 35),
        net_heads=embed // 32,
        embedding_scale=12.0,
        attention_scale=1 / head_dim,
        residual_scale=0.22,
        logit_divisor=logit_divisor,
    )


_BYTE = dataclasses.replace(
    _granite4(64, 4, 16, 2, 32, shared_mlp=96, logit_divisor=8.0),
    vocab=256,
    layers=4,
    attention_layers=(2,),
    net_heads=8,
    net_head_dim=16,
    net_v_dim=16,
)
_GRANITE_HYBRID_PRESETS = {
    "granite-4.0-h-byte-500k": dataclasses.replace(_BYTE, experts=12, top_k=4),
    "granite-4.0-byte-500k": _BYTE,
    "granite-4.0-micro": dataclasses.replace(
        _granite4(2560, 40, 64, 8, 8192, shared_mlp=8192, logit_divisor=10.0),
        attention_layers=every(1, 40),
        rotary=True,
        theta=10_000_000.0,
    ),
    "granite-4.0-h-micro": _granite4(2048, 32, 64, 8, 8192, shared_mlp=8192, logit_divisor=8.0),
    "granite-4.0-h-tiny": dataclasses.replace(
        _granite4(1536, 12, 128, 4, 512, shared_mlp=1024, logit_divisor=6.0), experts=64, top_k=6
    ),
    "granite-4.0-h-small": dataclasses.replace(
        _granite4(4096, 32, 128, 8, 768, shared_mlp=1536, logit_divisor=16.0), experts=72, top_k=10
    ),
}


class _PositionKind(Entry):
    """The field `rotary`: whether the attention has rotary positions."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `rotary`; refuse other kinds of positions."""
        published.expect("position_embedding_type", "nope", "rope")
        return {"rotary": published.text("position_embedding_type", "nope") == "rope"}

    def write(self, config: GraniteHybridConfig) -> Attributes:
        """Return the attribute."""
        return {"position_embedding_type": "rope" if config.rotary else "nope"}


_TYPES = ("full_attention", "linear_attention")
GRANITE_HYBRID = Family(
    "granite_hybrid",
    GraniteHybridConfig,
    build_granite_hybrid,
    _GRANITE_HYBRID_PRESETS,
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    (
        *decoder_attributes(),
        *SCALES,
        *MAMBA_ATTRIBUTES,
        LayerTypes("attention_layers", _TYPES, lambda *_: (), published=("attention", "mamba")),
        _PositionKind(),
        Count("shared_mlp", "shared_intermediate_size", 1024),
        Count("experts", "num_local_experts", 8, minimum=0),
        Count("top_k", "num_experts_per_tok", 2, minimum=0),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Activation(),
        Attribute("bias", "attention_bias", False),
        *(Unpublished("mlp_bias", False, "no MLP has a bias"), Expect("mlp_bias", False, written=False)),
        Expect("normalization_function", "rmsnorm", written=False),
        Ignore("mamba_chunk_size", "init_method"),
    ),
    (
        *(*EDGES, *beside_mamba(ATTENTION), *mamba_weights(f"{LAYER}mamba."), *PRE_NORMS),
        *(*_MOE_WEIGHTS, *joined_weights(_DENSE, _MIXED)),
    ),
)
