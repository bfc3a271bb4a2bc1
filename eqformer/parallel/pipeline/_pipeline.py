"""Execution of pipeline schedules: a scan over ticks, in which each device runs its column of the schedule's tables."""

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
"""Cotangent of the loss sum: all gradients are multiplied by this number."""
ModelPart = Callable[..., PyTree]
"""One of the functions `first`, `stage` and `last` of `pipeline_gradients`."""


def pipeline_gradients(
    schedule: Schedule,
    first: ModelPart,
    stage: ModelPart,
    last: ModelPart,
    parameters: tuple[PyTree, PyTree],
    data: PyTree,
    *,
    shared: PyTree = None,
    has_aux: bool = False,
    remat: bool = False,
    seed: Seed = 1,
) -> tuple[PyTree, ...]:
    """Compute loss sum, count and gradients of all microbatches in the order of a schedule, inside `shard_map`.

    For each microbatch `piece`, the model is `x = first(edges, piece)`, then `x = stage(blocks, x, piece)` for each
    part of the model, then `last(edges, x, piece)`, which returns a loss sum and a count. `edges` are the parameters
    outside of the layers. The functions may use collectives over axes other than `pipe`.

    An entry of the schedule's tables is one part's forward, backward or weight computation for one microbatch. A device
    stores the residuals of forward entries, in as many slots as are used at once. With `remat` it stores only the
    inputs of parts, and runs a part again in the backward entry. The last part's backward entry also computes the loss,
    so with `remat` its forward entry does nothing. Idle devices compute nothing. In a tick in which any device sends
    over a link, all devices send.

    The loss sum, the count and the gradients of `edges` are summed over `pipe`. If the data vary over other axes, all
    results are partial sums, which the caller must sum over these axes. Gradients are summed in float32 at least. They
    are None for arrays that are not floating-point. If the schedule is split, the weight gradients of `nn.DenseMap`s in
    `blocks` are computed in weight entries (see `_residuals`), and all other gradients in backward entries.

    The result is `(sum, count, gradients)`, or `(sum, count, aux, gradients)` with `has_aux`. The gradients are a pair
    like `parameters`.

    Args:
        schedule: Entries of each device in each tick, and the placement of the parts.
        first: Function of `edges` and a microbatch: the model before the layers.
        stage: Function of the layers of a part, `x` and a microbatch.
        last: Function of `edges`, `x` and a microbatch: the model after the layers, and the loss.
        parameters: `(edges, blocks)`: `edges` are replicated over the axis `pipe`. `blocks` are this device's layers:
            the leading dim of each array has the layers of the device's first chunk, then the layers of its next chunk,
            and so on.
        data: Arrays with a leading dim `microbatches`, replicated over the axis.
        shared: Parameters that the layers of all stages read, replicated over the axis `pipe`. They are the second
            argument of `stage`, and their gradients are the third entry of the gradients. None: there are none.
        has_aux: Whether a stage returns `(x, aux)`, where `aux` has values of `nn.Aux` with a leading dim of layers.
            The losses in `aux` are added to the loss sum, and the sum of `aux` over microbatches is returned.
        remat: Whether a part runs forward again in its backward entry.
        seed: Cotangent of the loss sum.
    """
    if (devices := jax.lax.axis_size(PIPE)) != schedule.stages:
        raise ValueError(
            f"pipeline_gradients(schedule={schedule.name!r}): the schedule is for {schedule.stages} stages, but the "
            f"axis {PIPE!r} has {devices} devices; make the two numbers equal."
        )
    data = vary(data, [PIPE])
    if shared is not None:
        parameters, stage = (parameters[0], (parameters[1], _copy(shared, schedule.chunks))), _with_copy(stage)
    # Mark the parameters as varying like the data, so that gradients stay partial sums and the loop reduces nothing.
    parameters = vary_like(parameters, data)

    def stage_without_aux(*args: PyTree) -> tuple[PyTree, None]:
        return stage(*args), None

    functions = (first, stage if has_aux else stage_without_aux, last)
    executor = _Executor(schedule, functions, parameters, data, remat, seed)
    state, _ = jax.lax.scan(executor.run_tick, executor.initial_state(), executor.local_actions())
    sums = state.sums
    # Each stage has its own terms of the loss and of the gradients of edges. Gradients of blocks need no sum.
    block_grads, shared_grads = (sums.block_grads, None) if shared is None else sums.block_grads
    shared_grads = jax.tree.map(lambda x: jnp.sum(x, axis=0), shared_grads)
    (total, count), edge_grads, shared_grads = _sum_over_stages((sums.loss, sums.edge_grads, shared_grads))
    gradients = (edge_grads, block_grads, *(() if shared is None else (shared_grads,)))
    return (total, count, *((sums.aux,) if has_aux else ()), gradients)


