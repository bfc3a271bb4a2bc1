"""What published mixtures share: attributes of Qwen's configurations, and names of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

from .._config import Config
from .._weights import Weight
from ._common import gated_weights


def mixture_numbers(config: Config, experts: int, top_k: int, *, normalise: bool = False) -> dict[str, Any]:
    """Experts, their width, how they are chosen, and which layers have them, as Qwen's configurations say it."""
    return choice_numbers(config, experts, top_k, normalise=normalise) | {
        "expert_mlp": config.take("moe_intermediate_size"),
        "dense": tuple(config.take("mlp_only_layers", None) or ()),
        "every": config.count("decoder_sparse_step", 1),
    }


def mixture_attributes(numbers: Any) -> dict[str, Any]:
    """The same the other way."""
    return choice_attributes(numbers) | {
        "moe_intermediate_size": numbers.expert_mlp,
        "mlp_only_layers": list(numbers.dense),
        "decoder_sparse_step": numbers.every,
    }


def choice_numbers(
    config: Config, experts: int, top_k: int, *, normalise: bool = False, balance: float = 0.001
) -> dict[str, Any]:
    """Of these, how many experts there are, and how they are chosen; what is given are the family's defaults."""
    return {
        "experts": config.take("num_experts", config.take("num_local_experts", experts)),
        "top_k": config.take("num_experts_per_tok", top_k),
        "normalise": config.take("norm_topk_prob", normalise),
        "balance": config.take("router_aux_loss_coef", balance),
    }


def choice_attributes(numbers: Any) -> dict[str, Any]:
    """The same the other way."""
    return {
        "num_experts": numbers.experts,
        "num_experts_per_tok": numbers.top_k,
        "norm_topk_prob": numbers.normalise,
        "router_aux_loss_coef": numbers.balance,
    }


def which_are_mixtures(numbers: Any) -> tuple[bool, ...]:
    """Which layers have experts: every so many, but those that are named."""
    return tuple(layer not in numbers.dense and (layer + 1) % numbers.every == 0 for layer in range(numbers.layers))


def mixture_weights(where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
    """Of a `MoE`: its router's map, and its gated experts."""
    prefix = "model.layers.{layer}.mlp."
    experts = gated_weights(lambda m: where(m).experts.mlps, layers, prefix=prefix + "experts.{expert}.")
    return [Weight(f"{prefix}gate.weight", lambda m: where(m).router.linear.weight, "", layers), *experts]


def shared_mixture_weights(where: Callable[[Any], Any], layers: Sequence[int], is_mixture: bool = True) -> list[Weight]:
    """Of a `MoE` with a `GatedShared` expert or, of layers without experts, of a `GatedMLP`."""
    if not is_mixture:
        return gated_weights(where, layers)
    prefix = "model.layers.{layer}.mlp.shared_expert"
    shared = gated_weights(lambda m: where(m).shared.layer, layers, prefix=f"{prefix}.")
    gate = Weight(f"{prefix}_gate.weight", lambda m: where(m).shared.gate.weight, "", layers)
    return [*mixture_weights(where, layers), *shared, gate]


def stacked_mixture_weights(
    where: Callable[[Any], Any],
    layers: Sequence[int],
    *,
    prefix: str = "model.layers.{layer}.mlp.",
    bias: bool = True,
    interleaved: bool = True,
) -> list[Weight]:
    """Of a `MoE` whose experts are published as one array, inputs first, gates and ups in turns or in halves."""
    router, experts = lambda m: where(m).router.linear, lambda m: where(m).experts.mlps
    turned = "experts inputs outputs -> experts outputs inputs"
    ups = lambda m: (experts(m).gate.weight, experts(m).up.weight)
    biases = lambda m: (experts(m).gate.bias, experts(m).up.bias)
    found = [
        Weight(f"{prefix}router.weight", lambda m: router(m).weight, "", layers),
        Weight(f"{prefix}experts.gate_up_proj", ups, turned, layers, axis=2, interleaved=interleaved),
        Weight(f"{prefix}experts.down_proj", lambda m: experts(m).down.weight, turned, layers),
    ]
    if bias:
        found += [
            Weight(f"{prefix}router.bias", lambda m: router(m).bias, "", layers),
            Weight(f"{prefix}experts.gate_up_proj_bias", biases, "", layers, axis=1, interleaved=interleaved),
            Weight(f"{prefix}experts.down_proj_bias", lambda m: experts(m).down.bias, "", layers),
        ]
    return found
