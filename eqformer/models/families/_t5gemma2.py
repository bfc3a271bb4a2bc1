"""T5Gemma 2 (Zhang et al. 2025): Gemma 3's blocks as an encoder, and a decoder that also reads it."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Encoder, full, MergedAttention, Transformer, window_both_ways
from .._attributes import Attribute, Entry, Expect, field_types, Fields, Ignore, read_entries
from .._config_types import Attributes, Index, PublishedConfig
from .._family import Family, MultimodalModel
from .._weight_rules import Rule
from ._common import ATTENTION, gated_weights, head_norm_weights, norm_weights
from ._decoder import causal_mask, layer_windows, norm, stacks_of
from ._gemma3 import GEMMA3, gemma3_block, GEMMA3_MISSING, gemma3_model, GEMMA3_PRESETS, Gemma3Config


_TABLE = (*GEMMA3.attributes, Attribute("start", "bos_token_id", 2), Ignore("dropout_rate"))
_MULTIMODAL_ENCODER = MultimodalModel("t5gemma2_encoder")


class _EqualHalves(Entry):
    """The attributes of the encoder's text model and of the decoder, which must be equal."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the decoder's fields; refuse an encoder with others."""
        multimodal = PublishedConfig(published.nested("encoder"), f"{published.source}: encoder")
        encoder = _read(_MULTIMODAL_ENCODER.text_attributes(multimodal), f"{multimodal.source}: text_config")
        decoder = _read(published.nested("decoder"), f"{published.source}: decoder")
        differing = {name: value for name, value in encoder.items() if value != decoder[name] and name != "start"}
        if differing:
            decoder_values = {name: decoder[name] for name in differing}
            published.refuse(
                f"the encoder has {differing} and the decoder {decoder_values}; this family has two halves alike."
            )
        published.expect("vocab_size", decoder["vocab"])
        return decoder

    def write(self, config: "T5Gemma2Config") -> Attributes:
        """Return the attributes of both halves."""
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
    """Return the rules for a half, whose arrays' names begin with `prefix`; `part` as in `Rule`."""
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
# The parts that images go through, and the vector of the end-of-image id, which text does not use.
UNREAD = tuple(
    f"{prefix}{part}"
    for prefix in (_ENCODER, _NEWER, "model.decoder.")
    for part in ("vision_tower.", "multi_modal_projector.", "embed_tokens.eoi_embedding")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Gemma2Config(Gemma3Config):
    """The config of a T5Gemma 2, whose encoder and decoder are of the same sizes, and share a table."""

    start: Index = 2
    """The id with which the decoder begins."""

    def __post_init__(self):
        if not self.tied:
            raise ValueError("T5Gemma2Config(tied=False): the table of both halves is the head too; leave tied out.")


def build_t5gemma2(config: T5Gemma2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a T5Gemma 2 with random weights."""

    def encoder_block(window: int | None, key: Key[Array, ""]) -> Block:
        return gemma3_block(config, window, full() if window is None else window_both_ways(window), key=key)

    def decoder_block(window: int | None, key: Key[Array, ""]) -> Block:
        mask = causal_mask(window)
        return gemma3_block(config, window, mask, as_mixer=MergedAttention, reads="source", key=key)

    encoder_key, decoder_key = jax.random.split(key)
    encoder = Encoder(
        stacks_of(encoder_block, layer_windows(config), key=encoder_key), norm(config, offset=1.0), start=config.start
    )
    return dataclasses.replace(gemma3_model(config, decoder_block, key=decoder_key), encoder=encoder)


def _t5gemma2(gemma3: str) -> T5Gemma2Config:
    """Return a config whose halves have the sizes of a Gemma 3."""
    return T5Gemma2Config(**vars(GEMMA3_PRESETS[gemma3]))


_PRESETS = {
    "t5gemma2-byte-900k": dataclasses.replace(_t5gemma2("gemma3-byte-500k"), bias=True),
    "t5gemma2-270m": dataclasses.replace(_t5gemma2("gemma3-270m"), vocab=262_144),
    "t5gemma2-1b": dataclasses.replace(_t5gemma2("gemma3-1b"), vocab=262_144),
    "t5gemma2-4b": dataclasses.replace(_t5gemma2("gemma3-4b"), vocab=262_144),
}

T5GEMMA2 = Family(
    "t5gemma2",
    T5Gemma2Config,
    build_t5gemma2,
    _PRESETS,
    "T5Gemma2ForConditionalGeneration",
    "t5gemma2",
    T5GEMMA2_ATTRIBUTES,
    T5GEMMA2_WEIGHTS,
    ignored_suffixes=("decoder.embed_tokens.weight",),
    unread=lambda config: UNREAD,
)
