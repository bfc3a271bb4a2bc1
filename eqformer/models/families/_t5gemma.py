"""T5Gemma (Zhang et al. 2025, arXiv:2504.06225) and T5Gemma 2 (Zhang et al. 2025).

T5Gemma has a Gemma 2 as the encoder, and a Gemma 2 with cross-attention as the decoder. T5Gemma 2 has Gemma 3's blocks
in both; each attention of the decoder reads the encoder's output and the decoder's tokens together.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Entry, Expect, field_types, Fields, Ignore, read_entries
from .._config_types import Attributes, Index, PublishedConfig
from .._family import Family, MultimodalModel
from .._weight_rules import Rule
from ._common import ATTENTION, attention_weights, gated_weights, head_norm_weights, norm_weights
from ._decoder import causal_mask, layer_windows, norm, stacks_of
from ._gemma import (
    GEMMA2,
    gemma2_block,
    gemma2_model,
    GEMMA2_PRESETS,
    Gemma2Config,
    GEMMA3,
    gemma3_block,
    GEMMA3_MISSING,
    gemma3_model,
    GEMMA3_PRESETS,
    Gemma3Config,
    scores_of,
)


_TABLE = (*GEMMA3.attributes, Attribute("start", "bos_token_id", 2), Ignore("dropout_rate"))
_MULTIMODAL_ENCODER = MultimodalModel("t5gemma2_encoder")


class _EqualHalves(Entry):
    """The attributes of the encoder's text model and of the decoder, which must be equal."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the decoder's fields; refuse an encoder whose fields differ."""
        multimodal = PublishedConfig(published.nested("encoder"), f"{published.source}: encoder")
        encoder = _read(_MULTIMODAL_ENCODER.text_attributes(multimodal), f"{multimodal.source}: text_config")
        decoder = _read(published.nested("decoder"), f"{published.source}: decoder")
        differing = {name: value for name, value in encoder.items() if value != decoder[name] and name != "start"}
        if differing:
            decoder_values = {name: decoder[name] for name in differing}
            published.refuse(
                f"the encoder has {differing} and the decoder {decoder_values}; in this family both must be equal."
            )
        published.expect("vocab_size", decoder["vocab"])
        return decoder

    def write(self, config: "T5Gemma2Config") -> Attributes:
        """Return the attributes of the encoder and of the decoder."""
        attributes: Attributes = {}
        for entry in _TABLE:
            attributes |= entry.write(config)
        text = {"model_type": "t5gemma2_encoder", "text_config": {"model_type": "t5gemma2_text"} | attributes}
        decoder = {"model_type": "t5gemma2_decoder"} | attributes
        return {"encoder": text, "decoder": decoder, "vocab_size": config.vocab}


def _read(attributes: Attributes, source: str) -> Fields:
    published = PublishedConfig(GEMMA3_MISSING | attributes, source)
    fields = read_entries(_TABLE, published, {**field_types(GEMMA3.config), "start": Index})
    published.finish()
    return fields


T5GEMMA2_ATTRIBUTES: tuple[Entry, ...] = (
    _EqualHalves(),
    Expect("is_encoder_decoder", True),
    Expect("tie_word_embeddings", True),
    # Attributes of training and of images.
    Ignore("dropout_rate", "classifier_dropout_rate", "eoi_token_index", "image_token_index"),
)


def half_weights(prefix: str, part: str) -> tuple[Rule, ...]:
    """Return the rules for the encoder or the decoder, whose arrays' names begin with `prefix`; `part` as in `Rule`."""
    norms = norm_weights(
        mixer="pre_self_attn_layernorm",
        mixer_output="post_self_attn_layernorm",
        feed_forward="pre_feedforward_layernorm",
        feed_forward_output="post_feedforward_layernorm",
    )
    final_norm = Rule("model.norm.weight", f"{part}.norm.weight" if part else "norm.weight")
    layers = (
        dataclasses.replace(rule, part=part) for rule in (*ATTENTION, *gated_weights(), *head_norm_weights(), *norms)
    )
    return tuple(
        dataclasses.replace(rule, name=prefix + rule.name.removeprefix("model.")) for rule in (final_norm, *layers)
    )


def _encoder(prefix: str) -> tuple[Rule, ...]:
    return (Rule(f"{prefix}embed_tokens.weight", "embedding.weight"), *half_weights(prefix, "encoder"))


