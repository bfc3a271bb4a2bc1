"""JAXformer (Makkar, Makkar and Jindal 2025): latent attention in blocks of several layers, tied embedding.

Numbers, norms, biases, dropout and the order of layers follow the published program: RMSNorm with a shift, a GELU MLP,
biases in every linear map, and blocks whose last layer has no rotary position. Latent attention is the paper's
(DeepSeek-V2): the program takes its rotary key from the joint latent and turns queries by frequencies that differ from
head to head, so that scores there depend on more than relative position; ours do not.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Key

from ..nn import (
    Block,
    Dropout,
    Embedding,
    gelu_tanh,
    LatentAttention,
    MLP,
    Period,
    RMSNorm,
    Rotary,
    Stack,
    Transformer,
)


@dataclasses.dataclass(frozen=True)
class JAXformer:
    """The numbers of a JAXformer; `blocks` repeat, each of `layers_per_block` layers."""

    vocab: int
    embed: int
    blocks: int
    layers_per_block: int
    heads: int
    latent: int
    rope_dim: int
    mlp: int | None = None  # 4 * embed by default
    theta: float = 10_000.0
    eps: float = 1e-6
    dropout: float = 0.0


def build_jaxformer(
    numbers: JAXformer,
    *,
    core: Callable[..., Array] | None = None,
    remat: str = "none",
    unroll: int = 1,
    key: Key[Array, ""],
) -> Transformer:
    """A JAXformer with random weights; `core`, `remat` and `unroll` choose how it runs, not what it computes."""
    embed, mlp = numbers.embed, numbers.mlp or 4 * numbers.embed
    if embed % numbers.heads:
        raise ValueError(f"JAXformer(embed={embed}, heads={numbers.heads}): heads must divide embed.")
    damping = (2 * numbers.blocks * numbers.layers_per_block) ** -0.5
    dropout = Dropout(numbers.dropout) if numbers.dropout else None

    def layer(rotary: Rotary | None, key: Key[Array, ""]) -> Block:
        attention, feed_forward = jax.random.split(key)
        return Block(
            attention=LatentAttention(
                embed=embed,
                heads=numbers.heads,
                head_dim=embed // numbers.heads,
                latent=numbers.latent,
                q_latent=numbers.latent,
                rotary=rotary,
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
            attention_norm=RMSNorm("embed", embed=embed, eps=numbers.eps, shift=True),
            feed_forward_norm=RMSNorm("embed", embed=embed, eps=numbers.eps, shift=True),
            dropout=dropout,
        )

    def block(key: Key[Array, ""]) -> Period:
        rotary = Rotary(numbers.rope_dim, numbers.theta, interleaved=True)
        kinds = (rotary,) * (numbers.layers_per_block - 1) + (None,)
        return Period(tuple(map(layer, kinds, jax.random.split(key, numbers.layers_per_block))))

    embedding, stack = jax.random.split(key)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, key=embedding),
        stacks=(Stack(block, numbers.blocks, remat=remat, unroll=unroll, key=stack),),
        norm=RMSNorm("embed", embed=embed, eps=numbers.eps, shift=True),
    )


JAXFORMER_PRESETS = {
    "jaxformer-byte-1m": JAXformer(vocab=256, embed=128, blocks=2, layers_per_block=2, heads=8, latent=64, rope_dim=16),
    "jaxformer-byte-7m": JAXformer(
        vocab=256, embed=256, blocks=4, layers_per_block=2, heads=8, latent=64, rope_dim=16, dropout=0.1
    ),
    # The published 8 blocks of 6 layers with a dense feed-forward in every layer.
    "jaxformer-dense": JAXformer(
        vocab=100_277, embed=768, blocks=8, layers_per_block=6, heads=12, latent=128, rope_dim=64, dropout=0.1
    ),
}
