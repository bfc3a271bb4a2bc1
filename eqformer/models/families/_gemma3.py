"""Gemma 3, its text models (Kamath et al. 2025, arXiv:2503.19786): five local layers to a global one, normed heads."""

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
    gelu_tanh,
    LinearScaling,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    sliding_window,
    Transformer,
)
from .._config import Config, layer_types
from .._weights import Published, Weight
from ._common import (
    attention_weights,
    common_attributes,
    common_numbers,
    edge_weights,
    four_norm_weights,
    gated_weights,
    query_key_norm_weights,
)
from ._pattern import all_but_every, decoder, layer_weights, windows_of


@dataclasses.dataclass(frozen=True)
class Gemma3:
    """The numbers of a Gemma 3; the local layers, numbered in `windowed`, see a `window`, the others everything."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    windowed: tuple[int, ...]
    window: int = 1024
    head_dim: int = 256
    query_scalar: int = 256  # scores are divided by its root
    logit_softcap: float | None = None
    theta: float = 1_000_000.0
    local_theta: float = 10_000.0
    scaling: RotaryScaling | None = None  # not of local layers
    eps: float = 1e-6
    tied: bool = True
    max_seq: int = 131_072  # the longest rows it was trained on; it changes nothing


def build_gemma3(numbers: Gemma3, *, key: Key[Array, ""]) -> Transformer:
    """A Gemma 3 with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        attention, mlp = jax.random.split(key)
        far = Rotary(head_dim, numbers.theta, scaling=numbers.scaling)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    query_norm=RMSNorm("head_dim", head_dim=head_dim, eps=numbers.eps, offset=1.0),
                    key_norm=RMSNorm("head_dim", head_dim=head_dim, eps=numbers.eps, offset=1.0),
                    rotary=far if window is None else Rotary(head_dim, numbers.local_theta),
                    mask=causal() if window is None else sliding_window(window),
                    scale=numbers.query_scalar**-0.5,
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps, offset=1.0),
                output_norm=RMSNorm("embed", embed=embed, eps=numbers.eps, offset=1.0),
            ),
            feed_forward=Residual(
                GatedMLP(embed=embed, mlp=numbers.mlp, activation=gelu_tanh, key=mlp),
                RMSNorm("embed", embed=embed, eps=numbers.eps, offset=1.0),
                output_norm=RMSNorm("embed", embed=embed, eps=numbers.eps, offset=1.0),
            ),
        )

    ends: dict[str, Any] = {"offset": 1.0, "embedding_scale": embed**0.5, "logit_softcap": numbers.logit_softcap}
    return decoder(numbers, block, windows_of(numbers), **ends, key=key)


def _gemma3(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> Gemma3:
    windowed, vocab = all_but_every(6, layers), more.pop("vocab", 262_208)
    return Gemma3(vocab, embed, layers, heads, kv_heads, mlp, windowed, **more)


_LONG = LinearScaling(8.0)
GEMMA3_PRESETS = {
    "gemma3-byte-500k": _gemma3(
        64, 12, 4, 2, 128, vocab=256, window=64, head_dim=16, query_scalar=16, theta=1e5, max_seq=512
    ),
    "gemma3-270m": _gemma3(640, 18, 4, 1, 2048, vocab=262_144, window=512, max_seq=32_768),
    "gemma3-1b": _gemma3(1152, 26, 4, 1, 6912, vocab=262_144, window=512, max_seq=32_768),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10_240, scaling=_LONG),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15_360, scaling=_LONG),
    "gemma3-27b": _gemma3(5376, 62, 32, 16, 21_504, head_dim=128, query_scalar=168, scaling=_LONG),
}


def _read(config: Config) -> Gemma3:
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("attention_bias", False)
    config.expect("use_bidirectional_attention", False)
    for name in ("hidden_act", "cache_implementation", "attn_logit_softcapping"):  # which nothing reads
        config.take(name, None)
    local_theta, _ = config.rotary(10_000.0, "sliding_attention", ("rope_local_base_freq", None))
    found = common_numbers(config, 1e6, "full_attention", head_dim=256, kv_heads=4, tied=True)
    window, pattern = config.take("sliding_window", 4096), config.count("_sliding_window_pattern", 6)
    pattern = config.count("sliding_window_pattern", pattern)
    return Gemma3(
        **found,
        windowed=config.windowed(found["layers"], window, all_but_every(pattern, found["layers"])),
        window=window,
        query_scalar=config.take("query_pre_attn_scalar", 256),
        logit_softcap=config.take("final_logit_softcapping", None),
        local_theta=local_theta,
    )


def _write(numbers: Gemma3) -> dict[str, Any]:
    return common_attributes(numbers) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": numbers.window,
        "layer_types": layer_types(numbers.layers, numbers.windowed),
        "query_pre_attn_scalar": numbers.query_scalar,
        "final_logit_softcapping": numbers.logit_softcap,
        "rope_local_base_freq": numbers.local_theta,
    }


def _weights(numbers: Gemma3) -> list[Weight]:
    def rules(_: Any, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        attention = attention_weights(lambda m: where(m).mixer.layer, layers)
        head_norms = query_key_norm_weights(lambda m: where(m).mixer.layer, layers)
        feed_forward = gated_weights(lambda m: where(m).feed_forward.layer, layers)
        return [*attention, *head_norms, *feed_forward, *four_norm_weights(where, layers)]

    return [*edge_weights(numbers.tied), *layer_weights(windows_of(numbers), rules)]


GEMMA3_PUBLISHED = Published("Gemma3ForCausalLM", "gemma3_text", _read, _write, _weights)
