"""Gemma 2 (Riviere et al. 2024, arXiv:2408.00118): four norms a layer, softcaps, and a window in every other layer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    BlockwiseCore,
    causal,
    GatedMLP,
    gelu_tanh,
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
)
from ._pattern import all_but_every, decoder, layer_weights, windows_of


@dataclasses.dataclass(frozen=True)
class Gemma2:
    """The numbers of a Gemma 2; the layers numbered in `windowed` see a `window`, the others everything."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    windowed: tuple[int, ...]
    window: int = 4096
    head_dim: int = 256
    query_scalar: int = 256  # scores are divided by its root
    score_softcap: float | None = 50.0
    logit_softcap: float | None = 30.0
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    tied: bool = True
    max_seq: int = 8192  # the longest rows it was trained on; it changes nothing


def build_gemma2(numbers: Gemma2, *, key: Key[Array, ""]) -> Transformer:
    """A Gemma 2 with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim
    core = BlockwiseCore(softcap=numbers.score_softcap)

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        attention, mlp = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    mask=causal() if window is None else sliding_window(window),
                    scale=numbers.query_scalar**-0.5,
                    core=core,
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


def _gemma2(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> Gemma2:
    windowed = all_but_every(2, layers)
    return Gemma2(256_000, embed, layers, heads, kv_heads, mlp, windowed, **more)


GEMMA2_PRESETS = {
    "gemma2-byte-500k": Gemma2(
        256, 96, 4, 4, 2, 256, windowed=(0, 2), window=128, head_dim=32, query_scalar=32, max_seq=512
    ),
    "gemma2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma2-9b": _gemma2(3584, 42, 16, 8, 14_336),
    "gemma2-27b": _gemma2(4608, 46, 32, 16, 36_864, head_dim=128, query_scalar=144),
}


def _read(config: Config) -> Gemma2:
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("attention_bias", False)
    config.expect("use_bidirectional_attention", False)
    for name in ("hidden_act", "cache_implementation"):  # which nothing reads
        config.take(name, None)
    found, window = common_numbers(config, head_dim=256, kv_heads=4, tied=True), config.take("sliding_window", 4096)
    return Gemma2(
        **found,
        windowed=config.windowed(found["layers"], window, all_but_every(2, found["layers"])),
        window=window,
        query_scalar=config.take("query_pre_attn_scalar", 256),
        score_softcap=config.nullable("attn_logit_softcapping", 50.0),
        logit_softcap=config.nullable("final_logit_softcapping", 30.0),
    )


def _write(numbers: Gemma2) -> dict[str, Any]:
    return common_attributes(numbers) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": numbers.window,
        "layer_types": layer_types(numbers.layers, numbers.windowed),
        "query_pre_attn_scalar": numbers.query_scalar,
        "attn_logit_softcapping": numbers.score_softcap,
        "final_logit_softcapping": numbers.logit_softcap,
    }


def _weights(numbers: Gemma2) -> list[Weight]:
    def rules(_: Any, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        attention = attention_weights(lambda m: where(m).mixer.layer, layers)
        feed_forward = gated_weights(lambda m: where(m).feed_forward.layer, layers)
        return [*attention, *feed_forward, *four_norm_weights(where, layers)]

    return [*edge_weights(numbers.tied), *layer_weights(windows_of(numbers), rules)]


GEMMA2_PUBLISHED = Published("Gemma2ForCausalLM", "gemma2", _read, _write, _weights)
