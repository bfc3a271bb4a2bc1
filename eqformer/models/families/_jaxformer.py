"""JAXformer (Makkar, Makkar and Jindal 2025): latent attention in blocks of several layers, tied embedding.

Sizes and the order of layers follow the published program: norms have a shift, every map has a bias, and the last layer
of each block has no rotary positions. With `experts`, the last layer of each block is a mixture beside shared experts.

Two parts differ from the published program. The program leaves the shared experts out of a mixture's sum. Its attention
scores do not depend on relative positions alone; here, latent attention follows the paper (DeepSeek-V2).
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._config_types import NotNegative, OptionalSize, Positive, Rate, Size
from .._family import divide_heads, Family, ModelConfig


@dataclasses.dataclass(frozen=True)
class JAXformerConfig(ModelConfig):
    """The config of a JAXformer."""

    blocks: Size
    """The number of blocks."""
    layers_per_block: Size
    """The number of layers of a block."""
    heads: Size
    """The number of heads."""
    latent: Size
    """Channels of the latent of keys and values."""
    rope_dim: Size
    """Channels of the rotated key."""
    mlp: Size | None = None
    """Hidden features; None: 4 * embed."""
    theta: Positive = 10_000.0
    """The base of rotary positions."""
    eps: NotNegative = 1e-6
    """The epsilon of norms, which is added to the mean square before the root."""
    dropout: Rate = 0.0
    """The rate of dropout."""
    experts: Size | None = None
    """The number of experts of a mixture; None: all layers are dense."""
    top_k: Size = 2
    """The number of experts that each token chooses."""
    shared: OptionalSize = 2
    """The number of shared experts, which together are one dense layer that is `shared` times as wide as an expert."""
    capacity: Positive = 1.5
    """The capacity factor of experts (`nn.Capacity`)."""
    balance: NotNegative = 0.01
    """The weight of the balance loss."""


def build_jaxformer(config: JAXformerConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a JAXformer with random weights."""
    embed, mlp = config.embed, config.mlp or 4 * config.embed
    head_dim = divide_heads(config)
    damping = (2 * config.blocks * config.layers_per_block) ** -0.5
    dropout = nn.Dropout(config.dropout) if config.dropout else None

    def norm() -> nn.RMSNorm:
        return nn.RMSNorm("embed", embed=embed, eps=config.eps, shift=True)

    def dense(key: Key[Array, ""], times: int = 1) -> nn.MLP:
        width = times * mlp
        return nn.MLP(
            embed=embed, mlp=width, activation=nn.gelu_tanh, bias=True, output_std=damping * width**-0.5, key=key
        )

    def mixture(count: int, key: Key[Array, ""]) -> nn.MoE:
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        return nn.MoE(
            nn.TopKRouter(
                embed=embed,
                experts=count,
                top_k=config.top_k,
                score="sigmoid",
                normalize=True,
                bias=True,
                key=router_key,
            ),
            nn.Experts(dense, count, key=experts_key),
            dispatch=nn.Capacity(config.capacity),
            shared=dense(shared_key, config.shared) if config.shared else None,
            losses=(nn.LoadBalance(config.balance, normalize=True),) if config.balance else (),
        )

    def layer(rotary: nn.Rotary | None, key: Key[Array, ""]) -> nn.Block:
        attention_key, feed_forward_key = jax.random.split(key)
        mixer = nn.LatentAttention(
            embed=embed,
            heads=config.heads,
            head_dim=head_dim,
            latent=config.latent,
            q_latent=config.latent,
            rotary=rotary,
            bias=True,
            output_std=damping * embed**-0.5,
            key=attention_key,
        )
        if rotary is None and config.experts is not None:
            feed_forward = mixture(config.experts, feed_forward_key)
        else:
            feed_forward = dense(feed_forward_key)
        return nn.Block(nn.Residual(mixer, norm(), dropout=dropout), nn.Residual(feed_forward, norm(), dropout=dropout))

    def block(key: Key[Array, ""]) -> nn.SuperBlock:
        rotary = nn.Rotary(config.rope_dim, config.theta, interleaved=True)
        kinds = (rotary,) * (config.layers_per_block - 1) + (None,)
        return nn.SuperBlock(tuple(map(layer, kinds, jax.random.split(key, config.layers_per_block))))

    embedding_key, stack_key = jax.random.split(key)
    return nn.Transformer(
        embedding=nn.Embedding(vocab=config.vocab, embed=embed, key=embedding_key),
        stacks=(nn.Stack(block, config.blocks, key=stack_key),),
        norm=norm(),
    )


_SMALL = JAXformerConfig(256, 128, blocks=2, layers_per_block=2, heads=8, latent=64, rope_dim=16)
_LARGE = JAXformerConfig(100_277, 768, blocks=8, layers_per_block=6, heads=12, latent=128, rope_dim=64, dropout=0.1)
_PRESETS = {
    "jaxformer-byte-1m": _SMALL,
    "jaxformer-byte-7m": dataclasses.replace(_SMALL, embed=256, blocks=4, dropout=0.1),
    "jaxformer-byte-4m": dataclasses.replace(_SMALL, experts=16),
    # The published sizes, 8 blocks of 6 layers, without and with experts.
    "jaxformer-dense": _LARGE,
    "jaxformer": dataclasses.replace(_LARGE, experts=16),
}

JAXFORMER = Family("jaxformer", JAXformerConfig, build_jaxformer, _PRESETS)
