"""What published mixtures share: how they are built, attributes of configurations, and names of arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Dispatch,
    Dropless,
    Experts,
    FeedForward,
    GatedShared,
    LinearMap,
    LoadBalance,
    MoE,
    Norm,
    TopKRouter,
)
from .._attributes import Attribute, Count, Entry
from .._config_types import Index, NotNegative, Positive, Size
from .._family import DecoderConfig
from .._published_config import PublishedConfig
from .._weight_rules import Rule
from ._common import gated_weights, LAYER
from ._decoder import gated_mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenMoEConfig(DecoderConfig):
    """What the configs of Qwen's mixtures have in common."""

    expert_mlp: Size
    """Hidden features of an expert."""
    experts: Size
    """Experts of a layer."""
    top_k: Size
    """Experts of a token."""
    normalise: bool
    """Whether a token's weights add up to 1."""
    dense_layers: tuple[Index, ...] = ()
    """The numbers of layers without experts."""
    moe_every: Size = 1
    """Of the others, every how many have some."""
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
    router: Key[Array, ""],
    experts: Key[Array, ""],
    **options: Any,
) -> MoE:
    """A mixture of experts by a config.

    Args:
        config: Has the numbers of experts and of those a token has, and the weight of the balance loss.
        expert: `expert(key)`, which builds one.
        shared: A layer that every token has beside its experts.
        dispatch: How tokens reach experts.
        balance: Further arguments of `LoadBalance`.
        weighs_inputs: Whether weights multiply the experts' inputs.
        expert_norm: A norm of what experts read.
        latent: The maps to what they read, and from what they give.
        router: The key of the router.
        experts: The key of the experts.
        **options: Further arguments of the router, which come first.
    """
    sizes: dict[str, Any] = {"embed": config.embed, "experts": config.experts, "top_k": config.top_k}
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
    """Small experts beside a shared one, of which each token takes as much as it wants (Qwen2-MoE)."""
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
    """Small experts, of groups, beside some that every token has (DeepSeek); `options` are the router's."""
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


# How DeepSeek-V3 and those after it choose experts: by sigmoids, and a bias for the choice alone.
BIASED_SIGMOIDS: Mapping[str, Any] = {"score": "sigmoid", "balanced": True, "group_score": "top2"}


def which_are_mixtures(config: QwenMoEConfig) -> tuple[bool, ...]:
    """Which layers have experts: every so many, but those that are named."""
    return tuple(
        layer not in config.dense_layers and (layer + 1) % config.moe_every == 0 for layer in range(config.layers)
    )


@dataclasses.dataclass(frozen=True)
class DenseLayers(Entry):
    """The numbers of the layers without experts; none where nothing is said."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`dense_layers`."""
        return {"dense_layers": tuple(published.listed("mlp_only_layers", Index, empty=True) or ())}

    def write(self, config: Any) -> dict[str, Any]:
        """The list."""
        return {"mlp_only_layers": list(config.dense_layers)}


class Groups(Count):
    """A number of groups, of which a null says that there is one."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The field's value."""
        (name,) = self._published
        return {self.name: 1 if published.take(name) is None else published.count(name)}


def choice_attributes(
    experts: int, top_k: int, *, normalise: bool = False, balance: float = 0.001
) -> tuple[Entry, ...]:
    """How many experts there are, and how they are chosen; given is what transformers takes for what is missing."""
    return (
        Count("experts", ("num_experts", "num_local_experts"), experts),
        Count("top_k", "num_experts_per_tok", top_k),
        Attribute("normalise", "norm_topk_prob", normalise),
        Attribute("balance", "router_aux_loss_coef", balance),
    )


def mixture_attributes(experts: int, top_k: int, *, normalise: bool = False) -> tuple[Entry, ...]:
    """The same, with the experts' width, and which layers have them, as Qwen's configurations say it."""
    return (
        *choice_attributes(experts, top_k, normalise=normalise),
        Count("expert_mlp", "moe_intermediate_size"),
        DenseLayers(),
        Count("moe_every", "decoder_sparse_step", 1),
    )


# The fields that `mixture_beside_shared` reads, as DeepSeek's configurations say them.
SHARED_ATTRIBUTES: tuple[Entry, ...] = (
    Count("expert_mlp", "moe_intermediate_size"),
    Count("experts", "n_routed_experts"),
    Count("top_k", "num_experts_per_tok"),
    Count("shared", "n_shared_experts", least=0),
    Attribute("first_dense", "first_k_dense_replace"),
    Attribute("scale", "routed_scaling_factor"),
    Groups("groups", "n_group"),
    Groups("kept_groups", "topk_group"),
)

# A `MoE`'s router and its gated experts.
MIXTURE = (
    Rule(f"{LAYER}mlp.gate.weight", "feed_forward.layer.router.linear.weight"),
    *gated_weights("feed_forward.layer.experts.mlps", prefix=f"{LAYER}mlp.experts.{{expert}}."),
)
# The same where a folder has the experts of a layer as one array, gates before ups.
_EXPERTS = "feed_forward.layer.experts.mlps"
FUSED = (
    Rule(
        f"{LAYER}mlp.experts.gate_up_proj", (f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"), axis=1, variant=True
    ),
    Rule(f"{LAYER}mlp.experts.down_proj", f"{_EXPERTS}.down.weight", variant=True),
)
# The same with inputs before outputs, where a folder of several kinds of data may have it either way.
TURNED = tuple(
    dataclasses.replace(rule, pattern="experts inputs outputs -> experts outputs inputs", axis=2 * rule.axis)
    for rule in FUSED
)
# The bias of its choice, and the experts that every token has.
SELECTION_BIAS = Rule(f"{LAYER}mlp.gate.e_score_correction_bias", "feed_forward.layer.router.selection_bias")
SHARED = gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_experts.")
# Its `GatedShared` expert.
GATED_SHARED = (
    *gated_weights("feed_forward.layer.shared.layer", prefix=f"{LAYER}mlp.shared_expert."),
    Rule(f"{LAYER}mlp.shared_expert_gate.weight", "feed_forward.layer.shared.gate.weight"),
)


def stacked_mixture_weights(prefix: str = f"{LAYER}mlp.", *, interleaved: bool) -> tuple[Rule, ...]:
    """Of a `MoE` whose experts are published as one array, inputs first, gates and ups in turns or in halves."""
    experts, turned = "feed_forward.layer.experts.mlps", "experts inputs outputs -> experts outputs inputs"
    ups = lambda leaf: (f"{experts}.gate.{leaf}", f"{experts}.up.{leaf}")
    return (
        Rule(f"{prefix}router.weight", "feed_forward.layer.router.linear.weight"),
        Rule(f"{prefix}router.bias", "feed_forward.layer.router.linear.bias"),
        Rule(f"{prefix}experts.gate_up_proj", ups("weight"), turned, axis=2, interleaved=interleaved),
        Rule(f"{prefix}experts.gate_up_proj_bias", ups("bias"), axis=1, interleaved=interleaved),
        Rule(f"{prefix}experts.down_proj", f"{experts}.down.weight", turned),
        Rule(f"{prefix}experts.down_proj_bias", f"{experts}.down.bias"),
    )