_ENCODER, _NEWER = "model.encoder.", "model.encoder.text_model."  # as published, and as transformers names them
T5GEMMA2_WEIGHTS = (
    *_encoder(_ENCODER),
    *(dataclasses.replace(rule, variant=True) for rule in _encoder(_NEWER)),
    *half_weights("model.decoder.", ""),
)
# Parts for images, and the vector of the end-of-image id; a text model does not read them.
UNREAD = tuple(
    f"{prefix}{part}"
    for prefix in (_ENCODER, _NEWER, "model.decoder.")
    for part in ("vision_tower.", "multi_modal_projector.", "embed_tokens.eoi_embedding")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Gemma2Config(Gemma3Config):
    """The config of a T5Gemma 2, whose encoder and decoder have equal sizes and share the embedding table."""

    start: Index = 2
    """The id with which the decoder begins."""

    def __post_init__(self):
        if not self.tied:
            raise ValueError("T5Gemma2Config(tied=False): the embedding table is always the head too; leave tied out.")


def build_t5gemma2(config: T5Gemma2Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a T5Gemma 2 with random weights."""

    def encoder_block(window: int | None, key: Key[Array, ""]) -> nn.Block:
        return gemma3_block(config, window, nn.full() if window is None else nn.window_both_ways(window), key=key)

    def decoder_block(window: int | None, key: Key[Array, ""]) -> nn.Block:
        mask = causal_mask(window)
        return gemma3_block(config, window, mask, as_mixer=nn.MergedAttention, reads="source", key=key)

    encoder_key, decoder_key = jax.random.split(key)
    encoder = nn.Encoder(
        stacks_of(encoder_block, layer_windows(config), key=encoder_key), norm(config, offset=1.0), start=config.start
    )
    return dataclasses.replace(gemma3_model(config, decoder_block, key=decoder_key), encoder=encoder)


def _t5gemma2(gemma3: str) -> T5Gemma2Config:
    """Return a config whose encoder and decoder have the sizes of a Gemma 3."""
    return T5Gemma2Config(**vars(GEMMA3_PRESETS[gemma3]))


_T5GEMMA2_PRESETS = {
    "t5gemma2-byte-900k": dataclasses.replace(_t5gemma2("gemma3-byte-500k"), bias=True),
    "t5gemma2-270m": dataclasses.replace(_t5gemma2("gemma3-270m"), vocab=262_144),
    "t5gemma2-1b": dataclasses.replace(_t5gemma2("gemma3-1b"), vocab=262_144),
    "t5gemma2-4b": dataclasses.replace(_t5gemma2("gemma3-4b"), vocab=262_144),
}

T5GEMMA2 = Family(
    "t5gemma2",
    T5Gemma2Config,
    build_t5gemma2,
    _T5GEMMA2_PRESETS,
    "T5Gemma2ForConditionalGeneration",
    "t5gemma2",
    T5GEMMA2_ATTRIBUTES,
    T5GEMMA2_WEIGHTS,
    ignored_suffixes=("decoder.embed_tokens.weight",),
    unread=lambda config: UNREAD,
    classifier=None,
)


# Transformers' defaults for the encoder and for the decoder.
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
        """Return the attributes of the encoder and of the decoder, and the attributes outside of both."""
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
    Expect("is_decoder", False, True),  # The value has no effect: which stack decodes follows from the names.
    Ignore("dropout_rate", "cross_attention_hidden_size"),
)
T5GEMMA_ATTRIBUTES: tuple[Entry, ...] = (
    _EncoderAndDecoder(),
    Expect("is_encoder_decoder", True),
    # The encoder and the decoder have a vocab_size of their own; the other attributes are settings of training.
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
    """The config of a T5Gemma; the fields that it shares with a `Gemma2Config` describe the decoder."""

    encoder: Gemma2Config | None = None
    """The config of the encoder, whose window layers see a window on both sides of a token; None: the encoder has the
    decoder's fields."""
    start: Index = 2
    """The id with which the decoder begins."""


def build_t5gemma(config: T5GemmaConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a T5Gemma with random weights."""
    encoder_config = config.encoder or config

    def encoder_block(window: int | None, key: Key[Array, ""]) -> nn.Block:
        mask = nn.full() if window is None else nn.window_both_ways(2 * window + 1)
        return gemma2_block(encoder_config, mask, key)

    def decoder_block(window: int | None, key: Key[Array, ""]) -> nn.Block:
        block_key, cross_key = jax.random.split(key)
        cross = nn.CrossAttention(
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
        return nn.Block(mixer, nn.Residual(cross, before, output_norm=after, reads="source"), feed_forward)

    table_key, encoder_key, decoder_key = jax.random.split(key, 3)
    stacks = stacks_of(encoder_block, layer_windows(encoder_config), key=encoder_key)
    encoder_norm = norm(encoder_config, offset=1.0)
    embedding = nn.Embedding(
        vocab=encoder_config.vocab, embed=encoder_config.embed, scale=encoder_config.embed**0.5, key=table_key
    )
    encoder = nn.Encoder(stacks, encoder_norm, start=config.start, embedding=embedding)
    return dataclasses.replace(gemma2_model(config, decoder_block, key=decoder_key), encoder=encoder)


def _t5gemma(decoder: str, encoder: Gemma2Config | None = None) -> T5GemmaConfig:
    """Return a config whose decoder has the sizes of a Gemma 2; without an `encoder`, the encoder has them too."""
    return T5GemmaConfig(**vars(GEMMA2_PRESETS[decoder]), encoder=encoder)


_BYTE = Gemma2Config(256, 64, 2, 2, 1, 128, window_layers=(0,), window=32, head_dim=32, query_scalar=32, max_seq=512)
_T5GEMMA_PRESETS = {
    "t5gemma-byte-700k": dataclasses.replace(_t5gemma("gemma2-byte-500k", _BYTE), bias=True),
    "t5gemma-2b-2b": _t5gemma("gemma2-2b"),
    "t5gemma-9b-2b": _t5gemma("gemma2-2b", GEMMA2_PRESETS["gemma2-9b"]),
    "t5gemma-9b-9b": _t5gemma("gemma2-9b"),
}

T5GEMMA = Family(
    "t5gemma",
    T5GemmaConfig,
    build_t5gemma,
    _T5GEMMA_PRESETS,
    "T5GemmaForConditionalGeneration",
    "t5gemma",
    T5GEMMA_ATTRIBUTES,
    T5GEMMA_WEIGHTS,
    classifier=None,
)
