"""Expert parallelism: tokens are gathered on all devices of the axis `expert`, or sent to those with their experts."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree, Shaped

from .. import nn
from . import _send as send
from ._axes import BATCH_AXES, CONTEXT, EXPERT, TENSOR
from ._expert_exchange import exchange_choices
from ._expert_method import choose_expert_method, count_pieces, Exchange
from ._vary import vary
from .state._gather import gather_parameter
from .tensor._replicated_layers import counted_once, Sliced
from .tensor._residual_stream import ResidualStream
from .tensor._tensor import HEAD_DIMS


class SplitMoE(nn.Routed):
    """A mixture of which this device holds some experts, and of each a slice of its hidden features.

    `method="gather"`: the tokens of all devices of the axis `expert` are gathered, each device computes what its own
    experts add, and the sums are scattered back; exact. As all choices may be for one device, it is done in as many
    pieces as keep the room for them below 1 GiB. `"exchange"`: each choice goes to its expert's device and back by
    all-to-alls (DeepSpeed-MoE, arXiv:2201.05596), those of `exchange`, in rounds until all have had a place; exact.
    `"auto"`: the cheaper one (`choose_expert_method`). Each token is routed once, on one device. `stream` is that over the
    axis `tensor`, None where that has one device: split tokens or features are put together for the experts.
    """

    inner: nn.MoE
    method: str = eqx.field(static=True)
    exchange: Exchange = eqx.field(static=True)
    stream: ResidualStream | None = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], nn.Aux]:
        """The layer's output for this device's tokens, and their `Aux`."""
        x = self._kept(x)
        given = x if self.stream is None else self.stream.to_routed(x)
        tokens = nn.positions_like(self._whole_rows(given).shape[:-1]) if tokens is None else tokens
        own = self._own(tokens, given.shape[-2])
        routing = self._routed(given, tokens, own)
        if self.inner.expert_norm is not None:
            normed = self.inner.expert_norm(x)
            given = normed if self.stream is None else self.stream.to_routed(normed)
        given = _through(self.inner.to_latent, given)
        if isinstance(routing, nn.Slots):
            y, aux = self._taken(given, routing, tokens)
        else:
            y, dropped = self._chosen(given, routing, own)
            aux = self.inner.aux_of_routing(routing, own, dropped, self._total, self._row_total)
            if self._splits_tokens:
                aux = eqx.tree_at(lambda a: a.dropped, jax.tree.map(lambda leaf: _sum(leaf, (TENSOR,)), aux), dropped)
        y = _through(self.inner.from_latent, y)
        y = checkpoint_name(y if self.stream is None else self.stream.from_routed(y), "product")
        return (y if self.inner.shared is None else y + self.inner.shared(x)), aux

    def _kept(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Name this device's tokens for the remat policy `full` to keep, where the experts' devices gather them.

        XLA for GPUs begins all-gathers a turn of the backward loop early. To gather tokens that are not kept, it
        recomputes the block's mixer a turn early, and once more in the turn that needs the mixer's other results.
        """
        if jax.lax.axis_size(EXPERT) == 1 or self._splits_tokens:
            return x
        router = self.inner.router
        facts = (router.whole if isinstance(router, Sliced) else router).facts()
        tokens = math.prod(x.shape[:-1])
        row = self.inner.expert_width(x.shape[-1]) * x.dtype.itemsize
        gathers = facts.gives_slots or self._method(tokens, int(facts.choices), row) == "gather"
        return checkpoint_name(x, "own tokens") if gathers else x

    def _method(self, tokens: int, top_k: int, row_bytes: int) -> str:
        """Return how so many tokens of a device reach the experts of other devices."""
        sizes = {"tokens": tokens, "top_k": top_k, "devices": jax.lax.axis_size(EXPERT), "row_bytes": row_bytes}
        return choose_expert_method(self.method, **sizes, exchange=self.exchange)

    @property
    def _splits_tokens(self) -> bool:
        return self.stream is not None and self.stream.routed.splits_tokens

    @property
    def _splits_features(self) -> bool:
        return self.stream is not None and self.stream.splits_features

    def _total(self, x: Array) -> Array:
        return _sum(x, (*BATCH_AXES, CONTEXT, *(TENSOR,) * self._splits_tokens))

    def _row_total(self, x: Array) -> Array:
        return _sum(x, (CONTEXT, *(TENSOR,) * self._splits_tokens))

    def _routed(self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens, own: nn.Tokens) -> nn.Routing | nn.Slots:
        """What the router gives; where a choice depends on other tokens too, it sees the whole rows, `tokens`."""
        router, stream, own = self.inner.router, self.stream, own.fold_in(nn.ROUTER)
        if stream is None:
            return router(x, own)
        assert isinstance(router, Sliced)
        if self._splits_tokens and router.whole.facts().among != "token":
            routing = router.whole(self._whole_rows(x), tokens.fold_in(nn.ROUTER))
            return routing if isinstance(routing, nn.Slots) else jax.tree.map(stream.routed.own, routing)
        once = lambda leaf: counted_once(stream, leaf) if nn.is_trainable(leaf) else _same(leaf)
        routing = router.whole(x, own)
        return jax.tree.map(once, routing) if router.is_split and not self._splits_tokens else routing

    def _own(self, tokens: nn.Tokens, size: int) -> nn.Tokens:
        """The tokens that this device routes."""
        if not self._splits_tokens:
            return tokens
        start = jax.lax.axis_index(TENSOR) * size
        tokens = dataclasses.replace(tokens, source=None, score_bias=None)  # which no router reads
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1), tokens)

    def _whole_rows(self, x: Shaped[Array, "*batch seq dim"]) -> Shaped[Array, "*batch full_seq dim"]:
        """All tokens of this device's rows, on every device of `tensor`."""
        return x if self.stream is None else self.stream.routed.whole("rows for experts", x)

    def _reduced(self, y: Float[Array, "*batch full_seq embed"]) -> Float[Array, "*batch seq embed"]:
        """The sum over slices of hidden features, of the tokens that `_whole_rows` was given."""
        return y if self.stream is None else self.stream.routed.summed("slices of experts", y)

    def _chosen(
        self, x: Float[Array, "*batch seq embed"], routing: nn.Routing, tokens: nn.Tokens
    ) -> tuple[Array, Int[Array, ""]]:
        """What the chosen experts add to each token, and how many choices were dropped."""
        dispatch = self.inner.dispatch_of(tokens, routing)
        if self.stream is None and jax.lax.axis_size(EXPERT) == 1:
            return dispatch(self.inner.experts, x, routing, weighs_inputs=self.inner.weighs_inputs)
        number = routing.scores.shape[-1]
        x, choices, weights = (self._whole_rows(array) for array in (x, routing.experts, routing.weights))
        choices, dropped = dispatch.kept(choices, number)
        flat = (array.reshape(-1, array.shape[-1]) for array in (x, choices, weights))
        if jax.lax.axis_size(EXPERT) == 1:
            y = self._sum(self._experts(), *flat)
        else:
            y = self._over_devices(*flat)
        dropped = dropped if self.stream is None else _same(dropped)
        return self._reduced(y.reshape(x.shape)), dropped

    def _over_devices(self, x: Array, choices: Array, weights: Array) -> Array:
        tokens, top_k = choices.shape
        if self._method(tokens, top_k, x.shape[-1] * x.dtype.itemsize) == "gather":
            return self._gathered(x, choices, weights)
        return exchange_choices(self._experts(), x, choices, weights, self.exchange, weighs_inputs=self.inner.weighs_inputs)

    def _gathered(self, x: Array, choices: Array, weights: Array) -> Array:
        experts = self._experts()
        rows = jax.lax.axis_size(EXPERT) * choices.size  # all of which may be for this device's experts
        pieces = count_pieces(len(x), rows * x.shape[-1] * x.dtype.itemsize)
        if pieces == 1:
            return self._sum_of_all(experts, x, choices, weights)
        # One after another, and again in the backward pass, which keeps none of them and sums gradients over them.
        wide = lambda x: x.astype(nn.at_least_float32(x.dtype)) if nn.is_trainable(x) else x
        experts = jax.tree.map(wide, experts)
        arrays = jax.tree.map(lambda a: a.reshape(pieces, -1, *a.shape[1:]), (x, choices, weights))
        one = jax.checkpoint(lambda piece: self._sum_of_all(experts, *piece), prevent_cse=False)
        return jax.lax.map(one, arrays).reshape(x.shape)

    def _sum_of_all(self, experts: nn.Experts, x: Array, choices: Array, weights: Array) -> Array:
        """What all devices' experts add to this device's tokens."""
        x, choices, weights = map(_to_all, (x, choices, weights))
        own = choices - jax.lax.axis_index(EXPERT) * len(experts)
        own = jnp.where((own >= 0) & (own < len(experts)) & (choices >= 0), own, -1)
        y = self._sum(experts, x, own, weights)
        return send.psum_scatter("sums of all experts", y, EXPERT)

    def _sum(self, experts: nn.Experts, x: Array, choices: Array, weights: Array) -> Array:
        given = {"weighs_inputs": self.inner.weighs_inputs, "devices": jax.lax.axis_size(EXPERT)}
        return nn.dispatch.sum_of_experts(experts, x, choices, weights, **given)

    def _taken(self, x: Array, slots: nn.Slots, tokens: nn.Tokens) -> tuple[Array, nn.Aux]:
        """What experts that have chosen tokens of whole rows add, and what they took."""
        x, experts = self._whole_rows(x), self._experts()
        aux = nn.aux_of_slots(slots, tokens, x)
        if self.stream is not None:  # the same on all devices of the axis
            aux = jax.tree.map(_same, aux)
            slots = slots if self._splits_tokens else jax.tree.map(self._whole_rows, slots)
        if jax.lax.axis_size(EXPERT) == 1:
            return self._reduced(nn.dispatch.run_slots(experts, x, slots)), aux
        rows, slots = jax.tree.map(_to_all, (x, slots))
        start = jax.lax.axis_index(EXPERT) * len(experts)
        own = lambda array: jax.lax.dynamic_slice_in_dim(array, start, len(experts), 1)
        y = nn.dispatch.run_slots(experts, rows, nn.Slots(own(slots.token), own(slots.weight)))
        return self._reduced(send.psum_scatter("sums of all experts", y, EXPERT)), aux

    def _experts(self) -> nn.Experts:
        """This device's experts; as outputs are summed over `tensor`, only the first device adds their biases."""
        if self.stream is None:
            return self.inner.experts
        experts = self.inner.experts
        if self._splits_features:
            experts = jax.tree.map(_of_hidden_features, experts, nn.dims(experts))
        is_first = jax.lax.axis_index(TENSOR) == 0

        def own(linear: nn.LinearMap) -> nn.LinearMap:
            if linear.bias is None or linear.outputs != ("embed",):
                return linear
            return eqx.tree_at(lambda m: m.bias, linear, jnp.where(is_first, linear.bias, 0))

        return nn.map_linears(own, experts)


