"""Mistral (Jiang et al. 2023, arXiv:2310.06825): a Llama whose layers see a sliding window, in its first version."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    causal,
    Embedding,
    GatedMLP,
    Linear,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    sliding_window,
    Stack,
    Transformer,
)
from .._config import Config
from .._weights import Published, Weight
from ._common import block_weights, common_attributes, common_numbers, edge_weights, gated_weights


@dataclasses.dataclass(frozen=True)
class Mistral:
    """The numbers of a Mistral."""

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
    window: int | None = None  # of every layer
    tied: bool = False
    max_seq: int = 32_768  # the longest rows it was trained on; it changes nothing


def build_mistral(numbers: Mistral, *, key: Key[Array, ""]) -> Transformer:
    """A Mistral with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5

    def block(key: Key[Array, ""]) -> Block:
        attention, mlp = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    mask=causal() if numbers.window is None else sliding_window(numbers.window),
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


def _mistral(vocab: int, embed: int, layers: int, mlp: int, **more: Any) -> Mistral:
    return Mistral(vocab=vocab, embed=embed, layers=layers, heads=32, kv_heads=8, head_dim=128, mlp=mlp, **more)


MISTRAL_PRESETS = {
    "mistral-byte-500k": Mistral(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, window=128, tied=True, max_seq=512
    ),
    "mistral-7b-v0.1": _mistral(32_000, 4096, 32, 14_336, window=4096),
    "mistral-7b-v0.3": _mistral(32_768, 4096, 32, 14_336, theta=1e6),
    "mistral-nemo-12b": _mistral(131_072, 5120, 40, 14_336, theta=1e6, max_seq=131_072),
    "mistral-small-24b": _mistral(131_072, 5120, 40, 32_768, theta=1e8),
}


def _read(config: Config) -> Mistral:
    config.expect("hidden_act", "silu")
    return Mistral(**common_numbers(config, kv_heads=8), window=config.nullable("sliding_window", 4096))


def _write(numbers: Mistral) -> dict[str, Any]:
    return common_attributes(numbers) | {"hidden_act": "silu", "sliding_window": numbers.window}


def _weights(numbers: Mistral) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    feed_forward = gated_weights(lambda m: blocks(m).feed_forward.layer, layers)
    return [*edge_weights(numbers.tied), *block_weights(blocks, layers), *feed_forward]


MISTRAL_PUBLISHED = Published("MistralForCausalLM", "mistral", _read, _write, _weights)
