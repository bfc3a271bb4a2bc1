"""Builders and tables that published mixtures of experts share: attributes of configurations, names of arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Dispatch,
    Dropless,
    ExpertGroups,
    Experts,
    FeedForward,
    GatedShared,
    LinearMap,
    LoadBalance,
    MoE,
    Norm,
    TopKRouter,
)
from .._attributes import Attribute, Attributes, Count, Entry, Fields
from .._config_types import Index, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig
from .._weight_rules import Rule
from ._common import gated_weights, LAYER
from ._decoder import gated_mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenMoEConfig(DecoderConfig):
    """Base class of the configs of Qwen's mixtures."""

    expert_mlp: Size
    """Hidden features of an expert."""
    experts: Size
    """The number of experts of a layer."""
    top_k: Size
    """The number of experts that each token chooses."""
    normalise: bool
    """Whether the weights of a token's experts are normalized to add up to 1."""
    dense_layers: tuple[Index, ...] = ()
    """The numbers of layers without experts."""
    moe_every: Size = 1
    """Every `moe_every`-th layer has experts, unless it is one of the `dense_layers`."""
    theta: Positive = 1_000_000.0
    balance: NotNegative = 0.001
    """The weight of `LoadBalance`, over the batch."""


def mixture(
    config: Any,
    expert: Callable[[Key[Array, ""]], FeedForward],
    *,
    shared: FeedForward | GatedShared | None = None,
    dispatch: Dispatch = Dropless(),
    balance: Mapping[str, Any] = {},
    weighs_inputs: bool = False,
    expert_norm: Norm | None = None,
    latent: tuple[LinearMap, LinearMap] | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_score: str = "max",
    router: Key[Array, ""],
    experts: Key[Array, ""],
    **options: Any,
) -> MoE:
    """Return a mixture of experts by a config.

    Args:
        config: A config with the numbers of experts and of a token's experts, and the weight of the balance loss.
        expert: A function `expert(key)` that builds an expert.
        shared: A layer that every token passes through beside its experts.
        dispatch: The way in which tokens reach experts.
        balance: Further arguments of `LoadBalance`.
        weighs_inputs: Whether weights multiply the experts' inputs.
        expert_norm: A norm of the experts' inputs.
        latent: The maps into the experts' latent inputs, and out of their latent outputs.
        groups: The groups of experts.
        kept_groups: The groups that a token chooses before it chooses experts.
        group_score: The score of a group, as in `nn.ExpertGroups`.
        router: The key of the router.
        experts: The key of the experts.
        **options: Further arguments of the router, which take precedence.
    """
    sizes: dict[str, Any] = {"embed": config.embed, "experts": config.experts, "top_k": config.top_k}
    sizes["groups"] = ExpertGroups(groups, kept_groups, group_score)
    return MoE(
        TopKRouter(**(sizes | options), key=router),
        Experts(expert, config.experts, key=experts),
        dispatch=dispatch,
        shared=shared,
        losses=(LoadBalance(config.balance, **balance),) if config.balance else (),
        expert_norm=expert_norm,
        to_latent=None if latent is None else latent[0],
        from_latent=None if latent is None else latent[1],
        weighs_inputs=weighs_inputs,
    )


def mixture_beside_gated_shared(config: Any, key: Key[Array, ""]) -> MoE:
    """Return small experts beside a shared expert with a gate for each token (Qwen2-MoE)."""
    router, experts, shared, gate = jax.random.split(key, 4)
    return mixture(
        config,
        lambda key: gated_mlp(config, mlp=config.expert_mlp, key=key),
        shared=GatedShared(gated_mlp(config, mlp=config.shared_mlp, key=shared), embed=config.embed, key=gate),
        normalise=config.normalise,
        router=router,
        experts=experts,
    )


def mixture_beside_shared(config: Any, key: Key[Array, ""], *, balance: Mapping[str, Any] = {}, **options: Any) -> MoE:
    """Return small experts in groups beside shared experts (DeepSeek); `options` are arguments of the router."""
    router, experts, shared = jax.random.split(key, 3)
    return mixture(
        config,
        lambda key: gated_mlp(config, mlp=config.expert_mlp, key=key),
        shared=gated_mlp(config, mlp=config.shared * config.expert_mlp, key=shared),
        balance={"per": "sequence", **balance},
        scale=config.scale,
        groups=config.groups,
        kept_groups=config.kept_groups,
        **options,
        router=router,
        experts=experts,
    )


# Arguments of the routers of DeepSeek-V3 and its successors: sigmoid scores, and a bias that affects the choice alone.
BIASED_SIGMOIDS: Mapping[str, Any] = {"score": "sigmoid", "balanced": True, "group_score": "top2"}


