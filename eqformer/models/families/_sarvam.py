"""Sarvam 30B, a smaller GLM-4.5 that rotates whole heads, and Sarvam 105B, a smaller DeepSeek-V3 (Sarvam AI 2026)."""

import dataclasses

from .._attributes import Activation, Attribute, Count, Entry, Expect, Ignore
from .._config_types import Fraction, Index, Length, NotNegative, Number, Positive, Size
from .._family import Family
from .._rotary_attributes import RotaryFraction, RotaryPositions
from .._weight_rules import Rule
from ._common import decoder_attributes, EDGES, GATED, INTO_HEADS, LAYER, leaf_paths, OF_HEADS, OUT_OF_HEADS, PRE_NORMS
from ._deepseek import latent_attention_attributes, LATENT_BYTE, LATENT_WEIGHTS
from ._deepseek_v3 import build_deepseek_v3, DeepSeekV3Config
from ._glm import build_glm4_moe, GLM4MoEConfig
from ._mixtures import ExpertGroupCount, FIRST_DENSE, MIXTURE, SELECTION_BIAS, SHARED


# The publisher's own configurations call the experts by other names than transformers.
_MIXTURE_ATTRIBUTES: tuple[Entry, ...] = (
    Count("expert_mlp", "moe_intermediate_size"),
    Count("experts", ("num_experts", "n_routed_experts"), 128, written=("n_routed_experts",)),
    Count("top_k", "num_experts_per_tok"),
    Count("shared", ("num_shared_experts", "n_shared_experts"), 1, written=("n_shared_experts",), minimum=0),
    Attribute("scale", "routed_scaling_factor"),
    ExpertGroupCount("groups", "n_group", 1),
    ExpertGroupCount("kept_groups", "topk_group", 1),
    FIRST_DENSE,
    Attribute("normalize", "norm_topk_prob", True),
    Attribute("balance", "router_aux_loss_coef", 0.0001),
    Ignore("num_mtp_layers", num_nextn_predict_layers=0),  # layers for multi-token prediction
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SarvamMoEConfig(GLM4MoEConfig):
    """The config of a Sarvam 30B; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    rotary_fraction: Fraction = 1.0
    top_k: Size = 6
    scale: Number = 2.5
    theta: Positive = 8_000_000.0
    eps: NotNegative = 1e-6
    qk_norm: bool = True


_MOE_PRESETS = {
    "sarvam-moe-byte-500k": SarvamMoEConfig(
        256, 64, 4, 4, 2, 128, expert_mlp=32, experts=12, top_k=4, head_dim=16, theta=1e4, tied=True
    ),
    "sarvam-30b": SarvamMoEConfig(262_144, 4096, 19, 64, 4, 8192, expert_mlp=1024, head_dim=64),
}

_ATTENTION, _QKV = f"{LAYER}attention.", ("query", "key", "value")
_SELECTION_BIAS = dataclasses.replace(SELECTION_BIAS, name=f"{LAYER}mlp.gate.expert_bias")
SARVAM_MOE = Family(
    "sarvam_moe",
    SarvamMoEConfig,
    build_glm4_moe,
    _MOE_PRESETS,
    "SarvamMoEForCausalLM",
    "sarvam_moe",
    (
        *decoder_attributes(RotaryPositions(8_000_000.0), head_dim=64, kv_heads=4, max_seq=131_072),
        *_MIXTURE_ATTRIBUTES,
        RotaryFraction(1.0),
        Attribute("qk_norm", "use_qk_norm", True),
        Attribute("bias", ("use_qkv_bias", "attention_bias"), False, written=("attention_bias",)),
        Activation(),
    ),
    (
        Rule("model.word_embeddings.weight", "embedding.weight"),
        *(*EDGES[1:], *PRE_NORMS, *GATED, *MIXTURE, *SHARED, _SELECTION_BIAS),
        Rule(f"{_ATTENTION}query_key_value.weight", leaf_paths(_QKV, "weight"), INTO_HEADS),
        Rule(f"{_ATTENTION}query_key_value.bias", leaf_paths(_QKV, "bias"), OF_HEADS),
        Rule(f"{_ATTENTION}dense.weight", "mixer.layer.output.weight", OUT_OF_HEADS),
        *(Rule(f"{_ATTENTION}{name}_layernorm.weight", f"mixer.layer.{name}_norm.weight") for name in _QKV[:2]),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SarvamMLAConfig(DeepSeekV3Config):
    """The config of a Sarvam 105B."""

    q_latent: Size | None = None
    experts: Size = 128
    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    max_seq: Length = 4096


_MLA_PRESETS = {
    "sarvam-mla-byte-500k": SarvamMLAConfig(**LATENT_BYTE, experts=12, top_k=4, tied=True),
    # Without the scaling of rotary positions, which only `config.json` states.
    "sarvam-105b": SarvamMLAConfig(262_144, 4096, layers=32, heads=64, mlp=16_384, expert_mlp=2048),
}

SARVAM_MLA = Family(
    "sarvam_mla",
    SarvamMLAConfig,
    build_deepseek_v3,
    _MLA_PRESETS,
    "SarvamMLAForCausalLM",
    "sarvam_mla",
    (
        *latent_attention_attributes(max_seq=4096),
        *_MIXTURE_ATTRIBUTES,
        Attribute("interleaved", "rope_interleave", True),
        Expect("scoring_func", "sigmoid", written=False),
        Expect("topk_method", "noaux_tc", written=False),
        Ignore("q_head_dim"),  # a sum of other sizes
    ),
    (*LATENT_WEIGHTS, SELECTION_BIAS),
)
