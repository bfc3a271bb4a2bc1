"""SmolLM3 (Bakouch et al. 2025): a Llama of which each fourth layer has no rotary positions (arXiv:2501.18795)."""

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
from ._pattern import decoder, every, layer_weights, windows_of


@dataclasses.dataclass(frozen=True)
class SmolLM3:
    """The numbers of a SmolLM3. The layers numbered in `unrotated` have no rotary positions, those in `windowed` see a
    `window`.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    unrotated: tuple[int, ...]
    head_dim: int | None = None  # embed / heads by default
    theta: float = 5_000_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    window: int | None = None
    windowed: tuple[int, ...] = ()
    tied: bool = True
    max_seq: int = 65_536  # the longest rows it was trained on; it changes nothing


def build_smollm3(numbers: SmolLM3, *, key: Key[Array, ""]) -> Transformer:
    """A SmolLM3 with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim or numbers.embed // numbers.heads
    damping = (2 * numbers.layers) ** -0.5

    def block(kind: tuple[bool, int | None], key: Key[Array, ""]) -> Block:
        rotated, window = kind
        attention, mlp = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling) if rotated else None,
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

    return decoder(numbers, block, _kinds(numbers), key=key)


def _kinds(numbers: SmolLM3) -> list[tuple[bool, int | None]]:
    """Of each layer whether it has rotary positions, and its window."""
    return [(layer not in numbers.unrotated, window) for layer, window in enumerate(windows_of(numbers))]


SMOLLM3_PRESETS = {
    "smollm3-byte-400k": SmolLM3(
        vocab=256, embed=64, layers=8, heads=4, kv_heads=2, mlp=192, unrotated=every(4, 8), theta=10_000.0
    ),
    "smollm3-3b": SmolLM3(
        vocab=128_256, embed=2048, layers=36, heads=16, kv_heads=4, mlp=11_008, unrotated=every(4, 36)
    ),
}


def _read(config: Config) -> SmolLM3:
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    found = common_numbers(config, kv_heads=4, tied=True, theta=2_000_000.0)
    layers, interval = range(found["layers"]), config.count("no_rope_layer_interval", 4)
    rotated = config.take("no_rope_layers", [(layer + 1) % interval for layer in layers])
    if len(rotated) != len(layers):
        config.refuse(f"no_rope_layers={rotated} must say of {len(layers)} layers, the model's, whether they turn.")
    unrotated = tuple(layer for layer in layers if not rotated[layer])
    return SmolLM3(**found, unrotated=unrotated, **switched_windows(config, len(layers), None, unrotated))


def _write(numbers: SmolLM3) -> dict[str, Any]:
    said = {"hidden_act": "silu", "no_rope_layers": [int(rotated) for rotated, _ in _kinds(numbers)]}
    return common_attributes(numbers) | switched_window_attributes(numbers) | said


def _weights(numbers: SmolLM3) -> list[Weight]:
    def rules(_: Any, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        return [*block_weights(where, layers), *gated_weights(lambda m: where(m).feed_forward.layer, layers)]

    return [*edge_weights(numbers.tied), *layer_weights(_kinds(numbers), rules)]


SMOLLM3_PUBLISHED = Published("SmolLM3ForCausalLM", "smollm3", _read, _write, _weights)
