"""Qwen3-MoE (Qwen team 2025, arXiv:2505.09388): each head's queries and keys normed, mixtures in chosen layers."""

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
from ._common import (
    block_weights,
    common_attributes,
    common_numbers,
    edge_weights,
    gated_weights,
    query_key_norm_weights,
)
from ._mixtures import mixture_attributes, mixture_numbers, mixture_weights, which_are_mixtures
from ._pattern import decoder, layer_weights


@dataclasses.dataclass(frozen=True)
class Qwen3MoE:
    """The numbers of a Qwen3-MoE; `mlp` is a dense layer's width, `expert_mlp` an expert's."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    expert_mlp: int
    experts: int = 128
    top_k: int = 8
    normalise: bool = True
    dense: tuple[int, ...] = ()  # layers without experts, and
    every: int = 1  # every how many layers there are some
    head_dim: int | None = None  # embed / heads by default
    theta: float = 1_000_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    bias: bool = False  # of the attention's four projections
    balance: float = 0.001  # of `LoadBalance`, over the batch
    tied: bool = False
    max_seq: int = 40_960  # the longest rows it was trained on; it changes nothing


def build_qwen3_moe(numbers: Qwen3MoE, *, key: Key[Array, ""]) -> Transformer:
    """A Qwen3-MoE with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5

    def gated(mlp: int, key: Key[Array, ""]) -> GatedMLP:
        return GatedMLP(embed=embed, mlp=mlp, output_std=damping * mlp**-0.5, key=key)

    def mixture(key: Key[Array, ""]) -> MoE:
        router, experts = jax.random.split(key)
        return MoE(
            TopKRouter(
                embed=embed,
                experts=numbers.experts,
                top_k=numbers.top_k,
                normalise=numbers.normalise,
                key=router,
            ),
            Experts(lambda key: gated(numbers.expert_mlp, key), numbers.experts, key=experts),
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
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    query_norm=RMSNorm("head_dim", head_dim=head_dim, eps=numbers.eps),
                    key_norm=RMSNorm("head_dim", head_dim=head_dim, eps=numbers.eps),
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


QWEN3_MOE_PRESETS = {
    "qwen3-moe-byte-500k": Qwen3MoE(
        256, 64, 4, heads=4, kv_heads=2, mlp=128, expert_mlp=32, experts=16, top_k=4, theta=10_000.0, tied=True
    ),
    "qwen3-30b-a3b": Qwen3MoE(151_936, 2048, 48, heads=32, kv_heads=4, mlp=6144, expert_mlp=768, head_dim=128),
    "qwen3-235b-a22b": Qwen3MoE(151_936, 4096, 94, heads=64, kv_heads=4, mlp=12_288, expert_mlp=1536, head_dim=128),
}


def _read(config: Config) -> Qwen3MoE:
    config.expect("hidden_act", "silu")
    config.expect("use_sliding_window", False)
    config.take("sliding_window", None)
    config.take("max_window_layers", None)
    bias = config.take("attention_bias", False)
    return Qwen3MoE(**common_numbers(config, kv_heads=4), **mixture_numbers(config, 128, 8), bias=bias)


def _write(numbers: Qwen3MoE) -> dict[str, Any]:
    said = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": numbers.bias}
    return common_attributes(numbers) | mixture_attributes(numbers) | said


def _weights(numbers: Qwen3MoE) -> list[Weight]:
    def rules(is_mixture: bool, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        fed = lambda m: where(m).feed_forward.layer
        feed_forward = mixture_weights(fed, layers) if is_mixture else gated_weights(fed, layers)
        projections = block_weights(where, layers, bias=numbers.bias)
        return [*projections, *query_key_norm_weights(lambda m: where(m).mixer.layer, layers), *feed_forward]

    return [*edge_weights(numbers.tied), *layer_weights(which_are_mixtures(numbers), rules)]


QWEN3_MOE_PUBLISHED = Published("Qwen3MoeForCausalLM", "qwen3_moe", _read, _write, _weights)
