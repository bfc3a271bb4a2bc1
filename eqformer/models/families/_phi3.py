"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): a Llama with joined projections and LongRoPE."""

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
    LongRopeScaling,
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
from ._common import common_attributes, common_numbers, edge_weights, joined_gated_weights, pre_norm_weights
from ._phi3_divisors import PHI3_MINI, PHI4_MINI, PHI35_MINI


@dataclasses.dataclass(frozen=True)
class Phi3:
    """The numbers of a Phi-3; `turning` is the part of a head's channels that rotary positions turn."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None  # embed / heads by default
    turning: float = 1.0
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    window: int | None = None
    eps: float = 1e-5
    tied: bool = False
    max_seq: int = 4096  # the longest rows it was trained on; it changes nothing


def build_phi3(numbers: Phi3, *, key: Key[Array, ""]) -> Transformer:
    """A Phi-3 with random weights."""
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
                    rotary=Rotary(int(head_dim * numbers.turning), numbers.theta, scaling=numbers.scaling),
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


PHI3_PRESETS = {
    "phi3-byte-500k": Phi3(256, 96, 4, 6, 2, 256, window=64),
    "phi3-mini-4k": Phi3(32_064, 3072, 32, 32, 32, 8192, window=2047),
    "phi3-mini-128k": Phi3(32_064, 3072, 32, 32, 32, 8192, scaling=PHI3_MINI, window=262_144, max_seq=131_072),
    "phi3.5-mini": Phi3(32_064, 3072, 32, 32, 32, 8192, scaling=PHI35_MINI, window=262_144, max_seq=131_072),
    "phi3-medium-4k": Phi3(32_064, 5120, 40, 40, 10, 17_920, window=2047),
    "phi4": Phi3(100_352, 5120, 40, 40, 10, 17_920, theta=250_000.0, max_seq=16_384),
    "phi4-mini": Phi3(
        200_064,
        3072,
        32,
        24,
        8,
        8192,
        turning=0.75,
        scaling=PHI4_MINI,
        window=262_144,
        tied=True,
        max_seq=131_072,
    ),  # fmt: skip
}


def _read(config: Config) -> Phi3:
    config.expect("hidden_act", "silu")
    for name in ("full_attn_mod", "interpolate_factor"):
        config.expect(name, 1)
    turning = config.partial_rotary()
    found = common_numbers(config)
    # Where it is missing, transformers takes 4096, not the longest length.
    original = config.take("original_max_position_embeddings", 4096)
    if isinstance(found["scaling"], LongRopeScaling) and found["scaling"].original_length != original:
        config.refuse(f"original_max_position_embeddings={original}: rope_scaling says {found['scaling']}.")
    return Phi3(**found, turning=turning, window=config.take("sliding_window", None))


def _write(numbers: Phi3) -> dict[str, Any]:
    said = {"hidden_act": "silu", "partial_rotary_factor": numbers.turning, "sliding_window": numbers.window}
    if isinstance(numbers.scaling, LongRopeScaling):
        said["original_max_position_embeddings"] = numbers.scaling.original_length
    return common_attributes(numbers) | said


def _weights(numbers: Phi3) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    attention = lambda m: blocks(m).mixer.layer
    joined = lambda m: (attention(m).query.weight, attention(m).key.weight, attention(m).value.weight)
    into, out = "(heads head_dim) embed -> heads head_dim embed", "embed (heads head_dim) -> embed heads head_dim"
    prefix = "model.layers.{layer}.self_attn."
    return [
        *edge_weights(numbers.tied),
        Weight(f"{prefix}qkv_proj.weight", joined, into, layers),
        Weight(f"{prefix}o_proj.weight", lambda m: attention(m).output.weight, out, layers),
        *joined_gated_weights(lambda m: blocks(m).feed_forward.layer, layers),
        *pre_norm_weights(blocks, layers),
    ]


PHI3_PUBLISHED = Published("Phi3ForCausalLM", "phi3", _read, _write, _weights)
