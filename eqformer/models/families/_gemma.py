"""Gemma (Mesnard et al. 2024, arXiv:2403.08295): scaled embeddings, norms counted from one, gated gelu, wide heads."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Embedding,
    GatedMLP,
    gelu_tanh,
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
class Gemma:
    """The numbers of a Gemma."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int = 256
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    tied: bool = True
    max_seq: int = 8192  # the longest rows it was trained on; it changes nothing


def build_gemma(numbers: Gemma, *, key: Key[Array, ""]) -> Transformer:
    """A Gemma with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim
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
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps, offset=1.0),
            ),
            feed_forward=Residual(
                GatedMLP(
                    embed=embed,
                    mlp=numbers.mlp,
                    activation=gelu_tanh,
                    output_std=damping * numbers.mlp**-0.5,
                    key=mlp,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps, offset=1.0),
            ),
        )

    embedding, stack, head = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, scale=embed**0.5, key=embedding),
        stacks=(Stack(block, numbers.layers, key=stack),),
        norm=RMSNorm("embed", embed=embed, eps=numbers.eps, offset=1.0),
        head=None if numbers.tied else Linear("embed -> vocab", embed=embed, vocab=numbers.vocab, key=head),
    )


GEMMA_PRESETS = {
    "gemma-byte-500k": Gemma(vocab=256, embed=96, layers=4, heads=4, kv_heads=2, mlp=256, head_dim=32, max_seq=512),
    "gemma-2b": Gemma(vocab=256_000, embed=2048, layers=18, heads=8, kv_heads=1, mlp=16_384),
    "gemma-7b": Gemma(vocab=256_000, embed=3072, layers=28, heads=16, kv_heads=16, mlp=24_576),
}


def _read(config: Config) -> Gemma:
    # Early checkpoints say gelu and mean its approximation, as does whatever stands in the second attribute.
    config.expect("hidden_act", "gelu_pytorch_tanh", "gelu")
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("attention_bias", False)
    config.expect("use_bidirectional_attention", False)
    return Gemma(**common_numbers(config, head_dim=256, tied=True))


def _write(numbers: Gemma) -> dict[str, Any]:
    return common_attributes(numbers) | {"hidden_act": "gelu_pytorch_tanh"}


def _weights(numbers: Gemma) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    feed_forward = gated_weights(lambda m: blocks(m).feed_forward.layer, layers)
    return [*edge_weights(numbers.tied), *block_weights(blocks, layers), *feed_forward]


GEMMA_PUBLISHED = Published("GemmaForCausalLM", "gemma", _read, _write, _weights)
