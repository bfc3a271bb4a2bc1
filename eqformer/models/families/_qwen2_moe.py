"""Qwen2-MoE (Qwen team 2024, arXiv:2407.10671, section 2.2): small experts beside a shared expert with a gate."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute
from .._config_types import Index, Length, PublishedConfig, Size
from .._family import Family
from .._layer_attributes import SwitchedWindows
from . import _mixtures as mixtures
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, layer_windows, pre_norm_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2MoEConfig(mixtures.QwenMoEConfig):
    """The config of a Qwen2-MoE; `mlp` is a dense layer's width, `expert_mlp` and `shared_mlp` the experts'."""

    shared_mlp: Size
    """Hidden features of the shared expert."""
    experts: Size = 60
    top_k: Size = 4
    normalise: bool = False
    bias: bool = True
    """Whether queries, keys and values have biases."""
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    window_layers: tuple[Index, ...] = ()
    """The numbers of the layers that see a `window`; all other layers see whole rows."""


def build_qwen2_moe(config: Qwen2MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen2-MoE with random weights."""

    def block(kind: tuple[bool, int | None], key: Key[Array, ""]) -> Block:
        (is_mixture, window), (mixer, feed_forward) = kind, jax.random.split(key)
        attended = attention(config, window=window, bias=config.bias, output_bias=False, key=mixer)
        if is_mixture:
            return pre_norm_block(config, attended, mixtures.mixture_beside_gated_shared(config, feed_forward))
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(
        config, block, list(zip(mixtures.mixture_flags(config), layer_windows(config), strict=True)), key=key
    )


def _every_other(published: PublishedConfig, layers: int) -> range:
    """Return the first, the third and so on of the first `max_window_layers` layers."""
    return range(0, min(layers, published.count("max_window_layers", 28, least=0)), 2)


_PRESETS = {
    "qwen2-moe-byte-500k": Qwen2MoEConfig(
        256, 64, 4, 4, 4, mlp=128, expert_mlp=32, shared_mlp=64, experts=12, theta=10_000.0, tied=True
    ),
    "qwen1.5-moe-a2.7b": Qwen2MoEConfig(151_936, 2048, 24, 16, 16, mlp=5632, expert_mlp=1408, shared_mlp=5632),
    "qwen2-57b-a14b": Qwen2MoEConfig(
        151_936, 3584, 28, 28, 4, mlp=18_944, expert_mlp=2560, shared_mlp=20_480, experts=64, top_k=8
    ),
}

QWEN2_MOE = Family(
    "qwen2_moe",
    Qwen2MoEConfig,
    build_qwen2_moe,
    _PRESETS,
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    (
        *decoder_attributes(kv_heads=16, max_seq=32_768),
        *mixtures.mixture_attributes(60, 4),
        SwitchedWindows(4096, _every_other),
        Attribute("bias", "qkv_bias", True),
        Attribute("shared_mlp", "shared_expert_intermediate_size"),
        Activation(),
    ),
    (*LLAMA_WEIGHTS, *mixtures.MIXTURE, *mixtures.GATED_SHARED),
)
