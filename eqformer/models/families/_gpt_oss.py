"""gpt-oss (OpenAI 2025, arXiv:2508.10925): sinks, biases everywhere, clamped experts, windows in every second layer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    causal,
    Experts,
    GatedMLP,
    LoadBalance,
    MoE,
    quick_gelu,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    sliding_window,
    TopKRouter,
    Transformer,
    YarnScaling,
)
from .._config import Config, layer_types
from .._weights import Published, Weight
from ._common import block_weights, common_attributes, common_numbers, edge_weights
from ._mixtures import stacked_mixture_weights
from ._pattern import all_but_every, decoder, layer_weights, windows_of


@dataclasses.dataclass(frozen=True)
class GPTOSS:
    """The numbers of a gpt-oss; `mlp` is one expert's, and the layers numbered in `windowed` see a `window`."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    windowed: tuple[int, ...]
    window: int = 128
    experts: int = 32
    top_k: int = 4
    limit: float = 7.0
    head_dim: int = 64
    theta: float = 150_000.0
    scaling: RotaryScaling | None = YarnScaling(32.0, 4096, truncate=False)
    eps: float = 1e-5
    bias: bool = True  # of the attention's four projections
    balance: float = 0.001  # of `LoadBalance`, over the batch
    tied: bool = False
    max_seq: int = 131_072  # the longest rows it was trained on; it changes nothing


def build_gpt_oss(numbers: GPTOSS, *, key: Key[Array, ""]) -> Transformer:
    """A gpt-oss with random weights."""
    embed, head_dim = numbers.embed, numbers.head_dim
    damping = (2 * numbers.layers) ** -0.5

    def expert(key: Key[Array, ""]) -> GatedMLP:
        options: dict[str, Any] = {"bias": True, "activation": quick_gelu, "limit": numbers.limit, "offset": 1.0}
        return GatedMLP(embed=embed, mlp=numbers.mlp, **options, output_std=damping * numbers.mlp**-0.5, key=key)

    def mixture(key: Key[Array, ""]) -> MoE:
        choose, experts = jax.random.split(key)
        losses = (LoadBalance(numbers.balance),) if numbers.balance else ()
        sizes: dict[str, Any] = {"embed": embed, "experts": numbers.experts, "top_k": numbers.top_k}
        router = TopKRouter(**sizes, normalise=True, bias=True, key=choose)
        return MoE(router, Experts(expert, numbers.experts, key=experts), losses=losses)

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        attention, feed_forward = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    kv_heads=numbers.kv_heads,
                    head_dim=head_dim,
                    bias=numbers.bias,
                    output_std=damping * (numbers.heads * head_dim) ** -0.5,
                    rotary=Rotary(head_dim, numbers.theta, scaling=numbers.scaling),
                    sinks=True,
                    mask=causal() if window is None else sliding_window(window),
                    key=attention,
                ),
                RMSNorm("embed", embed=embed, eps=numbers.eps),
            ),
            feed_forward=Residual(mixture(feed_forward), RMSNorm("embed", embed=embed, eps=numbers.eps)),
        )

    return decoder(numbers, block, windows_of(numbers), key=key)


GPT_OSS_PRESETS = {
    "gpt-oss-byte-500k": GPTOSS(
        256, 64, 4, 4, 2, 32, (0, 2), window=64, experts=12, head_dim=16, theta=1e4, scaling=None, tied=True
    ),
    "gpt-oss-20b": GPTOSS(201_088, 2880, 24, 64, 8, 2880, all_but_every(2, 24), balance=0.9),
    "gpt-oss-120b": GPTOSS(201_088, 2880, 36, 64, 8, 2880, all_but_every(2, 36), experts=128, balance=0.9),
}


def _read(config: Config) -> GPTOSS:
    config.expect("hidden_act", "silu")
    config.expect("swiglu_alpha", 1.702)
    for name in ("experts_per_token", "initial_context_length"):  # said elsewhere too
        config.take(name, None)
    if not (config.nested("rope_parameters") or config.nested("rope_scaling")):
        config.take("rope_parameters")  # transformers would stretch positions by default
    found = common_numbers(config, 150_000.0, head_dim=64, kv_heads=8)
    window = config.take("sliding_window", 128)
    return GPTOSS(
        **found,
        experts=config.take("num_local_experts", 128),
        top_k=config.take("num_experts_per_tok", 4),
        windowed=config.windowed(found["layers"], window, all_but_every(2, found["layers"])),
        window=window,
        limit=config.take("swiglu_limit", 7.0),
        bias=config.take("attention_bias", True),
        balance=config.take("router_aux_loss_coef", 0.001),
    )


def _write(numbers: GPTOSS) -> dict[str, Any]:
    unscaled = {} if numbers.scaling else {"rope_scaling": {"rope_type": "default"}}
    return common_attributes(numbers) | {
        **unscaled,
        "hidden_act": "silu",
        "num_local_experts": numbers.experts,
        "num_experts_per_tok": numbers.top_k,
        "layer_types": layer_types(numbers.layers, numbers.windowed),
        "sliding_window": numbers.window,
        "swiglu_limit": numbers.limit,
        **{"attention_bias": numbers.bias, "router_aux_loss_coef": numbers.balance},
    }


def _weights(numbers: GPTOSS) -> list[Weight]:
    def rules(_: Any, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        sinks = Weight("model.layers.{layer}.self_attn.sinks", lambda m: where(m).mixer.layer.sinks, "", layers)
        experts = stacked_mixture_weights(lambda m: where(m).feed_forward.layer, layers)
        return [*block_weights(where, layers, bias=numbers.bias), sinks, *experts]

    return [*edge_weights(numbers.tied), *layer_weights(windows_of(numbers), rules)]


GPT_OSS_PUBLISHED = Published("GptOssForCausalLM", "gpt_oss", _read, _write, _weights)
