"""T5 (Raffel et al. 2020, arXiv:1910.10683), T5 v1.1 and Flan-T5: an encoder, and a decoder that attends to it."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    causal,
    CrossAttention,
    Embedding,
    Encoder,
    full,
    Linear,
    MLP,
    RelativeBias,
    Residual,
    RMSNorm,
    Stack,
    Transformer,
)
from .._family import Family, ModelConfig
from .._kinds import Index, LayerCount, Length, NotNegative, Size
from ._decoder import bend, gated_mlp
from ._t5_attributes import T5_ATTRIBUTES
from ._t5_tables import T5_WEIGHTS


@dataclasses.dataclass(frozen=True)
class T5Config(ModelConfig):
    """The config of a T5."""

    layers: LayerCount
    """Layers of the decoder."""
    heads: Size
    """Heads."""
    mlp: Size
    """Hidden features of a feed-forward layer."""
    _: dataclasses.KW_ONLY
    encoder_layers: LayerCount | None = None
    """Layers of the encoder; None: as many."""
    head_dim: Size = 64
    """Channels of a head."""
    gated: bool = True
    """Whether feed-forward layers are gated (v1.1), or plain."""
    activation: str = "gelu_tanh"
    """The activation of their features, or of their gate: a name of `nn.ACTIVATIONS`."""
    tied: bool = False
    """Whether the head is the embedding's table."""
    scaled: bool = False
    """Whether vectors are divided by the root of their channels before the head."""
    ranges: Size = 32
    """Ranges of distances that have a bias of scores."""
    farthest: Length = 128
    """From where on all distances are in one range."""
    eps: NotNegative = 1e-6
    """What norms add before the root."""
    start: Index = 0
    """The id with which the decoder begins."""


def build_t5(config: T5Config, *, key: Key[Array, ""]) -> Transformer:
    """A T5 with random weights."""
    embed, inner = config.embed, config.heads * config.head_dim
    sizes: dict[str, Any] = {"embed": embed, "heads": config.heads, "head_dim": config.head_dim, "scale": 1.0}
    norm = lambda: RMSNorm("embed", embed=embed, eps=config.eps)

    def block(key: Key[Array, ""], *, reads: bool) -> Block:
        own, other, fed = jax.random.split(key, 3)
        given = sizes | {"output_std": (2 * config.layers * inner) ** -0.5}
        attention = Attention(mask=full() if reads else causal(), score_bias=True, **given, key=own)
        cross = None if reads else Residual(CrossAttention(**given, key=other), norm())
        plain = lambda: MLP(embed=embed, mlp=config.mlp, activation=bend(config), key=fed)
        layer = gated_mlp(config, key=fed) if config.gated else plain()
        return Block(Residual(attention, norm()), Residual(layer, norm()), cross=cross)

    def bias(key: Key[Array, ""], *, reads: bool) -> RelativeBias:
        given = {"ranges": config.ranges, "heads": config.heads, "farthest": config.farthest}
        return RelativeBias(both_ways=reads, **given, key=key)

    table, reading, writing, of_reading, of_writing, head = jax.random.split(key, 6)
    reader = Stack(lambda key: block(key, reads=True), config.encoder_layers or config.layers, key=reading)
    return Transformer(
        embedding=Embedding(vocab=config.vocab, embed=embed, key=table),
        stacks=(Stack(lambda key: block(key, reads=False), config.layers, key=writing),),
        norm=norm(),
        head=None if config.tied else Linear("embed -> vocab", embed=embed, vocab=config.vocab, key=head),
        logit_scale=embed**-0.5 if config.scaled else None,
        encoder=Encoder((reader,), norm(), bias(of_reading, reads=True), config.start),
        score_bias=bias(of_writing, reads=False),
    )


def _as_stored(config: Any, names: Collection[str]) -> T5Config:
    """Give the config a head where the folder has one: transformers writes that the head is tied in either case."""
    return dataclasses.replace(config, tied=config.tied and "lm_head.weight" not in names)


_FIRST: dict[str, Any] = {"gated": False, "activation": "relu", "tied": True, "scaled": True}
_PRESETS = {
    "t5-byte-200k": T5Config(384, 64, 2, 4, 128, head_dim=16, **_FIRST),
    "t5-byte-gated-200k": T5Config(384, 64, 2, 4, 96, head_dim=16),
    "t5-small": T5Config(32_128, 512, 6, 8, 2048, **_FIRST),
    "t5-base": T5Config(32_128, 768, 12, 12, 3072, **_FIRST),
    "t5-large": T5Config(32_128, 1024, 24, 16, 4096, **_FIRST),
    "flan-t5-small": T5Config(32_128, 512, 8, 6, 1024),
    "flan-t5-base": T5Config(32_128, 768, 12, 12, 2048),
    "flan-t5-large": T5Config(32_128, 1024, 24, 16, 2816),
    "flan-t5-xl": T5Config(32_128, 2048, 24, 32, 5120),
    "flan-t5-xxl": T5Config(32_128, 4096, 24, 64, 10_240),
}

T5 = Family(
    *("t5", T5Config, build_t5, _PRESETS, "T5ForConditionalGeneration", "t5", T5_ATTRIBUTES, T5_WEIGHTS),
    ignored_suffixes=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    as_stored=_as_stored,
)
