"""T5Gemma (Zhang et al. 2025, arXiv:2504.06225): a Gemma 2 as an encoder, and one as a decoder that attends to it."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, CrossAttention, Embedding, Encoder, full, Residual, Transformer, window_both_ways
from .._attributes import Attribute, Entry, Expect, field_types, Fields, Ignore, read_entries
from .._config_types import Attributes, Index, PublishedConfig
from .._family import Family
from .._weight_rules import Rule
from ._common import attention_weights
from ._decoder import causal_mask, layer_windows, norm, stacks_of
from ._gemma2 import GEMMA2, gemma2_block, gemma2_model, GEMMA2_PRESETS, Gemma2Config, scores_of
from ._t5gemma2 import half_weights


# Transformers' defaults for each half.
_MISSING = {"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_MISSING |= {"num_attention_heads": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192}


class _EncoderAndDecoder(Entry):
    """The attributes of the encoder and of the decoder, each like a Gemma 2's."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the decoder's fields, and `encoder` if it differs; `tied` is an attribute outside of both."""
        encoder, decoder = (_read_half(published, half) for half in ("encoder", "decoder"))
        is_same = all(value == decoder[name] for name, value in encoder.items() if name not in ("start", "tied"))
        fields: Fields = {name: value for name, value in encoder.items() if name != "start"} | {"tied": True}
        tied = published.flag("tie_word_embeddings", True)
        return decoder | {"tied": tied, "encoder": None if is_same else Gemma2Config(**fields)}

    def write(self, config: "T5GemmaConfig") -> Attributes:
        """Return the attributes of both halves, and those outside of both."""
        shared: Attributes = {"model_type": "t5_gemma_module", "bos_token_id": config.start}
        halves = {"encoder": config.encoder or config, "decoder": config}
        attributes = {name: shared | GEMMA2.write(half) for name, half in halves.items()}
        return attributes | {"vocab_size": config.vocab, "tie_word_embeddings": config.tied}


def _read_half(published: PublishedConfig, half: str) -> Fields:
    inner = PublishedConfig(_MISSING | published.nested(half), f"{published.source}: {half}")
    fields = read_entries((*GEMMA2.attributes, *_OF_HALVES), inner, {**field_types(Gemma2Config), "start": Index})
    inner.finish()
    return fields


_OF_HALVES = (
    Attribute("start", "bos_token_id", 2),
    Expect("is_decoder", False, True),  # the half's name states it
    Ignore("dropout_rate", "cross_attention_hidden_size"),
)
T5GEMMA_ATTRIBUTES: tuple[Entry, ...] = (
    _EncoderAndDecoder(),
    Expect("is_encoder_decoder", True),
    # The halves have a vocab_size too; the others are settings of training.
    Ignore("vocab_size", "dropout_rate", "classifier_dropout_rate"),
)

_CROSS = "model.decoder.layers.{layer}."
T5GEMMA_WEIGHTS = (
    Rule("model.encoder.embed_tokens.weight", "encoder.embedding.weight"),
    Rule("model.decoder.embed_tokens.weight", "embedding.weight"),
    *half_weights("model.encoder.", "encoder"),
    *half_weights("model.decoder.", ""),
    *attention_weights(prefix=f"{_CROSS}cross_attn.", path="sublayers.1.layer"),
    Rule(f"{_CROSS}pre_cross_attn_layernorm.weight", "sublayers.1.norm.weight"),
    Rule(f"{_CROSS}post_cross_attn_layernorm.weight", "sublayers.1.output_norm.weight"),
    Rule("lm_head.out_proj.weight", "head.weight"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5GemmaConfig(Gemma2Config):
    """The config of a T5Gemma; its own fields are those of the decoder."""

    encoder: Gemma2Config | None = None
    """The config of the encoder, whose window layers see a window on both sides of a token; None: the decoder's."""
    start: Index = 2
    """The id with which the decoder begins."""


def build_t5gemma(config: T5GemmaConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a T5Gemma with random weights."""
    encoder_config = config.encoder or config

    def encoder_block(window: int | None, key: Key[Array, ""]) -> Block:
        mask = full() if window is None else window_both_ways(2 * window + 1)
        return gemma2_block(encoder_config, mask, key)

    def decoder_block(window: int | None, key: Key[Array, ""]) -> Block:
        block_key, cross_key = jax.random.split(key)
        cross = CrossAttention(
            embed=config.embed,
            heads=config.heads,
            head_dim=config.head_size,
            kv_heads=config.kv_heads,
            source=encoder_config.embed,
            bias=config.bias,
            scores=scores_of(config),
            key=cross_key,
        )
        before, after = norm(config, offset=1.0), norm(config, offset=1.0)
        mixer, feed_forward = gemma2_block(config, causal_mask(window), block_key).sublayers
        return Block(mixer, Residual(cross, before, output_norm=after, reads="source"), feed_forward)

    table_key, encoder_key, decoder_key = jax.random.split(key, 3)
    stacks = stacks_of(encoder_block, layer_windows(encoder_config), key=encoder_key)
    encoder_norm = norm(encoder_config, offset=1.0)
    embedding = Embedding(
        vocab=encoder_config.vocab, embed=encoder_config.embed, scale=encoder_config.embed**0.5, key=table_key
    )
    encoder = Encoder(stacks, encoder_norm, start=config.start, embedding=embedding)
    return dataclasses.replace(gemma2_model(config, decoder_block, key=decoder_key), encoder=encoder)


def _t5gemma(decoder: str, encoder: Gemma2Config | None = None) -> T5GemmaConfig:
    """Return a config whose decoder has the sizes of a Gemma 2; the encoder has the same sizes, or others."""
    return T5GemmaConfig(**vars(GEMMA2_PRESETS[decoder]), encoder=encoder)


_BYTE = Gemma2Config(256, 64, 2, 2, 1, 128, window_layers=(0,), window=32, head_dim=32, query_scalar=32, max_seq=512)
_PRESETS = {
    "t5gemma-byte-700k": dataclasses.replace(_t5gemma("gemma2-byte-500k", _BYTE), bias=True),
    "t5gemma-2b-2b": _t5gemma("gemma2-2b"),
    "t5gemma-9b-2b": _t5gemma("gemma2-2b", GEMMA2_PRESETS["gemma2-9b"]),
    "t5gemma-9b-9b": _t5gemma("gemma2-9b"),
}

T5GEMMA = Family(
    "t5gemma",
    T5GemmaConfig,
    build_t5gemma,
    _PRESETS,
    "T5GemmaForConditionalGeneration",
    "t5gemma",
    T5GEMMA_ATTRIBUTES,
    T5GEMMA_WEIGHTS,
)
