"""SDAR (Cheng et al. 2025, arXiv:2510.06303): a Qwen3 with block-causal attention, which generates text block by block.

The masked tokens of a block are filled in several passes.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, block_causal, Transformer
from .._attributes import Activation, Attribute, Expect, Ignore
from .._config_types import Length, Positive, Size
from .._family import DecoderConfig, Family
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, head_norms, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class SDARConfig(DecoderConfig):
    """The config of an SDAR."""

    head_dim: Size = 128
    theta: Positive = 1_000_000.0
    bias: bool = False
    """Whether the attention's four projections have biases."""
    block: Length = 4
    """The number of tokens of a block; the tokens of a block see one another."""


def build_sdar(config: SDARConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an SDAR with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mask = block_causal(config.block)
        mixer = attention(config, mask=mask, bias=config.bias, **head_norms(config), key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, key=key)


_PRESETS = {
    "sdar-byte-500k": SDARConfig(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, head_dim=16, theta=10_000.0, tied=True, block=8
    ),
    "sdar-8b": SDARConfig(vocab=151_936, embed=4096, layers=36, heads=32, kv_heads=8, mlp=12_288),
}

SDAR = Family(
    "sdar",
    SDARConfig,
    build_sdar,
    _PRESETS,
    "SDARForCausalLM",
    "sdar",
    (
        *decoder_attributes(head_dim=128, kv_heads=32, max_seq=32_768),
        Attribute("bias", "attention_bias", False),
        Attribute("block", "block_size", 4),
        Expect("use_sliding_window", False),
        Ignore("sliding_window", "max_window_layers", "layer_types"),  # without effect unless windows are switched on
        Ignore("mask_token_id"),  # the loader of texts reads it
        Ignore("debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"),
        Activation(),
    ),
    LLAMA_WEIGHTS,
    denoises_blocks=True,
)
