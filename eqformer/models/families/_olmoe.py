"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): 64 small experts, queries and keys normed over all heads."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Embedding,
    Experts,
    GatedMLP,
    Linear,
    LoadBalance,
    MoE,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    Stack,
    TopKRouter,
    Transformer,
)
from .._config import Config
from .._weights import Published, Weight
from ._common import block_weights, common_attributes, common_numbers, edge_weights, query_key_norm_weights
from ._mixtures import choice_attributes, choice_numbers, mixture_weights


@dataclasses.dataclass(frozen=True)
class OLMoE:
    """The numbers of an OLMoE; `mlp` is one expert's."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    experts: int = 64
    top_k: int = 8
    normalise: bool = False
    head_dim: int | None = None  # embed / heads by default
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-5
    bias: bool = False  # of the attention's four projections
    balance: float = 0.01  # of `LoadBalance`, over the batch
    tied: bool = False
    max_seq: int = 4096  # the longest rows it was trained on; it changes nothing


def build_olmoe(numbers: OLMoE, *, key: Key[Array, ""]) -> Transformer:
    """An OLMoE with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5

    def expert(key: Key[Array, ""]) -> GatedMLP:
        return GatedMLP(embed=embed, mlp=numbers.mlp, output_std=damping * numbers.mlp**-0.5, key=key)

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
            Experts(expert, numbers.experts, key=experts),
            losses=(LoadBalance(numbers.balance),) if numbers.balance else (),
        )

    def block(key: Key[Array, ""]) -> Block:
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
                    query_norm=RMSNorm("heads head_dim", heads=numbers.heads, head_dim=head_dim, eps=numbers.eps),
                    key_norm=RMSNorm(
                        "kv_heads head_dim", kv_heads=numbers.kv_heads, head_dim=head_dim, eps=numbers.eps
                    ),
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(mixture(feed_forward), RMSNorm("embed", embed=embed, eps=numbers.eps)),
        )

    embedding, stack, head = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, key=embedding),
        stacks=(Stack(block, numbers.layers, key=stack),),
        norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
        head=None if numbers.tied else Linear("embed -> vocab", embed=embed, vocab=numbers.vocab, key=head),
    )


OLMOE_PRESETS = {
    "olmoe-byte-500k": OLMoE(256, 64, 4, heads=4, kv_heads=4, mlp=32, experts=16, top_k=4, tied=True),
    "olmoe-1b-7b": OLMoE(50_304, 2048, 16, heads=16, kv_heads=16, mlp=1024),
}


def _read(config: Config) -> OLMoE:
    config.expect("hidden_act", "silu")
    config.expect("clip_qkv", None)
    return OLMoE(
        **common_numbers(config),
        **choice_numbers(config, 64, 8, balance=0.01),
        bias=config.take("attention_bias", False),
    )


def _write(numbers: OLMoE) -> dict[str, Any]:
    said = {"hidden_act": "silu", "attention_bias": numbers.bias}
    return common_attributes(numbers) | choice_attributes(numbers) | said


def _weights(numbers: OLMoE) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    return [
        *edge_weights(numbers.tied),
        *block_weights(blocks, layers, bias=numbers.bias),
        *query_key_norm_weights(lambda m: blocks(m).mixer.layer, layers, "(heads head_dim) -> heads head_dim"),
        *mixture_weights(lambda m: blocks(m).feed_forward.layer, layers),
    ]


OLMOE_PUBLISHED = Published("OlmoeForCausalLM", "olmoe", _read, _write, _weights)
