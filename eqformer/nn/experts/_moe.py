"""Mixtures of experts: feed-forward layers in which each token takes a few experts of many."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ..._annotation_checks import checked
from .._contracts import Aux, FeedForward, Routed
from .._dtype import multiply_float32
from .._linear import Linear, LinearMap
from .._module import map_modules, modules
from .._norm import Norm
from .._tokens import Tokens, tokens_or_default
from .._transformer import Transformer
from ._balance import BalanceLoss, DeviceSum, sum_on_one_device
from ._dispatch import Dispatch, Dropless, run_slots
from ._experts import Experts
from ._routing import is_real, Router, Routing, Slots


ROUTER = 2
"""The number that a mixture folds into tokens' keys for its router; a block's dropouts fold in their sublayer's
index."""


class ExpertMixture(Routed):
    """A mixture of experts whose tokens and experts may be on different devices: the contract of `MoE`.

    A call is `combine(x, project_outputs(y))`. For each token, `y` is the weighted sum of the outputs of its experts,
    which read `project_inputs(normalize_inputs(x))`. Over a mesh a device holds some of the experts, and may hold some
    of the tokens or features of `x`. `normalize_inputs` and `combine` run on a device's part of the stream: apart from
    norms and layers that follow the contracts of `nn`, they may apply only elementwise functions. `project_inputs` and
    `project_outputs` get all features of a token, and every device runs their whole maps.
    """

    if TYPE_CHECKING:  # Type checkers take an abstract variable for an argument of each constructor.
        router: Router = eqx.field(init=False)
        experts: Experts = eqx.field(init=False)
        dispatch: Dispatch = eqx.field(init=False)
        shared: Callable[[Array], Array] | None = eqx.field(init=False)
        losses: tuple[BalanceLoss, ...] = eqx.field(init=False)
        weighs_inputs: bool = eqx.field(init=False)
    else:
        router: eqx.AbstractVar[Router]
        experts: eqx.AbstractVar[Experts]
        dispatch: eqx.AbstractVar[Dispatch]
        shared: eqx.AbstractVar[Callable[[Array], Array] | None]
        losses: eqx.AbstractVar[tuple[BalanceLoss, ...]]
        weighs_inputs: eqx.AbstractVar[bool]

    def normalize_inputs(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return the normalized input of the experts; the router reads `x` itself. By default return `x`."""
        return x

    def project_inputs(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq _"]:
        """Return the channels that experts read; by default all features of `x`."""
        return x

    def project_outputs(self, y: Float[Array, "*batch seq _"]) -> Float[Array, "*batch seq embed"]:
        """Map the sum of a token's experts to the features of the stream; by default return the sum itself."""
        return y

    def combine(
        self, x: Float[Array, "*batch seq embed"], y: Float[Array, "*batch seq embed"]
    ) -> Float[Array, "*batch seq embed"]:
        """Return the layer's output from its input `x` and the experts' output `y`; by default with `shared` added."""
        return y if self.shared is None else y + self.shared(x)

    def expert_width(self, embed: int) -> int:
        """Return the number of channels of `project_inputs`, for a stream of `embed`."""
        return embed

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], Aux]:
        """Return the layer's output, and the losses and counts of its routing."""
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        routing = self.router(x, tokens.fold_in(ROUTER))
        inputs = self.project_inputs(self.normalize_inputs(x))
        if isinstance(routing, Slots):
            y, aux = run_slots(self.experts, inputs, routing), aux_of_slots(routing, tokens, x)
        else:
            dispatch = self.dispatch_for(tokens, routing)
            y, dropped = dispatch(self.experts, inputs, routing, weighs_inputs=self.weighs_inputs)
            aux = self.aux_of_routing(routing, tokens, dropped)
        return self.combine(x, self.project_outputs(y)), aux

    def dispatch_for(self, tokens: Tokens, routing: Routing) -> Dispatch:
        """Return `dispatch` in training, and otherwise a dispatch that drops no choice."""
        return self.dispatch if tokens.is_training else self.dispatch.without_drops(self.experts, routing)

    def aux_of_routing(
        self,
        routing: Routing,
        tokens: Tokens,
        dropped: Int[Array, ""],
        total: DeviceSum = sum_on_one_device,
        row_total: DeviceSum = sum_on_one_device,
    ) -> Aux:
        """Return the losses and counts of a routing; `BalanceLoss` describes `total` and `row_total`."""
        zero = jnp.zeros_like(routing.scores, shape=())
        loss = sum((loss(routing, tokens, total, row_total) for loss in self.losses), start=zero)
        counts, real = routing.counts(), is_real(tokens, routing.scores.shape[:-1])
        share = jax.lax.stop_gradient(routing.scores)
        share = share / jnp.maximum(jnp.sum(share, axis=-1, keepdims=True), 1e-18)
        entropy = jnp.where(real, -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1), 0)
        load = jnp.sum(counts, axis=tuple(range(counts.ndim - 1)), dtype=jnp.int32)
        return Aux(loss, load, dropped, jnp.sum(entropy), jnp.sum(real, dtype=jnp.int32))

    def rebalance(self, aux: Aux, rate: float | Float[Array, ""]) -> "ExpertMixture":
        """Return the mixture with its router rebalanced by the load."""
        return eqx.tree_at(lambda m: m.router, self, self.router.rebalance(aux.load, rate))


