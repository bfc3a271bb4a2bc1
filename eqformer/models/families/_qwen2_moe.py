"""Qwen2-MoE (Qwen team 2024, arXiv:2407.10671, section 2.2): small experts beside one shared and gated."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Experts,
    GatedMLP,
    GatedShared,
    LoadBalance,
    MoE,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    TopKRouter,
    Transformer,
)
from .._config import Config
from .._weights import Published, Weight
from ._common import block_weights, common_attributes, common_numbers, edge_weights
from ._mixtures import mixture_attributes, mixture_numbers, shared_mixture_weights, which_are_mixtures
from ._pattern import decoder, layer_weights


@dataclasses.dataclass(frozen=True)
class Qwen2MoE:
    """The numbers of a Qwen2-MoE; `mlp` is a dense layer's width, `expert_mlp` and `shared_mlp` the experts'."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    expert_mlp: int
    shared_mlp: int
    experts: int = 60
    top_k: int = 4
    normalise: bool = False
    dense: tuple[int, ...] = ()  # layers without experts, and
    every: int = 1  # every how many layers there are some
    head_dim: int | None = None  # embed / heads by default
    theta: float = 1_000_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    bias: bool = True  # of queries, keys and values
    balance: float = 0.001  # of `LoadBalance`, over the batch
    tied: bool = False
    max_seq: int = 32_768  # the longest rows it was trained on; it changes nothing


def build_qwen2_moe(numbers: Qwen2MoE, *, key: Key[Array, ""]) -> Transformer:
    """A Qwen2-MoE with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5

    def gated(mlp: int, key: Key[Array, ""]) -> GatedMLP:
        return GatedMLP(embed=embed, mlp=mlp, output_std=damping * mlp**-0.5, key=key)

    def mixture(key: Key[Array, ""]) -> MoE:
        router, experts, shared, gate = jax.random.split(key, 4)
        return MoE(
            TopKRouter(
                embed=embed,
                experts=numbers.experts,
                top_k=numbers.top_k,
                normalise=numbers.normalise,
                key=router,
            ),
            Experts(lambda key: gated(numbers.expert_mlp, key), numbers.experts, key=experts),
            shared=GatedShared(gated(numbers.shared_mlp, shared), embed=embed, key=gate),
            losses=(LoadBalance(numbers.balance),) if numbers.balance else (),
        )

    def block(is_mixture: bool, key: Key[Array, ""]) -> Block:
        attention, feed_forward = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    bias=numbers.bias,
                    output_bias=False,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(
                mixture(feed_forward) if is_mixture else gated(numbers.mlp, feed_forward),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
        )

    return decoder(numbers, block, which_are_mixtures(numbers), key=key)


QWEN2_MOE_PRESETS = {
    "qwen2-moe-byte-500k": Qwen2MoE(
        256, 64, 4, 4, 4, mlp=128, expert_mlp=32, shared_mlp=64, experts=12, theta=10_000.0, tied=True
    ),
    "qwen1.5-moe-a2.7b": Qwen2MoE(151_936, 2048, 24, 16, 16, mlp=5632, expert_mlp=1408, shared_mlp=5632),
    "qwen2-57b-a14b": Qwen2MoE(
        151_936, 3584, 28, 28, 4, mlp=18_944, expert_mlp=2560, shared_mlp=20_480, experts=64, top_k=8
    ),
}


def _read(config: Config) -> Qwen2MoE:
    config.expect("hidden_act", "silu")
    config.expect("use_sliding_window", False)
    for name in ("sliding_window", "max_window_layers"):  # which say nothing without windows
        config.take(name, None)
    found = common_numbers(config) | mixture_numbers(config, 60, 4)
    config.windowed(found["layers"], None, ())
    bias, shared = config.take("qkv_bias", True), config.take("shared_expert_intermediate_size")
    return Qwen2MoE(**found, shared_mlp=shared, bias=bias)


def _write(numbers: Qwen2MoE) -> dict[str, Any]:
    said = {"hidden_act": "silu", "use_sliding_window": False, "qkv_bias": numbers.bias}
    said |= {"shared_expert_intermediate_size": numbers.shared_mlp}
    return common_attributes(numbers) | mixture_attributes(numbers) | said


def _weights(numbers: Qwen2MoE) -> list[Weight]:
    def rules(is_mixture: bool, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        found = block_weights(where, layers, bias=numbers.bias, output_bias=False)
        return [*found, *shared_mixture_weights(lambda m: where(m).feed_forward.layer, layers, is_mixture)]

    return [*edge_weights(numbers.tied), *layer_weights(which_are_mixtures(numbers), rules)]


QWEN2_MOE_PUBLISHED = Published("Qwen2MoeForCausalLM", "qwen2_moe", _read, _write, _weights)
