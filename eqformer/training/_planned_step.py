"""Gradients, steps and evaluation under a plan: `shard_map` runs the loss on each device's piece of model and batch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from .. import nn
from .._shapes import ArrayOrShape, Batch
from ..parallel import (
    filter_shard_map,
    OnDevice,
    pipeline_gradients,
    Plan,
    select_differentiable,
    shardings,
    TENSOR,
    varying_axes,
)
from ._batch_tokens import batch_tokens
from ._host_memory import brought_near, is_on_host, taken_back
from ._loss import evaluation_sums
from ._loss_result import check_takes_tokens, check_whole, sum_and_count
from ._loss_scale import Scale, seed, unscaled
from ._moments import Codes
from ._optimizer import Optimizer, trainable, Trained
from ._row_loss import row_nats
from ._step import accumulated_gradients, Gradients, GradientsOf, in_microbatches, LossFn, make_step, Step, TrainState
from ._tally import Count, Tally


Found = tuple[Array, PyTree, PyTree]  # a loss's sum, its count and aux, and gradients


def planned_gradients(plan: Plan) -> GradientsOf:
    """What `make_step` takes as `gradients_of` to run under a plan: the gradients equal those of one device.

    They, and the aux of routed layers, are in the order of the model that is given: `plan.to_pipeline_order`'s.

    The loss is called as `loss_fn(model, batch, None, tokens=..., vocabulary=...)` with the wrapped model, this
    device's rows and tokens, and the `Vocabulary` that reads split logits, as `next_token_loss` takes them. In a
    pipeline the last stage calls it with a model whose stacks only return the layers' output. The batch is cut into the
    plan's `microbatches`, which go through the pipeline or, without one, run one after another.
    """

    def gradients_of(loss_fn: LossFn, trained: Trained = trainable) -> Gradients:
        check_takes_tokens(loss_fn)

        def of_batch(model: PyTree, batch: PyTree, key: PyTree, scale: Scale = None) -> Found:
            plan.check(model, rows=batch.ids.shape[0], seq=batch.ids.shape[1], group=batch.group)
            local = _Local(plan.on_device(model), loss_fn, trained)
            pieces = plan.arrange(batch, batch_tokens(batch, key))
            whole = PartitionSpec()
            specs = plan.parameter_specs(model), plan.batch_specs(pieces), whole
            out = whole, (whole, plan.aux_spec), plan.state_specs(model)
            mapped = filter_shard_map(local.gradients, plan.mesh, specs, out)
            total, (count, aux), gradients = mapped(model, pieces, scale)
            return total, Tally(count, aux) if nn.aux_of(aux) else count, gradients

        return of_batch

    return gradients_of


def planned_evaluation(plan: Plan) -> Callable[[PyTree, Batch], dict[str, Float[Array, ""]]]:
    """`evaluation_sums` under a plan, jitted."""

    def totals(device: OnDevice, *args: Any, **given: Any) -> dict[str, Array]:
        return {name: device.total(each) for name, each in evaluation_sums(*args, **given).items()}

    return _forward(plan, totals, PartitionSpec())


def planned_row_nats(plan: Plan) -> Callable[[PyTree, Batch], Float[Array, "batch"]]:
    """`row_nats` under a plan, jitted."""
    return _forward(plan, lambda _, *args, **given: row_nats(*args, **given), PartitionSpec(plan.batch_axes))


def _forward(plan: Plan, function: Callable[..., Any], out: PartitionSpec) -> Callable[[PyTree, Batch], Any]:
    """`function(device, model, batch, tokens=..., vocabulary=...)` of each device's rows, without gradients, jitted."""
    in_pieces = plan if plan.is_pipelined else dataclasses.replace(plan, microbatches=1)

    @eqx.filter_jit
    def of_batch(model: PyTree, batch: Batch) -> PyTree:
        in_pieces.check(model, rows=batch.ids.shape[0], seq=batch.ids.shape[1])
        device = plan.on_device(model)

        def per_device(model: PyTree, pieces: PyTree) -> PyTree:
            wrapped, (batch, tokens) = device.wrap_forward(model), pieces
            return function(device, wrapped, batch, tokens=tokens, vocabulary=device.vocabulary)

        pieces = plan.arrange(batch, batch_tokens(batch))
        specs = plan.parameter_specs(model), plan.batch_specs(pieces)
        return filter_shard_map(per_device, plan.mesh, specs, out)(model, pieces)

    return of_batch


