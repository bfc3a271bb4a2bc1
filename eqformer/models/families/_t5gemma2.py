"""T5Gemma 2 (Zhang et al. 2025): Gemma 3's blocks as an encoder, and a decoder that also reads it."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import Block, Encoder, full, MergedAttention, Transformer, window_both_ways
from .._family import Family
from .._kinds import Index
from ._decoder import norm
from ._gemma3 import build_gemma3, GEMMA3, gemma3_block, Gemma3Config
from ._pattern import stacks_of, windows_of
from ._t5gemma2_tables import T5GEMMA2_ATTRIBUTES, T5GEMMA2_WEIGHTS, UNREAD


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
