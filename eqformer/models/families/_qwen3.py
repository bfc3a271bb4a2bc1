"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): a Llama whose queries and keys are normalised, head by head."""

import dataclasses
from collections.abc import Callable, Sequence
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
)
from .._config import Config
from .._weights import Published, Weight
from ._common import (
    block_weights,
    common_attributes,
    common_numbers,
    edge_weights,
    gated_weights,
    query_key_norm_weights,
    switched_window_attributes,
    switched_windows,
)
from ._pattern import decoder, layer_weights, windows_of


@dataclasses.dataclass(frozen=True)
class Qwen3:
    """The numbers of a Qwen3; the layers numbered in `windowed` see a `window`, the others everything."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int = 128
    theta: float = 1_000_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    bias: bool = False  # of the attention's four projections
    window: int | None = None
    windowed: tuple[int, ...] = ()
    tied: bool = False
    max_seq: int = 32_768  # the longest rows it was trained on; it changes nothing


def build_qwen3(numbers: Qwen3, *, key: Key[Array, ""]) -> Transformer:
    """A Qwen3 with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim
    damping = (2 * numbers.layers) ** -0.5

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
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    query_norm=RMSNorm("head_dim", head_dim=head_dim, eps=numbers.eps),
                    key_norm=RMSNorm("head_dim", head_dim=head_dim, eps=numbers.eps),
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    mask=causal() if window is None else sliding_window(window),
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, output_std=damping * numbers.mlp**-0.5, key=mlp),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
        )

    return decoder(numbers, block, windows_of(numbers), key=key)


def _qwen3(embed: int, layers: int, heads: int, mlp: int, tied: bool = False) -> Qwen3:
    return Qwen3(vocab=151_936, embed=embed, layers=layers, heads=heads, kv_heads=8, mlp=mlp, tied=tied, max_seq=40_960)


QWEN3_PRESETS = {
    "qwen3-byte-500k": Qwen3(
        vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, head_dim=16, theta=10_000.0, tied=True
    ),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600),
}


def _read(config: Config) -> Qwen3:
    config.expect("hidden_act", "silu")
    found = common_numbers(config, head_dim=128) | {"bias": config.take("attention_bias", False)}
    later = range(config.take("max_window_layers", 28), found["layers"])
    return Qwen3(**found, **switched_windows(config, found["layers"], 4096, later))


def _write(numbers: Qwen3) -> dict[str, Any]:
    said = {
        "hidden_act": "silu",
        "attention_bias": numbers.bias,
        "max_window_layers": min(numbers.windowed, default=numbers.layers),
    }
    return common_attributes(numbers) | switched_window_attributes(numbers) | said


def _weights(numbers: Qwen3) -> list[Weight]:
    def rules(_: Any, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        block = block_weights(where, layers, bias=numbers.bias)
        head_norms = query_key_norm_weights(lambda m: where(m).mixer.layer, layers)
        return [*block, *head_norms, *gated_weights(lambda m: where(m).feed_forward.layer, layers)]

    return [*edge_weights(numbers.tied), *layer_weights(windows_of(numbers), rules)]


QWEN3_PUBLISHED = Published("Qwen3ForCausalLM", "qwen3", _read, _write, _weights)
