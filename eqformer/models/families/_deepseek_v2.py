"""DeepSeek-V2 (arXiv:2405.04434): latent attention, and many small experts beside shared ones."""

import dataclasses
import functools

from jaxtyping import Array, Key

from ...nn import Transformer, YarnScaling
from .._attributes import Attribute, Entry, Expect, Fields
from .._config_types import Attributes, Index, NotNegative, Number, OptionalSize, PublishedConfig, Size
from .._family import Family
from ._deepseek import build_latent, latent_attributes, LATENT_BYTE, LATENT_WEIGHTS, LatentConfig
from ._mixtures import mixture_beside_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV2Config(LatentConfig):
    """The config of a DeepSeek-V2."""

    experts: Size = 64
    top_k: Size = 6
    shared: OptionalSize = 2
    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 1.0
    balance: NotNegative = 0.001


def build_deepseek_v2(config: DeepSeekV2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a DeepSeek-V2 with random weights."""
    mixture = functools.partial(mixture_beside_shared, config)
    return build_latent(config, mixture, interleaved=True, key=key)


class _Method(Entry):
    """The attribute `topk_method`: experts are chosen among all (greedy), or only from a token's best groups."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return one group if the method is greedy, whatever `n_group` and `topk_group` say; else no field."""
        published.expect("topk_method", "greedy", "group_limited_greedy")
        is_greedy = published.text("topk_method", "greedy") == "greedy"
        return {"groups": 1, "kept_groups": 1} if is_greedy else {}

    def write(self, config: DeepSeekV2Config) -> Attributes:
        """Return the method's name."""
        return {"topk_method": "greedy" if config.groups == 1 else "group_limited_greedy"}


_YARN = YarnScaling(40.0, 4096, magnitude=1.0)
_PRESETS = {
    "deepseek-v2-byte-500k": DeepSeekV2Config(**LATENT_BYTE, q_latent=None, experts=16, top_k=4, tied=True),
    "deepseek-v2-lite": DeepSeekV2Config(
        vocab=102_400,
        embed=2048,
        layers=27,
        heads=16,
        mlp=10_944,
        expert_mlp=1408,
        q_latent=None,
        scaling=_YARN,
        temperature=0.707,
    ),
    "deepseek-v2": DeepSeekV2Config(
        vocab=102_400,
        embed=5120,
        layers=60,
        heads=128,
        mlp=12_288,
        expert_mlp=1536,
        q_latent=1536,
        experts=160,
        groups=8,
        kept_groups=3,
        scale=16.0,
        scaling=_YARN,
        temperature=0.707,
    ),
}

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    DeepSeekV2Config,
    build_deepseek_v2,
    _PRESETS,
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    (
        *latent_attributes(max_seq=2048),
        _Method(),
        Attribute("balance", ("router_aux_loss_coef", "aux_loss_alpha"), 0.001, written=("aux_loss_alpha",)),
        Expect("scoring_func", "softmax"),
        Expect("norm_topk_prob", False),
        Expect("mlp_bias", False),
    ),
    LATENT_WEIGHTS,
)
