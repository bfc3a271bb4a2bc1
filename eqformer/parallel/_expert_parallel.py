"""Expert parallelism: devices of the axis `expert` gather all tokens, or exchange the tokens of each expert."""

import dataclasses
import functools
import math
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree, Shaped

from .. import nn
from . import _collectives as send
from ._expert_exchange import choose_expert_method, count_gathered_pieces, Exchange, exchange_choices
from ._fully_sharded import gather_parameter
from ._mesh import BATCH_AXES, CONTEXT, EXPERT, TENSOR
from ._shard_map import vary
from .tensor._residual_stream import ResidualStream
from .tensor._tensor import count_once, HEAD_DIMS, Sliced


class SplitMixture(nn.Routed):
    """Mixture of experts whose experts are split over the axis `expert`, and their hidden features over `tensor`.

    `inner` has this device's experts. Each device routes its own tokens. There are two methods to send tokens to
    experts on other devices, with the same results:

    - `"gather"`: every device gathers the tokens of all devices of `expert` and sums the outputs of its own experts for
      each token. A reduce-scatter adds the sums of all devices. Since all choices may be for experts of one device, the
      tokens are processed in pieces that keep the gathered rows below 1 GiB.
    - `"exchange"`: the all-to-alls of `exchange` send each token to the devices of its chosen experts, and the outputs
      back. The buffers have a fixed number of slots, so there are as many rounds as the choices need
      (DeepSpeed-MoE, arXiv:2201.05596).
    """

    inner: nn.ExpertMixture
    method: str = eqx.field(static=True)
    """`"gather"`, `"exchange"`, or `"auto"` for the cheaper method by `choose_expert_method`."""
    exchange: Exchange = eqx.field(static=True)
    stream: ResidualStream | None = eqx.field(static=True)
    """Residual stream over `tensor`, gathered for the experts if it is split; None if the axis has one device."""

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], nn.Aux]:
        """Return the layer's output for this device's tokens, and the auxiliary outputs (`nn.Aux`)."""
        x = self._name_gathered_tokens(x)
        inputs = x if self.stream is None else self.stream.to_routed(x)
        if tokens is None:
            tokens = nn.positions_like(self._gather_rows(inputs).shape[:-1])
        device_tokens = self._slice_tokens(tokens, inputs.shape[-2])
        routing = self._route(inputs, tokens, device_tokens)
        normed = self.inner.normalize_inputs(x)
        if normed is not x:
            inputs = normed if self.stream is None else self.stream.to_routed(normed)
        inputs = self.inner.project_inputs(inputs)
        if self._router().facts().expert_choice:
            y, aux = self._run_slots(inputs, cast(nn.Slots, routing), tokens)
        else:
            routing = cast(nn.Routing, routing)
            y, dropped = self._run_choices(inputs, routing, device_tokens)
            aux = self.inner.aux_of_routing(routing, device_tokens, dropped, self._sum_tokens, self._sum_row)
            if self._splits_tokens:
                # `aux` is for this device's tokens, but `dropped` already counts the dropped choices of all tokens.
                summed = jax.tree.map(functools.partial(_sum_over, axes=(TENSOR,)), aux)
                aux = eqx.tree_at(lambda a: a.dropped, summed, dropped)
        y = self.inner.project_outputs(y)
        y = checkpoint_name(y if self.stream is None else self.stream.from_routed(y), "product")
        return self.inner.combine(x, y), aux

    def _name_gathered_tokens(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return `x`, marked to be saved by the remat policy `full` if it will be gathered over `expert`.

        In the backward loop over layers, XLA for GPUs begins the all-gather of `x` one iteration early. If `x` is not
        saved, XLA runs the block's mixer twice. The first run computes `x` for the early all-gather. The second run, in
        the block's own iteration, computes the other results of the mixer.
        """
        if jax.lax.axis_size(EXPERT) == 1 or self._splits_tokens:
            return x
        facts = self._router().facts()
        tokens = math.prod(x.shape[:-1])
        # The maps of `project_inputs` may hold slices here, so take the width from the shape of their result.
        row_bytes = jax.eval_shape(self.inner.project_inputs, x).shape[-1] * x.dtype.itemsize
        gathers = facts.expert_choice or self._method(tokens, int(facts.choices), row_bytes) == "gather"
        return checkpoint_name(x, "own tokens") if gathers else x

    def _method(self, tokens: int, top_k: int, row_bytes: int) -> str:
        """Return the method for this number of tokens on each device."""
        sizes = {"tokens": tokens, "top_k": top_k, "devices": jax.lax.axis_size(EXPERT), "row_bytes": row_bytes}
        return choose_expert_method(self.method, **sizes, exchange=self.exchange)

    def _router(self) -> nn.Router:
        """Return the router, with its arrays gathered over `tensor` if they are split."""
        router = self.inner.router
        return router.whole if isinstance(router, Sliced) else router

    @property
    def _splits_tokens(self) -> bool:
        return self.stream is not None and self.stream.routed.splits_tokens

    @property
    def _splits_features(self) -> bool:
        return self.stream is not None and self.stream.splits_features

    def _sum_tokens(self, x: Array) -> Array:
        """Sum over all devices that split the tokens of the batch."""
        return _sum_over(x, (*BATCH_AXES, CONTEXT, *(TENSOR,) * self._splits_tokens))

    def _sum_row(self, x: Array) -> Array:
        """Sum over the devices that split the tokens of a row."""
        return _sum_over(x, (CONTEXT, *(TENSOR,) * self._splits_tokens))

    def _route(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens, device_tokens: nn.Tokens
    ) -> nn.Routing | nn.Slots:
        """Route this device's tokens.

        `device_tokens` are the tokens of `x`. `tokens` are the tokens of whole rows, for routers whose choices for a
        token depend on other tokens of the row.
        """
        router, stream, device_tokens = self.inner.router, self.stream, device_tokens.fold_in(nn.ROUTER)
        if stream is None:
            return router(x, device_tokens)
        assert isinstance(router, Sliced)
        if self._splits_tokens and router.whole.facts().among != "token":
            routing = router.whole(self._gather_rows(x), tokens.fold_in(nn.ROUTER))
            expert_choice = router.whole.facts().expert_choice
            return routing if expert_choice else jax.tree.map(stream.routed.take_local, routing)
        routing = router.whole(x, device_tokens)
        if self._splits_tokens or not router.is_split:
            return routing
        # All devices of `tensor` have routed the same tokens, so only one of them may contribute to the gradients.

        def count_leaf(leaf: Array) -> Array:
            return count_once(stream, leaf) if nn.is_trainable(leaf) else _mark_replicated(leaf)

        return jax.tree.map(count_leaf, routing)

    def _slice_tokens(self, tokens: nn.Tokens, size: int) -> nn.Tokens:
        """Return the tokens that this device routes."""
        if not self._splits_tokens:
            return tokens
        start = jax.lax.axis_index(TENSOR) * size
        # No router reads these fields.
        tokens = dataclasses.replace(tokens, source=None, score_bias=None, rotary_alpha=None)
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1), tokens)

    def _gather_rows(self, x: Shaped[Array, "*batch seq dim"]) -> Shaped[Array, "*batch full_seq dim"]:
        """Gather over `tensor` all tokens of this device's rows."""
        return x if self.stream is None else self.stream.routed.gather("expert input over tensor", x)

    def _sum_slices(self, y: Float[Array, "*batch full_seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Sum the outputs of slices of hidden features over `tensor`, and return this device's part of the stream."""
        return y if self.stream is None else self.stream.routed.reduce("expert output over tensor", y)

    def _run_choices(
        self, x: Float[Array, "*batch seq embed"], routing: nn.Routing, tokens: nn.Tokens
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, ""]]:
        """Return for each token the sum of its chosen experts' outputs, and the number of dropped choices."""
        dispatch = self.inner.dispatch_for(tokens, routing)
        if self.stream is None and jax.lax.axis_size(EXPERT) == 1:
            return dispatch(self.inner.experts, x, routing, weighs_inputs=self.inner.weighs_inputs)
        experts = routing.scores.shape[-1]
        x, choices, weights = (self._gather_rows(array) for array in (x, routing.experts, routing.weights))
        choices, dropped = dispatch.keep_choices(choices, experts)
        flat = (array.reshape(-1, array.shape[-1]) for array in (x, choices, weights))
        if jax.lax.axis_size(EXPERT) == 1:
            y = self._sum_experts(self._device_experts(), *flat)
        else:
            y = self._run_over_devices(*flat)
        dropped = dropped if self.stream is None else _mark_replicated(dropped)
        return self._sum_slices(y.reshape(x.shape)), dropped

    def _run_over_devices(self, x: Array, choices: Array, weights: Array) -> Float[Array, "tokens embed"]:
        """Return the sum of the chosen experts' outputs for this device's tokens, by gather or exchange."""
        tokens, top_k = choices.shape
        if self._method(tokens, top_k, x.shape[-1] * x.dtype.itemsize) == "gather":
            return self._run_gathered(x, choices, weights)
        weighs_inputs = self.inner.weighs_inputs
        experts = self._device_experts()
        return exchange_choices(experts, x, choices, weights, self.exchange, weighs_inputs=weighs_inputs)

    def _run_gathered(self, x: Array, choices: Array, weights: Array) -> Float[Array, "tokens embed"]:
        """Return the sum of the chosen experts' outputs for this device's tokens, which are gathered at once or piece
        by piece."""
        experts = self._device_experts()
        rows = jax.lax.axis_size(EXPERT) * choices.size  # The choices of all devices may be for this device's experts.
        pieces = count_gathered_pieces(len(x), rows * x.shape[-1] * x.dtype.itemsize)
        if pieces == 1:
            return self._run_piece(experts, x, choices, weights)
        # Run one piece after another. The backward pass recomputes each piece, and sums the gradients of the experts in
        # float32 at least, so widen the experts here.
        experts = jax.tree.map(_widen_trainable, experts)
        arrays = tuple(array.reshape(pieces, -1, *array.shape[1:]) for array in (x, choices, weights))
        run_piece = jax.checkpoint(lambda piece: self._run_piece(experts, *piece), prevent_cse=False)
        return jax.lax.map(run_piece, arrays).reshape(x.shape)

    def _run_piece(self, experts: nn.Experts, x: Array, choices: Array, weights: Array) -> Float[Array, "tokens embed"]:
        """Return the sum of the chosen experts' outputs for this device's tokens, by a gather and a reduce-scatter."""
        x, choices, weights = map(_gather_for_experts, (x, choices, weights))
        device_choices = choices - jax.lax.axis_index(EXPERT) * len(experts)
        is_here = (device_choices >= 0) & (device_choices < len(experts)) & (choices >= 0)
        device_choices = jnp.where(is_here, device_choices, -1)
        y = self._sum_experts(experts, x, device_choices, weights)
        return send.psum_scatter("summed expert output", y, EXPERT)

    def _sum_experts(self, experts: nn.Experts, x: Array, choices: Array, weights: Array) -> Array:
        """Return for each token the sum of its chosen experts' outputs; `choices` are indices into `experts`, or -1."""
        options = {"weighs_inputs": self.inner.weighs_inputs, "devices": jax.lax.axis_size(EXPERT)}
        return nn.dispatch.sum_experts(experts, x, choices, weights, **options)

    def _run_slots(
        self, x: Float[Array, "*batch seq embed"], slots: nn.Slots, tokens: nn.Tokens
    ) -> tuple[Float[Array, "*batch seq embed"], nn.Aux]:
        """Return, for each token, the sum of the outputs of the experts that chose the token, and the aux.

        Experts choose tokens from whole rows.
        """
        x, experts = self._gather_rows(x), self._device_experts()
        aux = nn.aux_of_slots(slots, tokens, x)
        if self.stream is not None:  # All devices of `tensor` have computed the same values.
            aux = jax.tree.map(_mark_replicated, aux)
            # Unless tokens are split, slots are replicated. Mark them as varying, so that their gradients from all
            # slices of hidden features are summed.
            slots = slots if self._splits_tokens else jax.tree.map(self._gather_rows, slots)
        if jax.lax.axis_size(EXPERT) == 1:
            return self._sum_slices(nn.dispatch.run_slots(experts, x, slots)), aux
        rows, slots = jax.tree.map(_gather_for_experts, (x, slots))
        start = jax.lax.axis_index(EXPERT) * len(experts)
        token, weight = (
            jax.lax.dynamic_slice_in_dim(array, start, len(experts), 1) for array in (slots.token, slots.weight)
        )
        y = nn.dispatch.run_slots(experts, rows, nn.Slots(token, weight))
        return self._sum_slices(send.psum_scatter("summed expert output", y, EXPERT)), aux

    def _device_experts(self) -> nn.Experts:
        """Return this device's experts with slices of their hidden features.

        Outputs will be summed over `tensor`, so output biases are zero on all devices of `tensor` but the first.
        """
        if self.stream is None:
            return self.inner.experts
        experts = self.inner.experts
        if self._splits_features:
            experts = jax.tree.map(_split_hidden_features, experts, nn.dims(experts))
        is_first = jax.lax.axis_index(TENSOR) == 0

        def zero_other_biases(linear: nn.LinearMap) -> nn.LinearMap:
            if linear.bias is None or linear.outputs != ("embed",):
                return linear
            return eqx.tree_at(lambda m: m.bias, linear, jnp.where(is_first, linear.bias, 0))

        return nn.map_linears(zero_other_biases, experts)


def _widen_trainable(x: PyTree) -> PyTree:
    """Cast a trainable array to float32 at least."""
    return x.astype(nn.at_least_float32(x.dtype)) if nn.is_trainable(x) else x


def _sum_over(x: Array, axes: tuple[str, ...]) -> Array:
    """Sum a small array over devices, and name the sum so that remat policies save it.

    If the backward pass recomputed the sum, all devices would wait for each other once more.
    """
    return checkpoint_name(send.psum("expert loads", vary(x, axes), axes), "product")


def _gather_for_experts(x: Array) -> Array:
    return send.all_gather("gathered expert input", x, EXPERT)


def _mark_replicated(x: Array) -> Array:
    """Mark a value as replicated over `tensor`; all devices of `tensor` have computed the same value."""
    return send.pmax("replicated values", vary(x, [TENSOR]), TENSOR)


def _split_hidden_features(leaf: PyTree, names: PyTree) -> PyTree:
    """Split an expert's array along its hidden dim instead of `embed`; gather an array without a hidden dim."""
    if not eqx.is_array(leaf) or "embed" not in names.split():
        return leaf
    embed_dim = names.split().index("embed")
    hidden_dims = [dim for dim, name in enumerate(names.split()) if name in HEAD_DIMS]
    if not hidden_dims:
        return gather_parameter(leaf, embed_dim)
    # A layout that assigns two dims to `tensor` splits the last of them. If this is the hidden dim, change nothing.
    if embed_dim < hidden_dims[0]:
        return leaf
    return send.all_to_all("expert weights by hidden features", leaf, TENSOR, hidden_dims[0], embed_dim)
