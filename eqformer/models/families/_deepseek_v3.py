"""DeepSeek-V3 (arXiv:2412.19437), Kimi K2 (arXiv:2507.20534): latent attention, experts chosen by biased sigmoids."""

import dataclasses
import functools

from jaxtyping import Array, Key

from ...nn import Transformer, YarnScaling
from .._attributes import Attribute, Expect, Ignore
from .._family import Family
from .._weight_rules import NUMBERED_PREDICTOR
from ._deepseek import build_latent, latent_attributes, LATENT_WEIGHTS, SigmoidLatentConfig
from ._mixtures import SELECTION_BIAS, sigmoid_mixture_beside_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(SigmoidLatentConfig):
    """The config of a DeepSeek-V3."""

    interleaved: bool = True
    """Whether the channels that are rotated together are neighbors."""


def build_deepseek_v3(config: DeepSeekV3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a DeepSeek-V3 with random weights."""
    mixture = functools.partial(sigmoid_mixture_beside_shared, config, normalise=config.normalise)
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
_PRESETS = {
    "deepseek-v3-byte-500k": DeepSeekV3Config(
        vocab=256,
        embed=64,
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
        top_k=4,
        first_dense=1,
        groups=4,
        kept_groups=2,
        tied=True,
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
    _PRESETS,
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    (
        *latent_attributes(max_seq=4096),
        Attribute("normalise", "norm_topk_prob", True),
        Attribute("interleaved", "rope_interleave", True),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        Expect("scoring_func", "sigmoid"),
        Expect("topk_method", "noaux_tc"),
        Ignore("num_mtp_layers", num_nextn_predict_layers=0),  # predictors, which transformers skips too
    ),
    (*LATENT_WEIGHTS, SELECTION_BIAS),
    predictor=NUMBERED_PREDICTOR,
    aliases=("kimi_k2",),
)
