"""LFM2 and 2.5 (Liquid AI 2025, arXiv:2511.23404): gated short convolutions, and in some layers an attention."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Attributes, Entry, Fields
from .._config_types import Positive, PublishedConfig, Size
from .._family import Family
from ._decoder import decoder, gated_mlp, pre_norm_block
from ._short_convs import CONV_ATTRIBUTES, conv_or_attention, CONV_WEIGHTS, ConvConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LFM2Config(ConvConfig):
    """The config of an LFM2."""


def build_lfm2(config: LFM2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return an LFM2 with random weights."""

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        mixed = conv_or_attention(config, is_attention, mixer)
        return pre_norm_block(config, mixed, gated_mlp(config, key=feed_forward))

    return decoder(config, block, [layer in config.attention_layers for layer in range(config.layers)], key=key)


class _Width(Entry):
    """Hidden features; configurations may state those of a layer without gates, of which two thirds are used."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `mlp`."""
        width = published.read("block_ff_dim", Size, published.read("intermediate_size", Size, 12_288))
        multiple = published.count("block_multiple_of", 256)
        factor = published.nullable("block_ffn_dim_multiplier", 1.0)
        factor = published.checked("block_ffn_dim_multiplier", factor, Positive | None)
        if published.flag("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            width = width if factor is None else -(-int(factor * width) // multiple) * multiple
        return {"mlp": published.checked("block_ffn_dim_multiplier: hidden features", width, Size)}

    def write(self, config: LFM2Config) -> Attributes:
        """Return the width as it is."""
        return {"intermediate_size": config.mlp, "block_auto_adjust_ff_dim": False}


_ATTENTION_LAYERS = (2, 5, 8, 10, 12, 14)
_PRESETS = {
    "lfm2-byte-200k": LFM2Config(256, 64, 4, 4, 2, 160, attention_layers=(2,), bias=True, theta=1e4),
    "lfm2-350m": LFM2Config(65_536, 1024, 16, 16, 8, 4608, attention_layers=_ATTENTION_LAYERS),
    "lfm2-700m": LFM2Config(65_536, 1536, 16, 24, 8, 6912, attention_layers=_ATTENTION_LAYERS),
    "lfm2-1.2b": LFM2Config(65_536, 2048, 16, 32, 8, 8192, attention_layers=_ATTENTION_LAYERS),
}

LFM2 = Family(
    "lfm2",
    LFM2Config,
    build_lfm2,
    _PRESETS,
    "Lfm2ForCausalLM",
    "lfm2",
    (*CONV_ATTRIBUTES, _Width()),
    CONV_WEIGHTS,
)
