"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): a Llama encoder, trained on masked tokens."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Expect, Ignore
from .._config_types import Length, NotNegative, Positive
from .._family import DecoderConfig, Family
from . import _decoder as decoders
from ._common import decoder_attributes, LLAMA_WEIGHTS


@dataclasses.dataclass(frozen=True)
class EuroBERTConfig(DecoderConfig):
    """The config of a EuroBERT."""

    _: dataclasses.KW_ONLY
    theta: Positive = 250_000.0
    eps: NotNegative = 1e-5
    max_seq: Length = 8192


def build_eurobert(config: EuroBERTConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a EuroBERT with random weights."""

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = decoders.attention(config, mask=nn.Mask(is_causal=False), key=mixer_key)
        return decoders.pre_norm_block(config, mixer, decoders.gated_mlp(config, key=feed_forward_key))

    return decoders.decoder(config, block, key=key)


_PRESETS = {
    "eurobert-byte-200k": EuroBERTConfig(256, 64, 4, 4, 2, 96),
    "eurobert-210m": EuroBERTConfig(128_256, 768, 12, 12, 12, 3072),
    "eurobert-610m": EuroBERTConfig(128_256, 1152, 26, 18, 6, 4096),
    "eurobert-2.1b": EuroBERTConfig(128_256, 2304, 32, 18, 6, 6144),
}

EUROBERT = Family(
    *("eurobert", EuroBERTConfig, build_eurobert, _PRESETS, "EuroBertForMaskedLM", "eurobert"),
    (
        *decoder_attributes(max_seq=8192),
        Activation(),
        Expect("attention_bias", False),
        Expect("mlp_bias", False),
        Ignore("is_causal"),  # The model is an encoder, whatever the value is.
        Ignore("classifier_pooling", "clf_pooling", "mask_token_id"),
        Ignore("bos_token", "eos_token", "pad_token", "mask_token"),  # The tokenizer has them, too.
    ),
    LLAMA_WEIGHTS,
    classifier=None,  # The scores of its classifiers are means over tokens.
)