def planned_step(
    loss_fn: LossFn,
    optimizer: Optimizer,
    plan: Plan,
    *,
    clip: float | None = 1.0,
    balance_rate: float = 0.0,
    gradient_norms: bool = False,
) -> Step:
    """`make_step` under a plan: the same numbers; the state is sharded as `state_shardings` says.

    Args:
        loss_fn: `loss_fn(model, batch, key) -> (sum, count)`, whose quotient is minimised.
        optimizer: What the gradients do to the model, and which parameters are trained.
        plan: The mesh, and how the model runs over it, in how many microbatches.
        clip: The norm to which gradients are clipped; None: they are not.
        balance_rate: The step size of the routers' selection biases, see `rebalanced`.
        gradient_norms: Whether metrics have the norm of each module's gradient too, see `module_gradient_norms`.
    """

    def place(state: TrainState) -> TrainState:
        arrays, rest = eqx.partition(state, eqx.is_array)
        near = dataclasses.replace(plan, optimizer_memory="device")
        arrays = jax.lax.with_sharding_constraint(arrays, state_shardings(near, optimizer, arrays))
        kept = taken_back(plan, optimizer, arrays.optimizer_state)
        return eqx.combine(eqx.tree_at(lambda s: s.optimizer_state, arrays, kept), rest)

    return make_step(
        loss_fn,
        optimizer,
        clip=clip,
        balance_rate=balance_rate,
        gradient_norms=gradient_norms,
        gradients_of=planned_gradients(plan),
        place=place,
        near=functools.partial(brought_near, plan, optimizer),
        as_read=plan.aux_to_reading_order,
    )


def state_shardings(plan: Plan, optimizer: Optimizer, state: PyTree) -> PyTree:
    """The sharding of each array of a `TrainState` (of arrays or shapes), as a tree like it; None for other leaves.

    Raises a `ValueError` for an optimizer whose state has another shape than the parameter.
    """
    whole, parameters = PartitionSpec(), optimizer.trained(state.model)
    specs_and_shapes = plan.state_specs(parameters), parameters
    memory = optimizer.map_state(_spec_of_memory, state.optimizer_state, *specs_and_shapes, other=whole)
    counts = lambda s: (s.step, s.skipped, s.skipped_in_a_row, s.loss_scale, s.empty_batches)
    parts = plan.parameter_specs(state.model), memory, *(jax.tree.map(lambda _: whole, x) for x in counts(state))
    fields = lambda s: (s.model, s.optimizer_state, *counts(s))
    found = shardings(eqx.tree_at(fields, state, parts, is_leaf=_is_none), plan.mesh)
    far = is_on_host(plan, optimizer, state.optimizer_state)
    kept = lambda sharding, is_far: sharding.with_memory_kind("pinned_host") if is_far else sharding
    return eqx.tree_at(lambda s: s.optimizer_state, found, jax.tree.map(kept, found.optimizer_state, far))


def _spec_of_memory(held: PyTree, spec: PartitionSpec, parameter: ArrayOrShape) -> PyTree:
    """The spec of what an optimizer holds for a parameter; scales of rows are split like the rows."""
    if isinstance(held, Codes):
        of_levels, dims = _spec_of_memory(held.levels, spec, parameter), len(parameter.shape)
        rows = PartitionSpec(*(*spec, *(None,) * (dims - len(spec)))[: dims - 1])
        return eqx.tree_at(lambda codes: (codes.levels, codes.scale), held, (of_levels, rows))
    if held.shape != parameter.shape:
        raise ValueError(
            f"state_shardings: the optimizer holds an array of shape {held.shape} for a parameter of shape "
            f"{parameter.shape}, but under a plan it is laid out like the parameter; hold it in the parameter's shape."
        )
    return spec


