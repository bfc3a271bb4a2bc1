"""Llama 4 (Meta 2025), text: chunks with rotary positions, whole rows without, sigmoids that weigh experts' inputs."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Block,
    Llama3Scaling,
    LogTemperature,
    LongRopeScaling,
    Mask,
    MoE,
    Scores,
    Transformer,
    YarnScaling,
)
from .._attributes import Activation, Attribute, Count, Entry, Nullable, SwitchedAttribute
from .._config_types import Index, Length, NotNegative, Number, Positive, Size
from .._family import DecoderConfig, Family, MultimodalModel
from .._layer_attributes import every, LayerTypes, ListedLayers, NoRotaryLayers, Period
from .._rotary_attributes import RotaryPositions
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, PRE_NORMS
from ._decoder import attention, decoder, gated_mlp, norm, pre_norm_block, rotary_of
from ._mixtures import mixture, stacked_mixture_weights


ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(RotaryPositions(500_000.0), head_dim=128, kv_heads=8, max_seq=131_072),
    Attribute("dense_mlp", "intermediate_size_mlp", 16_384),
    Count("experts", "num_local_experts", 16),
    Count("top_k", "num_experts_per_tok", 1),
    Attribute("qk_norm", "use_qk_norm", True),
    Attribute("balance", "router_aux_loss_coef", 0.001),
    Attribute("bias", "attention_bias", False),
    Attribute("temperature_every", "floor_scale", 8192),
    SwitchedAttribute(Attribute("temperature", "attn_scale", 0.1), "attn_temperature_tuning"),
    Nullable("chunk", "attention_chunk_size", 8192),
    ListedLayers("moe_layers", "moe_layers", Period(1, ("interleave_moe_layer_step",))),
    NoRotaryLayers(empty=True),
    LayerTypes("full_layers", ("full_attention", "chunked_attention"), NoRotaryLayers(empty=True), empty=True),
    Activation(),
)
_FEED_FORWARD = f"{LAYER}feed_forward."
WEIGHTS = (
    *(*EDGES, *ATTENTION, *PRE_NORMS),
    *gated_weights(prefix=_FEED_FORWARD),
    *gated_weights("feed_forward.layer.shared", prefix=f"{_FEED_FORWARD}shared_expert."),
    *stacked_mixture_weights(_FEED_FORWARD, interleaved=False),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """The config of a Llama 4; `mlp` is an expert's width and the shared expert's, `dense_mlp` a dense layer's."""

    dense_mlp: Size
    """Hidden features of a dense layer."""
    moe_layers: tuple[Index, ...]
    """The numbers of the layers with experts."""
    no_rotary_layers: tuple[Index, ...]
    """The numbers of the layers without rotary positions, whose scores grow by `LogTemperature`."""
    full_layers: tuple[Index, ...]
    """The numbers of the layers that see whole rows."""
    experts: Size = 16
    """The number of experts of a layer."""
    top_k: Size = 1
    """The number of experts that each token chooses."""
    chunk: Length | None = 8192
    """The number of tokens of a chunk; layers outside `full_layers` see only their chunk. None: they see whole rows."""
    qk_norm: bool = True
    """Whether rotated layers have norms of queries and keys."""
    temperature: Number = 0.1
    """The factor of `LogTemperature`."""
    temperature_every: Length = 8192
    """The number of tokens after which scores grow."""
    head_dim: Size = 128
    theta: Positive = 500_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    balance: NotNegative = 0.001
    """The weight of `LoadBalance`, over the batch."""
    max_seq: Length = 131_072

    def __post_init__(self):
        if self.qk_norm and isinstance(self.scaling, YarnScaling | LongRopeScaling):
            raise ValueError(
                f"Llama4Config(qk_norm=True, scaling={self.scaling}): norms after a rotation are known of no scaling "
                "that changes lengths."
            )

    @property
    def kinds(self) -> tuple[tuple[bool, bool, bool], ...]:
        """For each layer, whether it has rotary positions, sees whole rows, and has experts."""
        return tuple(
            (n not in self.no_rotary_layers, n in self.full_layers, n in self.moe_layers) for n in range(self.layers)
        )


def build_llama4(config: Llama4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Llama 4 with random weights."""
    temperature = LogTemperature(config.temperature_every, config.temperature) if config.temperature else None

    def experts(key: Key[Array, ""]) -> MoE:
        router, experts, shared = jax.random.split(key, 3)
        options: dict[str, Any] = {"score": "sigmoid", "balance": {"normalise": True}, "weighs_inputs": True}
        options |= {"shared": gated_mlp(config, key=shared), "router": router, "experts": experts}
        return mixture(config, lambda key: gated_mlp(config, key=key), **options)

    def block(kind: tuple[bool, bool, bool], key: Key[Array, ""]) -> Block:
        (rotated, sees_all, is_mixture), (mixer, feed_forward) = kind, jax.random.split(key)
        options: dict[str, Any] = {"mask": Mask(chunk=None if sees_all else config.chunk), "bias": config.bias}
        if rotated:
            # Transformers applies these norms after the rotation, which changes no length.
            norms = dict.fromkeys(("query_norm", "key_norm"), norm(config, "head_dim", scale=False))
            rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)
            options |= {"rotary": rotary} | (norms if config.qk_norm else {})
        else:
            options |= {"rotary": None, "scores": Scores(temperature=temperature)}
        dense = lambda: gated_mlp(config, mlp=config.dense_mlp, key=feed_forward)
        layer = experts(feed_forward) if is_mixture else dense()
        return pre_norm_block(config, attention(config, **options, key=mixer), layer)

    return decoder(config, block, config.kinds, key=key)


def _llama4(moe_every: int, **more: Any) -> Llama4Config:
    layers: dict[str, Any] = {"moe_layers": every(moe_every, 48)}
    layers |= dict.fromkeys(("no_rotary_layers", "full_layers"), every(4, 48))
    return Llama4Config(202_048, 5120, 48, 40, 8, 8192, dense_mlp=16_384, **layers, **more)


_SCOUT = Llama3Scaling(16.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_length=8192)
_BYTE: dict[str, Any] = {"moe_layers": (1, 3), "no_rotary_layers": (3,), "full_layers": (3,), "dense_mlp": 96}
_PRESETS = {
    "llama4-byte-500k": Llama4Config(256, 64, 4, 4, 2, 32, **_BYTE, experts=12, chunk=64, head_dim=16, theta=1e4),
    "llama4-scout": _llama4(1, scaling=_SCOUT, max_seq=10_485_760),
    "llama4-maverick": _llama4(2, experts=128, qk_norm=False, max_seq=1_048_576),
}

LLAMA4 = Family(
    "llama4",
    Llama4Config,
    build_llama4,
    _PRESETS,
    "Llama4ForCausalLM",
    "llama4_text",
    ATTRIBUTES,
    WEIGHTS,
    multimodal=(MultimodalModel("llama4"),),
)
