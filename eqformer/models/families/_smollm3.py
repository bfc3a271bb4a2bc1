"""SmolLM3 (Bakouch et al. 2025): a Llama without rotary positions in each fourth layer (arXiv:2501.18795)."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Index, Length, Positive
from .._family import DecoderConfig, Family
from .._layer_attributes import every, NoRotaryLayers, SwitchedWindows
from .._rotary_attributes import RotaryPositions
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, layer_windows, pre_norm_block, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """The config of a SmolLM3."""

    no_rotary_layers: tuple[Index, ...]
    """The numbers of the layers without rotary positions."""
    theta: Positive = 5_000_000.0
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The numbers of the layers that see a `window`; all other layers see whole rows."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    tied: bool = True
    max_seq: Length = 65_536


def build_smollm3(config: SmolLM3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a SmolLM3 with random weights."""

    def block(kind: tuple[bool, int | None], key: Key[Array, ""]) -> Block:
        is_rotated, window = kind
        mixer, feed_forward = jax.random.split(key)
        rotary = rotary_of(config, config.head_size, scaling=config.scaling) if is_rotated else None
        attended = attention(config, window=window, bias=config.bias, rotary=rotary, key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, bias=config.mlp_bias, key=feed_forward))

    kinds = [(layer not in config.no_rotary_layers, window) for layer, window in enumerate(layer_windows(config))]
    return decoder(config, block, kinds, key=key)


_PRESETS = {
    "smollm3-byte-400k": SmolLM3Config(
        vocab=256, embed=64, layers=8, heads=4, kv_heads=2, mlp=192, no_rotary_layers=every(4, 8), theta=10_000.0
    ),
    "smollm3-3b": SmolLM3Config(
        vocab=128_256, embed=2048, layers=36, heads=16, kv_heads=4, mlp=11_008, no_rotary_layers=every(4, 36)
    ),
}

SMOLLM3 = Family(
    "smollm3",
    SmolLM3Config,
    build_smollm3,
    _PRESETS,
    "SmolLM3ForCausalLM",
    "smollm3",
    (
        *decoder_attributes(RotaryPositions(2_000_000.0), kv_heads=4, tied=True, max_seq=32_768),
        NoRotaryLayers(),
        SwitchedWindows(None, NoRotaryLayers()),
        Activation(),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    LLAMA_WEIGHTS,
)
