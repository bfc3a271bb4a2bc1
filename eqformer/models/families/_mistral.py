"""Models of Mistral AI.

Mistral (Jiang et al. 2023, arXiv:2310.06825) is a Llama; in its first version every layer has a sliding window.
Ministral 8B (2024) is a Mistral with a window in three of four layers. Ministral 3 (2025) is a Mistral with YaRN, and
with a factor of the queries that grows with the position. Mixtral (Jiang et al. 2024, arXiv:2401.04088) is a Mistral
whose feed-forward layers are mixtures of gated experts. Mistral 4 (2026) has DeepSeek's latent attention with the
queries' factor of Ministral 3, and experts chosen by softmax.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ...nn import Block, Capacity, Dropless, LogTemperature, RotaryScaling, Scores, Transformer, YarnScaling
from .._attributes import Activation, Attribute, Count, Entry, Fields, Nullable, Unpublished
from .._config_types import (
    Attributes,
    Fraction,
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
from .._layer_attributes import NullableWindows
from .._rotary_attributes import RotaryPositions, RotaryWithGrowth, RotaryWithTemperature
from .._weight_rules import Rule
from . import _common as tables
from ._decoder import attention, decoder, gated_mlp, layer_windows, pre_norm_block
from ._deepseek import build_latent, latent_attributes, LATENT_BYTE, LATENT_WEIGHTS, LatentConfig
from ._mixtures import FUSED, FUSED_BY_EXPERT, mixture, mixture_beside_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """The config of a Mistral."""

    eps: NotNegative = 1e-5
    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""


def build_mistral(config: MistralConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mistral with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=config.window, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, key=key)


_7B = MistralConfig(vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, head_dim=128)
_NEMO = dataclasses.replace(_7B, vocab=131_072, embed=5120, layers=40, theta=1e6, max_seq=131_072)
_MISTRAL_PRESETS = {
    "mistral-byte-500k": MistralConfig(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, window=128, tied=True, max_seq=512
    ),
    "mistral-7b-v0.1": dataclasses.replace(_7B, window=4096),
    "mistral-7b-v0.3": dataclasses.replace(_7B, vocab=32_768, theta=1e6),
    "mistral-nemo-12b": _NEMO,
    "mistral-small-24b": dataclasses.replace(_NEMO, mlp=32_768, theta=1e8, max_seq=_7B.max_seq),
}

MISTRAL = Family(
    "mistral",
    MistralConfig,
    build_mistral,
    _MISTRAL_PRESETS,
    "MistralForCausalLM",
    "mistral",
    (*tables.decoder_attributes(kv_heads=8, max_seq=131_072), Nullable("window", "sliding_window", 4096), Activation()),
    tables.LLAMA_WEIGHTS,
    multimodal=(MultimodalModel("mistral3"),),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinistralConfig(DecoderConfig):
    """The config of a Ministral 8B of 2024."""

    window_layers: tuple[Index, ...]
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 32_768
    """The number of tokens that the layers of `window_layers` see."""
    theta: Positive = 100_000_000.0
    eps: NotNegative = 1e-5


def build_ministral(config: MinistralConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Ministral of 2024 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        return pre_norm_block(
            config, attention(config, window=window, key=mixer_key), gated_mlp(config, key=feed_forward_key)
        )

    return decoder(config, block, layer_windows(config), key=key)


_MINISTRAL_PRESETS = {
    "ministral-byte-500k": MinistralConfig(
        256, 96, 4, 6, 2, 320, head_dim=16, window_layers=(1, 2, 3), window=64, theta=10_000.0, tied=True, max_seq=512
    ),
    "ministral-8b": MinistralConfig(
        *(131_072, 4096, 36, 32, 8, 12_288),
        head_dim=128,
        window_layers=tuple(layer for layer in range(36) if layer % 4),
    ),
}

MINISTRAL = Family(
    "ministral",
    MinistralConfig,
    build_ministral,
    _MINISTRAL_PRESETS,
    "MinistralForCausalLM",
    "ministral",
    (
        *tables.decoder_attributes(kv_heads=8, max_seq=131_072),
        tables.StatedHeadSize(),  # transformers 5.24 fails without a number
        NullableWindows(4096, lambda published, layers: range(layers)),
        Activation(),
    ),
    tables.LLAMA_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """The config of a Ministral 3."""

    head_dim: Size = 128
    theta: Positive = 1_000_000.0
    scaling: RotaryScaling | None = YarnScaling(16.0, 16_384, magnitude=1.0)
    growth: Number = 0.1
    """The strength of `LogTemperature`; 0: scores do not grow."""
    growth_every: Length = 16_384
    """The number of positions between two increases of the queries' factor."""
    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""
    eps: NotNegative = 1e-5
    max_seq: Length = 262_144


