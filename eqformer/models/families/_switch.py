"""Decoders in the manner of GShard (Lepikhin et al. 2020) and Switch (Fedus et al. 2021): every other layer a mixture.

Both papers' models are encoders and decoders with relative positions; these are decoders alone, with rotary positions.
Their experts are as in the papers: which layers have them, how they are chosen, how many slots they have, the losses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Capacity,
    Embedding,
    Experts,
    LoadBalance,
    MLP,
    MoE,
    RandomSecondRouter,
    relu,
    Residual,
    RMSNorm,
    Router,
    Stack,
    SuperBlock,
    TopKRouter,
    Transformer,
)
from .._config_types import LayerCount, NotNegative, Positive, Size
from .._family import Family, ModelConfig
from ._decoder import rotary_of


@dataclasses.dataclass(frozen=True)
class GShardConfig(ModelConfig):
    """The config of a decoder in GShard's manner: top-2, the second by chance, `f p` loss of first choices."""

    layers: LayerCount
    """Layers: every second one a mixture, so an even number."""
    heads: Size
    """Heads."""
    mlp: Size
    """Hidden features of a feed-forward layer and of an expert."""
    experts: Size
    """The number of experts of a layer."""
    capacity: Positive = 1.0
    """The experts' slots for both choices, as a multiple of the slots that even loads need."""
    balance: NotNegative = 0.01
    """The weight of the balance loss."""
    theta: Positive = 10_000.0
    """The base of rotary positions."""
    eps: NotNegative = 1e-6
    """The number that norms add to the mean square before the root."""


@dataclasses.dataclass(frozen=True)
class SwitchConfig(GShardConfig):
    """The config of a decoder in Switch's manner: top-1, jitter, capacity factor, load-balance loss."""

    capacity: Positive = 1.25
    """The experts' slots, as a multiple of the slots that even loads need."""
    jitter: NotNegative = 0.01
    """The largest relative change of the router's input while training."""


def build_switch(config: GShardConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Switch or GShard decoder with random weights."""
    embed, kind = config.embed, type(config).__name__
    if config.layers % 2:
        raise ValueError(f"{kind}(layers={config.layers}): every second layer is a mixture; give an even number.")
    if embed % config.heads:
        raise ValueError(f"{kind}(embed={embed}, heads={config.heads}): heads must divide embed.")
    damping = (2 * config.layers) ** -0.5
    norm = lambda: RMSNorm("embed", embed=embed, eps=config.eps)

    def expert(key: Key[Array, ""]) -> MLP:
        return MLP(embed=embed, mlp=config.mlp, activation=relu, output_std=damping * config.mlp**-0.5, key=key)

    def router(key: Key[Array, ""]) -> Router:
        if isinstance(config, SwitchConfig):
            return TopKRouter(embed=embed, experts=config.experts, top_k=1, jitter=config.jitter, key=key)
        return RandomSecondRouter(embed=embed, experts=config.experts, key=key)

    def mixture(key: Key[Array, ""]) -> MoE:
        choose, experts = jax.random.split(key)
        routed, balance = Experts(expert, config.experts, key=experts), LoadBalance(config.balance, choices=1)
        return MoE(router(choose), routed, dispatch=Capacity(config.capacity), losses=(balance,))

    def layer(make: Callable[..., MLP | MoE], key: Key[Array, ""]) -> Block:
        attention, feed_forward = jax.random.split(key)
        size = embed // config.heads
        arguments: dict[str, Any] = {"heads": config.heads, "head_dim": size, "rotary": rotary_of(config, size)}
        mixer = Attention(embed=embed, **arguments, output_std=damping * embed**-0.5, key=attention)
        return Block(Residual(mixer, norm()), Residual(make(feed_forward), norm()))

    def pair(key: Key[Array, ""]) -> SuperBlock:
        return SuperBlock(tuple(map(layer, (expert, mixture), jax.random.split(key))))

    embedding, stack = jax.random.split(key)
    return Transformer(
        embedding=Embedding(vocab=config.vocab, embed=embed, key=embedding),
        stacks=(Stack(pair, config.layers // 2, key=stack),),
        norm=norm(),
    )


_GSHARD_PRESETS = {
    "gshard-byte-400k": GShardConfig(vocab=256, embed=64, layers=4, heads=4, mlp=128, experts=8),
    "gshard-byte-4m": GShardConfig(vocab=256, embed=128, layers=4, heads=8, mlp=512, experts=16),
}
_SWITCH_PRESETS = {
    "switch-byte-400k": SwitchConfig(vocab=256, embed=64, layers=4, heads=4, mlp=128, experts=8),
    "switch-byte-4m": SwitchConfig(vocab=256, embed=128, layers=4, heads=8, mlp=512, experts=16),
}

GSHARD = Family("gshard", GShardConfig, build_switch, _GSHARD_PRESETS)
SWITCH = Family("switch", SwitchConfig, build_switch, _SWITCH_PRESETS)
