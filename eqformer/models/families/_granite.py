"""Granite 3 (Granite Team, IBM, 2024): a Llama with multipliers of embeddings, scores, sublayers and logits."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Embedding,
    GatedMLP,
    Linear,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    Stack,
    Transformer,
)
from .._config import Config
from .._weights import Published, Weight
from ._common import block_weights, common_attributes, common_numbers, edge_weights, gated_weights


@dataclasses.dataclass(frozen=True)
class Granite:
    """The numbers of a Granite; logits are divided by `logit_divisor`."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logit_divisor: float
    head_dim: int | None = None  # embed / heads by default
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-5
    tied: bool = True
    max_seq: int = 4096  # the longest rows it was trained on; it changes nothing


def build_granite(numbers: Granite, *, key: Key[Array, ""]) -> Transformer:
    """A Granite with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads

    def block(key: Key[Array, ""]) -> Block:
        attention, mlp = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    scale=numbers.attention_scale,
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
                scale=numbers.residual_scale,
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, key=mlp),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
                scale=numbers.residual_scale,
            ),
        )

    embedding, stack, head = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, scale=numbers.embedding_scale, key=embedding),
        stacks=(Stack(block, numbers.layers, key=stack),),
        norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
        head=None if numbers.tied else Linear("embed -> vocab", embed=embed, vocab=numbers.vocab, key=head),
        logit_scale=1 / numbers.logit_divisor,
    )


def _granite(embed: int, heads: int, mlp: int, head_dim: int, logit_divisor: float, **more: Any) -> Granite:
    return Granite(
        vocab=49_155,
        embed=embed,
        layers=40,
        heads=heads,
        kv_heads=8,
        mlp=mlp,
        embedding_scale=12.0,
        attention_scale=1 / head_dim,
        residual_scale=0.22,
        logit_divisor=logit_divisor,
        **more,
    )


GRANITE_PRESETS = {
    "granite-byte-500k": Granite(
        vocab=256,
        embed=96,
        layers=4,
        heads=6,
        kv_heads=2,
        mlp=320,
        embedding_scale=12.0,
        attention_scale=1 / 16,
        residual_scale=0.22,
        logit_divisor=8.0,
        max_seq=512,
    ),
    "granite-3.0-2b": _granite(2048, 32, 8192, 64, 8.0),
    "granite-3.0-8b": _granite(4096, 32, 12_800, 128, 16.0),
    "granite-3.1-2b": _granite(2048, 32, 8192, 64, 8.0, theta=5_000_000.0, max_seq=131_072),
    "granite-3.1-8b": _granite(4096, 32, 12_800, 128, 16.0, theta=10_000_000.0, max_seq=131_072),
}
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}


def _read(config: Config) -> Granite:
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    multipliers: dict[str, Any] = {name: float(config.take(its, 1.0)) for name, its in _MULTIPLIERS.items()}
    return Granite(**common_numbers(config), **multipliers)


def _write(numbers: Granite) -> dict[str, Any]:
    multipliers = {its: getattr(numbers, name) for name, its in _MULTIPLIERS.items()}
    return common_attributes(numbers) | multipliers | {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _weights(numbers: Granite) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    feed_forward = gated_weights(lambda m: blocks(m).feed_forward.layer, layers)
    return [*edge_weights(numbers.tied), *block_weights(blocks, layers), *feed_forward]


GRANITE_PUBLISHED = Published("GraniteForCausalLM", "granite", _read, _write, _weights)
