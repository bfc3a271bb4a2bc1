"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024): pre-norm, grouped queries, rotary, gated silu."""

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
    Llama3Scaling,
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
class Llama:
    """The numbers of a Llama."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None  # embed / heads by default
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-5
    bias: bool = False  # of the attention's four projections
    tied: bool = False
    max_seq: int = 8192  # the longest rows it was trained on; it changes nothing


def build_llama(numbers: Llama, *, key: Key[Array, ""]) -> Transformer:
    """A Llama with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    # Each of the 2 * layers additions to the residual stream starts smaller, so their sum does not grow with depth.
    damping = (2 * numbers.layers) ** -0.5
    rotary = Rotary(head_dim, numbers.theta, scaling=numbers.scaling)

    def block(key: Key[Array, ""]) -> Block:
        attention, mlp = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    bias=numbers.bias,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    rotary=rotary,
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, output_std=damping * numbers.mlp**-0.5, key=mlp),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
        )

    embedding, stack, head = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, key=embedding),
        stacks=(Stack(block, numbers.layers, key=stack),),
        norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
        head=None if numbers.tied else Linear("embed -> vocab", embed=embed, vocab=numbers.vocab, key=head),
    )


def _llama3(embed: int, layers: int, heads: int, mlp: int, factor: float | None = None, tied: bool = False) -> Llama:
    scaling, max_seq = None, 8192
    if factor is not None:
        max_seq = 131_072
        scaling = Llama3Scaling(
            factor=factor, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
        )
    return Llama(
        vocab=128_256,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=8,
        mlp=mlp,
        theta=500_000.0,
        scaling=scaling,
        tied=tied,
        max_seq=max_seq,
    )


LLAMA_PRESETS = {
    "llama-byte-1m": Llama(vocab=256, embed=128, layers=4, heads=8, kv_heads=4, mlp=384, tied=True),
    "llama-byte-8m": Llama(vocab=256, embed=256, layers=8, heads=8, kv_heads=4, mlp=1024),
    "llama-byte-34m": Llama(vocab=256, embed=512, layers=12, heads=8, kv_heads=4, mlp=1536),
    "llama-2-7b": Llama(vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11_008, max_seq=4096),
    "llama-2-13b": Llama(vocab=32_000, embed=5120, layers=40, heads=40, kv_heads=40, mlp=13_824, max_seq=4096),
    "llama-2-70b": Llama(vocab=32_000, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28_672, max_seq=4096),
    "llama-3-8b": _llama3(4096, 32, 32, 14_336),
    "llama-3-70b": _llama3(8192, 80, 64, 28_672),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336, factor=8.0),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672, factor=8.0),
    "llama-3.1-405b": _llama3(16_384, 126, 128, 53_248, factor=8.0),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, factor=32.0, tied=True),
}


def _read(config: Config) -> Llama:
    config.expect("hidden_act", "silu")
    config.expect("mlp_bias", False)
    config.take("is_llama_config", None)  # SmolLM2 says what it is
    return Llama(**common_numbers(config), bias=config.take("attention_bias", False))


def _write(numbers: Llama) -> dict[str, Any]:
    return common_attributes(numbers) | {"hidden_act": "silu", "mlp_bias": False, "attention_bias": numbers.bias}


def _weights(numbers: Llama) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    feed_forward = gated_weights(lambda m: blocks(m).feed_forward.layer, layers)
    return [*edge_weights(numbers.tied), *block_weights(blocks, layers, bias=numbers.bias), *feed_forward]


LLAMA_PUBLISHED = Published("LlamaForCausalLM", "llama", _read, _write, _weights)
