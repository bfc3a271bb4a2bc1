"""Mistral (Jiang et al. 2023, arXiv:2310.06825): a Llama; in its first version every layer has a sliding window."""

import dataclasses

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

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, window=config.window, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, key=key)


_7B = MistralConfig(vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, head_dim=128)
_NEMO = dataclasses.replace(_7B, vocab=131_072, embed=5120, layers=40, theta=1e6, max_seq=131_072)
_PRESETS = {
    "mistral-byte-500k": MistralConfig(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, window=128, tied=True, max_seq=512
    ),
    "mistral-7b-v0.1": dataclasses.replace(_7B, window=4096),
    "mistral-7b-v0.3": dataclasses.replace(_7B, vocab=32_768, theta=1e6),
    "mistral-nemo-12b": _NEMO,
    "mistral-small-24b": dataclasses.replace(_NEMO, mlp=32_768, theta=1e8, max_seq=_7B.max_seq),
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
