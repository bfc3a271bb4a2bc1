"""MiMo-V2-Flash (Xiaomi 2025): layers with a window have sinks and twice as many key heads.

Values have fewer channels than keys.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import Attention, Block, GatedMLP, MoE, Residual, RotaryScaling, Scores, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore, Nullable, Unpublished
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
from .._family import Family
from .._layer_attributes import all_but_every, flagged_layers, Windows
from .._rotary_attributes import PartRotaryByType
from .._weight_rules import Rule
from ._common import decoder_attributes, LAYER, LLAMA_WEIGHTS
from ._decoder import attention, damping, decoder, gated_mlp, layer_windows, local_part_rotary, norm, part_rotary
from ._mixtures import (
    DenseLayersConfig,
    ExpertGroupCount,
    FlaggedMixtures,
    MIXTURE,
    mixture,
    SELECTION_BIAS,
    sigmoid_router,
    SigmoidMoEConfig,
    small_expert,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiMoV2FlashConfig(SigmoidMoEConfig, DenseLayersConfig):
    """The config of a MiMo-V2-Flash; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    window_layers: tuple[Index, ...]
    """The indices of the layers with a `window`, sinks and `2 * kv_heads` key heads; other layers see whole rows."""
    window: Length = 129
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 192
    v_dim: Size = 128
    """Channels of a head's value."""
    value_scale: Number | None = 0.707
    """A factor of the values; None: 1."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    rotary_fraction: Fraction = 0.334
    """The fraction of a head's channels that is rotated."""
    theta: Positive = 5_000_000.0
    local_rotary_fraction: Fraction = 0.334
    """The fraction of a head's channels that is rotated, in layers with a window."""
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    experts: Size = 256
    shared: OptionalSize = 0
    eps: NotNegative = 1e-5
    max_seq: Length = 262_144


