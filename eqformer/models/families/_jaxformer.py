"""JAXformer (Makkar, Makkar and Jindal 2025): latent attention in blocks of several layers, tied embedding.

Numbers and the order of layers follow the published program: norms with a shift, biases in every map, and blocks whose
last layer has no rotary position and, with `experts`, a mixture beside shared ones (which the program leaves out
of its sum). Latent attention is the paper's (DeepSeek-V2): the program's scores depend on more than relative position.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Block,
    Capacity,
    Dropout,
    Embedding,
    gelu_tanh,
    LatentAttention,
    MLP,
    MoE,
    Residual,
    RMSNorm,
    Rotary,
    Stack,
    SuperBlock,
    Transformer,
)
from .._config_types import NotNegative, OptionalSize, Positive, Rate, Size
from .._family import Family, ModelConfig
from ._mixtures import mixture


@dataclasses.dataclass(frozen=True)
class JAXformerConfig(ModelConfig):
    """The config of a JAXformer."""

    blocks: Size
    """The number of times that the layers of a block repeat."""
    layers_per_block: Size
    """Layers of a block."""
    heads: Size
    """Heads."""
    latent: Size
    """Channels of the latent of keys and values."""
    rope_dim: Size
    """Channels of the rotated key."""
    mlp: Size | None = None
    """Hidden features; None: 4 * embed."""
    theta: Positive = 10_000.0
    """The base of rotary positions."""
    eps: NotNegative = 1e-6
    """The number that norms add to the mean square before the root."""
    dropout: Rate = 0.0
    """The rate of dropout."""
    experts: Size | None = None
    """Experts of a mixture; None: dense layers throughout."""
    top_k: Size = 2
    """The number of experts that each token chooses."""
    shared: OptionalSize = 2
    """The number of shared experts, which are one layer of so many times the width."""
    capacity: Positive = 1.5
    """The experts' slots, as a multiple of the slots that even loads need."""
    balance: NotNegative = 0.01
    """The weight of the balance loss."""


def build_jaxformer(config: JAXformerConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a JAXformer with random weights."""
    embed, mlp = config.embed, config.mlp or 4 * config.embed
    if embed % config.heads:
        raise ValueError(f"JAXformerConfig(embed={embed}, heads={config.heads}): heads must divide embed.")
    damping = (2 * config.blocks * config.layers_per_block) ** -0.5
    dropout = Dropout(config.dropout) if config.dropout else None
    norm = lambda: RMSNorm("embed", embed=embed, eps=config.eps, shift=True)

    def dense(key: Key[Array, ""], times: int = 1) -> MLP:
        width = times * mlp
        return MLP(embed=embed, mlp=width, activation=gelu_tanh, bias=True, output_std=damping * width**-0.5, key=key)

    def mixed(key: Key[Array, ""]) -> MoE:
        router, experts, shared = jax.random.split(key, 3)
        arguments: dict[str, Any] = {"dispatch": Capacity(config.capacity), "balance": {"normalise": True}}
        arguments |= {"shared": dense(shared, config.shared) if config.shared else None}
        arguments |= {"score": "sigmoid", "normalise": True, "bias": True}
        return mixture(config, dense, **arguments, router=router, experts=experts)

    def layer(rotary: Rotary | None, key: Key[Array, ""]) -> Block:
        attention, feed_forward = jax.random.split(key)
        sizes: dict[str, Any] = {"embed": embed, "heads": config.heads, "head_dim": embed // config.heads}
        sizes |= {"latent": config.latent, "q_latent": config.latent, "rotary": rotary}
        mixer = LatentAttention(**sizes, bias=True, output_std=damping * embed**-0.5, key=attention)
        layer_mlp = mixed(feed_forward) if rotary is None and config.experts is not None else dense(feed_forward)
        return Block(Residual(mixer, norm(), dropout=dropout), Residual(layer_mlp, norm(), dropout=dropout))

    def block(key: Key[Array, ""]) -> SuperBlock:
        rotary = Rotary(config.rope_dim, config.theta, interleaved=True)
        kinds = (rotary,) * (config.layers_per_block - 1) + (None,)
        return SuperBlock(tuple(map(layer, kinds, jax.random.split(key, config.layers_per_block))))

    embedding_key, stack_key = jax.random.split(key)
    return Transformer(
        embedding=Embedding(vocab=config.vocab, embed=embed, key=embedding_key),
        stacks=(Stack(block, config.blocks, key=stack_key),),
        norm=norm(),
    )


_SMALL = JAXformerConfig(256, 128, blocks=2, layers_per_block=2, heads=8, latent=64, rope_dim=16)
_LARGE = JAXformerConfig(100_277, 768, blocks=8, layers_per_block=6, heads=12, latent=128, rope_dim=64, dropout=0.1)
_PRESETS = {
    "jaxformer-byte-1m": _SMALL,
    "jaxformer-byte-7m": dataclasses.replace(_SMALL, embed=256, blocks=4, dropout=0.1),
    "jaxformer-byte-4m": dataclasses.replace(_SMALL, experts=16),
    # The published 8 blocks of 6 layers, without its experts and with them.
    "jaxformer-dense": _LARGE,
    "jaxformer": dataclasses.replace(_LARGE, experts=16),
}

JAXFORMER = Family("jaxformer", JAXformerConfig, build_jaxformer, _PRESETS)
