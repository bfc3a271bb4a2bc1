"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): an encoder with local and global attention, of masked tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    LayerNorm,
    Linear,
    Mask,
    PredictionHead,
    Residual,
    Transformer,
)
from .._family import Family
from ._decoder import bend, damping, decoder, gated_mlp, rotary_of
from ._modernbert_config import ModernBERTConfig
from ._modernbert_tables import MODERNBERT_ATTRIBUTES, MODERNBERT_WEIGHTS


def build_modernbert(config: ModernBERTConfig, *, key: Key[Array, ""]) -> Transformer:
    """A ModernBERT with random weights."""
    size, rest = divmod(config.embed, config.heads)
    if rest:
        raise ValueError(f"ModernBERTConfig(embed={config.embed}, heads={config.heads}): heads must divide embed.")
    norm = lambda: LayerNorm("embed", embed=config.embed, eps=config.eps, bias=config.norm_bias)

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> Block:
        (is_global, is_first), (mixer, feed_forward) = kind, jax.random.split(key)
        local = rotary_of(config, size, theta=config.local_theta, scaling=config.local_scaling)
        rotary = rotary_of(config, size, scaling=config.scaling) if is_global else local
        mask = Mask(is_causal=False, window=None if is_global else config.window // 2 + 1)
        given: dict[str, Any] = {"bias": config.bias, "output_std": damping(config) * config.embed**-0.5}
        given |= {"embed": config.embed, "heads": config.heads, "head_dim": size, "key": mixer}
        mixed = Attention(mask=mask, rotary=rotary, **given)
        fed = gated_mlp(config, bias=config.mlp_bias, key=feed_forward)
        return Block(Residual(mixed, None if is_first else norm()), Residual(fed, norm()))

    of_decoder, of_dense, of_head = jax.random.split(key, 3)
    kinds = [(layer in config.global_layers, layer == 0) for layer in range(config.layers)]
    dense = PredictionHead(
        norm(),
        norm(),
        embed=config.embed,
        bias=config.dense_bias,
        activation=bend(config, "dense_activation"),
        key=of_dense,
    )
    model = decoder(config, block, kinds, final_norm=dense, key=of_decoder)
    if not config.tied:
        sizes = {"embed": config.embed, "vocab": config.vocab}
        head = Linear("embed -> vocab", bias=config.logit_bias, **sizes, key=of_head)
        return dataclasses.replace(model, embedding_norm=norm(), head=head)
    bias = jnp.zeros(config.vocab, jnp.float32) if config.logit_bias else None
    return dataclasses.replace(model, embedding_norm=norm(), logit_bias=bias)


_BIASES: dict[str, Any] = {"norm_bias": True, "bias": True, "mlp_bias": True, "dense_bias": True}
_PRESETS = {
    "modernbert-byte-200k": ModernBERTConfig(256, 64, 4, 4, 96, global_layers=(0, 3), window=32, **_BIASES),
    "modernbert-byte-untied-200k": ModernBERTConfig(256, 64, 4, 4, 96, global_layers=(0, 3), window=32, tied=False),
    "modernbert-base": ModernBERTConfig(50_368, 768, 22, 12, 1152, global_layers=tuple(range(0, 22, 3))),
    "modernbert-large": ModernBERTConfig(50_368, 1024, 28, 16, 2624, global_layers=tuple(range(0, 28, 3))),
}

MODERNBERT = Family(
    "modernbert",
    ModernBERTConfig,
    build_modernbert,
    _PRESETS,
    "ModernBertForMaskedLM",
    "modernbert",
    MODERNBERT_ATTRIBUTES,
    MODERNBERT_WEIGHTS,
)
