"""Command R (Cohere 2024): attention and feed-forward side by side after one norm, scaled logits."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    ParallelBlock,
    Residual,
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
class Cohere:
    """The numbers of a Command R; with `normed`, each head has a norm of its queries or keys, its own scale."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None  # embed / heads by default
    theta: float = 8_000_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-5
    bias: bool = False  # of the attention's four projections
    normed: bool = False
    logit_scale: float = 0.0625
    tied: bool = True
    max_seq: int = 8192  # the longest rows it was trained on; it changes nothing


def build_cohere(numbers: Cohere, *, key: Key[Array, ""]) -> Transformer:
    """A Command R with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5

    def norm(**sizes: Any) -> LayerNorm | None:
        if not numbers.normed:
            return None
        return LayerNorm(" ".join(sizes), over="head_dim", bias=False, eps=numbers.eps, **sizes)

    def block(key: Key[Array, ""]) -> ParallelBlock:
        attention, mlp = jax.random.split(key)
        return ParallelBlock(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    bias=numbers.bias,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    query_norm=norm(heads=numbers.heads, head_dim=head_dim),
                    key_norm=norm(kv_heads=numbers.kv_heads, head_dim=head_dim),
                    rotary=Rotary(head_dim, numbers.theta, interleaved=True, scaling=numbers.scaling),
                    key=attention,
                ),
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, output_std=damping * numbers.mlp**-0.5, key=mlp)
            ),
            norm=LayerNorm("embed", embed=embed, bias=False, eps=numbers.eps),
        )

    embedding, stack, head = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, key=embedding),
        stacks=(Stack(block, numbers.layers, key=stack),),
        norm=LayerNorm("embed", embed=embed, bias=False, eps=numbers.eps),
        head=None if numbers.tied else Linear("embed -> vocab", embed=embed, vocab=numbers.vocab, key=head),
        logit_scale=numbers.logit_scale,
    )


COHERE_PRESETS = {
    "cohere-byte-500k": Cohere(256, 96, 4, 6, 2, 256, theta=10_000.0),
    "command-r": Cohere(256_000, 8192, 40, 64, 64, 22_528),
    "command-r-plus": Cohere(
        256_000, 12_288, 64, 96, 8, 33_792, theta=75_000_000.0, normed=True, logit_scale=0.8333333
    ),
}


def _read(config: Config) -> Cohere:
    config.expect("hidden_act", "silu")
    found = common_numbers(config, 500_000.0, eps="layer_norm_eps", tied=True)
    bias, scale = config.take("attention_bias", False), config.take("logit_scale", 0.0625)
    return Cohere(**found, bias=bias, normed=config.take("use_qk_norm", False), logit_scale=scale)


def _write(numbers: Cohere) -> dict[str, Any]:
    found = common_attributes(numbers)
    found["layer_norm_eps"] = found.pop("rms_norm_eps")
    found |= {"hidden_act": "silu", "attention_bias": numbers.bias, "use_qk_norm": numbers.normed}
    return found | {"logit_scale": numbers.logit_scale}


def _weights(numbers: Cohere) -> list[Weight]:
    blocks, layers = lambda m: m.stacks[0].blocks, range(numbers.layers)
    return [
        *edge_weights(numbers.tied),
        *attention_weights(lambda m: blocks(m).mixer.layer, layers, bias=numbers.bias),
        *(query_key_norm_weights(lambda m: blocks(m).mixer.layer, layers) if numbers.normed else ()),
        *gated_weights(lambda m: blocks(m).feed_forward.layer, layers),
        *norm_weights(blocks, layers, {"mixer.norm": "input_layernorm"}),
    ]


COHERE_PUBLISHED = Published("CohereForCausalLM", "cohere", _read, _write, _weights)