def build_mimo_v2_flash(config: MiMoV2FlashConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a MiMo-V2-Flash with random weights."""
    if config.shared:
        raise ValueError(
            f"MiMoV2FlashConfig(shared={config.shared}): this family has no shared experts; give shared=0."
        )
    rotary, local_rotary = part_rotary(config), local_part_rotary(config)

    def build_attention(window: int | None, key: Key[Array, ""]) -> Attention:
        is_local = window is not None
        return attention(
            config,
            window=window,
            kv_heads=config.kv_heads * 2 if is_local else config.kv_heads,
            head_dim=(config.head_dim, config.v_dim),
            bias=config.bias,
            output_bias=False,
            output_std=damping(config) * (config.heads * config.v_dim) ** -0.5,
            rotary=local_rotary if is_local else rotary,
            scores=Scores(sinks=jnp.zeros(config.heads, jnp.float32) if is_local else None),
            key=key,
        )

    def block(kind: tuple[int | None, bool], key: Key[Array, ""]) -> Block:
        window, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        # Attention is linear in its values, and its output map has no bias: the output is scaled instead of the values.
        return Block(
            Residual(build_attention(window, mixer_key), norm(config), scale=config.value_scale),
            Residual(_feed_forward(config, is_mixture, feed_forward_key), norm(config)),
        )

    return decoder(config, block, list(zip(layer_windows(config), config.mixtures, strict=True)), key=key)


def _feed_forward(config: MiMoV2FlashConfig, is_mixture: bool, key: Key[Array, ""]) -> MoE | GatedMLP:
    """Return a mixture without shared experts, or a dense layer."""
    if not is_mixture:
        return gated_mlp(config, key=key)
    router_key, experts_key = jax.random.split(key)
    return mixture(
        config,
        functools.partial(small_expert, config),
        balance_per="sequence",
        balance_normalize=True,
        router=router_key,
        experts=experts_key,
        **sigmoid_router(config),
    )


def _local(published: PublishedConfig, layers: int) -> Iterable[int]:
    """Return the layers with a window; by default all but the first and every sixth."""
    flagged = flagged_layers(published, "hybrid_layer_pattern")
    return all_but_every(6, layers)[1:] if flagged is None else flagged


class _PublisherWindows(Windows):
    """`Windows`, or the publisher's `sliding_window_size`, which does not count the query's own token."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields; `sliding_window_size` takes precedence, as in transformers."""
        fields, size = super().read(published), published.read("sliding_window_size", Length, None)
        return fields if size is None else fields | {"window": size + 1}


class _RepeatedSizes(Entry):
    """The publisher's `swa_` sizes of layers with a window, which must follow from the sizes of the other layers."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse other sizes."""
        # The factor of each size, and the size if the attribute is missing.
        sizes = {
            "num_attention_heads": (1, None),
            "num_key_value_heads": (2, 4),
            "head_dim": (1, 192),
            "v_head_dim": (1, 128),
        }
        for name, (factor, default) in sizes.items():
            local, size = published.read(f"swa_{name}", Size, None), published.read(name, Size, default)
            if local is not None and size is not None and local != factor * size:
                published.refuse(
                    f"swa_{name}={local}, {name}={size}: this family has {factor * size} in all layers with a window."
                )
        return {}

    def write(self, config: object) -> Attributes:
        """Return no attribute."""
        return {}


_PRESETS = {
    "mimo-v2-byte-500k": MiMoV2FlashConfig(
        *(256, 64, 4, 4, 1, 128),
        expert_mlp=32,
        experts=16,
        top_k=4,
        head_dim=24,
        v_dim=16,
        window=64,
        window_layers=(1, 2),
        theta=10_000.0,
        tied=True,
    ),
    "mimo-v2-flash": MiMoV2FlashConfig(
        *(152_576, 4096, 48, 64, 4, 16_384),
        expert_mlp=2048,
        window_layers=all_but_every(6, 48)[1:],
    ),
}

MIMO_V2_FLASH = Family(
    "mimo_v2_flash",
    MiMoV2FlashConfig,
    build_mimo_v2_flash,
    _PRESETS,
    "MiMoV2FlashForCausalLM",
    "mimo_v2_flash",
    (
        *decoder_attributes(
            PartRotaryByType((5e6, 1e4), (0.334, 0.334), fraction=0.334, older=("rope_theta", "swa_rope_theta")),
            head_dim=192,
            kv_heads=4,
            max_seq=131_072,
        ),
        Attribute("eps", "rms_norm_eps", 1e-5),
        _PublisherWindows(129, _local),
        Count("v_dim", "v_head_dim", 128),
        Nullable("value_scale", "attention_value_scale", 0.707),
        Attribute("bias", "attention_bias", False),
        FlaggedMixtures(),
        Count("expert_mlp", "moe_intermediate_size", 2048),
        Count("experts", ("num_local_experts", "n_routed_experts"), 256, written=("n_routed_experts",)),
        Count("top_k", "num_experts_per_tok", 8),
        Attribute("scale", "routed_scaling_factor", 1.0),
        Attribute("normalize", "norm_topk_prob", True),
        ExpertGroupCount("groups", "n_group", 1),
        ExpertGroupCount("kept_groups", "topk_group", 1),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Unpublished("shared", 0, "there are no shared experts"),
        Activation(),
        # The publisher's own program reads these attributes. All models of this family have these values.
        _RepeatedSizes(),
        Expect("partial_rotary_factor", 0.334, written=False),
        Expect("add_swa_attention_sink_bias", True, written=False),
        Expect("add_full_attention_sink_bias", False, written=False),
        Expect("layernorm_epsilon", 1e-5, written=False),
        Expect("scoring_func", "sigmoid", written=False),
        Expect("topk_method", "noaux_tc", written=False),
        Expect("n_shared_experts", 0, written=False),
        Ignore("attention_chunk_size"),  # repeats the window
    ),
    (
        *(*LLAMA_WEIGHTS, *MIXTURE, SELECTION_BIAS),
        Rule(f"{LAYER}self_attn.attention_sink_bias", "mixer.layer.scores.sinks"),
    ),
    ignored_prefixes=("model.mtp.",),
)
