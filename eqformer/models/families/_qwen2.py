"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671, 2412.15115): a Llama with biased queries, keys and values."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation
from .._config_types import Index, Length, Positive
from .._family import DecoderConfig, Family
from .._layer_attributes import LateWindows
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, layer_windows, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """The config of a Qwen2."""

    theta: Positive = 1_000_000.0
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The numbers of the layers that see a `window`; all other layers see whole rows."""


def build_qwen2(config: Qwen2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen2 with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, window=window, bias=True, output_bias=False, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, layer_windows(config), key=key)


_QWEN2_05B = Qwen2Config(vocab=151_936, embed=896, layers=24, heads=14, kv_heads=2, mlp=4864, tied=True)
_QWEN2_15B = Qwen2Config(vocab=151_936, embed=1536, layers=28, heads=12, kv_heads=2, mlp=8960, tied=True)
_QWEN2_7B = Qwen2Config(vocab=152_064, embed=3584, layers=28, heads=28, kv_heads=4, mlp=18_944)
_QWEN2_72B = Qwen2Config(vocab=152_064, embed=8192, layers=80, heads=64, kv_heads=8, mlp=29_568, eps=1e-5)
_PRESETS = {
    "qwen2-byte-500k": Qwen2Config(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, theta=10_000.0, tied=True
    ),
    "qwen2-0.5b": _QWEN2_05B,
    "qwen2-1.5b": _QWEN2_15B,
    "qwen2-7b": _QWEN2_7B,
    "qwen2-72b": _QWEN2_72B,
    "qwen2.5-0.5b": _QWEN2_05B,
    "qwen2.5-1.5b": _QWEN2_15B,
    "qwen2.5-3b": Qwen2Config(vocab=151_936, embed=2048, layers=36, heads=16, kv_heads=2, mlp=11_008, tied=True),
    "qwen2.5-7b": _QWEN2_7B,
    "qwen2.5-14b": Qwen2Config(vocab=152_064, embed=5120, layers=48, heads=40, kv_heads=8, mlp=13_824, eps=1e-5),
    "qwen2.5-32b": Qwen2Config(vocab=152_064, embed=5120, layers=64, heads=40, kv_heads=8, mlp=27_648, eps=1e-5),
    "qwen2.5-72b": _QWEN2_72B,
}

QWEN2 = Family(
    "qwen2",
    Qwen2Config,
    build_qwen2,
    _PRESETS,
    "Qwen2ForCausalLM",
    "qwen2",
    (*decoder_attributes(kv_heads=32, max_seq=32_768), LateWindows(4096, 28), Activation()),
    LLAMA_WEIGHTS,
)
