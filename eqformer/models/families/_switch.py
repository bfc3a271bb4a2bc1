"""Decoders in the manner of GShard (Lepikhin et al. 2020) and Switch (Fedus et al. 2021): every other layer a mixture.

The papers' models are encoder-decoders with relative positions. The models here are decoders with rotary positions. The
layers with experts, the choice of experts, the capacity of an expert, and the losses are as in the papers.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Key

from ... import nn
from .._config_types import LayerCount, NotNegative, Positive, Size
from .._family import divide_heads, Family, ModelConfig
from ._decoder import rotary_of


@dataclasses.dataclass(frozen=True)
class GShardConfig(ModelConfig):
    """The config of a decoder like GShard.

    A token takes two experts, the second at random. The balance loss counts first choices only.
    """

    layers: LayerCount
    """The number of layers, which is even, because every second layer is a mixture."""
    heads: Size
    """The number of heads."""
    mlp: Size
    """Hidden features of a feed-forward layer and of an expert."""
    experts: Size
    """The number of experts of a layer."""
    capacity: Positive = 1.0
    """The capacity factor: an expert takes at most `capacity` times an even share of the first and second choices."""
    balance: NotNegative = 0.01
    """The weight of the balance loss."""
    theta: Positive = 10_000.0
    """The base of rotary positions."""
    eps: NotNegative = 1e-6
    """The epsilon of norms, which is added to the mean square before the root."""


@dataclasses.dataclass(frozen=True)
class SwitchConfig(GShardConfig):
    """The config of a decoder like Switch: one expert per token, jitter, a capacity factor, a balance loss."""

    capacity: Positive = 1.25
    """The capacity factor: an expert takes at most `capacity` times an even share of the tokens."""
    jitter: NotNegative = 0.01
    """The largest relative change of the router's input while training."""


def build_switch(config: GShardConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Switch or GShard decoder with random weights."""
    embed, head_dim = config.embed, divide_heads(config)
    if config.layers % 2:
        name = type(config).__name__
        raise ValueError(f"{name}(layers={config.layers}): every second layer is a mixture; give an even number.")
    damping = (2 * config.layers) ** -0.5

    def norm() -> nn.RMSNorm:
        return nn.RMSNorm("embed", embed=embed, eps=config.eps)

    def expert(key: Key[Array, ""]) -> nn.MLP:
        return nn.MLP(embed=embed, mlp=config.mlp, activation=nn.relu, output_std=damping * config.mlp**-0.5, key=key)

    def router(key: Key[Array, ""]) -> nn.Router:
        if isinstance(config, SwitchConfig):
            return nn.TopKRouter(embed=embed, experts=config.experts, top_k=1, jitter=config.jitter, key=key)
        return nn.RandomSecondRouter(embed=embed, experts=config.experts, key=key)

    def mixture(key: Key[Array, ""]) -> nn.MoE:
        router_key, experts_key = jax.random.split(key)
        routed, balance = nn.Experts(expert, config.experts, key=experts_key), nn.LoadBalance(config.balance, choices=1)
        return nn.MoE(router(router_key), routed, dispatch=nn.Capacity(config.capacity), losses=(balance,))

    def layer(make: Callable[[Key[Array, ""]], nn.MLP | nn.MoE], key: Key[Array, ""]) -> nn.Block:
        attention_key, feed_forward_key = jax.random.split(key)
        mixer = nn.Attention(
            embed=embed,
            heads=config.heads,
            head_dim=head_dim,
            output_std=damping * embed**-0.5,
            rotary=rotary_of(config, head_dim),
            key=attention_key,
        )
        return nn.Block(nn.Residual(mixer, norm()), nn.Residual(make(feed_forward_key), norm()))

    def pair(key: Key[Array, ""]) -> nn.SuperBlock:
        return nn.SuperBlock(tuple(map(layer, (expert, mixture), jax.random.split(key))))

    embedding_key, stack_key = jax.random.split(key)
    return nn.Transformer(
        embedding=nn.Embedding(vocab=config.vocab, embed=embed, key=embedding_key),
        stacks=(nn.Stack(pair, config.layers // 2, key=stack_key),),
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
