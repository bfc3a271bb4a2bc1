"""MiniCPM3 (OpenBMB 2024) and Youtu-LLM (Tencent 2025): decoders with latent attention and without experts.

Youtu-LLM has DeepSeek-V3's attention. MiniCPM3 rotates halves of the channels together, and multiplies embeddings,
sublayers and logits by factors.
"""

import dataclasses
from typing import Any, Unpack

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Attribute, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Length, NotNegative, Number, PublishedConfig, Size
from .._family import Family
from ._decoder import decoder, DecoderEnds, gated_mlp, pre_norm_block
from ._deepseek import DENSE_LATENT_WEIGHTS, latent_attention, latent_attention_attributes, LatentAttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniCPM3Config(LatentAttentionConfig):
    """The config of a MiniCPM3."""

    q_latent: Size | None = 768
    latent: Size = 256
    head_dim: Size = 64
    rope_dim: Size = 32
    v_dim: Size = 64
    embedding_scale: Number = 12.0
    """A factor of the embeddings."""
    depth_scale: Number = 1.4
    """The factor of what each sublayer adds to the residual stream is `depth_scale / sqrt(layers)`."""
    base_embed: Size = 256
    """The factor of the logits is `base_embed / embed`."""
    eps: NotNegative = 1e-5
    tied: bool = True
    max_seq: Length = 32_768


def build_minicpm3(config: MiniCPM3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a MiniCPM3 with random weights."""
    residual_scale = config.depth_scale * config.layers**-0.5
    logit_scale = config.base_embed / config.embed
    return _build(config, False, residual_scale, key, embedding_scale=config.embedding_scale, logit_scale=logit_scale)


def _build(
    config: LatentAttentionConfig,
    interleaved: bool,
    residual_scale: float | None,
    key: Key[Array, ""],
    **ends: Unpack[DecoderEnds],
) -> Transformer:
    """Return a decoder with latent attention and gated layers; `ends` are arguments of `decoder`."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = latent_attention(config, interleaved=interleaved, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key), residual_scale=residual_scale)

    return decoder(config, block, key=key, **ends)


class _ValueSize(Entry):
    """The channels of a head's value; a missing or null attribute means `embed / heads`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `v_dim`."""
        stated = published.nullable("v_head_dim", None)
        if stated is None:
            stated = published.count("hidden_size") // published.count("num_attention_heads")
        return {"v_dim": stated}

    def write(self, config: MiniCPM3Config) -> Attributes:
        """Return the attribute."""
        return {"v_head_dim": config.v_dim}


_BYTE: dict[str, Any] = {
    **{"vocab": 256, "embed": 96, "layers": 4, "heads": 6, "mlp": 256},
    **{"q_latent": 48, "latent": 32, "head_dim": 16, "rope_dim": 8, "v_dim": 16},
}
_MINICPM3_PRESETS = {
    "minicpm3-byte-500k": MiniCPM3Config(**_BYTE, base_embed=96),
    # Without the divisors of LongRoPE, which only `config.json` states.
    "minicpm3-4b": MiniCPM3Config(vocab=73_448, embed=2560, layers=62, heads=40, mlp=6400),
}

MINICPM3 = Family(
    "minicpm3",
    MiniCPM3Config,
    build_minicpm3,
    _MINICPM3_PRESETS,
    "MiniCPM3ForCausalLM",
    "minicpm3",
    (
        *latent_attention_attributes(value_size=_ValueSize(), tied=True, max_seq=32_768),
        Attribute("embedding_scale", "scale_emb", 12),
        Attribute("depth_scale", "scale_depth"),
        Attribute("base_embed", "dim_model_base"),
        Expect("mlp_bias", False),
    ),
    DENSE_LATENT_WEIGHTS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YoutuConfig(LatentAttentionConfig):
    """The config of a Youtu-LLM."""

    q_latent: Size | None = 1536
    interleaved: bool = True
    """Whether the channels that are rotated together are neighbors."""
    tied: bool = True
    max_seq: Length = 131_072


def build_youtu(config: YoutuConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Youtu-LLM with random weights."""
    return _build(config, config.interleaved, None, key)


_YOUTU_PRESETS = {
    "youtu-byte-500k": YoutuConfig(**_BYTE),
    "youtu-llm-2b": YoutuConfig(vocab=128_256, embed=2048, layers=32, heads=16, mlp=6144),
}

YOUTU = Family(
    "youtu",
    YoutuConfig,
    build_youtu,
    _YOUTU_PRESETS,
    "YoutuForCausalLM",
    "youtu",
    (
        *latent_attention_attributes(tied=True, max_seq=131_072),
        Attribute("interleaved", "rope_interleave", True),
        Ignore("embedding_initializer_range"),
    ),
    DENSE_LATENT_WEIGHTS,
)
