"""One executor for any schedule: a scan over ticks in which each device does what its column of the table says."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PyTree

from ... import nn
from ..._shapes import Array
from .. import _send as send
from .._axes import PIPE
from .._vary import vary, vary_like, varying_axes
from ..state._stand_ins import stand_in
from ._deferred_wgrad import differentiable, is_differentiated, split_gradients, tapped, taps, watched, weight_gradients
from ._residuals import add, add_rows, get, Kept, put, zeros
from ._routing import Link, route, Turn
from ._schedule import IDLE, Schedule


Seed = Float[Array, ""] | int


def pipeline_gradients(
    schedule: Schedule,
    first: Callable[..., Any],
    stage: Callable[..., Any],
    last: Callable[..., Any],
    parameters: tuple[PyTree, PyTree],
    data: PyTree,
    *,
    has_aux: bool = False,
    remat: bool = False,
    seed: Seed = 1,
) -> tuple[Any, ...]:
    """Loss sum, count and gradients of the sum over all microbatches, run as the schedule says; inside `shard_map`.

    The model is `last(edges, stage(blocks, ... first(edges, piece)), piece) -> (sum, count)` with one `stage` a part.
    The functions may use collectives over other axes. A device keeps what the derivative of its parts needs, in as many
    slots as are in use at once; or, with `remat`, only their inputs, and runs a part again in its backward, so that the
    forward entry of the model's last part does nothing. The last part's backward computes the loss. An idle device
    computes nothing. In a tick in which any device sends a message one way, all devices send one that way.

    Sum, count and the gradients of `edges` are reduced over `pipe`; over axes that the data vary over they are partial
    sums, to be reduced once by the caller. Gradients are summed in float32 at least and are None for arrays that are
    not floating-point. If the schedule is split, the gradients of `nn.DenseMap`s' weights in `blocks` are computed in
    the weight entries (see `_weight_gradients`); all other gradients come with the backward entries.

    Args:
        schedule: Who does what at which tick; messages go as its placement says.
        first: What comes before the layers.
        stage: A part of the model, `stage(part of blocks, x, piece) -> x`.
        last: What comes after the layers, and the loss.
        parameters: `(edges, blocks)`: `edges` whole on every device of the axis `pipe`, `blocks` this device's layers,
            each array with a `layers` dim in front that holds `chunks` equal groups in turn.
        data: Pieces, with a leading dim `microbatches`, whole on every device of the axis.
        has_aux: Whether a stage returns `(x, aux)`, of `nn.Aux` with a `layers` dim in front: their losses join the
            loss sum, and their sums over microbatches are returned third.
        remat: Whether a part runs forward again in its backward entry.
        seed: What the loss sum is multiplied by for the gradients.
    """
    if (there := jax.lax.axis_size(PIPE)) != schedule.stages:
        raise ValueError(
            f"pipeline_gradients(schedule={schedule.name!r}): the schedule is for {schedule.stages} stages, but the "
            f"axis {PIPE!r} has {there} devices; make one as the other."
        )
    data = vary(data, [PIPE])
    # Typed as varying like the data, so that gradients stay partial sums and nothing is reduced within the loop.
    parameters = vary_like(parameters, data)
    with_aux = stage if has_aux else lambda *given: (stage(*given), None)
    run = _Run(schedule, (first, with_aux, last), parameters, data, remat, seed)
    turns = jax.tree.map(lambda table: jnp.asarray(table)[:, run.rank], run.routes.turns)
    sums = jax.lax.scan(lambda state, turn: (run.tick(state, turn), None), run.start(), turns)[0].sums
    # Loss sums and edges are partial on every device of the ring; blocks are a device's own.
    (total, count), of_edges = _over_ring((sums.loss, sums.edges))
    return (total, count, *((sums.aux,) if has_aux else ()), (of_edges, sums.blocks))


class _Sums(eqx.Module):
    """What entries add to: loss sum and count, layers' aux and gradients; and, by slot, inputs and cotangents of maps
    whose weights' gradients are still to be computed."""

    loss: tuple[Array, ...]
    aux: PyTree
    edges: PyTree
    blocks: PyTree
    products: PyTree


