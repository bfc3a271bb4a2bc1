"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671, 2412.15115): a Llama with biased queries, keys and values."""

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
    switched_window_attributes,
    switched_windows,
)
from ._pattern import decoder, layer_weights, windows_of


@dataclasses.dataclass(frozen=True)
class Qwen2:
    """The numbers of a Qwen2; the layers numbered in `windowed` see a `window`, the others everything."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None  # embed / heads by default
    theta: float = 1_000_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    window: int | None = None
    windowed: tuple[int, ...] = ()
    tied: bool = False
    max_seq: int = 32_768  # the longest rows it was trained on; it changes nothing


def build_qwen2(numbers: Qwen2, *, key: Key[Array, ""]) -> Transformer:
    """A Qwen2 with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
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
                    bias=True,
                    output_bias=False,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
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


_QWEN2_05B = Qwen2(vocab=151_936, embed=896, layers=24, heads=14, kv_heads=2, mlp=4864, tied=True)
_QWEN2_15B = Qwen2(vocab=151_936, embed=1536, layers=28, heads=12, kv_heads=2, mlp=8960, tied=True)
_QWEN2_7B = Qwen2(vocab=152_064, embed=3584, layers=28, heads=28, kv_heads=4, mlp=18_944)
_QWEN2_72B = Qwen2(vocab=152_064, embed=8192, layers=80, heads=64, kv_heads=8, mlp=29_568, eps=1e-5)
QWEN2_PRESETS = {
    "qwen2-byte-500k": Qwen2(vocab=256, embed=96, layers=4, heads=6, kv_heads=2, mlp=320, theta=10_000.0, tied=True),
    "qwen2-0.5b": _QWEN2_05B,
    "qwen2-1.5b": _QWEN2_15B,
    "qwen2-7b": _QWEN2_7B,
    "qwen2-72b": _QWEN2_72B,
    "qwen2.5-0.5b": _QWEN2_05B,
    "qwen2.5-1.5b": _QWEN2_15B,
    "qwen2.5-3b": Qwen2(vocab=151_936, embed=2048, layers=36, heads=16, kv_heads=2, mlp=11_008, tied=True),
    "qwen2.5-7b": _QWEN2_7B,
    "qwen2.5-14b": Qwen2(vocab=152_064, embed=5120, layers=48, heads=40, kv_heads=8, mlp=13_824, eps=1e-5),
    "qwen2.5-32b": Qwen2(vocab=152_064, embed=5120, layers=64, heads=40, kv_heads=8, mlp=27_648, eps=1e-5),
    "qwen2.5-72b": _QWEN2_72B,
}


def _read(config: Config) -> Qwen2:
    config.expect("hidden_act", "silu")
    found = common_numbers(config)
    later = range(config.take("max_window_layers", 28), found["layers"])
    return Qwen2(**found, **switched_windows(config, found["layers"], 4096, later))


def _write(numbers: Qwen2) -> dict[str, Any]:
    said = {"hidden_act": "silu", "max_window_layers": min(numbers.windowed, default=numbers.layers)}
    return common_attributes(numbers) | switched_window_attributes(numbers) | said


def _weights(numbers: Qwen2) -> list[Weight]:
    def rules(_: Any, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        block = block_weights(where, layers, bias=True, output_bias=False)
        return [*block, *gated_weights(lambda m: where(m).feed_forward.layer, layers)]

    return [*edge_weights(numbers.tied), *layer_weights(windows_of(numbers), rules)]


QWEN2_PUBLISHED = Published("Qwen2ForCausalLM", "qwen2", _read, _write, _weights)
