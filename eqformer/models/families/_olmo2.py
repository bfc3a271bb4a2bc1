"""OLMo 2 (OLMo team 2024, arXiv:2501.00656): norms of what sublayers give, queries and keys normed over all heads."""

import dataclasses
from collections.abc import Callable
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
from ._common import (
    attention_weights,
    common_attributes,
    common_numbers,
    edge_weights,
    gated_weights,
    norm_weights,
    query_key_norm_weights,
)


@dataclasses.dataclass(frozen=True)
class Olmo2:
    """The numbers of an OLMo 2."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None  # embed / heads by default
    theta: float = 500_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    bias: bool = False  # of the attention's four projections
    tied: bool = False
    max_seq: int = 4096  # the longest rows it was trained on; it changes nothing


def build_olmo2(numbers: Olmo2, *, key: Key[Array, ""]) -> Transformer:
    """An OLMo 2 with random weights."""
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
                    bias=numbers.bias,
                    query_norm=RMSNorm("heads head_dim", heads=numbers.heads, head_dim=head_dim, eps=numbers.eps),
                    key_norm=RMSNorm(
                        "kv_heads head_dim", kv_heads=numbers.kv_heads, head_dim=head_dim, eps=numbers.eps
                    ),
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    key=attention,
                ),
                output_norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, key=mlp),
                output_norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
        )

    embedding, stack, head = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, key=embedding),
        stacks=(Stack(block, numbers.layers, key=stack),),
        norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
        head=None if numbers.tied else Linear("embed -> vocab", embed=embed, vocab=numbers.vocab, key=head),
    )


OLMO2_PRESETS = {
    "olmo2-byte-500k": Olmo2(vocab=256, embed=96, layers=4, heads=6, kv_heads=6, mlp=256, theta=10_000.0),
    "olmo2-1b": Olmo2(vocab=100_352, embed=2048, layers=16, heads=16, kv_heads=16, mlp=8192),
    "olmo2-7b": Olmo2(vocab=100_352, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11_008),
    "olmo2-13b": Olmo2(vocab=100_352, embed=5120, layers=40, heads=40, kv_heads=40, mlp=13_824),
    "olmo2-32b": Olmo2(vocab=100_352, embed=5120, layers=64, heads=40, kv_heads=8, mlp=27_648),
}


def _read(config: Config) -> Olmo2:
    config.expect("hidden_act", "silu")
    return Olmo2(**common_numbers(config), bias=config.take("attention_bias", False))


def _write(numbers: Olmo2) -> dict[str, Any]:
    return common_attributes(numbers) | {"hidden_act": "silu", "attention_bias": numbers.bias}


def _weights(numbers: Olmo2) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    return [*edge_weights(numbers.tied), *olmo_weights(blocks, layers, numbers.bias)]


def olmo_weights(where: Callable[[Any], Any], layers: range, bias: bool) -> list[Weight]:
    """Of a block of OLMo 2 or 3."""
    norms = {
        "mixer.output_norm": "post_attention_layernorm",
        "feed_forward.output_norm": "post_feedforward_layernorm",
    }
    return [
        *attention_weights(lambda m: where(m).mixer.layer, layers, bias=bias),
        *query_key_norm_weights(lambda m: where(m).mixer.layer, layers, "(heads head_dim) -> heads head_dim"),
        *gated_weights(lambda m: where(m).feed_forward.layer, layers),
        *norm_weights(where, layers, norms),
    ]


OLMO2_PUBLISHED = Published("Olmo2ForCausalLM", "olmo2", _read, _write, _weights)
