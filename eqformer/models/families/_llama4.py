"""The text models of Llama 4 (Meta 2025): chunked attention, full attention without positions, weighted expert inputs.

Layers with chunked attention have rotary positions.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
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
    # GGUF files have the maps of each expert.
    *(
        dataclasses.replace(rule, variant=True)
        for rule in gated_weights("feed_forward.layer.experts.mlps", prefix=f"{_FEED_FORWARD}experts.{{expert}}.")
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """The config of a Llama 4; `mlp` is the width of an expert and of the shared expert."""

    dense_mlp: Size
    """Hidden features of a dense layer."""
    moe_layers: tuple[Index, ...]
    """The indices of the layers with experts."""
    no_rotary_layers: tuple[Index, ...]
    """The indices of the layers without rotary positions, whose scores grow by `LogTemperature`."""
    full_layers: tuple[Index, ...]
    """The indices of the layers that see whole rows."""
    experts: Size = 16
    """The number of experts of a layer."""
    top_k: Size = 1
    """The number of experts that each token chooses."""
    chunk: Length | None = 8192
    """The number of tokens of a chunk; in layers outside of `full_layers`, a token sees only its chunk. None: there are
    no chunks."""
    qk_norm: bool = True
    """Whether rotated layers have norms of queries and keys."""
    temperature: Number = 0.1
    """The factor of `LogTemperature`."""
    temperature_every: Length = 8192
    """The number `every` of `LogTemperature`: scores grow at each multiple of this number of tokens."""
    head_dim: Size = 128
    theta: Positive = 500_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    max_seq: Length = 131_072

    def __post_init__(self):
        if self.qk_norm and self.scaling is not None and self.scaling.changes_norms:
            raise ValueError(
                f"Llama4Config(qk_norm=True, scaling={self.scaling}): queries and keys are normed after their "
                "rotation, and this scaling changes their lengths; give qk_norm=False or another scaling."
            )

    @property
    def kinds(self) -> tuple[tuple[bool, bool, bool], ...]:
        """For each layer, whether it has rotary positions, sees whole rows, and has experts."""
        return tuple(
            (n not in self.no_rotary_layers, n in self.full_layers, n in self.moe_layers) for n in range(self.layers)
        )


def build_llama4(config: Llama4Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Llama 4 with random weights."""
    size = config.head_size
    temperature = nn.LogTemperature(config.temperature_every, config.temperature) if config.temperature else None

    def experts(key: Key[Array, ""]) -> nn.MoE:
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        return mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            shared=gated_mlp(config, key=shared_key),
            balance_normalize=True,
            weighs_inputs=True,
            score="sigmoid",
            router=router_key,
            experts=experts_key,
        )

    def block(kind: tuple[bool, bool, bool], key: Key[Array, ""]) -> nn.Block:
        is_rotated, sees_all, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        has_norms = is_rotated and config.qk_norm
        mixer = attention(
            config,
            bias=config.bias,
            mask=nn.Mask(chunk=None if sees_all else config.chunk),
            rotary=rotary_of(config, size, interleaved=True, scaling=config.scaling) if is_rotated else None,
            scores=None if is_rotated else nn.Scores(temperature=temperature),
            # Transformers applies these norms after the rotation. The result is the same, because a rotation changes no
            # length.
            query_norm=norm(config, "head_dim", scale=False) if has_norms else None,
            key_norm=norm(config, "head_dim", scale=False) if has_norms else None,
            key=mixer_key,
        )
        if is_mixture:
            return pre_norm_block(config, mixer, experts(feed_forward_key))
        return pre_norm_block(config, mixer, gated_mlp(config, mlp=config.dense_mlp, key=feed_forward_key))

    return decoder(config, block, config.kinds, key=key)


_SCOUT = Llama4Config(
    *(202_048, 5120, 48, 40, 8, 8192),
    dense_mlp=16_384,
    moe_layers=every(1, 48),
    no_rotary_layers=every(4, 48),
    full_layers=every(4, 48),
    scaling=nn.Llama3Scaling(16.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_length=8192),
    max_seq=10_485_760,
)
_PRESETS = {
    "llama4-byte-500k": Llama4Config(
        *(256, 64, 4, 4, 2, 32),
        dense_mlp=96,
        moe_layers=(1, 3),
        no_rotary_layers=(3,),
        full_layers=(3,),
        experts=12,
        chunk=64,
        head_dim=16,
        theta=1e4,
    ),
    "llama4-scout": _SCOUT,
    "llama4-maverick": dataclasses.replace(
        _SCOUT, moe_layers=every(2, 48), experts=128, qk_norm=False, scaling=None, max_seq=1_048_576
    ),
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
