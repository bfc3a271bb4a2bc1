"""DeepSeek-V3 (arXiv:2412.19437): latent attention, sigmoid scores with a bias for the choice, groups of experts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Key

from ...nn import (
    LoadBalance,
    RotaryScaling,
    TopKRouter,
    Transformer,
    YarnScaling,
)
from .._config import Config
from .._weights import Published, Weight
from ._common import edge_weights
from ._deepseek import latent_attributes, latent_block, latent_block_weights, latent_numbers, mixtures_after_dense
from ._pattern import decoder, layer_weights


@dataclasses.dataclass(frozen=True)
class DeepSeekV3:
    """The numbers of a DeepSeek-V3.

    `mlp` is a dense layer's width, `expert_mlp` an expert's; `shared` counts experts that see every token. `head_dim`
    channels of a head's key are not rotated. With a `temperature` (of YaRN, `mscale_all_dim`), scores grow with its
    factor.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    mlp: int
    expert_mlp: int
    q_latent: int | None
    latent: int = 512
    head_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    experts: int = 256
    top_k: int = 8
    shared: int = 1
    first_dense: int = 3  # layers without experts
    groups: int = 8
    kept_groups: int = 4
    scale: float = 2.5
    normalise: bool = True
    interleaved: bool = True  # whether the channels that turn together are neighbours
    balance: float = 0.0001  # of `LoadBalance`, row by row
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    temperature: float = 0.0
    eps: float = 1e-6
    tied: bool = False
    max_seq: int = 163_840  # the longest rows it was trained on; it changes nothing


def build_deepseek_v3(numbers: DeepSeekV3, *, key: Key[Array, ""]) -> Transformer:
    """A DeepSeek-V3 with random weights."""
    embed = numbers.embed

    def router(key: Key[Array, ""]) -> TopKRouter:
        return TopKRouter(
            embed=embed,
            experts=numbers.experts,
            top_k=numbers.top_k,
            score="sigmoid",
            normalise=numbers.normalise,
            balanced=True,
            group_score="top2",
            scale=numbers.scale,
            groups=numbers.groups,
            kept_groups=numbers.kept_groups,
            key=key,
        )

    losses = (LoadBalance(numbers.balance, per="sequence", normalise=True),) if numbers.balance else ()
    block = lambda is_mixture, key: latent_block(
        numbers, is_mixture, router=router, losses=losses, interleaved=numbers.interleaved, key=key
    )
    return decoder(numbers, block, mixtures_after_dense(numbers), key=key)


DEEPSEEK_V3_PRESETS = {
    "deepseek-v3-byte-500k": DeepSeekV3(
        256,
        64,
        4,
        4,
        128,
        32,
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
    ),  # fmt: skip
    "deepseek-v3": DeepSeekV3(
        129_280, 7168, 61, 128, 18_432, 2048, 1536, scaling=YarnScaling(40.0, 4096, magnitude=1.0), temperature=1.0
    ),
}


def _read(config: Config) -> DeepSeekV3:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):  # layers behind the model, which transformers skips too
        config.take(name, None)
    return DeepSeekV3(
        **latent_numbers(config),
        normalise=config.take("norm_topk_prob", True),
        interleaved=config.take("rope_interleave", True),
        balance=config.take("router_aux_loss_coef", 0.0001),
    )


def _write(numbers: DeepSeekV3) -> dict[str, Any]:
    return latent_attributes(numbers) | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": numbers.normalise,
        "rope_interleave": numbers.interleaved,
        "router_aux_loss_coef": numbers.balance,
        "num_nextn_predict_layers": 0,
    }


def _weights(numbers: DeepSeekV3) -> list[Weight]:
    def rules(is_mixture: bool, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        found = latent_block_weights(numbers, is_mixture, where, layers)
        bias = lambda m: where(m).feed_forward.layer.router.selection_bias
        name = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
        return [*found, Weight(name, bias, "", layers)] if is_mixture else found

    return [*edge_weights(numbers.tied), *layer_weights(mixtures_after_dense(numbers), rules)]


_MTP = ("model.layers.61.",)
DEEPSEEK_V3_PUBLISHED = Published(
    "DeepseekV3ForCausalLM", "deepseek_v3", _read, _write, _weights, ignored_prefixes=_MTP
)