def _copy(shared: PyTree, chunks: int) -> PyTree:
    """Return a copy of the parameters for each chunk of a device, so that copies are sliced like a chunk's layers."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (chunks, *x.shape)), shared)


def _with_copy(stage: ModelPart) -> ModelPart:
    """Return `stage` as a function of a pair: the layers of a part, and that part's copy of the shared parameters."""

    def run(part: tuple[PyTree, PyTree], *args: PyTree) -> PyTree:
        blocks, copies = part
        return stage(blocks, jax.tree.map(lambda x: x[0], copies), *args)

    return run


class _Sums(eqx.Module):
    """Arrays that backward and weight entries update."""

    loss: tuple[PyTree, ...]
    """Loss sum and count."""
    aux: PyTree
    """Sum of the aux of this device's layers."""
    edge_grads: PyTree
    block_grads: PyTree
    operands: PyTree
    """Slots of operands of deferred weight gradients."""


class _State(eqx.Module):
    """Carry of the scan over ticks."""

    inputs: PyTree
    """Slots of inputs of parts."""
    cotangents: PyTree
    """Slots of cotangents of the parts' outputs."""
    residuals: list[Array]
    """Slots of residuals; empty with `remat`."""
    sums: _Sums


class _Executor:
    """Constants of a call of `pipeline_gradients`, and one method for each kind of entry.

    An argument `entry` is the number `chunk * microbatches + microbatch`, as in the tables of a `Schedule`.
    `_microbatch(entry)` and `_chunk(entry)` return the data and the layers of an entry.
    """

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
        run_part = functools.partial(self._run_part_with_inputs, self._chunk(entry), x, self._microbatch(entry))
        self.packer = None if remat else _residuals.ResidualPacker(run_part)

    def local_actions(self) -> TickActions:
        """Return this device's column of each table of actions."""
        columns = [jnp.asarray(table)[:, self.rank] for table in jax.tree.leaves(self.routes.actions)]
        return jax.tree.unflatten(jax.tree.structure(self.routes.actions), columns)

    def _trace_shapes(
        self,
    ) -> tuple[frozenset[str], PyTree, tuple[PyTree, ...], PyTree, dict[int, _residuals.ProbeShapes]]:
        """Trace the model for shapes.

        Return the mesh axes over which the activations between parts vary; the shapes of these activations, of loss sum
        and count, and of the aux; and, by index, the linear maps whose weight gradients can be deferred.
        """
        axes = frozenset({PIPE})
        chunk, piece = self._chunk(jnp.int32(0)), self._microbatch(jnp.int32(0))
        records: dict[int, _residuals.CallRecord] = {}

        def program(axes: frozenset[str]) -> tuple:
            nonlocal records
            blocks, records = _residuals.record_calls(chunk) if self.schedule.is_split else (chunk, {})
            x = vary(self.first(self.edges, piece), axes)
            y, aux = self.stage(blocks, x, piece)
            total, count = self.last(self.edges, vary(y, axes), piece)
            # The loss sum varies over all axes of the terms that are added to it.
            loss = vary_like((total, count), nn.aux_loss(aux), self.rank)
            return x, y, vary(aux, [PIPE]), loss

        while True:  # Stop when the output of a part varies over no more axes than the input.
            x, y, aux, loss = jax.eval_shape(functools.partial(program, axes))
            new_axes = axes.union(*map(varying_axes, jax.tree.leaves((x, y))))
            if new_axes == axes:
                break
            axes = new_axes
        _check_activations(x, y)
        tokens = min(leaf.size // leaf.shape[-1] for leaf in jax.tree.leaves(x) if leaf.ndim)
        deferrable = _residuals.find_deferrable(chunk, records, tokens) if self.schedule.is_split else {}
        return axes, x, loss, aux, deferrable

    def initial_state(self) -> _State:
        """Return empty slots and zero sums, which vary over the mesh axes of the terms that will be added."""
        inputs, cotangents = (
            zeros(self.x, max(slots, 1)) for slots in (self.routes.input_slots, self.routes.cotangent_slots)
        )
        operands = {index: shapes.zeros(self.routes.operand_slots) for index, shapes in self.deferrable.items()}
        aux = jax.tree.map(self._zeros_of_all_chunks, self.aux)
        edge_grads, block_grads = jax.tree.map(grad_proxy, _residuals.select_differentiable((self.edges, self.blocks)))
        sums = _Sums(zeros(self.loss), aux, edge_grads, block_grads, operands)
        return _State(inputs, cotangents, self._zero_residuals(self.routes.residual_slots), sums)

    def _zeros_of_all_chunks(self, x: jax.ShapeDtypeStruct) -> Array:
        """Return zeros for the layers of all chunks; `x` has the shape for one chunk."""
        return zeros(x, self.schedule.chunks).reshape(-1, *x.shape[1:])

    def _zero_residuals(self, *slots: int) -> list[Array]:
        """Return zeros of the shapes of a part's residuals, with `slots` in front."""
        return zeros(self.packer.shapes, *slots) if self.packer else []

    def run_tick(self, state: _State, action: TickActions) -> tuple[_State, None]:
        """Run a tick: the device's forward, backward and weight entry, then the messages between devices."""
        # Read slots outside of `cond`, because slots that are arguments of a branch would be allocated twice.
        x, zero = _residuals.read_slot(state.inputs, action.forward_input), zeros(self.x)
        run, idle = lambda: self._forward(x, action), lambda: (zero, zero, self._zero_residuals())
        x, y, residuals = jax.lax.cond(action.forward != IDLE, run, idle)
        # The first part's input does not arrive as a message. Its forward entry computes the input, so store it here.
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
        """Return the part's input, output and residuals.

        With `remat`, the model's last part does not run here, because it runs in its backward entry. The
        part's input is then returned in place of the output; no code reads the returned value.
        """
        piece, chunk = self._microbatch(action.forward), self._chunk(action.forward)
        first = lambda: vary(self.first(self.edges, piece), self.axes)
        x = jax.lax.cond(self._is_part(action.forward, 0), first, lambda: x)
        if self.packer:
            results, inputs = self._run_part_with_inputs(chunk, x, piece)
            return x, results[0][0], self.packer.pack(results, inputs)
        run = lambda: vary(self.stage(chunk, x, piece)[0], self.axes)
        return x, jax.lax.cond(self._is_part(action.forward, -1), lambda: x, run), []

    def _run_part_with_inputs(self, chunk: PyTree, x: PyTree, piece: PyTree) -> tuple[tuple, PyTree]:
        """Return the results of `_run_part`, and its arguments: the layers with deferred maps, `x` and `piece`."""
        inputs = _residuals.defer_maps(chunk, self.deferrable), x, piece
        return self._run_part(*inputs), inputs

    def _run_part(self, blocks: PyTree, x: PyTree, piece: PyTree) -> tuple:
        """Run a part forward; return `((output, loss of its aux), vjp function, aux)`."""
        trained, static = eqx.partition(blocks, _residuals.flag_differentiated(blocks))

        def stage(trained: PyTree, x: PyTree) -> tuple[tuple, PyTree]:
            y, aux = self.stage(eqx.combine(trained, static), x, piece)
            return (vary(y, self.axes), vary_like(nn.aux_loss(aux), self.loss[0])), aux

        return jax.vjp(stage, trained, x, has_aux=True)

    def _backward(
        self, sums: _Sums, x: PyTree, cotangent: PyTree, residuals: list[Array], action: TickActions
    ) -> tuple[_Sums, PyTree]:
        """Return the sums with the part's gradients added, and the gradient of the part's input.

        `x`, `cotangent` and `residuals` come from slots, but the cotangent of the last part comes from the loss.
        """
        piece, chunk = self._microbatch(action.backward), self._chunk(action.backward)
        inputs = _residuals.defer_maps(chunk, self.deferrable), x, piece
        results = self.packer.unpack(residuals, inputs) if self.packer else self._run_part(*inputs)
        (y, aux_loss), part_vjp, aux = results
        loss, edge_grads, cotangent = jax.lax.cond(
            self._is_part(action.backward, -1),
            lambda loss, edge_grads: self._backward_of_last(loss, edge_grads, y, piece),
            lambda loss, edge_grads: (loss, edge_grads, cotangent),
            sums.loss,
            sums.edge_grads,
        )
        chunk_grads, dx = part_vjp((cotangent, jnp.ones_like(aux_loss) * self.seed))
        chunk_grads, operands = _residuals.split_gradients(chunk_grads, chunk)
        edge_grads = jax.lax.cond(
            self._is_part(action.backward, 0),
            lambda grads: self._backward_of_first(grads, dx, piece),
            lambda grads: grads,
            edge_grads,
        )
        block_grads = self._add_chunk(sums.block_grads, chunk_grads, action.backward)
        loss = loss[0] + aux_loss.astype(loss[0].dtype), *loss[1:]
        aux = self._add_chunk(sums.aux, jax.tree.map(vary_like, aux, sums.aux), action.backward)
        operand_slots = _residuals.write_slot(sums.operands, action.backward_operands, operands)
        return _Sums(loss, aux, edge_grads, block_grads, operand_slots), dx

    def _backward_of_last(
        self, loss: tuple[PyTree, ...], edge_grads: PyTree, y: PyTree, piece: PyTree
    ) -> tuple[tuple, PyTree, PyTree]:
        """Run `last` forward and backward for the output `y` of the last part.

        Return `loss` with the loss sum and count added, `edge_grads` with the gradients of `edges` added, and the
        cotangent of `y`.
        """
        trained, static = eqx.partition(self.edges, eqx.is_inexact_array)
        last = lambda trained, y: self.last(eqx.combine(trained, static), y, piece)
        total, last_vjp, count = jax.vjp(last, trained, y, has_aux=True)
        last_grads, cotangent = last_vjp(jnp.ones_like(total) * self.seed)
        return _residuals.accumulate(loss, (total, count)), _residuals.accumulate(edge_grads, last_grads), cotangent

    def _backward_of_first(self, edge_grads: PyTree, dx: PyTree, piece: PyTree) -> PyTree:
        """Return `edge_grads` with the gradients of `edges` through `first` added."""
        trained, static = eqx.partition(self.edges, eqx.is_inexact_array)
        first = lambda trained: vary(self.first(eqx.combine(trained, static), piece), self.axes)
        return _residuals.accumulate(edge_grads, jax.vjp(first, trained)[1](dx)[0])

    def _weight(self, sums: _Sums, action: TickActions) -> _Sums:
        """Return the sums with the part's deferred weight gradients added."""
        operands = _residuals.read_slot(sums.operands, action.weight_operands)
        chunk_grads = _residuals.weight_gradients(self._chunk(action.weight), operands)
        return dataclasses.replace(sums, block_grads=self._add_chunk(sums.block_grads, chunk_grads, action.weight))

    def _send(self, message: PyTree, link: Link, is_used: Bool[Array, ""]) -> PyTree:
        """Send a message over a link, and return the message that arrives.

        `is_used` says whether any device sends over the link in this tick. Its value is the same on all devices, so
        all devices take the same branch. A message from a device to itself is returned unchanged.
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
        """Return whether an entry of this device is for the given part of the model; -1 is the last part."""
        stage, chunk = int(self.schedule.stage_of[part]), int(self.schedule.chunk_of[part])
        return (self.rank == stage) & (entry // self.schedule.microbatches == chunk)

    def _microbatch(self, entry: Int[Array, ""]) -> PyTree:
        """Return the data of an entry's microbatch."""
        return _residuals.read_slot(self.data, entry % self.schedule.microbatches)

    def _chunk(self, entry: Int[Array, ""]) -> PyTree:
        """Return the layers of an entry's chunk."""
        chunks = self.schedule.chunks
        if chunks == 1:
            return self.blocks
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        groups = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), arrays)
        return eqx.combine(_residuals.read_slot(groups, entry // self.schedule.microbatches), static)

    def _add_chunk(self, sums: PyTree, chunk_terms: PyTree, entry: Int[Array, ""]) -> PyTree:
        """Add terms for the layers of the entry's chunk to the rows of these layers in `sums`."""
        if self.schedule.chunks == 1:
            return _residuals.accumulate(sums, chunk_terms)
        return _residuals.accumulate_group(sums, entry // self.schedule.microbatches, chunk_terms)


def _sum_over_stages(sums: PyTree) -> PyTree:
    return send.psum("loss and edge gradients over stages", sums, PIPE)


def _check_data(schedule: Schedule, blocks: PyTree, data: PyTree) -> None:
    """Raise a `ValueError` unless chunks have equal numbers of layers and the data have one piece per microbatch."""
    call = f"pipeline_gradients(schedule={schedule.name!r})"
    for leaf in jax.tree.leaves(data):
        if leaf.shape[:1] != (schedule.microbatches,):
            raise ValueError(
                f"{call}: the leading dim of all data must be the schedule's number of microbatches, "
                f"{schedule.microbatches}, but the shape of an array is {leaf.shape}; reshape it to (microbatches, "
                "rows, ...)."
            )
    layers = {leaf.shape[0] for leaf in jax.tree.leaves(eqx.filter(blocks, eqx.is_array))}
    if any(count % schedule.chunks for count in layers):
        raise ValueError(
            f"{call}: the leading dim of the arrays of blocks must be a multiple of chunks={schedule.chunks}, but the "
            f"arrays have {sorted(layers)} layers; see layer_order."
        )


def _check_activations(x: PyTree, y: PyTree) -> None:
    """Raise a `ValueError` unless a stage's output has the shapes and dtypes of its input."""
    if (input_shapes := _describe_shapes(x)) != (output_shapes := _describe_shapes(y)):
        raise ValueError(
            "pipeline_gradients(stage): a stage must return the shapes and dtypes of its input, but the input has "
            f"{input_shapes} and the output {output_shapes}; let `first` return the shapes that stages return."
        )


def _describe_shapes(tree: PyTree) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