class MoE(ExpertMixture):
    """Mixture of experts: `shared(x) + sum_k w_k experts[i_k](x)`.

    The router chooses the experts `i` and the weights `w` of each token.

    `dispatch` is the way in which tokens reach experts, `Dropless()` or `Capacity(factor)`; with experts that choose
    their tokens (`ExpertChoiceRouter`) it is not used. Tokens have no keys in evaluation and generation; no dispatch
    then drops anything, so that a token's output does not depend on later tokens or on the length of the call. `shared`
    runs on every token. `losses` are summed into `Aux.loss`. With `weighs_inputs` the layer is
    `shared(x) + sum_k experts[i_k](w_k x)` (Llama 4). With maps `to_latent` and `from_latent` it is
    `shared(x) + from_latent(sum_k w_k experts[i_k](to_latent(x)))`: experts read fewer channels, and devices send fewer
    channels to them (Nemotron 3). With a `latent_norm`, the sum is normalized before `from_latent` (Kimi K3).
    """

    router: Router
    experts: Experts
    dispatch: Dispatch
    shared: Callable[[Array], Array] | None
    losses: tuple[BalanceLoss, ...]
    expert_norm: Norm | None
    to_latent: LinearMap | None
    from_latent: LinearMap | None
    latent_norm: Norm | None
    weighs_inputs: bool = eqx.field(static=True)

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        dispatch: Dispatch | None = None,
        shared: Callable[[Array], Array] | None = None,
        losses: tuple[BalanceLoss, ...] = (),
        expert_norm: Norm | None = None,
        to_latent: LinearMap | None = None,
        from_latent: LinearMap | None = None,
        latent_norm: Norm | None = None,
        weighs_inputs: bool = False,
    ):
        """Put the parts together. Raises a `ValueError` for parts that do not fit together.

        Args:
            router: Chooses the experts of a token, and their weights.
            experts: The experts.
            dispatch: The way in which tokens reach experts; None: `Dropless()`.
            shared: A layer that runs on every token beside the experts.
            losses: Balance losses, summed into `Aux.loss`.
            expert_norm: A norm of the experts' input, which neither the router nor `shared` reads (Gemma 4).
            to_latent: A map `embed -> latent` of the experts' input; the experts' `embed` is then the latent's size.
            from_latent: A map `latent -> embed` of the sum of the experts' outputs.
            latent_norm: A norm of that sum, before `from_latent`, over a dim `expert_latent` (Kimi K3).
            weighs_inputs: Whether weights multiply the experts' inputs instead of their outputs (Llama 4).
        """
        facts, name = router.facts(), type(router).__name__
        if facts.experts != len(experts):
            raise ValueError(
                f"MoE(router, experts): the router chooses among {facts.experts} experts and there are {len(experts)}; "
                "build both for the same number of experts."
            )
        if losses and facts.expert_choice:
            raise ValueError(
                f"MoE({name}, losses={losses}): experts that choose their tokens are equally busy by "
                "construction; pass no losses."
            )
        if weighs_inputs and facts.expert_choice:
            raise ValueError(
                f"MoE({name}, weighs_inputs=True): experts that choose their tokens weigh their outputs; "
                "leave weighs_inputs out, or take a router by which tokens choose."
            )
        if (to_latent is None) != (from_latent is None):
            missing = "to_latent" if to_latent is None else "from_latent"
            raise ValueError(
                f"MoE({missing}=None): experts that read a latent need to_latent and from_latent; give both or neither."
            )
        if latent_norm is not None and from_latent is None:
            raise ValueError("MoE(latent_norm=..., from_latent=None): the norm is for experts that read a latent.")
        self.weighs_inputs, self.expert_norm, self.latent_norm = weighs_inputs, expert_norm, latent_norm
        self.to_latent, self.from_latent = to_latent, from_latent
        self.router, self.experts, self.shared, self.losses = router, experts, shared, losses
        self.dispatch = Dropless() if dispatch is None else dispatch

    def normalize_inputs(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Apply the `expert_norm`, if there is one."""
        return x if self.expert_norm is None else self.expert_norm(x)

    def project_inputs(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq _"]:
        """Map to the latent, if there is one."""
        return x if self.to_latent is None else self.to_latent(x)

    def project_outputs(self, y: Float[Array, "*batch seq _"]) -> Float[Array, "*batch seq embed"]:
        """Map back from the latent, if there is one."""
        if self.from_latent is None:
            return y
        return self.from_latent(y if self.latent_norm is None else self.latent_norm(y))

    def expert_width(self, embed: int) -> int:
        """Return the number of channels of the latent, or of the stream."""
        return embed if self.to_latent is None else self.to_latent.sizes["latent"]


class GatedShared(FeedForward):
    """`sigmoid(w . x) layer(x)`: a shared expert with one gate for each token (Qwen2-MoE)."""

    layer: Callable[[Array], Array]
    gate: LinearMap

    def __init__(self, layer: Callable[[Array], Array], *, embed: int, key: Key[Array, ""]):
        """Initialize the gate, a map to one number."""
        self.layer, self.gate = layer, Linear("embed -> gate", embed=embed, gate=1, key=key)

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself."""
        return multiply_float32(self.layer(x), jax.nn.sigmoid(self.gate(x)))


@checked
def aux_of_slots(slots: Slots, tokens: Tokens, x: Float[Array, "*batch seq embed"]) -> Aux:
    """Return the counts of experts that chose their tokens: no loss, no dropped choice, and no entropy of choices."""
    zero = jnp.zeros_like(slots.weight, shape=())
    load = jnp.sum(slots.token >= 0, axis=(0, 2), dtype=jnp.int32)
    real = jnp.sum(is_real(tokens, x.shape[:-1]), dtype=jnp.int32)
    return Aux(zero, load, jnp.zeros((), jnp.int32), zero, real)


def chooses_experts(model: Transformer) -> bool:
    """Return whether the model has a mixture whose tokens choose their experts, as `first_experts` needs."""
    return any(not moe.router.facts().expert_choice for moe in modules(model, ExpertMixture))


@checked
def first_experts(
    model: Transformer, ids: Int[Array, "*batch seq"], tokens: Tokens | None = None
) -> Int[Array, "mixtures *batch seq"]:
    """Return the index of each token's best expert, -1 for padding, in a row for each mixture in the layers' order.

    Raises a `ValueError` for a model without mixtures, or whose experts choose their tokens.
    """
    aux = map_modules(_FirstExpert, model, ExpertMixture).encode(ids, tokens)[2]
    stacks = [jnp.stack(jax.tree.leaves(stack), axis=1) for stack in aux if jax.tree.leaves(stack)]
    if not stacks:
        raise ValueError("first_experts(model): the model has no mixture of experts, so no token chooses an expert.")
    return jnp.concatenate([stack.reshape(-1, *ids.shape) for stack in stacks])


class _FirstExpert(Routed):
    """A mixture that returns each token's first expert instead of its `Aux`."""

    inner: ExpertMixture

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, "*batch seq"]]:
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        routing = self.inner.router(x, tokens.fold_in(ROUTER))
        if isinstance(routing, Slots):
            raise ValueError(
                "first_experts(model): the model's experts choose their tokens, so no token has a first expert."
            )
        return self.inner(x, tokens)[0], routing.experts[..., 0]
