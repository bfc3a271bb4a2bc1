"""GLM-5 (GLM-5 team 2026): DeepSeek-V3.2 with wider heads; some layers see the keys that an earlier layer chose."""

import dataclasses

from jaxtyping import Array, Key

from ...nn import Transformer
from .._attributes import Entry, Expect, Fields
from .._config_types import Attributes, Index, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import Family
from .._layer_attributes import layers_of
from .._weight_rules import NUMBERED_PREDICTOR
from ._decoder import Together
from ._deepseek import latent_attributes, LATENT_BYTE, LatentKind
from ._deepseek_v3 import build_deepseek_v32, DeepSeekV32Config, DSA_ATTRIBUTES, DSA_WEIGHTS
from ._mixtures import FIRST_DENSE, LayerMixtures


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMMoEDSAConfig(DeepSeekV32Config):
    """The config of a GLM-5."""

    head_dim: Size = 192
    v_dim: Size = 256
    index_heads: Size = 32
    reading_layers: tuple[Index, ...] = ()
    """The numbers of the layers without an indexer; they see the keys that the last layer with an indexer chose."""
    groups: Size = 1
    kept_groups: Size = 1
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 202_752


def build_glm_moe_dsa(config: GLMMoEDSAConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a GLM-5 with random weights; its indexers rotate neighboring channels together."""
    return build_deepseek_v32(config, index_interleaved=True, kinds=_kinds(config), key=key)


def _kinds(config: GLMMoEDSAConfig) -> list[LatentKind | Together[LatentKind]]:
    """Return each layer with an indexer together with the layers that read its choice."""
    rows: list[list[LatentKind]] = []
    for layer, is_mixture in enumerate(config.mixtures):
        if layer not in config.reading_layers:
            rows.append([LatentKind(is_mixture)])
        elif rows:
            rows[-1] = [rows[-1][0]._replace(shares="choice"), *rows[-1][1:], LatentKind(is_mixture, reads="choice")]
        else:
            raise ValueError(
                f"GLMMoEDSAConfig(reading_layers={config.reading_layers}): no layer before the first has an indexer; "
                "leave 0 out."
            )
    return [row[0] if len(row) == 1 else Together(tuple(row)) for row in rows]


class ReadingLayers(Entry):
    """`indexer_types` or, without a list, a pattern of letters or a period from which the list is made."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `reading_layers`; refuse other kinds, lists of another length, and a first layer that reads."""
        layers, types = layers_of(published), published.listed("indexer_types", str)
        pattern = published.read("index_topk_pattern", str | list[str], None)
        period = published.count("index_topk_freq", 1, least=0)
        first = published.count("index_skip_topk_offset", 2, least=0)
        if types is None and isinstance(pattern, str):
            types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        if types is None and isinstance(pattern, list):
            types = pattern
        if types is None:
            chooses = [max(layer - first + 1, 0) % max(period, 1) == 0 for layer in range(layers)]
            types = ["full" if chooses_keys else "shared" for chooses_keys in chooses]
        if len(types) != layers or {*types} - {"full", "shared"} or types[0] != "full":
            published.refuse(
                f"indexer_types={types} must name {layers} layers, 'full' or 'shared', and the first 'full'."
            )
        return {"reading_layers": tuple(layer for layer, kind in enumerate(types) if kind == "shared")}

    def write(self, config: GLMMoEDSAConfig) -> Attributes:
        """Return the list."""
        return {"indexer_types": ["shared" if n in config.reading_layers else "full" for n in range(config.layers)]}


_PRESETS = {
    "glm-5-byte-500k": GLMMoEDSAConfig(
        **LATENT_BYTE,
        q_latent=32,
        index_heads=4,
        index_dim=16,
        index_top_k=64,
        experts=12,
        top_k=4,
        first_dense=1,
        tied=True,
    ),
    "glm-5": GLMMoEDSAConfig(154_880, 6144, layers=78, heads=64, mlp=12_288, expert_mlp=2048, q_latent=2048),
}

GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    GLMMoEDSAConfig,
    build_glm_moe_dsa,
    _PRESETS,
    "GlmMoeDsaForCausalLM",
    "glm_moe_dsa",
    (
        *latent_attributes(mixtures=(FIRST_DENSE, LayerMixtures()), max_seq=202_752),
        *DSA_ATTRIBUTES,
        ReadingLayers(),
        Expect("indexer_rope_interleave", True, written=False),
    ),
    DSA_WEIGHTS,
    predictor=NUMBERED_PREDICTOR,
)