def mixture_flags(config: QwenMoEConfig) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: every `moe_every`-th layer but `dense_layers`."""
    return tuple(
        layer not in config.dense_layers and (layer + 1) % config.moe_every == 0 for layer in range(config.layers)
    )


@dataclasses.dataclass(frozen=True)
class DenseLayers(Entry):
    """The numbers of the layers without experts; none where the attribute is missing."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `dense_layers`."""
        return {"dense_layers": tuple(published.listed("mlp_only_layers", Index, empty=True) or ())}

    def write(self, config: QwenMoEConfig) -> Attributes:
        """Return the list."""
        return {"mlp_only_layers": list(config.dense_layers)}


class ExpertGroupCount(Count):
    """A number of groups of experts; null stands for one group."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value."""
        (name,) = self.published_names
        return {self.name: 1 if published.take(name) is None else published.count(name)}


def choice_attributes(
    experts: int, top_k: int, *, normalise: bool = False, balance: float = 0.001
) -> tuple[Entry, ...]:
    """Return the entries for the number of experts and their choice; arguments are transformers' defaults."""
    return (
        Count("experts", ("num_experts", "num_local_experts"), experts),
        Count("top_k", "num_experts_per_tok", top_k),
        Attribute("normalise", "norm_topk_prob", normalise),
        Attribute("balance", "router_aux_loss_coef", balance),
    )


def mixture_attributes(experts: int, top_k: int, *, normalise: bool = False) -> tuple[Entry, ...]:
    """Return the entries of `QwenMoEConfig`; arguments are transformers' defaults."""
    return (
        *choice_attributes(experts, top_k, normalise=normalise),
        Count("expert_mlp", "moe_intermediate_size"),
        DenseLayers(),
        Count("moe_every", "decoder_sparse_step", 1),
    )


# The fields that `mixture_beside_shared` reads, by the attributes of DeepSeek's configurations.
SHARED_ATTRIBUTES: tuple[Entry, ...] = (
    Count("expert_mlp", "moe_intermediate_size"),
    Count("experts", "n_routed_experts"),
    Count("top_k", "num_experts_per_tok"),
    Count("shared", "n_shared_experts", least=0),
    Attribute("first_dense", "first_k_dense_replace"),
    Attribute("scale", "routed_scaling_factor"),
    ExpertGroupCount("groups", "n_group"),
    ExpertGroupCount("kept_groups", "topk_group"),
)

# A `MoE`'s router and its gated experts.
MIXTURE = (
    Rule(f"{LAYER}mlp.gate.weight", "feed_forward.layer.router.linear.weight"),
    *gated_weights("feed_forward.layer.experts.mlps", prefix=f"{LAYER}mlp.experts.{{expert}}."),
)
# The experts of a layer as one array, gates before ups.
_EXPERTS = "feed_forward.layer.experts.mlps"
FUSED = (
    Rule(
        f"{LAYER}mlp.experts.gate_up_proj", (f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"), axis=1, variant=True
    ),
    Rule(f"{LAYER}mlp.experts.down_proj", f"{_EXPERTS}.down.weight", variant=True),
)
# The experts as one array with inputs before outputs; a folder of a multimodal model may have either layout.
TRANSPOSED = tuple(
    dataclasses.replace(rule, pattern="experts inputs outputs -> experts outputs inputs", axis=2 * rule.axis)
    for rule in FUSED
)
# The router's bias for the choice of experts, and the shared experts.
SELECTION_BIAS = Rule(f"{LAYER}mlp.gate.e_score_correction_bias", "feed_forward.layer.router.selection_bias")
SHARED = gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_experts.")
# A `GatedShared` expert.
GATED_SHARED = (
    *gated_weights("feed_forward.layer.shared.layer", prefix=f"{LAYER}mlp.shared_expert."),
    Rule(f"{LAYER}mlp.shared_expert_gate.weight", "feed_forward.layer.shared.gate.weight"),
)


def stacked_mixture_weights(prefix: str = f"{LAYER}mlp.", *, interleaved: bool) -> tuple[Rule, ...]:
    """Return the rules for experts that are published as one array with inputs first.

    Gates and ups alternate with `interleaved`, and else are two halves.
    """
    experts, transposed = "feed_forward.layer.experts.mlps", "experts inputs outputs -> experts outputs inputs"
    ups = lambda leaf: (f"{experts}.gate.{leaf}", f"{experts}.up.{leaf}")
    return (
        Rule(f"{prefix}router.weight", "feed_forward.layer.router.linear.weight"),
        Rule(f"{prefix}router.bias", "feed_forward.layer.router.linear.bias"),
        Rule(f"{prefix}experts.gate_up_proj", ups("weight"), transposed, axis=2, interleaved=interleaved),
        Rule(f"{prefix}experts.gate_up_proj_bias", ups("bias"), axis=1, interleaved=interleaved),
        Rule(f"{prefix}experts.down_proj", f"{experts}.down.weight", transposed),
        Rule(f"{prefix}experts.down_proj_bias", f"{experts}.down.bias"),
    )
