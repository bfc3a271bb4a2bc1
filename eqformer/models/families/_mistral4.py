"""Mistral 4 (Mistral AI 2026): DeepSeek's latent attention with queries that grow, experts chosen by softmax."""

import dataclasses
import functools

from jaxtyping import Array, Key

from ...nn import LogTemperature, RotaryScaling, Transformer, YarnScaling
from .._attributes import Attribute, Entry, Fields
from .._config_types import (
    Attributes,
    Fraction,
    Index,
    Length,
    NotNegative,
    Number,
    OptionalSize,
    PublishedConfig,
    Size,
)
from .._family import Family, MultimodalModel
from .._rotary_attributes import RotaryPositions, RotaryWithGrowth, RotaryWithTemperature
from ._deepseek import build_latent, latent_attributes, LATENT_WEIGHTS, LatentConfig
from ._mixtures import FUSED, mixture_beside_shared


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
    normalise: bool = True
    """Whether the weights of a token's experts are normalized to add up to 1."""
    interleaved: bool = True
    """Whether the channels that are rotated together are neighbors."""
    balance: NotNegative = 0.001
    scaling: RotaryScaling | None = YarnScaling(128.0, 8192, magnitude=1.0)
    temperature: Number = 1.0
    growth: Number = 0.1
    """The strength of `LogTemperature`; 0: none."""
    growth_every: Length = 8192
    """The number of positions after which the scores grow."""
    max_seq: Length = 1_048_576


def build_mistral4(config: Mistral4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mistral 4 with random weights."""
    mixture = functools.partial(mixture_beside_shared, config, group_score="top2", normalise=config.normalise)
    growth = LogTemperature(config.growth_every, config.growth, offset=0) if config.growth else None
    return build_latent(config, mixture, interleaved=config.interleaved, temperature=growth, key=key)


class _RotatedPart(Entry):
    """The part of a head that is rotated, which the head's sizes must confirm."""

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
_PRESETS = {
    "mistral4-byte-500k": Mistral4Config(
        256,
        64,
        layers=4,
        heads=4,
        mlp=128,
        expert_mlp=32,
        q_latent=32,
        latent=32,
        head_dim=16,
        rope_dim=8,
        v_dim=16,
        experts=16,
        scaling=None,
        temperature=0.0,
        growth_every=64,
        tied=True,
    ),
    "mistral4-119b": Mistral4Config(131_072, 4096, layers=36, heads=32, mlp=12_288, expert_mlp=2048, q_latent=1024),
}

MISTRAL4 = Family(
    "mistral4",
    Mistral4Config,
    build_mistral4,
    _PRESETS,
    "Mistral4ForCausalLM",
    "mistral4",
    (
        *latent_attributes(RotaryWithGrowth(_POSITIONS), max_seq=1_048_576),
        _RotatedPart(),
        Attribute("normalise", "norm_topk_prob", True),
        Attribute("interleaved", "rope_interleave", True),
        Attribute("balance", "router_aux_loss_coef", 0.001),
    ),
    # The experts of a layer are published as one array.
    (
        *(rule for rule in LATENT_WEIGHTS if "{expert}" not in rule.name),
        *(dataclasses.replace(rule, variant=False) for rule in FUSED),
    ),
    multimodal=(MultimodalModel("mistral3"),),
)
