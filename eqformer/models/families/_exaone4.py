"""Models of LG AI Research.

EXAONE 3.0, 3.5 and Deep (2024 and 2025, arXiv:2408.03541, arXiv:2412.04862) are Llamas under other names of arrays.
EXAONE 4 (2025, arXiv:2507.11407) has norms after sublayers. If a model of EXAONE 4 has windows, only layers with a
window have rotary positions. K-EXAONE (2026) has norms before sublayers, and DeepSeek-V3's mixtures.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, Llama3Scaling, Transformer
from .._attributes import Activation, Attribute, Count, Expect, Fields, Ignore
from .._config_types import Index, Length, NotNegative, Number, Positive, PublishedConfig
from .._family import DecoderConfig, Family
from .._layer_attributes import all_but_every, NullableWindows, Period
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import (
    ATTENTION,
    attention_weights,
    decoder_attributes,
    EDGES,
    GATED,
    gated_weights,
    head_norm_weights,
    HeadSize,
    KeyHeads,
    LAYER,
    LAYER_H,
    LLAMA_WEIGHTS,
    POST_NORMS,
    WIDTH,
)
from ._decoder import (
    attention,
    damping,
    decoder,
    gated_mlp,
    head_norms,
    layer_windows,
    post_norm_block,
    pre_norm_block,
    rotary_of,
)
from ._llama import build_llama, LlamaConfig
from ._mixtures import DenseLayersConfig, LayerMixtures, MIXTURE, SELECTION_BIAS, SHARED, SigmoidMoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaoneConfig(LlamaConfig):
    """The config of an EXAONE 3.0, 3.5 or Deep."""

    theta: Positive = 1_000_000.0
    max_seq: Length = 32_768


class _RenamedActivation(Activation):
    """The activation, as `hidden_act` or as `activation_function`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `activation`."""
        is_stated = published.take(_ACTIVATION.published, None) is not None
        return _ACTIVATION.read(published) if is_stated else super().read(published)


_ACTIVATION = Activation(published="activation_function")
_SCALING = Llama3Scaling(8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
_EXAONE_PRESETS = {
    "exaone-byte-500k": ExaoneConfig(256, 96, 4, 6, 2, 256, theta=10_000.0, tied=True),
    "exaone-3.0-7.8b": ExaoneConfig(102_400, 4096, 32, 32, 8, 14_336, theta=500_000.0, max_seq=4096),
    "exaone-3.5-2.4b": ExaoneConfig(102_400, 2560, 30, 32, 8, 7168, scaling=_SCALING, tied=True),
    "exaone-3.5-7.8b": ExaoneConfig(102_400, 4096, 32, 32, 8, 14_336, scaling=_SCALING),
    "exaone-3.5-32b": ExaoneConfig(102_400, 5120, 64, 40, 8, 27_392, scaling=_SCALING),
}

EXAONE = Family(
    "exaone",
    ExaoneConfig,
    build_llama,
    _EXAONE_PRESETS,
    "ExaoneForCausalLM",
    "exaone",
    (
        Count("vocab", "vocab_size", 102_400),
        Count("embed", "hidden_size", 4096),
        Count("layers", ("num_layers", "num_hidden_layers"), 32, written=("num_hidden_layers",)),
        Count("heads", "num_attention_heads", 32),
        *(WIDTH, KeyHeads(8), HeadSize(), RotaryPositions(500_000.0)),
        Attribute("eps", ("layer_norm_epsilon", "rms_norm_eps"), 1e-5, written=("rms_norm_eps",)),
        Attribute("tied", "tie_word_embeddings", False),
        Attribute("max_seq", "max_position_embeddings", 4096),
        *(Attribute("bias", "attention_bias", False), Attribute("mlp_bias", "mlp_bias", False)),
        _RenamedActivation(),
    ),
    (
        Rule("transformer.wte.weight", "embedding.weight"),
        Rule("transformer.ln_f.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight"),
        *attention_weights(prefix=f"{LAYER_H}attn.attention.", output="out"),
        Rule(f"{LAYER_H}ln_1.weight", "mixer.norm.weight"),
        Rule(f"{LAYER_H}ln_2.weight", "feed_forward.norm.weight"),
        *gated_weights(prefix=f"{LAYER_H}mlp.", names=("c_fc_0", "c_fc_1", "c_proj"), bias=True),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exaone4Config(DecoderConfig):
    """The config of an EXAONE 4."""

    window: Length | None = 4096
    """The number of tokens that the layers of `window_layers` see; None: no windows, and rotary positions in all
    layers."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`. With a window, the other layers have no rotary positions."""
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 131_072


