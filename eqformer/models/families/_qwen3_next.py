"""Qwen3-Next (Qwen team 2025): gated delta nets, and in each fourth layer an attention with gates; small experts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    GatedShared,
    LoadBalance,
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
from ._common import block_weights, common_attributes, common_numbers, edge_weights, query_key_norm_weights
from ._delta_nets import net_attributes, net_block_weights, net_numbers
from ._mixtures import mixture_attributes, mixture_numbers, shared_mixture_weights, which_are_mixtures
from ._pattern import decoder, every, layer_weights


@dataclasses.dataclass(frozen=True)
class Qwen3Next:
    """The numbers of a Qwen3-Next; `mlp` is a dense layer's width, `expert_mlp` and `shared_mlp` the experts'."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    expert_mlp: int
    shared_mlp: int
    attending: tuple[int, ...]  # the numbers of the layers with attention; others have nets
    net_heads: int = 32
    net_kv_heads: int = 16
    net_head_dim: int = 128
    net_v_dim: int = 128
    taps: int = 4
    experts: int = 512
    top_k: int = 10
    normalise: bool = True
    dense: tuple[int, ...] = ()  # layers without experts, and
    every: int = 1  # every how many layers there are some
    head_dim: int = 256
    turning: float = 0.25  # the part of a head's channels that has rotary positions
    theta: float = 10_000_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-6
    balance: float = 0.001  # of `LoadBalance`, over the batch
    tied: bool = False
    max_seq: int = 262_144  # the longest rows it was trained on; it changes nothing

    @property
    def kinds(self) -> tuple[tuple[bool, bool], ...]:
        """Of each layer whether it has an attention, and whether it has experts."""
        return tuple((layer in self.attending, mixture) for layer, mixture in enumerate(which_are_mixtures(self)))


def build_qwen3_next(numbers: Qwen3Next, *, key: Key[Array, ""]) -> Transformer:
    """A Qwen3-Next with random weights."""
    embed, head_dim, damping = numbers.embed, numbers.head_dim, (2 * numbers.layers) ** -0.5

    def norm(dim: str, size: Any) -> RMSNorm:
        return RMSNorm(dim, eps=numbers.eps, offset=1.0, **{dim: size})

    def gated(mlp: int, key: Key[Array, ""]) -> GatedMLP:
        return GatedMLP(embed=embed, mlp=mlp, output_std=damping * mlp**-0.5, key=key)

    def mixture(key: Key[Array, ""]) -> MoE:
        router, experts, shared, gate = jax.random.split(key, 4)
        sizes: dict[str, Any] = {"experts": numbers.experts, "top_k": numbers.top_k, "normalise": numbers.normalise}
        return MoE(
            TopKRouter(embed=embed, **sizes, key=router),
            Experts(lambda key: gated(numbers.expert_mlp, key), numbers.experts, key=experts),
            shared=GatedShared(gated(numbers.shared_mlp, shared), embed=embed, key=gate),
            losses=(LoadBalance(numbers.balance),) if numbers.balance else (),
        )

    def attention(key: Key[Array, ""]) -> Attention:
        return Attention(
            embed=embed,
            heads=numbers.heads,
            kv_heads=numbers.kv_heads,
            head_dim=head_dim,
            output_std=damping * (numbers.heads * head_dim) ** -0.5,
            query_norm=norm("head_dim", head_dim),
            key_norm=norm("head_dim", head_dim),
            rotary=Rotary(int(head_dim * numbers.turning), numbers.theta, scaling=numbers.scaling),
            gate=True,
            key=key,
        )

    def net(key: Key[Array, ""]) -> GatedDeltaNet:
        heads, v_dim = numbers.net_heads, numbers.net_v_dim
        sizes = {"kv_heads": numbers.net_kv_heads, "head_dim": numbers.net_head_dim, "taps": numbers.taps}
        std = damping * (heads * v_dim) ** -0.5
        return GatedDeltaNet(embed=embed, heads=heads, v_dim=v_dim, **sizes, eps=numbers.eps, output_std=std, key=key)

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        return Block(
            mixer=Residual(attention(mixer) if kind[0] else net(mixer), norm("embed", embed)),
            feed_forward=Residual(
                mixture(feed_forward) if kind[1] else gated(numbers.mlp, feed_forward), norm("embed", embed)
            ),
        )

    return decoder(numbers, block, numbers.kinds, offset=1.0, key=key)


_BYTE: dict[str, Any] = {"net_heads": 4, "net_kv_heads": 2, "net_head_dim": 16, "net_v_dim": 16, "head_dim": 32}
QWEN3_NEXT_PRESETS = {
    "qwen3-next-byte-500k": Qwen3Next(
        256, 64, 4, 2, 1, 128, 32, 32, every(4, 4), **_BYTE, experts=12, top_k=4, theta=1e4, tied=True
    ),
    "qwen3-next-80b-a3b": Qwen3Next(151_936, 2048, 48, 16, 2, 5120, 512, 512, every(4, 48)),
}


def _read(config: Config) -> Qwen3Next:
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    turning = config.partial_rotary(0.25)
    found = common_numbers(config, head_dim=256, kv_heads=2) | mixture_numbers(config, 512, 10, normalise=True)
    shared = config.take("shared_expert_intermediate_size", 512)
    return Qwen3Next(**found, **net_numbers(config, found["layers"]), turning=turning, shared_mlp=shared)


def _write(numbers: Qwen3Next) -> dict[str, Any]:
    said = {"hidden_act": "silu", "partial_rotary_factor": numbers.turning}
    said |= {"shared_expert_intermediate_size": numbers.shared_mlp} | net_attributes(numbers)
    return common_attributes(numbers) | mixture_attributes(numbers) | said


def _weights(numbers: Qwen3Next) -> list[Weight]:
    def rules(kind: tuple[bool, bool], where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
        feed_forward = shared_mixture_weights(lambda m: where(m).feed_forward.layer, layers, kind[1])
        if not kind[0]:
            return [*net_block_weights(where, layers, numbers.net_kv_heads), *feed_forward]
        norms = query_key_norm_weights(lambda m: where(m).mixer.layer, layers)
        return [*block_weights(where, layers, gated=numbers.heads), *norms, *feed_forward]

    return [*edge_weights(numbers.tied), *layer_weights(numbers.kinds, rules)]


_MTP = ("mtp.",)  # predicts further tokens
QWEN3_NEXT_PUBLISHED = Published("Qwen3NextForCausalLM", "qwen3_next", _read, _write, _weights, ignored_prefixes=_MTP)
