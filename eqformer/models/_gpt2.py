"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere, tied embedding."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Key

from ..nn import (
    Attention,
    Block,
    Dropout,
    Embedding,
    gelu_tanh,
    LayerNorm,
    LearnedPositions,
    MLP,
    Stack,
    Transformer,
)


@dataclasses.dataclass(frozen=True)
class GPT2:
    """The numbers of a GPT-2. Dropout acts on the embeddings and on both residual additions, not inside the softmax."""

    vocab: int
    embed: int
    layers: int
    heads: int
    max_seq: int = 1024
    mlp: int | None = None  # 4 * embed by default
    eps: float = 1e-5
    dropout: float = 0.0


def build_gpt2(
    numbers: GPT2,
    *,
    core: Callable[..., Array] | None = None,
    remat: str = "none",
    unroll: int = 1,
    key: Key[Array, ""],
) -> Transformer:
    """A GPT-2 with random weights; `core`, `remat` and `unroll` choose how it runs, not what it computes."""
    embed, mlp = numbers.embed, numbers.mlp or 4 * numbers.embed
    if embed % numbers.heads:
        raise ValueError(f"GPT2(embed={embed}, heads={numbers.heads}): heads must divide embed.")
    damping = (2 * numbers.layers) ** -0.5
    dropout = Dropout(numbers.dropout) if numbers.dropout else None

    def block(key: Key[Array, ""]) -> Block:
        attention, feed_forward = jax.random.split(key)
        return Block(
            attention=Attention(
                embed=embed,
                heads=numbers.heads,
                head_dim=embed // numbers.heads,
                bias=True,
                output_std=damping * embed**-0.5,
                core=core,
                key=attention,
            ),
            feed_forward=MLP(
                embed=embed,
                mlp=mlp,
                activation=gelu_tanh,
                bias=True,
                output_std=damping * mlp**-0.5,
                key=feed_forward,
            ),
            attention_norm=LayerNorm("embed", embed=embed, eps=numbers.eps),
            feed_forward_norm=LayerNorm("embed", embed=embed, eps=numbers.eps),
            dropout=dropout,
        )

    embedding, positions, stack = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, key=embedding),
        positions=LearnedPositions(max_seq=numbers.max_seq, embed=embed, key=positions),
        stacks=(Stack(block, numbers.layers, remat=remat, unroll=unroll, key=stack),),
        norm=LayerNorm("embed", embed=embed, eps=numbers.eps),
        dropout=dropout,
    )


GPT2_PRESETS = {
    "gpt2-byte-1m": GPT2(vocab=256, embed=128, layers=4, heads=8, max_seq=512),
    "gpt2": GPT2(vocab=50_257, embed=768, layers=12, heads=12, dropout=0.1),
    "gpt2-medium": GPT2(vocab=50_257, embed=1024, layers=24, heads=16, dropout=0.1),
    "gpt2-large": GPT2(vocab=50_257, embed=1280, layers=36, heads=20, dropout=0.1),
    "gpt2-xl": GPT2(vocab=50_257, embed=1600, layers=48, heads=25, dropout=0.1),
}
