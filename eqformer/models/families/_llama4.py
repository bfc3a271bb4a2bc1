"""Llama 4 (Meta 2025), text: chunks with rotary positions, whole rows without, sigmoids that weigh experts' inputs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Experts,
    GatedMLP,
    Llama3Scaling,
    LoadBalance,
    LogTemperature,
    Mask,
    MoE,
    Residual,
    RMSNorm,
    Rotary,
    RotaryScaling,
    TopKRouter,
    Transformer,
)
from .._config import Config
from .._weights import Published, Weight
from ._common import block_weights, common_attributes, common_numbers, edge_weights, gated_weights
from ._mixtures import stacked_mixture_weights
from ._pattern import decoder, every, layer_weights


@dataclasses.dataclass(frozen=True)
class Llama4:
    """The numbers of a Llama 4; `mlp` is an expert's width and the shared expert's, `dense_mlp` a dense layer's."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    dense_mlp: int
    mixtures: tuple[int, ...]  # the numbers of the layers with experts,
    unrotated: tuple[int, ...]  # of those without rotary positions, whose scores grow by `LogTemperature`,
    whole: tuple[int, ...]  # and of those that see whole rows
    experts: int = 16
    top_k: int = 1
    chunk: int | None = 8192  # which the others see
    normed: bool = True  # queries and keys of rotated layers
    temperature: float = 0.1
    temperature_every: int = 8192
    head_dim: int = 128
    theta: float = 500_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-5
    bias: bool = False  # of the attention's four projections
    balance: float = 0.001  # of `LoadBalance`, over the batch
    tied: bool = False
    max_seq: int = 131_072  # the longest rows it was trained on; it changes nothing

    @property
    def kinds(self) -> tuple[tuple[bool, bool, bool], ...]:
        """Of each layer whether it has rotary positions, sees whole rows, and has experts."""
        return tuple((n not in self.unrotated, n in self.whole, n in self.mixtures) for n in range(self.layers))


def build_llama4(numbers: Llama4, *, key: Key[Array, ""]) -> Transformer:
    """A Llama 4 with random weights."""
    embed, head_dim, eps, damping = numbers.embed, numbers.head_dim, numbers.eps, (2 * numbers.layers) ** -0.5
    sharper = LogTemperature(numbers.temperature_every, numbers.temperature) if numbers.temperature else None

    def gated(mlp: int, key: Key[Array, ""]) -> GatedMLP:
        return GatedMLP(embed=embed, mlp=mlp, output_std=damping * mlp**-0.5, key=key)

    def mixture(key: Key[Array, ""]) -> MoE:
        router, experts, shared = jax.random.split(key, 3)
        return MoE(
            TopKRouter(embed=embed, experts=numbers.experts, top_k=numbers.top_k, score="sigmoid", key=router),
            Experts(lambda key: gated(numbers.mlp, key), numbers.experts, key=experts),
            shared=gated(numbers.mlp, shared),
            losses=(LoadBalance(numbers.balance, normalise=True),) if numbers.balance else (),
            weighs_inputs=True,
        )

    def block(kind: tuple[bool, bool, bool], key: Key[Array, ""]) -> Block:
        rotated, sees_all, is_mixture = kind
        attention, feed_forward = jax.random.split(key)
        sizes = {"embed": embed, "heads": numbers.heads, "kv_heads": numbers.kv_heads, "head_dim": head_dim}
        options: dict[str, Any] = {"mask": Mask(chunk=None if sees_all else numbers.chunk), "temperature": sharper}
        if rotated:
            # Published after the rotation, which changes no length.
            norm = RMSNorm("head_dim", head_dim=head_dim, eps=eps, scale=False) if numbers.normed else None
            rotary = Rotary(head_dim, numbers.theta, interleaved=True, scaling=numbers.scaling)
            options |= {"query_norm": norm, "key_norm": norm, "rotary": rotary, "temperature": None}
        spread = damping * (numbers.heads * head_dim) ** -0.5
        return Block(
            mixer=Residual(
                Attention(**sizes, **options, bias=numbers.bias, output_std=spread, key=attention),
                RMSNorm("embed", embed=embed, eps=eps),
            ),
            feed_forward=Residual(
                mixture(feed_forward) if is_mixture else gated(numbers.dense_mlp, feed_forward),
                RMSNorm("embed", embed=embed, eps=eps),
            ),
        )

    return decoder(numbers, block, numbers.kinds, key=key)