class _Local:
    """What runs on one device, inside `shard_map`; the fields are constants of the call."""

    def __init__(self, device: OnDevice, loss_fn: LossFn, trained: Trained):
        self.device, self.loss_fn, self.trained = device, loss_fn, trained
        self.plan = device.plan

    def gradients(self, model: PyTree, pieces: PyTree, scale: Scale) -> Found:
        """The loss's sum, its count and the gradients, reduced over all devices."""
        parameters = self.device.parameters(model)
        of_pieces = self._pipelined if self.plan.runs_schedule else self._accumulated
        total, tally, gradients = of_pieces(model, parameters, pieces, scale)
        count, aux = (tally.count, tally.aux) if isinstance(tally, Tally) else (tally, None)
        aux = jax.tree.map(self.device.total, aux)
        return self.device.total(total), (self.device.total(count), aux), self.device.reduce(gradients)

    def _loss(self, model: PyTree, pieces: PyTree) -> tuple[Array, Count]:
        found = self.loss_fn(model, pieces[0], None, tokens=pieces[1], vocabulary=self.device.vocabulary)
        total, tally = sum_and_count(found, self.loss_fn)
        check_whole(total, self.loss_fn, self.plan.size(TENSOR))
        return total, tally

    def _accumulated(self, model: PyTree, parameters: PyTree, pieces: PyTree, scale: Scale) -> Found:
        def loss(parameters: PyTree, pieces: PyTree, key: None) -> tuple[Array, Count]:
            return self._loss(self.device.wrap(parameters, model), pieces)

        run_layers = 1 if self.plan.is_pipelined else self.plan.microbatches
        return accumulated_gradients(loss, run_layers, self.trained)(parameters, pieces, None, scale)

    def _pipelined(self, model: PyTree, parameters: PyTree, pieces: PyTree, scale: Scale) -> Found:
        """Gradients by a pipeline schedule; parameters outside of the stack are gathered once, before the schedule
        runs, and their gradients are reduced once, after it."""
        wrapped = self.device.wrap(parameters, model)
        # Differentiated at float32 parameters that are gathered in float32, so that the reductions of the gradients,
        # which are summed over microbatches by then, are float32 too.
        wide_model = _wide(model)
        wide_device = dataclasses.replace(self.device, leaves=_travelling_wide(self.device.leaves))
        of_wide = lambda wide: wide_device.wrap(wide, wide_model)
        like, pull = eqx.filter_vjp(lambda wide: select_differentiable(of_wide(wide)), _wide(parameters))
        edges = eqx.tree_at(lambda m: m.stacks, wrapped, None)

        def first(edges: PyTree, piece: PyTree) -> Array:
            batch, tokens = piece
            return edges.embed(batch.ids, tokens)

        def stage(stacks: PyTree, x: Array, piece: PyTree) -> tuple[Array, PyTree]:
            found = []
            for number, stack in enumerate(stacks):
                with jax.named_scope(f"stacks[{number}]"):  # as in the whole model, which is not called here
                    x, _, aux = stack(x, piece[1].fold_in(number))
                found.append(aux)
            return x, tuple(found)

        def last(edges: PyTree, x: Array, piece: PyTree) -> tuple[Array, Count]:
            return self._loss(_with_stacks(edges, (_Done(x, piece[1]),)), piece)

        pieces = in_microbatches(pieces, self.plan.microbatches)
        start = seed(scale, jax.tree.map(lambda x: x[0], pieces))
        total, count, aux, (of_edges, of_stacks) = pipeline_gradients(
            self.plan.timetable(),
            first,
            stage,
            last,
            (edges, wrapped.stacks),
            pieces,
            has_aux=True,
            remat=self.plan.stage_remat,
            seed=start,
        )
        gradients = unscaled(_with_stacks(of_edges, of_stacks), start)
        assert jax.tree.map(jnp.dtype, gradients) == jax.tree.map(jnp.dtype, like)
        (of_parameters,) = pull(gradients)
        return total, Tally(count, aux), self.trained(of_parameters)


class _Done(eqx.Module):
    """Takes the place of the layers once they have run with these `tokens`: returns their output."""

    value: Float[Array, "*batch seq embed"]
    tokens: nn.Tokens

    def __call__(
        self, x: PyTree, tokens: nn.Tokens, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], None, None]:
        is_default = not varying_axes(tokens.positions)  # made here, of no device's rows
        if is_default and (self.tokens.segments is not None or self.tokens.keys is not None):
            raise ValueError(
                "a loss under Plan over pipe calls its model without tokens, but the stages have run with the "
                "batch's documents and random keys; pass the loss's own tokens= on, as model.encode(batch.ids, tokens)."
            )
        return self.value, None, None


def _wide(model: PyTree) -> PyTree:
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(nn.in_float32(arrays), rest)


def _travelling_wide(leaves: PyTree) -> PyTree:
    """The plan's leaves, changed so that arrays outside of the stacks are gathered in float32 at least."""

    def wide(leaf: PyTree) -> PyTree:
        if not leaf.dtype or not jnp.issubdtype(leaf.dtype, jnp.inexact):  # no array, or one that has no gradient
            return leaf
        wide = str(nn.at_least_float32(jnp.dtype(leaf.dtype)))
        return dataclasses.replace(leaf, dtype=wide, sent=wide)

    return eqx.tree_at(lambda m: m.stacks, jax.tree.map(wide, leaves), leaves.stacks)


def _with_stacks(edges: PyTree, stacks: PyTree) -> PyTree:
    return eqx.tree_at(lambda m: m.stacks, edges, stacks, is_leaf=_is_none)


def _is_none(node: object) -> bool:
    return node is None
