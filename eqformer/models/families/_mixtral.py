"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): a Mistral whose feed-forward layers are mixtures of gated experts."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Capacity,
    causal,
    Dropless,
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
    sliding_window,
    Stack,
    TopKRouter,
    Transformer,
)
from .._config import Config
from .._weights import Published, Weight
from ._common import block_weights, common_attributes, common_numbers, edge_weights, gated_weights


@dataclasses.dataclass(frozen=True)
class Mixtral:
    """The numbers of a Mixtral; `mlp` is one expert's. `capacity` limits the experts' slots (None: nothing dropped)."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    experts: int = 8
    top_k: int = 2
    head_dim: int | None = None  # embed / heads by default
    theta: float = 1_000_000.0
    eps: float = 1e-5
    window: int | None = None
    balance: float = 0.02  # of `LoadBalance`, over the batch
    capacity: float | None = None
    tied: bool = False
    max_seq: int = 32_768  # the longest rows it was trained on; it changes nothing
    scaling: RotaryScaling | None = None
    jitter: float = 0.0


def build_mixtral(numbers: Mixtral, *, key: Key[Array, ""]) -> Transformer:
    """A Mixtral with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5
    mask = causal() if numbers.window is None else sliding_window(numbers.window)

    def mixture(key: Key[Array, ""]) -> MoE:
        router, experts = jax.random.split(key)
        expert = lambda key: GatedMLP(embed=embed, mlp=numbers.mlp, output_std=damping * numbers.mlp**-0.5, key=key)
        return MoE(
            TopKRouter(
                embed=embed,
                experts=numbers.experts,
                top_k=numbers.top_k,
                normalise=True,
                jitter=numbers.jitter,
                key=router,
            ),
            Experts(expert, numbers.experts, key=experts),
            dispatch=Dropless() if numbers.capacity is None else Capacity(numbers.capacity),
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
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    mask=mask,
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


MIXTRAL_PRESETS = {
    # Two of eight experts of half the width: at work, as many parameters as llama-byte-1m.
    "mixtral-byte-3m": Mixtral(vocab=256, embed=128, layers=4, heads=8, kv_heads=4, mlp=192, theta=10_000.0, tied=True),
    "mixtral-byte-500k": Mixtral(vocab=256, embed=64, layers=4, heads=4, kv_heads=2, mlp=64, theta=10_000.0, tied=True),
    "mixtral-8x7b": Mixtral(vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336),
    "mixtral-8x22b": Mixtral(vocab=32_768, embed=6144, layers=56, heads=48, kv_heads=8, mlp=16_384, max_seq=65_536),
}


def _read(config: Config) -> Mixtral:
    config.expect("hidden_act", "silu")
    return Mixtral(
        **common_numbers(config, 1e6, kv_heads=8),
        experts=config.take("num_local_experts", 8),
        top_k=config.take("num_experts_per_tok", 2),
        window=config.take("sliding_window", None),
        balance=config.take("router_aux_loss_coef", 0.001),
        jitter=config.take("router_jitter_noise", 0.0),
    )


def _write(numbers: Mixtral) -> dict[str, Any]:
    if numbers.capacity is not None:
        raise ValueError(
            f"save(numbers=Mixtral(capacity={numbers.capacity})): no configuration says a capacity, and without one no "
            "token is dropped; say that this is meant by capacity=None."
        )
    return common_attributes(numbers) | {
        "hidden_act": "silu",
        "num_local_experts": numbers.experts,
        "num_experts_per_tok": numbers.top_k,
        "sliding_window": numbers.window,
        "router_aux_loss_coef": numbers.balance,
        "router_jitter_noise": numbers.jitter,
    }


def _weights(numbers: Mixtral) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    moe = "model.layers.{layer}.block_sparse_moe."
    experts, names = lambda m: blocks(m).feed_forward.layer.experts.mlps, ("w1", "w3", "w2")
    return [
        *edge_weights(numbers.tied),
        *block_weights(blocks, layers),
        Weight(f"{moe}gate.weight", lambda m: blocks(m).feed_forward.layer.router.linear.weight, "", layers),
        *gated_weights(experts, layers, prefix=moe + "experts.{expert}.", names=names),
    ]


MIXTRAL_PUBLISHED = Published("MixtralForCausalLM", "mixtral", _read, _write, _weights)
