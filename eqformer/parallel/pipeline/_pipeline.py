"""The executor of any pipeline schedule: a scan over ticks in which each device follows its column of the table."""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PyTree

from ... import nn
from ..._shapes import Array
from .. import _collectives as send
from .._fully_sharded import grad_proxy
from .._mesh import PIPE
from .._shard_map import vary, vary_like, varying_axes, zeros
from . import _residuals
from ._schedule import IDLE, Link, route_messages, Schedule, TickActions


Seed = Float[Array, ""] | int
ModelPart = Callable[..., PyTree]


def pipeline_gradients(
    schedule: Schedule,
    first: ModelPart,
    stage: ModelPart,
    last: ModelPart,
    parameters: tuple[PyTree, PyTree],
    data: PyTree,
    *,
    has_aux: bool = False,
    remat: bool = False,
    seed: Seed = 1,
) -> tuple[PyTree, ...]:
    """Return loss sum, count and gradients of the sum over all microbatches, by a schedule; call it in `shard_map`.

    The model is `last(edges, stage(blocks, ... first(edges, piece)), piece) -> (sum, count)` with one `stage` per part.
    The functions may use collectives over other axes. A device keeps the residuals of its parts, in as many slots as
    are in use at once. With `remat` it keeps only the inputs of its parts, and runs a part again in its backward entry;
    the forward entry of the model's last part then has nothing to do. The last part's backward entry computes the loss.
    An idle device computes nothing. If any device sends a message over a link in a tick, all devices send one over that
    link.

    Sum, count and the gradients of `edges` are reduced over `pipe`; over axes that the data vary over they are partial
    sums, to be reduced once by the caller. Gradients are summed in float32 at least and are None for arrays that are
    not floating-point. If the schedule is split, the weight gradients of `nn.DenseMap`s in `blocks` are computed in
    the weight entries (see `_residuals`); all other gradients come with the backward entries.

    Args:
        schedule: The entries of each device and tick; messages go as its placement says.
        first: The model before the layers.
        stage: A part of the model, `stage(part of blocks, x, piece) -> x`.
        last: The model after the layers, and the loss.
        parameters: `(edges, blocks)`: `edges` replicated over the axis `pipe`, `blocks` this device's layers, each
            array with a leading `layers` dim that holds `chunks` equal groups in turn.
        data: Microbatches, with a leading dim `microbatches`, replicated over the axis.
        has_aux: Whether a stage returns `(x, aux)`, of `nn.Aux` with a leading `layers` dim: their losses join the
            loss sum, and their sums over microbatches are returned third.
        remat: Whether a part runs forward again in its backward entry.
        seed: The factor of the loss sum for the gradients.
    """
    if (devices := jax.lax.axis_size(PIPE)) != schedule.stages:
        raise ValueError(
            f"pipeline_gradients(schedule={schedule.name!r}): the schedule is for {schedule.stages} stages, but the "
            f"axis {PIPE!r} has {devices} devices; make one as the other."
        )
    data = vary(data, [PIPE])
    # Typed as varying like the data, so that gradients stay partial sums and nothing is reduced within the loop.
    parameters = vary_like(parameters, data)

    def stage_without_aux(*args: PyTree) -> tuple[PyTree, None]:
        return stage(*args), None

    functions = (first, stage if has_aux else stage_without_aux, last)
    executor = _Executor(schedule, functions, parameters, data, remat, seed)
    state, _ = jax.lax.scan(executor.tick, executor.initial_state(), executor.own_actions())
    sums = state.sums
    # Loss sums and gradients of edges are partial on every stage; gradients of blocks are a device's own.
    (total, count), edge_grads = _sum_over_stages((sums.loss, sums.edges))
    return (total, count, *((sums.aux,) if has_aux else ()), (edge_grads, sums.blocks))


class _Sums(eqx.Module):
    """Sums that entries add to: loss sum and count, layers' aux, gradients of edges and of blocks; and, by slot, the
    operands of deferred weight gradients."""

    loss: tuple[PyTree, ...]
    aux: PyTree
    edges: PyTree
    blocks: PyTree
    operands: PyTree


class _State(eqx.Module):
    """The carry of the scan over ticks: by slot, messages that wait and residuals of parts; and the sums."""

    inputs: PyTree
    cotangents: PyTree
    residuals: list[Array]
    sums: _Sums


