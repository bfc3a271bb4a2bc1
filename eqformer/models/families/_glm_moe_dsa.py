"""GLM-5 (GLM-5 team 2026): DeepSeek-V3.2 whose indexer turns neighbouring channels, with wider heads."""

import dataclasses

from jaxtyping import Array, Key

from ...nn import Transformer
from .._attributes import Expect
from .._family import Family
from .._predictors import BEHIND
from ._deepseek_v32 import build_deepseek_v32, DeepSeekV32Config, DSA_ATTRIBUTES, DSA_BYTE, DSA_WEIGHTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMMoEDSAConfig(DeepSeekV32Config):
    """The config of a GLM-5."""

    head_dim: int = 192
    v_dim: int = 256
    index_heads: int = 32
    groups: int = 1
    kept_groups: int = 1
    theta: float = 1_000_000.0
    eps: float = 1e-5
    max_seq: int = 202_752


def build_glm_moe_dsa(config: GLMMoEDSAConfig, *, key: Key[Array, ""]) -> Transformer:
    """A GLM-5 with random weights."""
    return build_deepseek_v32(config, index_interleaved=True, key=key)


_PRESETS = {
    "glm-5-byte-500k": GLMMoEDSAConfig(256, 64, layers=4, heads=4, mlp=128, **DSA_BYTE),
    "glm-5": GLMMoEDSAConfig(154_880, 6144, layers=78, heads=64, mlp=12_288, expert_mlp=2048, q_latent=2048),
}

GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    GLMMoEDSAConfig,
    build_glm_moe_dsa,
    _PRESETS,
    "GlmMoeDsaForCausalLM",
    "glm_moe_dsa",
    (*DSA_ATTRIBUTES, Expect("indexer_rope_interleave", True, written=False)),
    DSA_WEIGHTS,
    predictor=BEHIND,
)
