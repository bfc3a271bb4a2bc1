"""BLOOM (BigScience 2022, arXiv:2211.05100) and MPT (MosaicML 2023), which have `nn.ALiBi` and no other positions.

Both have pre-norm layers and feed-forward layers without gates, with four times as many hidden features as channels.
BLOOM has biases, and a norm after the embedding. MPT has no biases, and may clip queries, keys and values.
"""

import dataclasses
from typing import Protocol

import jax
from jaxtyping import Array, Key

from ...nn import ALiBi, Attention, Block, ClippedNorm, LayerNorm, Residual, Scores, Transformer
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, LayerCount, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import divide_heads, Family, ModelConfig, OLDER_DECODER_CLASSIFIER
from .._weight_rules import Rule
from ._common import INTO_HEADS, LAYER_H, leaf_paths, OF_HEADS, OUT_OF_HEADS, QKV, weight_and_bias
from ._decoder import damping, decoder, DecoderSizes, mlp


class _Sizes(DecoderSizes, Protocol):
    """Fields that the configs of both families have."""

    @property
    def heads(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class BloomConfig(ModelConfig):
    """The config of a BLOOM."""

    layers: LayerCount
    """The number of layers."""
    heads: Size
    """The number of heads."""
    _: dataclasses.KW_ONLY
    eps: NotNegative = 1e-5
    """The epsilon of norms, which is added to the variance before the root."""
    tied: bool = True
    """Whether the embedding's table is the head too."""
    max_seq: Length = 2048
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""
    activation = "gelu_tanh"  # of feed-forward layers; no attribute states it

    def __post_init__(self):
        divide_heads(self)


@dataclasses.dataclass(frozen=True)
class MPTConfig(ModelConfig):
    """The config of an MPT."""

    layers: LayerCount
    """The number of layers."""
    heads: Size
    """The number of heads."""
    _: dataclasses.KW_ONLY
    score_scale: Positive | None = None
    """The factor of the scores; None: the number of channels of a head to the power -0.5."""
    max_bias: Positive = 8.0
    """The largest exponent of `nn.ALiBi`: for a power of two heads, the smallest slope is `2 ** -max_bias`."""
    clip: Positive | None = None
    """The largest magnitude of queries, keys and values; None: no bound."""
    eps: NotNegative = 1e-5
    """The epsilon of norms, which is added to the variance before the root."""
    tied: bool = True
    """Whether the embedding's table is the head too."""
    max_seq: Length = 2048
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""
    activation = "gelu"  # of feed-forward layers; no attribute states it

    def __post_init__(self):
        divide_heads(self)


def build_bloom(config: BloomConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a BLOOM with random weights."""
    norm = lambda: LayerNorm("embed", embed=config.embed, eps=config.eps)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = _attention(config, Scores(alibi=ALiBi(heads=config.heads)), bias=True, key=mixer_key)
        feed_forward = mlp(config, 4 * config.embed, bias=True, key=feed_forward_key)
        return Block(Residual(mixer, norm()), Residual(feed_forward, norm()))

    return decoder(config, block, embedding_norm=norm(), final_norm=norm(), key=key)


def build_mpt(config: MPTConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an MPT with random weights."""
    norm = lambda: LayerNorm("embed", embed=config.embed, eps=config.eps, bias=False)
    scores = Scores(config.score_scale, alibi=ALiBi(heads=config.heads, max_bias=config.max_bias))
    clipped = None if config.clip is None else ClippedNorm(None, config.clip)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = _attention(config, scores, bias=False, clipped=clipped, key=mixer_key)
        feed_forward = mlp(config, 4 * config.embed, bias=False, key=feed_forward_key)
        return Block(Residual(mixer, norm()), Residual(feed_forward, norm()))

    return decoder(config, block, final_norm=norm(), key=key)


def _attention(
    config: _Sizes, scores: Scores, *, bias: bool, clipped: ClippedNorm | None = None, key: Key[Array, ""]
) -> Attention:
    return Attention(
        embed=config.embed,
        heads=config.heads,
        head_dim=config.embed // config.heads,
        bias=bias,
        output_std=damping(config) * config.embed**-0.5,
        query_norm=clipped,
        key_norm=clipped,
        value_norm=clipped,
        scores=scores,
        key=key,
    )


class _SlowButExact(Entry):
    """`slow_but_exact`: transformers sums `pretraining_tp` parts of each output map, and leaves out the map's bias."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse a sum over several parts."""
        parts = published.read("pretraining_tp", Size, 1)
        if published.flag("slow_but_exact", False) and parts > 1:
            published.refuse(
                f"slow_but_exact=True with pretraining_tp={parts}: transformers then leaves out the biases of output "
                "maps; set slow_but_exact to false, with which all biases are added."
            )
        return {}

    def write(self, config: BloomConfig) -> Attributes:
        """Return no attribute."""
        return {}


_BLOOM_PRESETS = {
    "bloom-byte-500k": BloomConfig(256, 96, 4, 6),
    "bloom-560m": BloomConfig(250_880, 1024, 24, 16),
    "bloom-1b1": BloomConfig(250_880, 1536, 24, 16),
    "bloom-1b7": BloomConfig(250_880, 2048, 24, 16),
    "bloom-3b": BloomConfig(250_880, 2560, 30, 32),
    "bloom-7b1": BloomConfig(250_880, 4096, 30, 32),
    "bloom": BloomConfig(250_880, 14_336, 70, 112),
}

BLOOM = Family(
    "bloom",
    BloomConfig,
    build_bloom,
    _BLOOM_PRESETS,
    "BloomForCausalLM",
    "bloom",
    (
        Count("vocab", "vocab_size", 250_880),
        # Transformers prefers the first of two names, and writes hidden_size, n_layer and n_head.
        Attribute("embed", ("n_embed", "hidden_size"), 64, written=("hidden_size",)),
        Attribute("layers", ("num_hidden_layers", "n_layer"), 2, written=("n_layer",)),
        Attribute("heads", ("num_attention_heads", "n_head"), 8, written=("n_head",)),
        Attribute("eps", "layer_norm_epsilon", 1e-5),
        Attribute("tied", "tie_word_embeddings", True),
        Attribute("max_seq", "seq_length", 2048),
        Expect("apply_residual_connection_post_layernorm", False),
        Expect("n_inner", None, written=False),
        _SlowButExact(),
        # Settings of rounding and of the publishers' own training program.
        Ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
        Ignore("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    ),
    (
        Rule("transformer.word_embeddings.weight", "embedding.weight"),
        *weight_and_bias("transformer.word_embeddings_layernorm", "embedding_norm"),
        *weight_and_bias("transformer.ln_f", "norm"),
        Rule("lm_head.weight", "head.weight"),
        *weight_and_bias(f"{LAYER_H}input_layernorm", "mixer.norm"),
        *weight_and_bias(f"{LAYER_H}post_attention_layernorm", "feed_forward.norm"),
        *(
            Rule(f"{LAYER_H}self_attention.query_key_value.{leaf}", leaf_paths(QKV, leaf), pattern, groups="heads")
            for leaf, pattern in (("weight", INTO_HEADS), ("bias", OF_HEADS))
        ),
        *weight_and_bias(f"{LAYER_H}self_attention.dense", "mixer.layer.output", OUT_OF_HEADS),
        *weight_and_bias(f"{LAYER_H}mlp.dense_h_to_4h", "feed_forward.layer.up"),
        *weight_and_bias(f"{LAYER_H}mlp.dense_4h_to_h", "feed_forward.layer.down"),
    ),
    is_bare=True,
    classifier=OLDER_DECODER_CLASSIFIER,
)


class _AttentionConfig(Entry):
    """`attn_config`, the settings of attention in an object of their own.

    Transformers does not read `alibi_bias_max` and computes the slopes of its default, 8. The publishers' own program
    reads it, and so does this entry.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `score_scale`, `max_bias` and `clip`; refuse other kinds of attention."""
        settings = PublishedConfig(published.nested("attn_config"), f"{published.source}, attn_config")
        settings.expect("attn_type", "multihead_attention")
        settings.expect("alibi", True)
        for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
            settings.expect(name, False)
        settings.expect("attn_impl", "torch", "flash", "triton")  # These compute the same attention.
        settings.take("attn_pdrop", None)
        fields: Fields = {
            "score_scale": settings.read("softmax_scale", Positive, None),
            "max_bias": settings.read("alibi_bias_max", Positive, 8),
            "clip": settings.read("clip_qkv", NotNegative, None) or None,  # 0 means no bound in transformers
        }
        settings.finish()
        return fields

    def write(self, config: MPTConfig) -> Attributes:
        """Return the attribute; raises a `ValueError` for a `max_bias` that is no whole number."""
        if config.max_bias != int(config.max_bias):
            raise ValueError(
                f"save(config=MPTConfig(max_bias={config.max_bias})): published configurations have a whole number; "
                "give one."
            )
        return {
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": int(config.max_bias),
                "clip_qkv": config.clip,
                "softmax_scale": config.score_scale,
            }
        }


_MPT_7B = MPTConfig(50_432, 4096, 32, 32)
_MPT_PRESETS = {
    "mpt-byte-500k": MPTConfig(256, 96, 4, 6),
    "mpt-7b": _MPT_7B,
    "mpt-7b-8k": dataclasses.replace(_MPT_7B, max_seq=8192),
    "mpt-7b-storywriter": dataclasses.replace(_MPT_7B, clip=6.0, max_bias=16.0, max_seq=65_536),
    "mpt-30b": MPTConfig(50_432, 7168, 48, 64, max_seq=8192),
}

_BLOCK = "transformer.blocks.{layer}."
MPT = Family(
    "mpt",
    MPTConfig,
    build_mpt,
    _MPT_PRESETS,
    "MptForCausalLM",
    "mpt",
    (
        Count("vocab", "vocab_size", 50_368),
        # Transformers prefers the first of two names, and writes the second.
        Count("embed", ("hidden_size", "d_model"), 2048, written=("d_model",)),
        Attribute("layers", ("num_hidden_layers", "n_layers"), 24, written=("n_layers",)),
        Count("heads", ("num_attention_heads", "n_heads"), 16, written=("n_heads",)),
        _AttentionConfig(),
        Attribute("eps", "layer_norm_epsilon", 1e-5),
        Attribute("tied", "tie_word_embeddings", True),
        Attribute("max_seq", "max_seq_len", 2048),
        Expect("expansion_ratio", 4),
        Expect("no_bias", True),
        Expect("logit_scale", None),
        Expect("norm_type", "low_precision_layernorm", "layernorm"),
        # With ALiBi there are no learned positions. The other attributes are settings of the publishers' program.
        Ignore("learned_pos_emb", "embedding_fraction", "emb_pdrop", "init_config", "init_device"),
        Ignore("tokenizer_name", "verbose"),
    ),
    (
        Rule("transformer.wte.weight", "embedding.weight"),
        Rule("transformer.norm_f.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight"),
        Rule(f"{_BLOCK}norm_1.weight", "mixer.norm.weight"),
        Rule(f"{_BLOCK}attn.Wqkv.weight", leaf_paths(QKV, "weight"), INTO_HEADS),
        Rule(f"{_BLOCK}attn.out_proj.weight", "mixer.layer.output.weight", OUT_OF_HEADS),
        Rule(f"{_BLOCK}norm_2.weight", "feed_forward.norm.weight"),
        Rule(f"{_BLOCK}ffn.up_proj.weight", "feed_forward.layer.up.weight"),
        Rule(f"{_BLOCK}ffn.down_proj.weight", "feed_forward.layer.down.weight"),
    ),
    classifier=OLDER_DECODER_CLASSIFIER,
)