_TYPES = ("chunked_attention", "full_attention")
_SAID = {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "normed": "use_qk_norm"}
_SAID |= {"temperature_every": "floor_scale", "temperature": "attn_scale", "balance": "router_aux_loss_coef"}
_SCOUT = Llama3Scaling(16.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_length=8192)
_SIZES = (202_048, 5120, 48, 40, 8, 8192, 16_384)
LLAMA4_PRESETS = {
    "llama4-byte-500k": Llama4(256, 64, 4, 4, 2, 32, 96, (1, 3), (3,), (3,), 12, chunk=64, head_dim=16, theta=1e4),
    "llama4-scout": Llama4(*_SIZES, every(1, 48), every(4, 48), every(4, 48), scaling=_SCOUT, max_seq=10_485_760),
    "llama4-maverick": Llama4(*_SIZES, every(2, 48), every(4, 48), every(4, 48), 128, normed=False, max_seq=1_048_576),
}


def _read(config: Config) -> Llama4:
    config.expect("hidden_act", "silu")
    found = common_numbers(config, 500_000.0, head_dim=128, kv_heads=8)
    found |= {name: config.take(published, getattr(Llama4, name)) for name, published in _SAID.items()}
    if found["normed"] and not isinstance(found["scaling"], Llama3Scaling | None):
        config.refuse(f"use_qk_norm with {found['scaling']}: norms after a rotation are known of none and llama3's.")
    layers, interval = range(found["layers"]), config.count("no_rope_layer_interval", 4)
    rotated = config.take("no_rope_layers", None) or [(layer + 1) % interval for layer in layers]
    types = config.take("layer_types", None) or [_TYPES[not rotated[layer]] for layer in layers]
    if {len(rotated), len(types)} != {len(layers)} or not set(types) <= set(_TYPES):
        config.refuse(f"no_rope_layers={rotated}, layer_types={types}: say of {len(layers)} layers, as {_TYPES}.")
    found["temperature"] *= bool(config.take("attn_temperature_tuning", True))
    return Llama4(
        **found,
        dense_mlp=config.take("intermediate_size_mlp", 16_384),
        chunk=config.nullable("attention_chunk_size", 8192),
        bias=config.take("attention_bias", False),
        mixtures=tuple(config.take("moe_layers", every(config.count("interleave_moe_layer_step", 1), len(layers)))),
        unrotated=tuple(layer for layer in layers if not rotated[layer]),
        whole=tuple(layer for layer in layers if _TYPES.index(types[layer])),
    )


def _write(numbers: Llama4) -> dict[str, Any]:
    said = {published: getattr(numbers, name) for name, published in _SAID.items()}
    said |= {"hidden_act": "silu", "attention_bias": numbers.bias, "attention_chunk_size": numbers.chunk}
    said |= {"moe_layers": list(numbers.mixtures), "no_rope_layers": [int(kind[0]) for kind in numbers.kinds]}
    said |= {"intermediate_size_mlp": numbers.dense_mlp, "layer_types": [_TYPES[kind[1]] for kind in numbers.kinds]}
    return common_attributes(numbers) | said | {"attn_temperature_tuning": numbers.temperature != 0}


def _weights(numbers: Llama4) -> list[Weight]:
    def rules(kind: Any, where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        prefix, fed = "model.layers.{layer}.feed_forward.", lambda m: where(m).feed_forward.layer
        found = block_weights(where, layers, bias=numbers.bias)
        if not kind[2]:
            return [*found, *gated_weights(fed, layers, prefix=prefix)]
        shared = gated_weights(lambda m: fed(m).shared, layers, prefix=prefix + "shared_expert.")
        return [*found, *shared, *stacked_mixture_weights(fed, layers, prefix=prefix, bias=False, interleaved=False)]

    return [*edge_weights(numbers.tied), *layer_weights(numbers.kinds, rules)]


LLAMA4_PUBLISHED = Published("Llama4ForCausalLM", "llama4_text", _read, _write, _weights)
