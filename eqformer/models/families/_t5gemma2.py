"""T5Gemma 2 (Zhang et al. 2025): Gemma 3's blocks as an encoder, and a decoder that also reads it."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import Block, Encoder, full, MergedAttention, Transformer, window_both_ways
from .._attributes import Attribute, Entry, Expect, field_types, Ignore, read_entries
from .._config_types import Index
from .._family import Family
from .._multimodal import MultimodalModel
from .._published_config import PublishedConfig
from .._weight_rules import Rule
from ._common import ATTENTION, gated_weights, head_norm_weights, norm_weights
from ._decoder import norm
from ._gemma3 import build_gemma3, GEMMA3, gemma3_block, GEMMA3_MISSING, Gemma3Config
from ._pattern import stacks_of, windows_of


_TABLE = (*GEMMA3.attributes, Attribute("start", "bos_token_id", 2), Ignore("dropout_rate"))
_WHOLE = MultimodalModel("t5gemma2_encoder")


class _Halves(Entry):
    """The same attributes of the encoder's text and of the decoder, which are of the same sizes."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Those of the decoder; refuse an encoder with others."""
        whole = PublishedConfig(published.nested("encoder"), f"{published.source}: encoder")
        encoder = _read(_WHOLE.text_attributes(whole), f"{whole.source}: text_config")
        decoder = _read(published.nested("decoder"), f"{published.source}: decoder")
        if unlike := {name: its for name, its in encoder.items() if its != decoder[name] and name != "start"}:
            its = {name: decoder[name] for name in unlike}
            published.refuse(f"the encoder has {unlike} and the decoder {its}; this family has two halves alike.")
        published.expect("vocab_size", decoder["vocab"])
        return decoder

    def write(self, config: Any) -> dict[str, Any]:
        """Both halves."""
        said: dict[str, Any] = {}
        for entry in _TABLE:
            said |= entry.write(config)
        text = {"model_type": "t5gemma2_encoder", "text_config": {"model_type": "t5gemma2_text"} | said}
        decoder = {"model_type": "t5gemma2_decoder"} | said
        return {"encoder": text, "decoder": decoder, "vocab_size": config.vocab}


def _read(said: dict[str, Any], source: str) -> dict[str, Any]:
    published = PublishedConfig(GEMMA3_MISSING | said, source)
    found = read_entries(_TABLE, published, {**field_types(GEMMA3.config), "start": Index})
    published.finish()
    return found


T5GEMMA2_ATTRIBUTES: tuple[Entry, ...] = (
    _Halves(),
    Expect("is_encoder_decoder", True),
    Expect("tie_word_embeddings", True),
    # Of training and of images.
    Ignore("dropout_rate", "classifier_dropout_rate", "eoi_token_index", "image_token_index"),
)


def half_weights(prefix: str, part: str) -> tuple[Rule, ...]:
    """The arrays of a half, whose names begin so."""
    four = norm_weights(
        mixer="pre_self_attn_layernorm",
        mixer_output="post_self_attn_layernorm",
        feed_forward="pre_feedforward_layernorm",
        feed_forward_output="post_feedforward_layernorm",
    )
    its = Rule("model.norm.weight", f"{part}.norm.weight" if part else "norm.weight")
    layers = (
        dataclasses.replace(rule, part=part) for rule in (*ATTENTION, *gated_weights(), *head_norm_weights(), *four)
    )
    return tuple(dataclasses.replace(rule, name=prefix + rule.name.removeprefix("model.")) for rule in (its, *layers))


def _encoder(prefix: str) -> tuple[Rule, ...]:
    return (Rule(f"{prefix}embed_tokens.weight", "embedding.weight"), *half_weights(prefix, "encoder"))


_ENCODER, _NEWER = "model.encoder.", "model.encoder.text_model."  # as published, and as transformers has them
T5GEMMA2_WEIGHTS = (
    *_encoder(_ENCODER),
    *(dataclasses.replace(rule, variant=True) for rule in _encoder(_NEWER)),
    *half_weights("model.decoder.", ""),
)
# What images go through, and the vector of the id behind an image, in which no text is read.
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
    """A T5Gemma 2 with random weights."""

    def reader(window: int | None, key: Key[Array, ""]) -> Block:
        return gemma3_block(config, window, mask=full() if window is None else window_both_ways(window), key=key)

    reading, writing = jax.random.split(key)
    encoder = Encoder(stacks_of(reader, windows_of(config), key=reading), norm(config, offset=1.0), start=config.start)
    return dataclasses.replace(build_gemma3(config, MergedAttention, key=writing), encoder=encoder)


def _t5gemma2(gemma3: str, **more: Any) -> T5Gemma2Config:
    """Both halves are of the sizes of a Gemma 3."""
    return T5Gemma2Config(**vars(GEMMA3.presets[gemma3]) | more)


_PRESETS = {"t5gemma2-byte-900k": _t5gemma2("gemma3-byte-500k", bias=True)}
_PRESETS |= {f"t5gemma2-{size}": _t5gemma2(f"gemma3-{size}", vocab=262_144) for size in ("270m", "1b", "4b")}

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
