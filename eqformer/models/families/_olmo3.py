"""OLMo 3 (OLMo team 2025): OLMo 2 with windows in three of four layers, and YaRN in the fourth."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    causal,
    GatedMLP,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    sliding_window,
    Transformer,
    YarnScaling,
)
from .._config import Config, layer_types
from .._weights import Published, Weight
from ._common import common_attributes, common_numbers, edge_weights
from ._olmo2 import olmo_weights
from ._pattern import all_but_every, decoder, layer_weights, windows_of


@dataclasses.dataclass(frozen=True)
class Olmo3:
    """The numbers of an OLMo 3; the layers numbered in `windowed` see a `window`, and `scaling` is of the others."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    windowed: tuple[int, ...]
    window: int = 4096
    head_dim: int | None = None  # embed / heads by default
    theta: float = 500_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    bias: bool = False  # of the attention's four projections
    tied: bool = False
    max_seq: int = 65_536  # the longest rows it was trained on; it changes nothing


def build_olmo3(numbers: Olmo3, *, key: Key[Array, ""]) -> Transformer:
    """An OLMo 3 with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        attention, mlp = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    bias=numbers.bias,
                    query_norm=RMSNorm("heads head_dim", heads=numbers.heads, head_dim=head_dim, eps=numbers.eps),
                    key_norm=RMSNorm(
                        "kv_heads head_dim", kv_heads=numbers.kv_heads, head_dim=head_dim, eps=numbers.eps
                    ),
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling if window is None else None),
                    mask=causal() if window is None else sliding_window(window),
                    key=attention,
                ),
                output_norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, key=mlp),
                output_norm=RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
        )

    return decoder(numbers, block, windows_of(numbers), key=key)


_YARN = YarnScaling(8.0, 8192, magnitude=1.2079441541679836)
OLMO3_PRESETS = {
    "olmo3-byte-500k": Olmo3(256, 96, 4, 6, 6, 256, all_but_every(4, 4), window=64, theta=10_000.0),
    "olmo3-7b": Olmo3(100_278, 4096, 32, 32, 32, 11_008, all_but_every(4, 32), scaling=_YARN),
    "olmo3-32b": Olmo3(100_278, 5120, 64, 40, 8, 27_648, all_but_every(4, 64), scaling=_YARN),
}


def _read(config: Config) -> Olmo3:
    config.expect("hidden_act", "silu")
    found = common_numbers(config, 500_000.0, "full_attention")
    given = config.nested("rope_parameters")
    if "sliding_attention" in given and config.rotary(500_000.0, "sliding_attention") != (found["theta"], None):
        config.refuse(f"rope_parameters={given}: only the layers without a window may have a scaling of their own.")
    window = config.take("sliding_window", 4096)
    windowed = config.windowed(found["layers"], window, all_but_every(4, found["layers"]))
    return Olmo3(**found, windowed=windowed, window=window, bias=config.take("attention_bias", False))


def _write(numbers: Olmo3) -> dict[str, Any]:
    common = common_attributes(numbers)
    plain = {"rope_type": "default", "rope_theta": numbers.theta}
    both = {"sliding_attention": plain, "full_attention": plain | common.get("rope_scaling", {})}
    return common | {
        "hidden_act": "silu",
        "attention_bias": numbers.bias,
        "sliding_window": numbers.window,
        "layer_types": layer_types(numbers.layers, numbers.windowed),
        "rope_parameters": both,  # newer transformers take the base of layers with windows from here alone
    }


def _weights(numbers: Olmo3) -> list[Weight]:
    rules = lambda _, where, layers: olmo_weights(where, layers, numbers.bias)
    return [*edge_weights(numbers.tied), *layer_weights(windows_of(numbers), rules)]


OLMO3_PUBLISHED = Published("Olmo3ForCausalLM", "olmo3", _read, _write, _weights)
