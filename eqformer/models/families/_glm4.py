"""GLM-4-0414 (GLM team 2024, arXiv:2406.12793; 2025): norms before and after, half of each head rotated."""

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
from ._common import (
    attention_weights,
    common_attributes,
    common_numbers,
    edge_weights,
    joined_gated_weights,
    norm_weights,
)


@dataclasses.dataclass(frozen=True)
class GLM4:
    """The numbers of a GLM-4; `turning` is the part of a head's channels that rotary positions turn."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None  # embed / heads by default
    turning: float = 0.5
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-5
    bias: bool = False  # of queries, keys and values
    tied: bool = False
    max_seq: int = 32_768  # the longest rows it was trained on; it changes nothing


def build_glm4(numbers: GLM4, *, key: Key[Array, ""]) -> Transformer:
    """A GLM-4 with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5
    turning = int(head_dim * numbers.turning)

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
                    output_bias=False,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    rotary=Rotary(turning, numbers.theta, interleaved=True, scaling=numbers.scaling),
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
                output_norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, output_std=damping * numbers.mlp**-0.5, key=mlp),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
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


GLM4_PRESETS = {
    "glm4-byte-500k": GLM4(256, 96, 4, 6, 2, 256, head_dim=16, bias=True),
    "glm4-9b": GLM4(151_552, 4096, 40, 32, 2, 13_696, head_dim=128, bias=True),
    "glm4-32b": GLM4(151_552, 6144, 61, 48, 2, 23_040, head_dim=128),
}


def _read(config: Config) -> GLM4:
    config.expect("hidden_act", "silu")
    turning = config.partial_rotary(0.5)
    return GLM4(
        **common_numbers(config, head_dim=128, kv_heads=2), turning=turning, bias=config.take("attention_bias", True)
    )


def _write(numbers: GLM4) -> dict[str, Any]:
    said = {"hidden_act": "silu", "partial_rotary_factor": numbers.turning, "attention_bias": numbers.bias}
    return common_attributes(numbers) | said | {"head_dim": numbers.head_dim or numbers.embed // numbers.heads}


def _weights(numbers: GLM4) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    return [
        *edge_weights(numbers.tied),
        *attention_weights(lambda m: blocks(m).mixer.layer, layers, bias=numbers.bias, output_bias=False),
        *joined_gated_weights(lambda m: blocks(m).feed_forward.layer, layers),
        *norm_weights(blocks, layers, _NORMS),
    ]


_NORMS = {
    "mixer.norm": "input_layernorm",
    "feed_forward.norm": "post_attention_layernorm",
    "mixer.output_norm": "post_self_attn_layernorm",
    "feed_forward.output_norm": "post_mlp_layernorm",
}
GLM4_PUBLISHED = Published("Glm4ForCausalLM", "glm4", _read, _write, _weights)