def _through(linear: nn.LinearMap | Sliced | None, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
    """A map of all features, in which they may be split."""
    if linear is None:
        return x
    return (linear.whole if isinstance(linear, Sliced) else linear)(x)


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    """The sum over devices, a few numbers, which the backward pass keeps: to add them up again, all devices wait."""
    return checkpoint_name(send.psum("loads of experts", vary(x, axes), axes), "product")


def _to_all(x: Array) -> Array:
    return send.all_gather("tokens to all experts", x, EXPERT)


def _same(x: Array) -> Array:
    """A value that all devices of `tensor` have computed alike, typed as replicated."""
    return send.pmax("same on all slices", vary(x, [TENSOR]), TENSOR)


def _of_hidden_features(leaf: PyTree, names: PyTree) -> PyTree:
    """An expert's array split by hidden features, where it was split by `embed`; whole if it has no hidden dim."""
    if not eqx.is_array(leaf) or "embed" not in names.split():
        return leaf
    of_embed = names.split().index("embed")
    hidden = [dim for dim, name in enumerate(names.split()) if name in HEAD_DIMS]
    if not hidden:
        return gather_parameter(leaf, of_embed)
    if of_embed < hidden[0]:  # of two dims the last is split, which in a map is the one that it contracts
        return leaf
    return send.all_to_all("features of experts", leaf, TENSOR, hidden[0], of_embed)