class _Executor:
    """The constants of one call, and the three kinds of entry as functions of the state."""

    def __init__(
        self,
        schedule: Schedule,
        functions: tuple[ModelPart, ModelPart, ModelPart],
        parameters: tuple[PyTree, PyTree],
        data: PyTree,
        remat: bool,
        seed: Seed,
    ):
        self.schedule, self.routes, self.data, self.seed = schedule, route_messages(schedule), data, seed
        self.first, self.stage, self.last = functions
        self.edges, self.blocks = parameters
        self.rank = jax.lax.axis_index(PIPE)
        _check_data(schedule, self.blocks, data)
        self.axes, self.x, self.loss, self.aux, self.deferrable = self._trace_shapes()
        x, entry = zeros(self.x), vary(jnp.int32(0), [PIPE])
        run_part = functools.partial(self._run_part_with_inputs, self._chunk(entry), x, self._piece(entry))
        self.packer = None if remat else _residuals.ResidualPacker(run_part)

    def own_actions(self) -> TickActions:
        """Return this device's column of the tables of actions."""
        columns = [jnp.asarray(table)[:, self.rank] for table in jax.tree.leaves(self.routes.actions)]
        return jax.tree.unflatten(jax.tree.structure(self.routes.actions), columns)

    def _trace_shapes(
        self,
    ) -> tuple[frozenset[str], PyTree, tuple[PyTree, ...], PyTree, dict[int, _residuals.ProbeShapes]]:
        """Trace for shapes: the varying axes of the stream between parts, the shapes of stream, sum and count, and aux,
        and the maps whose weight gradients are deferred."""
        axes = frozenset({PIPE})
        chunk, piece = self._chunk(jnp.int32(0)), self._piece(jnp.int32(0))
        records: dict[int, _residuals.CallRecord] = {}

        def program(axes: frozenset[str]) -> tuple:
            nonlocal records
            blocks, records = _residuals.record_calls(chunk) if self.schedule.is_split else (chunk, {})
            x = vary(self.first(self.edges, piece), axes)
            y, aux = self.stage(blocks, x, piece)
            total, count = self.last(self.edges, vary(y, axes), piece)
            # The loss varies over the axes of the terms that are added to it.
            loss = vary_like((total, count), nn.aux_loss(aux), self.rank)
            return x, y, vary(aux, [PIPE]), loss

        while True:
            x, y, aux, loss = jax.eval_shape(functools.partial(program, axes))
            grown = axes.union(*map(varying_axes, jax.tree.leaves((x, y))))
            if grown == axes:
                break
            axes = grown
        _check_stream(x, y)
        tokens = min(leaf.size // leaf.shape[-1] for leaf in jax.tree.leaves(x) if leaf.ndim)
        deferrable = _residuals.find_deferrable(chunk, records, tokens) if self.schedule.is_split else {}
        return axes, x, loss, aux, deferrable

    def initial_state(self) -> _State:
        """Return empty slots and zero sums, typed as varying like the terms that will be added."""
        inputs, cotangents = (
            zeros(self.x, max(slots, 1)) for slots in (self.routes.input_slots, self.routes.cotangent_slots)
        )
        operands = {number: shapes.zeros(self.routes.operand_slots) for number, shapes in self.deferrable.items()}
        aux = jax.tree.map(self._zeros_of_all_chunks, self.aux)
        edge_grads, block_grads = jax.tree.map(grad_proxy, _residuals.select_differentiable((self.edges, self.blocks)))
        sums = _Sums(zeros(self.loss), aux, edge_grads, block_grads, operands)
        return _State(inputs, cotangents, self._zero_residuals(self.routes.residual_slots), sums)

    def _zeros_of_all_chunks(self, x: jax.ShapeDtypeStruct) -> Array:
        """Return zeros for the layers of all chunks, where `x` is the shape of a chunk's."""
        return zeros(x, self.schedule.chunks).reshape(-1, *x.shape[1:])

    def _zero_residuals(self, *slots: int) -> list[Array]:
        """Return zeros in the place of a part's residuals."""
        return zeros(self.packer.shapes, *slots) if self.packer else []

    def tick(self, state: _State, action: TickActions) -> tuple[_State, None]:
        """Run one tick: a forward, a backward and a weight entry, and the messages between devices."""
        # Slots are read outside of `cond`, since slots that enter a branch would be allocated twice.
        x, zero = _residuals.read_slot(state.inputs, action.forward_input), zeros(self.x)
        run, idle = lambda: self._forward(x, action), lambda: (zero, zero, self._zero_residuals())
        x, y, residuals = jax.lax.cond(action.forward != IDLE, run, idle)
        # The model's first input is no message from another device, so it is stored where it is computed.
        is_first_part = (action.forward != IDLE) & self._is_part(action.forward, 0)
        inputs = _residuals.write_slot(state.inputs, jnp.where(is_first_part, action.forward_input, IDLE), x)
        residual_slots = _residuals.write_slot(state.residuals, action.forward_residuals, residuals)
        state = dataclasses.replace(state, inputs=inputs, residuals=residual_slots)
        operands = (
            _residuals.read_slot(inputs, action.backward_input),
            _residuals.read_slot(state.cotangents, action.backward_cotangent),
            _residuals.read_slot(state.residuals, action.backward_residuals),
        )
        sums, dx = jax.lax.cond(
            action.backward != IDLE,
            lambda sums: self._backward(sums, *operands, action),
            lambda sums: (sums, zero),
            state.sums,
        )
        state = dataclasses.replace(state, sums=sums)
        if self.schedule.is_split:
            sums = jax.lax.cond(
                action.weight != IDLE, lambda sums: self._weight(sums, action), lambda sums: sums, state.sums
            )
            state = dataclasses.replace(state, sums=sums)
        for link, arrival in zip(self.routes.links, action.arrivals, strict=True):
            name, message = ("inputs", y) if link.is_input else ("cotangents", dx)
            slots = _residuals.write_slot(
                getattr(state, name), arrival.slot, self._send(message, link, arrival.is_used)
            )
            state = dataclasses.replace(state, **{name: slots})
        return state, None

    def _forward(self, x: PyTree, action: TickActions) -> tuple[PyTree, PyTree, list[Array]]:
        """Return the part's input, output and residuals; with `remat`, the model's last part returns its input twice.

        The last part runs again in its backward entry, so that its output is not needed here.
        """
        piece, chunk = self._piece(action.forward), self._chunk(action.forward)
        first = lambda: vary(self.first(self.edges, piece), self.axes)
        x = jax.lax.cond(self._is_part(action.forward, 0), first, lambda: x)
        if self.packer:
            results, inputs = self._run_part_with_inputs(chunk, x, piece)
            return x, results[0][0], self.packer.pack(results, inputs)
        run = lambda: vary(self.stage(chunk, x, piece)[0], self.axes)
        return x, jax.lax.cond(self._is_part(action.forward, -1), lambda: x, run), []

    def _run_part_with_inputs(self, chunk: PyTree, x: PyTree, piece: PyTree) -> tuple[tuple, PyTree]:
        """Return the results of `_run_part` and all arrays that they are computed from."""
        inputs = _residuals.defer_maps(chunk, self.deferrable), x, piece
        return self._run_part(*inputs), inputs

    def _run_part(self, blocks: PyTree, x: PyTree, piece: PyTree) -> tuple:
        """Return `((output, loss of its aux), pullback, aux)` of a part."""
        trained, static = eqx.partition(blocks, _residuals.flag_differentiated(blocks))

        def stage(trained: PyTree, x: PyTree) -> tuple[tuple, PyTree]:
            y, aux = self.stage(eqx.combine(trained, static), x, piece)
            return (vary(y, self.axes), vary_like(nn.aux_loss(aux), self.loss[0])), aux

        return jax.vjp(stage, trained, x, has_aux=True)

    def _backward(
        self, sums: _Sums, x: PyTree, cotangent: PyTree, residuals: list[Array], action: TickActions
    ) -> tuple[_Sums, PyTree]:
        """Return the sums with this part's gradients added, and the gradient of its input."""
        piece, chunk = self._piece(action.backward), self._chunk(action.backward)
        inputs = _residuals.defer_maps(chunk, self.deferrable), x, piece
        results = self.packer.unpack(residuals, inputs) if self.packer else self._run_part(*inputs)
        (y, aux_loss), pull, aux = results
        loss, edge_grads, cotangent = jax.lax.cond(
            self._is_part(action.backward, -1),
            lambda loss, edge_grads: self._backward_of_last(loss, edge_grads, y, piece),
            lambda loss, edge_grads: (loss, edge_grads, cotangent),
            sums.loss,
            sums.edges,
        )
        chunk_grads, dx = pull((cotangent, jnp.ones_like(aux_loss) * self.seed))
        chunk_grads, operands = _residuals.split_gradients(chunk_grads, chunk)
        edge_grads = jax.lax.cond(
            self._is_part(action.backward, 0),
            lambda grads: self._backward_of_first(grads, dx, piece),
            lambda grads: grads,
            edge_grads,
        )
        block_grads = self._add_chunk(sums.blocks, chunk_grads, action.backward)
        loss = loss[0] + aux_loss.astype(loss[0].dtype), *loss[1:]
        aux = self._add_chunk(sums.aux, jax.tree.map(vary_like, aux, sums.aux), action.backward)
        operand_slots = _residuals.write_slot(sums.operands, action.backward_operands, operands)
        return _Sums(loss, aux, edge_grads, block_grads, operand_slots), dx

    def _backward_of_last(
        self, loss: tuple[PyTree, ...], edge_grads: PyTree, y: PyTree, piece: PyTree
    ) -> tuple[tuple, PyTree, PyTree]:
        """Compute the loss: return loss sum and count, and the gradients of both arguments of `last`."""
        trained, static = eqx.partition(self.edges, eqx.is_inexact_array)
        last = lambda trained, y: self.last(eqx.combine(trained, static), y, piece)
        total, pull, count = jax.vjp(last, trained, y, has_aux=True)
        last_grads, cotangent = pull(jnp.ones_like(total) * self.seed)
        return _residuals.accumulate(loss, (total, count)), _residuals.accumulate(edge_grads, last_grads), cotangent

    def _backward_of_first(self, edge_grads: PyTree, dx: PyTree, piece: PyTree) -> PyTree:
        trained, static = eqx.partition(self.edges, eqx.is_inexact_array)
        first = lambda trained: vary(self.first(eqx.combine(trained, static), piece), self.axes)
        return _residuals.accumulate(edge_grads, jax.vjp(first, trained)[1](dx)[0])

    def _weight(self, sums: _Sums, action: TickActions) -> _Sums:
        operands = _residuals.read_slot(sums.operands, action.weight_operands)
        chunk_grads = _residuals.weight_gradients(self._chunk(action.weight), operands)
        return dataclasses.replace(sums, blocks=self._add_chunk(sums.blocks, chunk_grads, action.weight))

    def _send(self, message: PyTree, link: Link, is_used: Bool[Array, ""]) -> PyTree:
        """Return the message that arrives over the link; `is_used` is whether any device sends over it in this tick.

        All devices take the same branch. A message from a device to itself is returned unchanged.
        """
        if link.shift == 0:
            return message
        stages = self.schedule.stages
        ring = [(stage, (stage + link.shift) % stages) for stage in range(stages)]
        name = "activations between stages" if link.is_input else "gradients between stages"

        def permute(message: PyTree) -> PyTree:
            return jax.tree.map(lambda x: send.ppermute(name, x, PIPE, ring), message)

        return jax.lax.cond(is_used, permute, lambda message: message, message)

    def _is_part(self, entry: Int[Array, ""], part: int) -> Bool[Array, ""]:
        """Return whether an entry is of this part of the model, 0 the first and -1 the last."""
        stage, chunk = int(self.schedule.stage_of[part]), int(self.schedule.chunk_of[part])
        return (self.rank == stage) & (entry // self.schedule.microbatches == chunk)

    def _piece(self, entry: Int[Array, ""]) -> PyTree:
        return _residuals.read_slot(self.data, entry % self.schedule.microbatches)

    def _chunk(self, entry: Int[Array, ""]) -> PyTree:
        chunks = self.schedule.chunks
        if chunks == 1:
            return self.blocks
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        groups = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), arrays)
        return eqx.combine(_residuals.read_slot(groups, entry // self.schedule.microbatches), static)

    def _add_chunk(self, sums: PyTree, chunk_terms: PyTree, entry: Int[Array, ""]) -> PyTree:
        """Add the terms of the entry's group of layers to the group's rows of the sums."""
        if self.schedule.chunks == 1:
            return _residuals.accumulate(sums, chunk_terms)
        return _residuals.accumulate_group(sums, entry // self.schedule.microbatches, chunk_terms)


def _sum_over_stages(sums: PyTree) -> PyTree:
    return send.psum("loss and edge gradients over stages", sums, PIPE)


def _check_data(schedule: Schedule, blocks: PyTree, data: PyTree) -> None:
    """Raise a `ValueError` unless chunks have equally many layers and the data have one piece per microbatch."""
    call = f"pipeline_gradients(schedule={schedule.name!r})"
    for leaf in jax.tree.leaves(data):
        if leaf.shape[:1] != (schedule.microbatches,):
            raise ValueError(
                f"{call}: the leading dim of all data is the microbatch, of which the schedule has "
                f"{schedule.microbatches}; an array has shape {leaf.shape}; reshape it to (microbatches, rows, ...)."
            )
    layers = {leaf.shape[0] for leaf in jax.tree.leaves(eqx.filter(blocks, eqx.is_array))}
    if any(number % schedule.chunks for number in layers):
        raise ValueError(
            f"{call}: the arrays of blocks have a leading dim of layers, a multiple of chunks={schedule.chunks}; "
            f"here it is {sorted(layers)}; see layer_order."
        )


def _check_stream(x: PyTree, y: PyTree) -> None:
    """Raise a `ValueError` unless a stage's output has the shapes and dtypes of its input."""
    if (input_shapes := _describe_shapes(x)) != (output_shapes := _describe_shapes(y)):
        raise ValueError(
            f"pipeline_gradients(stage): a stage maps the stream to one of its shapes and dtypes, but {input_shapes} "
            f"goes in and {output_shapes} comes out; let `first` return what stages return."
        )


def _describe_shapes(tree: PyTree) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
