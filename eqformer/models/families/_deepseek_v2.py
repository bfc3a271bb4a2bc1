"""DeepSeek-V2 (arXiv:2405.04434): latent attention, and many small experts beside shared ones."""

import dataclasses
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
class DeepSeekV2:
    """The numbers of a DeepSeek-V2.

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
    experts: int = 64
    top_k: int = 6
    shared: int = 2
    first_dense: int = 1  # layers without experts
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    balance: float = 0.001  # of `LoadBalance`, row by row
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    temperature: float = 0.0
    eps: float = 1e-6
    tied: bool = False
    max_seq: int = 163_840  # the longest rows it was trained on; it changes nothing


def build_deepseek_v2(numbers: DeepSeekV2, *, key: Key[Array, ""]) -> Transformer:
    """A DeepSeek-V2 with random weights."""
    embed = numbers.embed

    def router(key: Key[Array, ""]) -> TopKRouter:
        return TopKRouter(
            embed=embed,
            experts=numbers.experts,
            top_k=numbers.top_k,
            scale=numbers.scale,
            groups=numbers.groups,
            kept_groups=numbers.kept_groups,
            key=key,
        )

    losses = (LoadBalance(numbers.balance, per="sequence"),) if numbers.balance else ()
    block = lambda is_mixture, key: latent_block(
        numbers, is_mixture, router=router, losses=losses, interleaved=True, key=key
    )
    return decoder(numbers, block, mixtures_after_dense(numbers), key=key)


_YARN = YarnScaling(40.0, 4096, magnitude=1.0)
DEEPSEEK_V2_PRESETS = {
    "deepseek-v2-byte-500k": DeepSeekV2(
        256, 64, 4, 4, 128, 32, None, latent=32, head_dim=16, rope_dim=8, v_dim=16, experts=16, top_k=4, tied=True
    ),
    "deepseek-v2-lite": DeepSeekV2(
        102_400, 2048, 27, 16, mlp=10_944, expert_mlp=1408, q_latent=None, scaling=_YARN, temperature=0.707
    ),
    "deepseek-v2": DeepSeekV2(
        102_400,
        5120,
        60,
        128,
        12_288,
        1536,
        1536,
        512,
        128,
        64,
        128,
        160,
        groups=8,
        kept_groups=3,
        scale=16.0,
        scaling=_YARN,
        temperature=0.707,
    ),  # fmt: skip
}


def _read(config: Config) -> DeepSeekV2:
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False)
    config.expect("mlp_bias", False)
    config.expect("topk_method", "greedy", "group_limited_greedy")
    found, balance = latent_numbers(config), config.take("router_aux_loss_coef", config.take("aux_loss_alpha", 0.001))
    if config.take("topk_method", "greedy") == "greedy":  # which has no groups, whatever the configuration says
        found |= {"groups": 1, "kept_groups": 1}
    return DeepSeekV2(**found, balance=balance)


def _write(numbers: DeepSeekV2) -> dict[str, Any]:
    return latent_attributes(numbers) | {
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "mlp_bias": False,
        "topk_method": "greedy" if numbers.groups == 1 else "group_limited_greedy",
        "aux_loss_alpha": numbers.balance,
    }


def _weights(numbers: DeepSeekV2) -> list[Weight]:
    rules = lambda is_mixture, where, layers: latent_block_weights(numbers, is_mixture, where, layers)
    return [*edge_weights(numbers.tied), *layer_weights(mixtures_after_dense(numbers), rules)]


DEEPSEEK_V2_PUBLISHED = Published("DeepseekV2ForCausalLM", "deepseek_v2", _read, _write, _weights)
