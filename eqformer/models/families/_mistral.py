"""Mistral (Jiang et al. 2023, arXiv:2310.06825): a Llama; in its first version every layer has a sliding window."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Nullable
from .._config_types import Length, NotNegative
from .._family import DecoderConfig, Family, MultimodalModel
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """The config of a Mistral."""

    eps: NotNegative = 1e-5
    window: Length | None = None
    """The tokens that every layer sees; None: all."""


def build_mistral(config: MistralConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mistral with random weights."""

    def block(_: None, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, window=config.window, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, key=key)


def _mistral(vocab: int, embed: int, layers: int, mlp: int, **more: Any) -> MistralConfig:
    return MistralConfig(vocab=vocab, embed=embed, layers=layers, heads=32, kv_heads=8, head_dim=128, mlp=mlp, **more)


_PRESETS = {
    "mistral-byte-500k": MistralConfig(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, window=128, tied=True, max_seq=512
    ),
    "mistral-7b-v0.1": _mistral(32_000, 4096, 32, 14_336, window=4096),
    "mistral-7b-v0.3": _mistral(32_768, 4096, 32, 14_336, theta=1e6),
    "mistral-nemo-12b": _mistral(131_072, 5120, 40, 14_336, theta=1e6, max_seq=131_072),
    "mistral-small-24b": _mistral(131_072, 5120, 40, 32_768, theta=1e8),
}

MISTRAL = Family(
    "mistral",
    MistralConfig,
    build_mistral,
    _PRESETS,
    "MistralForCausalLM",
    "mistral",
    (*decoder_attributes(kv_heads=8, max_seq=131_072), Nullable("window", "sliding_window", 4096), Activation()),
    LLAMA_WEIGHTS,
    multimodal=(MultimodalModel("mistral3"),),
)
