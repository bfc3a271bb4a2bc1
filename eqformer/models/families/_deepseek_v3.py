"""DeepSeek-V3 (arXiv:2412.19437), Kimi K2 (arXiv:2507.20534), A.X K1 and DeepSeek-V3.2 (arXiv:2512.02556).

All have latent attention, and experts chosen by biased sigmoids. A.X K1 (SK Telecom 2026, arXiv:2601.09200) adds norms
after mixtures. DeepSeek-V3.2 adds an indexer that chooses the keys which each query sees.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

from jaxtyping import Array, Key

from ...nn import Indexer, Rotary, Transformer, YarnScaling
from .._attributes import Attribute, Count, Entry, Expect, Ignore
from .._config_types import Index, Length, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import AllLayers
from .._weight_rules import NUMBERED_PREDICTOR, Rule
from ._common import LAYER
from ._decoder import rotary_of, Together
from ._deepseek import build_latent, latent_attributes, LATENT_BYTE, LATENT_WEIGHTS, LatentKind, SigmoidLatentConfig
from ._mixtures import (
    FIRST_DENSE,
    FUSED,
    LayerMixtures,
    mixture_beside_shared,
    SELECTION_BIAS,
    sigmoid_mixture_beside_shared,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(SigmoidLatentConfig):
    """The config of a DeepSeek-V3."""

    interleaved: bool = True
    """Whether the channels that are rotated together are neighbors."""


def build_deepseek_v3(config: DeepSeekV3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a DeepSeek-V3 with random weights."""
    mixture = functools.partial(sigmoid_mixture_beside_shared, config, normalize=config.normalize)
    return build_latent(config, mixture, interleaved=config.interleaved, key=key)


