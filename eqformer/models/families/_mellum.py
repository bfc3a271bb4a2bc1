"""Mellum 2 (JetBrains 2026): a Qwen3-MoE with windows in some layers, which have another base of rotary positions."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ...nn import Block, RotaryScaling, Transformer
from .._attributes import Activation, Attribute, Count, Ignore
from .._config_types import Index, Length, NotNegative, Positive, Size
from .._family import Family
from .._layer_attributes import all_but_every, Windows
from .._rotary_attributes import RotaryByType
from ._common import decoder_attributes, LLAMA_WEIGHTS
from ._decoder import attention, decoder, gated_mlp, head_norms, layer_windows, pre_norm_block, rotary_of
from ._mixtures import DenseLayersConfig, LayerMixtures, MIXTURE, mixture, router_attributes, small_expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class MellumConfig(DenseLayersConfig):
    """The config of a Mellum 2; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    expert_mlp: Size
    """Hidden features of an expert."""
    experts: Size = 64
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    normalize: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    window_layers: tuple[Index, ...]
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    window: Length | None = 1024
    """The number of tokens that the layers of `window_layers` see."""
    theta: Positive = 500_000.0
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    max_seq: Length = 131_072


def build_mellum(config: MellumConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mellum 2 with random weights."""
    rotary = rotary_of(config, config.head_size, scaling=config.scaling)
    local_rotary = rotary_of(config, config.head_size, theta=config.local_theta, scaling=config.local_scaling)

    def block(kind: tuple[int | None, bool], key: Key[Array, ""]) -> Block:
        window, is_mixture = kind
        mixer_key, router_key, experts_key = jax.random.split(key, 3)
        mixer = attention(
            config,
            window=window,
            bias=config.bias,
            rotary=rotary if window is None else local_rotary,
            **head_norms(config),
            key=mixer_key,
        )
        if not is_mixture:
            return pre_norm_block(config, mixer, gated_mlp(config, key=experts_key))
        expert = functools.partial(small_expert, config)
        feed_forward = mixture(config, expert, normalize=config.normalize, router=router_key, experts=experts_key)
        return pre_norm_block(config, mixer, feed_forward)

    return decoder(config, block, list(zip(layer_windows(config), config.mixtures)), key=key)


_PRESETS = {
    "mellum-byte-500k": MellumConfig(
        *(256, 64, 4, 4, 2, 128),
        expert_mlp=32,
        experts=16,
        top_k=4,
        window=64,
        window_layers=all_but_every(4, 4),
        head_dim=16,
        theta=10_000.0,
        tied=True,
    ),
    "mellum2-12b-a2.5b": MellumConfig(
        98_304, 2304, 28, 32, 4, 7168, expert_mlp=896, head_dim=128, window_layers=all_but_every(4, 28)
    ),
}

MELLUM = Family(
    "mellum",
    MellumConfig,
    build_mellum,
    _PRESETS,
    "MellumForCausalLM",
    "mellum",
    (
        *decoder_attributes(RotaryByType(500_000.0, 10_000.0, scaled=False), head_dim=128, kv_heads=4, max_seq=131_072),
        Windows(1024, lambda published, layers: ()),
        *router_attributes(64, 8, normalize=True, local_first=True),
        Count("expert_mlp", "moe_intermediate_size", 896),
        LayerMixtures(),
        Attribute("bias", "attention_bias", False),
        Activation(),
        # Attributes of a predictor, the module for multi-token prediction, which transformers does not read either.
        Ignore("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    ),
    (*LLAMA_WEIGHTS, *MIXTURE),
    ignored_prefixes=("mtp.",),
)