def growth_of(config: Ministral3Config) -> LogTemperature | None:
    """Return the factor of queries that grows with the position; None if the factor is always 1."""
    return LogTemperature(config.growth_every, config.growth, offset=0) if config.growth else None


def build_ministral3(config: Ministral3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Ministral 3 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=config.window, scores=Scores(temperature=growth_of(config)), key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, key=key)


_MINISTRAL3_PRESETS = {
    "ministral3-byte-500k": Ministral3Config(
        256, 96, 4, 6, 2, 320, head_dim=16, theta=1e4, scaling=None, growth_every=64, tied=True, max_seq=512
    ),
    "ministral3-3b": Ministral3Config(131_072, 3072, 26, 32, 8, 9216, tied=True),
    "ministral3-8b": Ministral3Config(131_072, 4096, 34, 32, 8, 14_336),
    "ministral3-14b": Ministral3Config(131_072, 5120, 40, 32, 8, 16_384, theta=1e9),
}

MINISTRAL3 = Family(
    "ministral3",
    Ministral3Config,
    build_ministral3,
    _MINISTRAL3_PRESETS,
    "Ministral3ForCausalLM",
    "ministral3",
    (
        *tables.decoder_attributes(RotaryWithGrowth(), kv_heads=8, max_seq=262_144),
        tables.StatedHeadSize(128),
        Attribute("window", "sliding_window", None),
        Activation(),
    ),
    tables.LLAMA_WEIGHTS,
    multimodal=(MultimodalModel("mistral3"),),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """The config of a Mixtral; `mlp` is the width of an expert."""

    experts: Size = 8
    """The number of experts of a layer."""
    top_k: Size = 2
    """The number of experts that each token chooses."""
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""
    balance: NotNegative = 0.02
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    capacity: Positive | None = None
    """The capacity factor of experts (`nn.Capacity`); None: no token is dropped."""
    jitter: NotNegative = 0.0
    """The largest relative change of the router's input while training."""


def build_mixtral(config: MixtralConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mixtral with random weights."""
    dispatch = Dropless() if config.capacity is None else Capacity(config.capacity)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        router_key, experts_key = jax.random.split(feed_forward_key)
        feed_forward = mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            dispatch=dispatch,
            normalize=True,
            jitter=config.jitter,
            router=router_key,
            experts=experts_key,
        )
        return pre_norm_block(config, attention(config, window=config.window, key=mixer_key), feed_forward)

    return decoder(config, block, key=key)


_MIXTRAL_PRESETS = {
    # Each token uses two of eight experts of half the width, so as many parameters are active as in llama-byte-1m.
    "mixtral-byte-3m": MixtralConfig(
        vocab=256, embed=128, layers=4, heads=8, kv_heads=4, mlp=192, theta=10_000.0, tied=True
    ),
    "mixtral-byte-500k": MixtralConfig(
        vocab=256, embed=64, layers=4, heads=4, kv_heads=2, mlp=64, theta=10_000.0, tied=True
    ),
    "mixtral-8x7b": MixtralConfig(vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336),
    "mixtral-8x22b": MixtralConfig(
        vocab=32_768, embed=6144, layers=56, heads=48, kv_heads=8, mlp=16_384, max_seq=65_536
    ),
}

_MIXTURE, _EXPERTS = f"{tables.LAYER}block_sparse_moe.", "feed_forward.layer.experts.mlps"
MIXTRAL = Family(
    "mixtral",
    MixtralConfig,
    build_mixtral,
    _MIXTRAL_PRESETS,
    "MixtralForCausalLM",
    "mixtral",
    (
        *tables.decoder_attributes(RotaryPositions(1e6), kv_heads=8, max_seq=131_072),
        Count("experts", "num_local_experts", 8),
        Count("top_k", "num_experts_per_tok", 2),
        Attribute("window", "sliding_window", None),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Attribute("jitter", "router_jitter_noise", 0.0),
        Unpublished("capacity", None, "published models drop no tokens"),
        Activation(),
    ),
    (
        *(*tables.EDGES, *tables.ATTENTION, *tables.PRE_NORMS),
        Rule(f"{_MIXTURE}gate.weight", "feed_forward.layer.router.linear.weight"),
        *tables.gated_weights(_EXPERTS, prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral4Config(LatentConfig):
    """The config of a Mistral 4."""

    latent: Size = 256
    head_dim: Size = 64
    experts: Size = 128
    top_k: Size = 4
    shared: OptionalSize = 1
    first_dense: Index = 0
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 1.0
    normalize: bool = True
    """Whether the weights of a token's experts are normalized to add up to 1."""
    interleaved: bool = True
    """Whether the channels that are rotated together are neighbors."""
    balance: NotNegative = 0.001
    scaling: RotaryScaling | None = YarnScaling(128.0, 8192, magnitude=1.0)
    temperature: Number = 1.0
    growth: Number = 0.1
    """The strength of `LogTemperature`; 0: scores do not grow."""
    growth_every: Length = 8192
    """The number of positions between two increases of the queries' factor."""
    max_seq: Length = 1_048_576


def build_mistral4(config: Mistral4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mistral 4 with random weights."""
    mixture = functools.partial(mixture_beside_shared, config, group_score="top2", normalize=config.normalize)
    growth = LogTemperature(config.growth_every, config.growth, offset=0) if config.growth else None
    return build_latent(config, mixture, interleaved=config.interleaved, temperature=growth, key=key)


class _RotatedPart(Entry):
    """The rotated part of a head. A published part that contradicts the head's sizes is refused."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse another part."""
        rotated, unrotated = published.read("qk_rope_head_dim", Size), published.read("qk_nope_head_dim", Size)
        part = published.read("partial_rotary_factor", Fraction, rotated / (rotated + unrotated))
        if int((rotated + unrotated) * part) != rotated:
            published.refuse(f"partial_rotary_factor={part}: {rotated} of {rotated + unrotated} channels are rotated.")
        return {}

    def write(self, config: Mistral4Config) -> Attributes:
        """Return no attribute."""
        return {}


_POSITIONS = RotaryWithTemperature(
    RotaryPositions(required=True, skipped=("llama_4_scaling_beta", "max_position_embeddings"))
)
_MISTRAL4_PRESETS = {
    "mistral4-byte-500k": Mistral4Config(
        **LATENT_BYTE, q_latent=32, experts=16, scaling=None, temperature=0.0, growth_every=64, tied=True
    ),
    "mistral4-119b": Mistral4Config(131_072, 4096, layers=36, heads=32, mlp=12_288, expert_mlp=2048, q_latent=1024),
}

MISTRAL4 = Family(
    "mistral4",
    Mistral4Config,
    build_mistral4,
    _MISTRAL4_PRESETS,
    "Mistral4ForCausalLM",
    "mistral4",
    (
        *latent_attributes(RotaryWithGrowth(_POSITIONS), max_seq=1_048_576),
        _RotatedPart(),
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("interleaved", "rope_interleave", True),
        Attribute("balance", "router_aux_loss_coef", 0.001),
    ),
    # The experts of a layer are published as one array.
    (
        *(rule for rule in LATENT_WEIGHTS if ".mlp.experts." not in rule.name),
        *(dataclasses.replace(rule, variant=False) for rule in FUSED),
        *FUSED_BY_EXPERT,
    ),
    multimodal=(MultimodalModel("mistral3"),),
)
