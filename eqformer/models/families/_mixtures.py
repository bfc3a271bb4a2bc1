"""Builders and tables that published mixtures of experts share: attributes of configurations, names of arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable, TypedDict, Unpack

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Fields
from .._config_types import Attributes, Index, NotNegative, Number, OptionalSize, Positive, PublishedConfig, Size
from .._family import DecoderConfig
from .._layer_attributes import check_layer_types, flagged_layers, layers_of
from .._weight_rules import Rule
from ._common import gated_weights, LAYER
from ._decoder import gated_mlp, WithMLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenMoEConfig(DecoderConfig):
    """Base class of the configs of Qwen's mixtures."""

    expert_mlp: Size
    """Hidden features of an expert."""
    experts: Size
    """The number of experts of a layer."""
    top_k: Size
    """The number of experts that each token chooses."""
    normalize: bool
    """Whether the weights of a token's experts are normalized to add up to 1."""
    dense_layers: tuple[Index, ...] = ()
    """The indices of layers without experts."""
    moe_every: Size = 1
    """Every `moe_every`-th layer has experts, unless it is one of the `dense_layers`."""
    theta: Positive = 1_000_000.0
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidMixtureConfig(DecoderConfig):
    """Base class of configs of decoders whose experts are chosen by biased sigmoids, as in DeepSeek-V3."""

    experts: Size = 128
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    shared: OptionalSize = 1
    """The number of shared experts."""
    groups: Size = 1
    """The number of groups of experts."""
    kept_groups: Size = 1
    """The number of groups from which a token's experts are chosen."""
    scale: Number = 1.0
    """A factor of the experts' weights."""
    normalize: bool = True
    """Whether the weights of a token's experts are normalized to add up to 1."""
    balance: NotNegative = 0.0001
    """The weight of the loss `LoadBalance`, which is computed for each row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidMoEConfig(SigmoidMixtureConfig):
    """Base class of configs of decoders with DeepSeek-V3's mixtures of small experts after dense layers."""

    expert_mlp: Size
    """Hidden features of an expert."""
    first_dense: Index = 1
    """The number of layers before the first layer with experts."""

    def feed_forward(self, is_mixture: bool, key: Key[Array, ""]) -> nn.MoE | nn.GatedMLP:
        """Return a mixture, or a dense layer."""
        if not is_mixture:
            return gated_mlp(self, key=key)
        return sigmoid_mixture_beside_shared(self, key, normalize=self.normalize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLayersConfig(DecoderConfig):
    """Base class of configs of decoders in which some layers have no experts."""

    first_dense: Index = 0
    """The number of layers before the first layer with experts."""
    dense_layers: tuple[Index, ...] = ()
    """The indices of later layers without experts."""

    @property
    def mixtures(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(n >= self.first_dense and n not in self.dense_layers for n in range(self.layers))


@runtime_checkable
class WithMixture(Protocol):
    """Fields of a config with mixtures of experts."""

    @property
    def embed(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def balance(self) -> float: ...


@runtime_checkable
class WithSmallExperts(WithMLP, WithMixture, Protocol):
    """Fields of a config whose experts have another width than its dense layers."""

    @property
    def expert_mlp(self) -> int: ...


@runtime_checkable
class WithGatedShared(WithSmallExperts, Protocol):
    """Fields of a config with small experts beside a shared expert with a gate."""

    @property
    def shared_mlp(self) -> int: ...
    @property
    def normalize(self) -> bool: ...


@runtime_checkable
class WithShared(WithSmallExperts, Protocol):
    """Fields of a config with small experts in groups beside shared experts."""

    @property
    def shared(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def groups(self) -> int: ...
    @property
    def kept_groups(self) -> int: ...


@runtime_checkable
class WithSigmoidRouter(Protocol):
    """Fields of a config whose routers are those of `sigmoid_router`."""

    @property
    def groups(self) -> int: ...
    @property
    def kept_groups(self) -> int: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def scale(self) -> float: ...


@runtime_checkable
class WithDenseLayers(Protocol):
    """Fields of a config in which some layers have experts."""

    @property
    def mixtures(self) -> tuple[bool, ...]: ...


class _RouterOptions(TypedDict, total=False):
    """Arguments of `nn.TopKRouter` that a family may choose; `mixture` reads the others from the config."""

    top_k: int
    score: str
    normalize: bool
    normalize_eps: float
    scale: float
    balanced: bool
    bias: bool
    jitter: float
    norm: nn.Norm | None
    logit_scale: float
    scales_experts: bool


class _SigmoidRouterOptions(TypedDict):
    """Arguments of `mixture` for a router that chooses by biased sigmoids."""

    groups: nn.ExpertGroups
    score: str
    normalize: bool
    scale: float
    balanced: bool


def sigmoid_router(config: WithSigmoidRouter) -> _SigmoidRouterOptions:
    """Return arguments of `mixture`: experts are chosen by biased sigmoids, in the best groups (DeepSeek-V3)."""
    return {
        "groups": nn.ExpertGroups(config.groups, config.kept_groups, "top2"),
        "score": "sigmoid",
        "normalize": config.normalize,
        "scale": config.scale,
        "balanced": True,
    }


def mixture(
    config: WithMixture,
    expert: Callable[[Key[Array, ""]], nn.FeedForward],
    *,
    shared: nn.FeedForward | nn.GatedShared | None = None,
    dispatch: nn.Dispatch = nn.Dropless(),
    balance_per: str = "batch",
    balance_normalize: bool = False,
    weighs_inputs: bool = False,
    expert_norm: nn.Norm | None = None,
    latent: tuple[nn.LinearMap, nn.LinearMap] | None = None,
    latent_norm: nn.Norm | None = None,
    groups: nn.ExpertGroups | None = None,
    router: Key[Array, ""],
    experts: Key[Array, ""],
    **options: Unpack[_RouterOptions],
) -> nn.MoE:
    """Return a mixture of experts by a config.

    Args:
        config: A config with the numbers of experts and of a token's experts, and the weight of the balance loss.
        expert: A function `expert(key)` that builds an expert.
        shared: A layer that every token passes through beside its experts.
        dispatch: The way in which tokens reach experts.
        balance_per: `per` of `LoadBalance`: loads are counted per "batch" or per "sequence".
        balance_normalize: `normalize` of `LoadBalance`: whether each token's scores are divided by their sum.
        weighs_inputs: Whether weights multiply the experts' inputs.
        expert_norm: A norm of the experts' inputs.
        latent: The maps into the experts' latent inputs, and out of their latent outputs.
        latent_norm: A norm of the sum of the experts' latent outputs.
        groups: Groups of experts; a token first chooses its best groups. None: one group.
        router: The key of the router.
        experts: The key of the experts.
        **options: Further arguments of the router, which override the config's.
    """
    arguments: _RouterOptions = {"top_k": config.top_k}
    loss = nn.LoadBalance(config.balance, balance_per, balance_normalize)
    return nn.MoE(
        nn.TopKRouter(embed=config.embed, experts=config.experts, groups=groups, **(arguments | options), key=router),
        nn.Experts(expert, config.experts, key=experts),
        dispatch=dispatch,
        shared=shared,
        losses=(loss,) if config.balance else (),
        expert_norm=expert_norm,
        to_latent=None if latent is None else latent[0],
        from_latent=None if latent is None else latent[1],
        latent_norm=latent_norm,
        weighs_inputs=weighs_inputs,
    )


def small_expert(config: WithSmallExperts, key: Key[Array, ""], *, limit: float | None = None) -> nn.GatedMLP:
    """Return an expert: a gated layer of width `config.expert_mlp`; `limit` bounds its hidden features."""
    return gated_mlp(config, mlp=config.expert_mlp, limit=limit, key=key)


def mixture_beside_gated_shared(config: WithGatedShared, key: Key[Array, ""]) -> nn.MoE:
    """Return small experts beside a shared expert with a gate for each token (Qwen2-MoE)."""
    router_key, experts_key, shared_key, gate_key = jax.random.split(key, 4)
    return mixture(
        config,
        functools.partial(small_expert, config),
        shared=nn.GatedShared(
            gated_mlp(config, mlp=config.shared_mlp, key=shared_key), embed=config.embed, key=gate_key
        ),
        normalize=config.normalize,
        router=router_key,
        experts=experts_key,
    )


def mixture_beside_shared(
    config: WithShared,
    key: Key[Array, ""],
    *,
    score: str = "softmax",
    normalize: bool = False,
    balanced: bool = False,
    group_score: str = "max",
    balance_normalize: bool = False,
    limit: float | None = None,
    shared_limit: float | None = None,
) -> nn.MoE:
    """Return small experts in groups beside shared experts (DeepSeek-V2).

    Args:
        config: The config.
        key: The key of the weights.
        score: The function of the router's logits, as in `TopKRouter`.
        normalize: Whether the weights of a token's experts add up to the config's `scale`.
        balanced: Whether the choice of experts has a bias.
        group_score: The score of a group, as in `ExpertGroups`.
        balance_normalize: `normalize` of `LoadBalance`: whether each token's scores are divided by their sum.
        limit: The bound of the hidden features of experts, but not of shared experts; None: no bound.
        shared_limit: The bound of the hidden features of shared experts; None: no bound.
    """
    router_key, experts_key, shared_key = jax.random.split(key, 3)
    return mixture(
        config,
        functools.partial(small_expert, config, limit=limit),
        shared=gated_mlp(config, mlp=config.shared * config.expert_mlp, limit=shared_limit, key=shared_key),
        balance_per="sequence",
        balance_normalize=balance_normalize,
        groups=nn.ExpertGroups(config.groups, config.kept_groups, group_score),
        score=score,
        normalize=normalize,
        scale=config.scale,
        balanced=balanced,
        router=router_key,
        experts=experts_key,
    )


def sigmoid_mixture_beside_shared(
    config: WithShared,
    key: Key[Array, ""],
    *,
    normalize: bool,
    limit: float | None = None,
    shared_limit: float | None = None,
) -> nn.MoE:
    """Return small experts beside shared experts, chosen by sigmoids and a bias (DeepSeek-V3).

    The bias affects the choice of experts, not their weights; with `normalize`, a token's weights add up to 1. `limit`
    bounds the hidden features of experts, and `shared_limit` the hidden features of shared experts.
    """
    return mixture_beside_shared(
        config,
        key,
        score="sigmoid",
        normalize=normalize,
        balanced=True,
        group_score="top2",
        balance_normalize=True,
        limit=limit,
        shared_limit=shared_limit,
    )


def mixture_flags(config: QwenMoEConfig) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: every `moe_every`-th layer except `dense_layers`."""
    return tuple(
        layer not in config.dense_layers and (layer + 1) % config.moe_every == 0 for layer in range(config.layers)
    )


@dataclasses.dataclass(frozen=True)
class DenseLayers(Entry):
    """The indices of the layers without experts; none if the attribute is missing."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `dense_layers`."""
        return {"dense_layers": tuple(published.listed("mlp_only_layers", Index, empty=True) or ())}

    def write(self, config: QwenMoEConfig) -> Attributes:
        """Return the list."""
        return {"mlp_only_layers": list(config.dense_layers)}


class LayerMixtures(Entry):
    """`mlp_layer_types`, a list with "dense" or "sparse" for each layer.

    If the list is missing, another entry of the family's table reads which layers are dense.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `first_dense` and `dense_layers`; refuse other types of layers, and lists of another length."""
        if (types := published.listed("mlp_layer_types", str)) is None:
            return {}
        check_layer_types(published, "mlp_layer_types", types, ("dense", "sparse"))
        first = [*types, "sparse"].index("sparse")
        later = tuple(layer for layer, kind in enumerate(types) if kind == "dense" and layer > first)
        return {"first_dense": first, "dense_layers": later}

    def write(self, config: WithDenseLayers) -> Attributes:
        """Return the list."""
        return {"mlp_layer_types": ["sparse" if is_mixture else "dense" for is_mixture in config.mixtures]}


class FlaggedMixtures(LayerMixtures):
    """`mlp_layer_types` or, in publishers' own configurations, `moe_layer_freq`: 1 for a layer with experts, else 0."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `first_dense` and `dense_layers`; the list of types takes precedence."""
        fields, flagged = super().read(published), flagged_layers(published, "moe_layer_freq")
        if fields or flagged is None:
            return fields
        layers = layers_of(published)
        first = min(flagged, default=layers)
        return {"first_dense": first, "dense_layers": tuple(n for n in range(first, layers) if n not in flagged)}


class ExpertGroupCount(Count):
    """A number of groups of experts; null means one group."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value."""
        (name,) = self.published_names
        return {self.name: 1 if published.take(name, self.default) is None else published.count(name, self.default)}


def router_attributes(
    experts: int, top_k: int, *, normalize: bool = False, balance: float = 0.001, local_first: bool = False
) -> tuple[Entry, ...]:
    """Return the entries for the number of experts and the router; the arguments are transformers' defaults.

    `local_first` says whether transformers reads `num_local_experts` if a configuration has `num_experts` too.
    """
    names = ("num_experts", "num_local_experts")
    return (
        Count("experts", names[::-1] if local_first else names, experts, written=("num_experts",)),
        Count("top_k", "num_experts_per_tok", top_k),
        Attribute("normalize", "norm_topk_prob", normalize),
        Attribute("balance", "router_aux_loss_coef", balance),
    )


def mixture_attributes(
    experts: int, top_k: int, *, normalize: bool = False, local_first: bool = False
) -> tuple[Entry, ...]:
    """Return the table entries for the fields of `QwenMoEConfig`; the arguments are transformers' defaults."""
    return (
        *router_attributes(experts, top_k, normalize=normalize, local_first=local_first),
        Count("expert_mlp", "moe_intermediate_size"),
        DenseLayers(),
        Count("moe_every", "decoder_sparse_step", 1),
    )


FIRST_DENSE = Attribute("first_dense", "first_k_dense_replace")
# The fields that `mixture_beside_shared` reads, by the attributes of DeepSeek's configurations.
SHARED_ATTRIBUTES: tuple[Entry, ...] = (
    Count("expert_mlp", "moe_intermediate_size"),
    Count("experts", "n_routed_experts"),
    Count("top_k", "num_experts_per_tok"),
    Count("shared", "n_shared_experts", minimum=0),
    Attribute("scale", "routed_scaling_factor"),
    ExpertGroupCount("groups", "n_group"),
    ExpertGroupCount("kept_groups", "topk_group"),
)

# A `MoE`'s router and its gated experts.
MIXTURE = (
    Rule(f"{LAYER}mlp.gate.weight", "feed_forward.layer.router.linear.weight"),
    *gated_weights("feed_forward.layer.experts.mlps", prefix=f"{LAYER}mlp.experts.{{expert}}."),
)
# The experts of a layer as one array, in which the weights of `gate` come before the weights of `up`.
_EXPERTS = "feed_forward.layer.experts.mlps"
_TRANSPOSED = "experts inputs outputs -> experts outputs inputs"
FUSED = (
    Rule(
        f"{LAYER}mlp.experts.gate_up_proj", (f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"), axis=1, variant=True
    ),
    Rule(f"{LAYER}mlp.experts.down_proj", f"{_EXPERTS}.down.weight", variant=True),
)
# GGUF files have separate arrays for each expert.
FUSED_BY_EXPERT = (
    Rule(
        f"{LAYER}mlp.experts.{{expert}}.gate_up_proj.weight",
        (f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"),
        variant=True,
    ),
    Rule(f"{LAYER}mlp.experts.{{expert}}.down_proj.weight", f"{_EXPERTS}.down.weight", variant=True),
)
# Arrays of `FUSED` with inputs before outputs: `gate` and `up` are joined along dim 2 instead of dim 1. A folder
# of a multimodal model may have either layout.
TRANSPOSED = tuple(
    dataclasses.replace(rule, pattern=_TRANSPOSED, axis=2 if rule.axis == 1 else rule.axis) for rule in FUSED
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

    The outputs of `gate` and `up` alternate if `interleaved`, and otherwise are two halves.
    """
    gate, up, down = (f"{_EXPERTS}.{name}" for name in ("gate", "up", "down"))
    return (
        Rule(f"{prefix}router.weight", "feed_forward.layer.router.linear.weight"),
        Rule(f"{prefix}router.bias", "feed_forward.layer.router.linear.bias"),
        Rule(
            f"{prefix}experts.gate_up_proj",
            (f"{gate}.weight", f"{up}.weight"),
            _TRANSPOSED,
            axis=2,
            interleaved=interleaved,
        ),
        Rule(f"{prefix}experts.gate_up_proj_bias", (f"{gate}.bias", f"{up}.bias"), axis=1, interleaved=interleaved),
        Rule(f"{prefix}experts.down_proj", f"{down}.weight", _TRANSPOSED),
        Rule(f"{prefix}experts.down_proj_bias", f"{down}.bias"),
    )