class _State(eqx.Module):
    """The carry of the scan over ticks: the messages that wait and what parts keep, by slot, and the sums."""

    inputs: PyTree
    cotangents: PyTree
    kept: list[Array]
    sums: _Sums


class _Run:
    """The constants of one call, and the three kinds of entry as functions of the state."""

    def __init__(self, schedule: Schedule, functions: tuple, parameters: tuple, data: PyTree, remat: bool, seed: Seed):
        self.schedule, self.routes, self.data, self.seed = schedule, route(schedule), data, seed
        self.first, self.stage, self.last = functions
        self.edges, self.blocks = parameters
        self.rank = jax.lax.axis_index(PIPE)
        check_data(schedule, self.blocks, data)
        self.axes, self.x, self.loss, self.aux, self.taps = self._trace()
        x, entry = jax.tree.map(lambda x: zeros(x, self.axes), self.x), vary(jnp.int32(0), [PIPE])
        self.kept = None if remat else Kept(lambda: self._found(self._chunk(entry), x, self._piece(entry)))

    def _trace(self) -> tuple:
        """By tracing alone, the shapes and varying axes of the stream between parts, sum and count, aux, and taps."""
        axes: frozenset[str] = frozenset()
        chunk, piece = self._chunk(jnp.int32(0)), self._piece(jnp.int32(0))
        notes: dict = {}

        def program(axes: frozenset[str]) -> tuple:
            nonlocal notes
            blocks, notes = watched(chunk) if self.schedule.is_split else (chunk, {})
            x = vary(self.first(self.edges, piece), axes)
            y, aux = self.stage(blocks, x, piece)
            return x, y, aux, self.last(self.edges, vary(y, axes), piece), nn.aux_loss(aux)

        while True:
            x, y, aux, sums, extra = jax.eval_shape(lambda axes=axes: program(axes))
            grown = axes.union({PIPE}, *map(varying_axes, jax.tree.leaves((x, y))))
            if grown == axes:
                break
            axes = grown
        check_stream(x, y)
        tokens = min(leaf.size // leaf.shape[-1] for leaf in jax.tree.leaves(x) if leaf.ndim)
        loss = [(x, varying_axes(x) | varying_axes(extra) | {PIPE}) for x in sums]
        return axes, x, loss, aux, taps(chunk, notes, tokens) if self.schedule.is_split else {}

    def start(self) -> _State:
        """Empty stashes and zero sums, typed as varying like what will be added to them."""
        stash = lambda slots: jax.tree.map(lambda x: zeros(x, self.axes, max(slots, 1)), self.x)
        slots = self.routes.products
        products = {n: (zeros(t[0], t[1], slots), zeros(t[2], t[3], slots)) for n, t in self.taps.items()}
        loss = tuple(zeros(x, axes) for x, axes in self.loss)
        rows = lambda x: jax.ShapeDtypeStruct((x.shape[0] * self.schedule.chunks, *x.shape[1:]), x.dtype)
        aux = jax.tree.map(lambda x: zeros(rows(x), varying_axes(x) | {PIPE}), self.aux)
        of_edges, of_blocks = jax.tree.map(stand_in, differentiable((self.edges, self.blocks)))
        sums = _Sums(loss, aux, of_edges, of_blocks, products)
        return _State(stash(self.routes.inputs), stash(self.routes.cotangents), self._none(self.routes.kept), sums)

    def _none(self, *slots: int) -> list[Array]:
        """Zeros in the place of what parts keep."""
        return [zeros(x, varying_axes(x), *slots) for x in self.kept.shapes] if self.kept else []

    def tick(self, state: _State, turn: Turn) -> _State:
        """One tick: a forward, a backward and a weight entry, and the messages between devices."""
        nothing = jax.tree.map(lambda x: zeros(x, self.axes), self.x)
        # Slots are read outside of `cond`, since a stash that enters a branch would be held twice.
        x = get(state.inputs, turn.forward_input)
        run, idle = lambda: self._forward(x, turn), lambda: (nothing, nothing, self._none())
        x, y, made = jax.lax.cond(turn.forward != IDLE, run, idle)
        # The model's first input is no message from another device, so it is stashed where it is computed.
        made_here = (turn.forward != IDLE) & self._is_part(turn.forward, 0)
        inputs = put(state.inputs, jnp.where(made_here, turn.forward_input, IDLE), x)
        state = dataclasses.replace(state, inputs=inputs, kept=put(state.kept, turn.forward_kept, made))
        given = (
            get(inputs, turn.backward_input),
            get(state.cotangents, turn.backward_cotangent),
            get(state.kept, turn.backward_kept),
        )
        sums, dx = jax.lax.cond(
            turn.backward != IDLE, lambda s: self._backward(s, *given, turn), lambda s: (s, nothing), state.sums
        )
        state = dataclasses.replace(state, sums=sums)
        if self.schedule.is_split:
            sums = jax.lax.cond(turn.weight != IDLE, lambda s: self._weight(s, turn), lambda s: s, state.sums)
            state = dataclasses.replace(state, sums=sums)
        for link, arrival in zip(self.routes.links, turn.arrivals, strict=True):
            name, message = ("inputs", y) if link.is_input else ("cotangents", dx)
            stash = put(getattr(state, name), arrival.slot, self._sent(message, link, arrival.is_used))
            state = dataclasses.replace(state, **{name: stash})
        return state

    def _forward(self, x: PyTree, turn: Turn) -> tuple[PyTree, PyTree, list[Array]]:
        """The part's input, its output, and what it keeps; of a model's last part that is run again only the input."""
        piece, chunk = self._piece(turn.forward), self._chunk(turn.forward)
        first = lambda: vary(self.first(self.edges, piece), self.axes)
        x = jax.lax.cond(self._is_part(turn.forward, 0), first, lambda: x)
        if self.kept:
            found, given = self._found(chunk, x, piece)
            return x, found[0][0], self.kept.of(found, given)
        run = lambda: vary(self.stage(chunk, x, piece)[0], self.axes)
        return x, jax.lax.cond(self._is_part(turn.forward, -1), lambda: x, run), []

    def _found(self, chunk: PyTree, x: PyTree, piece: PyTree) -> tuple[tuple, PyTree]:
        """What `_of_part` gives, and all that it is computed from."""
        given = tapped(chunk, self.taps), x, piece
        return self._of_part(*given), given

    def _of_part(self, blocks: PyTree, x: PyTree, piece: PyTree) -> tuple:
        """`((output, its aux's loss), pullback, aux)` of a part."""
        wanted, rest = eqx.partition(blocks, is_differentiated(blocks))

        def stage(wanted: PyTree, x: PyTree) -> tuple[tuple, PyTree]:
            y, aux = self.stage(eqx.combine(wanted, rest), x, piece)
            return (vary(y, self.axes), vary(nn.aux_loss(aux), self.loss[0][1])), aux

        return jax.vjp(stage, wanted, x, has_aux=True)

    def _backward(
        self, sums: _Sums, x: PyTree, cotangent: PyTree, made: list[Array], turn: Turn
    ) -> tuple[_Sums, PyTree]:
        """The sums with this part's gradients, and the gradient of its input."""
        piece, chunk = self._piece(turn.backward), self._chunk(turn.backward)
        given = tapped(chunk, self.taps), x, piece
        (y, extra), pull, aux = self.kept.restored(made, given) if self.kept else self._of_part(*given)
        loss, of_edges, cotangent = jax.lax.cond(
            self._is_part(turn.backward, -1),
            lambda loss, of_edges: self._ending(loss, of_edges, y, piece),
            lambda loss, of_edges: (loss, of_edges, cotangent),
            sums.loss,
            sums.edges,
        )
        of_chunk, dx = pull((cotangent, jnp.ones_like(extra) * self.seed))
        of_chunk, products = split_gradients(of_chunk, self.taps, chunk)
        is_first = self._is_part(turn.backward, 0)
        of_edges = jax.lax.cond(is_first, lambda g: self._beginning(g, dx, piece), lambda g: g, of_edges)
        of_blocks = self._add_chunk(sums.blocks, of_chunk, turn.backward)
        loss = loss[0] + extra.astype(loss[0].dtype), *loss[1:]
        aux = jax.tree.map(lambda x, total: vary(x, varying_axes(total)), aux, sums.aux)
        aux = self._add_chunk(sums.aux, aux, turn.backward)
        return _Sums(loss, aux, of_edges, of_blocks, put(sums.products, turn.backward_products, products)), dx

    def _ending(self, loss: tuple, of_edges: PyTree, y: PyTree, piece: PyTree) -> tuple[tuple, PyTree, PyTree]:
        """The end of the model: loss sum and count, and the gradients of both arguments of `last`."""
        wanted, rest = eqx.partition(self.edges, eqx.is_inexact_array)
        last = lambda wanted, y: self.last(eqx.combine(wanted, rest), y, piece)
        total, pull, count = jax.vjp(last, wanted, y, has_aux=True)
        more, cotangent = pull(jnp.ones_like(total) * self.seed)
        return add(loss, (total, count)), add(of_edges, more), cotangent

    def _beginning(self, of_edges: PyTree, dx: PyTree, piece: PyTree) -> PyTree:
        wanted, rest = eqx.partition(self.edges, eqx.is_inexact_array)
        first = lambda wanted: vary(self.first(eqx.combine(wanted, rest), piece), self.axes)
        return add(of_edges, jax.vjp(first, wanted)[1](dx)[0])

    def _weight(self, sums: _Sums, turn: Turn) -> _Sums:
        of_chunk = weight_gradients(self._chunk(turn.weight), get(sums.products, turn.weight_products))
        return dataclasses.replace(sums, blocks=self._add_chunk(sums.blocks, of_chunk, turn.weight))

    def _sent(self, message: PyTree, link: Link, is_used: Bool[Array, ""]) -> PyTree:
        """The message that comes over the link, in a tick in which it brings any device one.

        All devices take the branch, or none. What stays on its device is handed over as it is.
        """
        if link.shift == 0:
            return message
        stages = self.schedule.stages
        ring = [(stage, (stage + link.shift) % stages) for stage in range(stages)]
        name = "activations between stages" if link.is_input else "gradients between stages"
        permuted = lambda message: jax.tree.map(lambda x: send.ppermute(name, x, PIPE, ring), message)
        return jax.lax.cond(is_used, permuted, lambda message: message, message)

    def _is_part(self, entry: Int[Array, ""], part: int) -> Bool[Array, ""]:
        """Whether an entry is of this part of the model, 0 the first and -1 the last."""
        stage, chunk = int(self.schedule.stage_of[part]), int(self.schedule.chunk_of[part])
        return (self.rank == stage) & (entry // self.schedule.microbatches == chunk)

    def _piece(self, entry: Int[Array, ""]) -> PyTree:
        return get(self.data, entry % self.schedule.microbatches)

    def _chunk(self, entry: Int[Array, ""]) -> PyTree:
        chunks = self.schedule.chunks
        if chunks == 1:
            return self.blocks
        group = lambda x: get(x.reshape(chunks, -1, *x.shape[1:]), entry // self.schedule.microbatches)
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        return eqx.combine(jax.tree.map(group, arrays), rest)

    def _add_chunk(self, sums: PyTree, more: PyTree, entry: Int[Array, ""]) -> PyTree:
        """The sums with the gradients of the entry's group of layers added to its rows."""
        if self.schedule.chunks == 1:
            return add(sums, more)
        return add_rows(sums, entry // self.schedule.microbatches, more)


def _over_ring(sums: PyTree) -> PyTree:
    return send.psum("sums over stages", sums, PIPE)


def check_data(schedule: Schedule, blocks: PyTree, data: PyTree) -> None:
    """Each chunk has as many rows of an array of blocks, and the data as many pieces as microbatches."""
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
            f"{call}: the arrays of blocks have a dim of layers in front, a multiple of chunks={schedule.chunks}; "
            f"here it is {sorted(layers)}; see layer_order."
        )


def check_stream(x: PyTree, y: PyTree) -> None:
    """What comes out of a stage goes into the next."""
    if (ours := _shapes(x)) != (theirs := _shapes(y)):
        raise ValueError(
            f"pipeline_gradients(stage): a stage maps the stream to one of its shapes and dtypes, but {ours} goes "
            f"in and {theirs} comes out; let first give what stages give."
        )


def _shapes(tree: PyTree) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