def build_exaone4(config: Exaone4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an EXAONE 4 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = _attention(config, window, output_std=None, key=mixer_key)
        return post_norm_block(config, mixer, gated_mlp(config, output_std=None, key=feed_forward_key))

    return decoder(config, block, layer_windows(config), key=key)


def _attention(
    config: "Exaone4Config | ExaoneMoEConfig", window: int | None, *, output_std: float | None, key: Key[Array, ""]
) -> Attention:
    """Return attention with rotary positions in layers with a window, or in all layers if no layer has a window."""
    is_rotated = window is not None or config.window is None
    rotary = rotary_of(config, config.head_size, scaling=config.scaling) if is_rotated else None
    return attention(config, window=window, rotary=rotary, output_std=output_std, **head_norms(config), key=key)


def _local(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    """Return the layers with a window, by `sliding_window_pattern`; no layers if it is null or 0.

    The pattern is a period, whose last layer has no window, or a text such as `LLLG`, in which `L` is a window.
    """
    name = "sliding_window_pattern"
    pattern = published.checked(name, published.nullable(name, 4), str | Index | None)
    if not pattern:  # Transformers writes a pattern of 0 if there is no window.
        return ()
    if not isinstance(pattern, str):
        return Period(4, (name,), but=True)(published, layers)
    if {*pattern} - {*"LG"}:
        published.refuse(
            f"{name}={pattern!r}: each letter must be L, for a layer with a window, or G, for a layer without a window."
        )
    return tuple(number for number in range(layers) if pattern[number % len(pattern)] == "L")


_LONG = Llama3Scaling(16.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
_PRESETS = {
    "exaone4-byte-500k": Exaone4Config(
        256, 96, 4, 6, 2, 256, window=64, window_layers=all_but_every(4, 4), theta=1e4, tied=True
    ),
    "exaone4-1.2b": Exaone4Config(
        102_400, 2048, 30, 32, 8, 4096, window=None, scaling=_LONG, tied=True, max_seq=65_536
    ),
    "exaone4-32b": Exaone4Config(102_400, 5120, 64, 40, 8, 27_392, window_layers=all_but_every(4, 64), scaling=_LONG),
}

EXAONE4 = Family(
    "exaone4",
    Exaone4Config,
    build_exaone4,
    _PRESETS,
    "Exaone4ForCausalLM",
    "exaone4",
    (
        *decoder_attributes(kv_heads=32),
        NullableWindows(4096, _local),
        Activation(),
        Expect("reorder_qk_norm", True, written=False),
    ),
    (*EDGES, *ATTENTION, *head_norm_weights(), *GATED, *POST_NORMS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaoneMoEConfig(SigmoidMoEConfig, DenseLayersConfig):
    """The config of a K-EXAONE; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    window: Length | None = 4096
    """The number of tokens that the layers of `window_layers` see; None: no windows, and rotary positions in all
    layers."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`. With a window, the other layers have no rotary positions."""
    scale: Number = 2.5
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 262_144


def build_exaone_moe(config: ExaoneMoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a K-EXAONE with random weights."""

    def block(kind: tuple[int | None, bool], key: Key[Array, ""]) -> Block:
        window, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        output_std = damping(config) * (config.heads * config.head_size) ** -0.5
        mixer = _attention(config, window, output_std=output_std, key=mixer_key)
        return pre_norm_block(config, mixer, config.feed_forward(is_mixture, feed_forward_key))

    return decoder(config, block, list(zip(layer_windows(config), config.mixtures, strict=True)), key=key)


_MOE_PRESETS = {
    "exaone-moe-byte-500k": ExaoneMoEConfig(
        *(256, 64, 4, 4, 2, 128),
        expert_mlp=32,
        experts=12,
        top_k=4,
        window=64,
        window_layers=all_but_every(4, 4),
        theta=1e4,
        tied=True,
    ),
    "k-exaone-236b-a23b": ExaoneMoEConfig(
        *(153_600, 6144, 48, 64, 8, 18_432),
        expert_mlp=2048,
        window=128,
        window_layers=all_but_every(4, 48),
        head_dim=128,
    ),
}

EXAONE_MOE = Family(
    "exaone_moe",
    ExaoneMoEConfig,
    build_exaone_moe,
    _MOE_PRESETS,
    "ExaoneMoeForCausalLM",
    "exaone_moe",
    (
        *decoder_attributes(kv_heads=32),
        NullableWindows(4096, _local),
        Count("expert_mlp", "moe_intermediate_size", 1024),
        Count("experts", ("num_experts", "num_local_experts"), 64),
        Count("top_k", "num_experts_per_tok", 8),
        Count("shared", "num_shared_experts", 1, minimum=0),
        *(Attribute("first_dense", "first_k_dense_replace", 1), LayerMixtures()),
        Attribute("scale", "routed_scaling_factor", 2.5),
        Attribute("normalize", "norm_topk_prob", True),
        Count("groups", "n_group", 1),
        Count("kept_groups", "topk_group", 1),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Activation(),
        # The publisher's own program reads these attributes. All models of this family have these values.
        Expect("scoring_func", "sigmoid", written=False),
        Expect("topk_method", "noaux_tc", written=False),
        Expect("first_last_k_dense_replace", 1, written=False),
        Ignore("is_moe_layer", "mtp_share_layers", "num_nextn_predict_layers"),  # repeated, or for predictors
    ),
    (
        *(*LLAMA_WEIGHTS, *MIXTURE, *SHARED),
        dataclasses.replace(SELECTION_BIAS, name=f"{LAYER}mlp.e_score_correction_bias"),
    ),
)