_V3 = DeepSeekV3Config(
    vocab=129_280,
    embed=7168,
    layers=61,
    heads=128,
    mlp=18_432,
    expert_mlp=2048,
    q_latent=1536,
    scaling=YarnScaling(40.0, 4096, magnitude=1.0),
    temperature=1.0,
)
_DEEPSEEK_V3_PRESETS = {
    "deepseek-v3-byte-500k": DeepSeekV3Config(
        **LATENT_BYTE, q_latent=32, experts=16, top_k=4, first_dense=1, groups=4, kept_groups=2, tied=True
    ),
    "deepseek-v3": _V3,
    "kimi-k2": dataclasses.replace(
        _V3,
        vocab=163_840,
        heads=64,
        experts=384,
        first_dense=1,
        groups=1,
        kept_groups=1,
        scale=2.827,
        theta=50_000.0,
        scaling=YarnScaling(32.0, 4096, beta_fast=1.0, magnitude=1.0),
    ),
}

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    DeepSeekV3Config,
    build_deepseek_v3,
    _DEEPSEEK_V3_PRESETS,
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    (
        *latent_attributes(max_seq=4096),
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("interleaved", "rope_interleave", True),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Expect("scoring_func", "sigmoid"),
        Expect("topk_method", "noaux_tc"),
        Ignore(
            "num_mtp_layers", num_nextn_predict_layers=0
        ),  # layers for multi-token prediction, which transformers skips too
    ),
    (*LATENT_WEIGHTS, SELECTION_BIAS),
    predictor=NUMBERED_PREDICTOR,
    aliases=("kimi_k2",),
    multimodal=(MultimodalModel("kimi_k25"), MultimodalModel("kimi_k25", "kimi_k2")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AXK1Config(DeepSeekV3Config):
    """The config of an A.X K1."""

    q_latent: Size
    experts: Size = 192
    first_dense: Index = 1
    balanced: bool = True
    """Whether the choice of experts has a bias. No attribute states it: a folder without biases is read as False."""
    max_seq: Length = 32_768


def build_axk1(config: AXK1Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an A.X K1 with random weights."""
    mixture = functools.partial(
        mixture_beside_shared,
        config,
        score="sigmoid",
        normalize=config.normalize,
        balanced=config.balanced,
        group_score="top2",
        balance_normalize=True,
    )
    return build_latent(config, mixture, interleaved=config.interleaved, mixture_norms=True, key=key)


def _with_stored_biases(config: Any, names: Collection[str]) -> AXK1Config:
    """Return the config without biases of the choice of experts if the folder has none."""
    return dataclasses.replace(config, balanced=any(name.endswith("e_score_correction_bias") for name in names))


_AXK1_PRESETS = {
    "axk1-byte-500k": AXK1Config(
        **LATENT_BYTE, q_latent=32, experts=16, top_k=4, first_dense=1, groups=4, kept_groups=2, tied=True
    ),
    "a.x-k1": AXK1Config(
        *(163_840, 7168), layers=61, heads=64, mlp=18_432, expert_mlp=2048, q_latent=1536, theta=10_000.0
    ),
}

_AFTER_MIXTURE = "post_mlp_layernorm."
AXK1 = Family(
    "axk1",
    AXK1Config,
    build_axk1,
    _AXK1_PRESETS,
    "AXK1ForCausalLM",
    "axk1",
    (
        *latent_attributes(
            mixtures=(Attribute("first_dense", "first_k_dense_replace", 1), LayerMixtures()), max_seq=32_768
        ),
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("interleaved", "rope_interleave", True),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Expect("scoring_func", "sigmoid", written=False),
        # Transformers chooses experts in the same way for all methods. Published folders have no predictors.
        Ignore("topk_method", "num_nextn_predict_layers"),
    ),
    (
        *(*LATENT_WEIGHTS, *FUSED, SELECTION_BIAS),
        Rule(f"{LAYER}{_AFTER_MIXTURE}weight", "feed_forward.output_norm.weight"),
    ),
    # Published folders have norms after dense layers too, which the model does not use.
    unread=lambda config: tuple(
        f"model.layers.{layer}.{_AFTER_MIXTURE}" for layer, is_mixture in enumerate(config.mixtures) if not is_mixture
    ),
    aliases=("AXK1",),
    as_stored=_with_stored_biases,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV32Config(SigmoidLatentConfig):
    """The config of a DeepSeek-V3.2."""

    q_latent: Size
    index_heads: Size = 64
    """The number of the indexer's heads."""
    index_dim: Size = 128
    """Channels of a head of the indexer; `rope_dim` of them are rotated."""
    index_top_k: Length = 2048
    """The number of keys that a query sees."""


def build_deepseek_v32(
    config: DeepSeekV32Config,
    *,
    index_interleaved: bool = False,
    kinds: Sequence[LatentKind | Together[LatentKind]] | None = None,
    key: Key[Array, ""],
) -> Transformer:
    """Return a DeepSeek-V3.2 with random weights; layers of `kinds` that read selected keys have no indexer."""
    mixture = functools.partial(sigmoid_mixture_beside_shared, config, normalize=config.normalize)
    rotary = rotary_of(config, config.rope_dim, "rope_dim", interleaved=index_interleaved, scaling=config.scaling)

    indexer = functools.partial(indexer_of, config, rotary)
    return build_latent(config, mixture, interleaved=True, indexer=indexer, kinds=kinds, key=key)


def indexer_of(
    config: DeepSeekV32Config,
    rotary: Rotary,
    key: Key[Array, ""],
    *,
    rotates_last: bool = False,
    norm_eps: float = 1e-6,
) -> Indexer:
    """Return the indexer of a layer; the options are arguments of `Indexer`."""
    return Indexer(
        embed=config.embed,
        q_latent=config.q_latent,
        heads=config.index_heads,
        dim=config.index_dim,
        top_k=config.index_top_k,
        rotary=rotary,
        rotates_last=rotates_last,
        norm_eps=norm_eps,
        key=key,
    )


DSA_ATTRIBUTES: tuple[Entry, ...] = (
    AllLayers("layer_types", "indexed_attention"),
    Count("q_latent", "q_lora_rank"),
    Count("index_heads", "index_n_heads"),
    Count("index_dim", "index_head_dim"),
    Count("index_top_k", "index_topk"),
    Attribute("normalize", "norm_topk_prob", True),
    Attribute("balance", "router_aux_loss_coef", 0.0001),
    Expect("scoring_func", "sigmoid"),
    Expect("topk_method", "noaux_tc"),
    Expect("rope_interleave", True, written=False),
    Expect("mlp_bias", False, written=False),
    Ignore(
        "num_mtp_layers", num_nextn_predict_layers=0
    ),  # layers for multi-token prediction, which transformers skips too
)
_EACH_CHOOSES = (
    AllLayers("indexer_types", "full"),
    Expect("index_topk_freq", 1, 0, written=False),
    Expect("index_topk_pattern", None, written=False),
    Ignore("index_skip_topk_offset"),
)
_INDEXER = f"{LAYER}self_attn.indexer."
DSA_WEIGHTS = (
    *(*LATENT_WEIGHTS, SELECTION_BIAS),
    Rule(f"{_INDEXER}wq_b.weight", "mixer.layer.indexer.query.weight", "(heads dim) latent -> heads dim latent"),
    Rule(f"{_INDEXER}wk.weight", "mixer.layer.indexer.key.weight"),
    Rule(f"{_INDEXER}k_norm.weight", "mixer.layer.indexer.key_norm.weight"),
    Rule(f"{_INDEXER}k_norm.bias", "mixer.layer.indexer.key_norm.bias"),
    Rule(f"{_INDEXER}weights_proj.weight", "mixer.layer.indexer.weight.weight"),
)

_DEEPSEEK_V32_PRESETS = {
    "deepseek-v3.2-byte-500k": DeepSeekV32Config(
        **LATENT_BYTE,
        q_latent=32,
        index_heads=4,
        index_dim=16,
        index_top_k=64,
        experts=12,
        top_k=4,
        first_dense=1,
        groups=1,
        kept_groups=1,
        bias=True,
        tied=True,
    ),
    "deepseek-v3.2": DeepSeekV32Config(
        129_280,
        7168,
        layers=61,
        heads=128,
        mlp=18_432,
        expert_mlp=2048,
        q_latent=1536,
        scaling=YarnScaling(40.0, 4096, magnitude=1.0),
        temperature=1.0,
    ),
}

DEEPSEEK_V32 = Family(
    "deepseek_v32",
    DeepSeekV32Config,
    build_deepseek_v32,
    _DEEPSEEK_V32_PRESETS,
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    (*latent_attributes(mixtures=(FIRST_DENSE, LayerMixtures()), max_seq=163_840), *DSA_ATTRIBUTES, *_EACH_CHOOSES),
    DSA_WEIGHTS,
    predictor=NUMBERED_PREDICTOR,
)
