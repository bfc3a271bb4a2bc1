"""A stack whose layers lie on several devices, called like any stack."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from .. import _collectives as send
from .._axes import PIPE
from .._shard_map import vary, varying_axes
from ._schedule import Schedule
from ._stage_layers import layers_of_parts


class PipelinedStack(nn.Module):
    """This device's layers of a stack split over the axis `pipe`, run on `microbatches` pieces of the rows in turn.

    In tick `t` of `m + p - 1`, stage `i` runs its layers on microbatch `t - i`, or nothing; `order` says which device
    is which stage, by default stage `i` is device `i`. Its derivative is GPipe: the stages run backward in the opposite
    order, from their inputs, of which each keeps `m + p - 1`. Rows are replicated over the axis, before and after, or
    split over it (`splits_rows`): the microbatches then move to the next device in each tick, so that the first stage
    has its next input and the last stage's outputs spread over all devices (as in GSPMD's pipelines and praxis).

    A cache holds this device's layers for all rows. Rows are the first dim, microbatch after microbatch.
    """

    inner: nn.Stack
    microbatches: int = eqx.field(static=True)
    splits_rows: bool = eqx.field(static=True, default=False)
    order: tuple[int, ...] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.microbatches < 1:
            raise ValueError(f"PipelinedStack(microbatches={self.microbatches}): give at least 1.")
        if self.splits_rows and self.order not in (None, tuple(range(len(self.order or ())))):
            raise ValueError(
                f"PipelinedStack(splits_rows=True, order={self.order}): rows go from device to device of the ring, in "
                "its order; leave out one of the two."
            )

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(
        self, x: Float[Array, "batch *dims embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "batch *dims embed"], PyTree, PyTree]:
        """The whole stack's output, the cache of this device's layers, and the layers' aux.

        The aux of a device is that of its own layers, with zeros for the others: the sum over `pipe` is the whole.
        """
        stages, order = jax.lax.axis_size(PIPE), self.order or range(jax.lax.axis_size(PIPE))
        rank = jnp.asarray(np.argsort(order), jnp.int32)[jax.lax.axis_index(PIPE)]
        pieces = self._split(x, self._local_pieces(x.shape[0], stages))
        tokens = self._tokens(x, tokens, cache, stages)
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        rows = pieces.shape[1]

        @jax.checkpoint
        def run(arrays: PyTree, x: Array, tokens: nn.Tokens, memory: PyTree, is_live: Array) -> tuple:
            def work() -> tuple:
                return _typed_like(eqx.combine(arrays, rest)(x, tokens, memory), (x, memory, nothing))

            return jax.lax.cond(is_live, work, lambda: (jnp.zeros_like(x), memory, nothing))

        def tick(carry: tuple, turn: Int[Array, ""]) -> tuple[tuple, None]:
            incoming, stream, cache, aux = carry
            number = turn - rank
            is_live = (number >= 0) & (number < self.microbatches)
            place = jnp.clip(number, 0, self.microbatches - 1)
            given = jnp.where(rank == 0, _piece(stream, self._slot(turn, stream)), incoming)
            memory = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place * rows, rows, 1), cache)
            y, memory, more = run(arrays, given, jax.tree.map(lambda x: _piece(x, place), tokens), memory, is_live)
            write = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, place * rows, 1)
            cache = jax.tree.map(write, cache, memory)
            aux = jax.tree.map(jnp.add, aux, more)
            return (_sent(y, 1, order), self._after(stream, y, turn, stages, rank), cache, aux), None

        one = jax.tree.map(lambda x: x[0], (pieces, tokens))
        few = jax.tree.map(lambda x: x[:, :rows], cache)
        call = lambda given: eqx.combine(arrays, rest)(given[0], one[1], given[1])
        axes, memory = _settled(lambda given: call(given)[:2], (vary(one[0], [PIPE]), few))
        shapes = jax.eval_shape(lambda: call((axes, memory))[2])
        nothing = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), varying_axes(x) | {PIPE}), shapes)
        stream = vary(pieces, varying_axes(axes))
        start = (jnp.zeros_like(stream[0]), stream, _typed_like(cache, memory), nothing)
        turns = jnp.arange(self.microbatches + stages - 1, dtype=jnp.int32)
        (_, stream, cache, aux), _ = jax.lax.scan(tick, start, turns)
        aux = jax.tree.map(lambda x: _among_all(x, stages), aux)
        return self._result(stream, stages, rank).reshape(x.shape), cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache of this device's layers."""
        return self.inner.init_cache(batch, capacity, dtype)

    def _local_pieces(self, rows: int, stages: int) -> int:
        call = f"PipelinedStack(microbatches={self.microbatches})"
        if self.splits_rows and self.microbatches % stages:
            raise ValueError(
                f"{call}: with splits_rows each of {stages} stages holds equally many microbatches; take a multiple of "
                f"{stages}, such as {-(-self.microbatches // stages) * stages}."
            )
        pieces = self.microbatches // stages if self.splits_rows else self.microbatches
        if rows % pieces:
            raise ValueError(
                f"{call}: the {rows} rows of a device must divide evenly into {pieces} microbatches, but "
                f"{rows % pieces} rows would be left; change one of them."
            )
        return pieces

    def _split(self, x: Array, pieces: int) -> Array:
        return x.reshape(pieces, x.shape[0] // pieces, *x.shape[1:])

    def _tokens(self, x: Array, tokens: nn.Tokens | None, cache: PyTree, stages: int) -> nn.Tokens:
        """Tokens of all microbatches: every stage needs them, and they are small."""
        tokens = nn.tokens_or_default(tokens, x.shape[:-1], cache)
        whole = jax.tree.map(_gathered, tokens) if self.splits_rows and stages > 1 else tokens
        return vary(jax.tree.map(lambda x: self._split(x, self.microbatches), whole), [PIPE])

    def _slot(self, turn: Array, stream: Array) -> Array:
        """Where the first stage finds its next input."""
        return turn % len(stream) if self.splits_rows else jnp.minimum(turn, len(stream) - 1)

    def _after(self, stream: Array, y: Array, turn: Array, stages: int, rank: Array) -> Array:
        """The stream with the last stage's output in the place of an input that is no longer needed."""
        is_last = rank == stages - 1
        if self.splits_rows:
            slot = turn % len(stream)
            new = jnp.where(is_last, y, _sent(_piece(stream, slot), -1, range(stages)))
        else:
            slot = jnp.maximum(turn - (stages - 1), 0)
            new = jnp.where(is_last & (turn >= stages - 1), y, _piece(stream, slot))
        return jax.lax.dynamic_update_index_in_dim(stream, new, slot, 0)

    def _result(self, stream: Array, stages: int, rank: Array) -> Array:
        if self.splits_rows:
            return jnp.roll(stream, -(stages - 1), 0)
        outputs = jnp.where(rank == stages - 1, stream, jnp.zeros_like(stream))
        return send.psum("outputs of the last stage", outputs, PIPE)


def pipelined_rounds(stacks: Sequence[nn.Stack], schedule: Schedule, microbatches: int) -> tuple[PipelinedStack, ...]:
    """This device's stacks for a forward pass: one after the other, each once through all devices for each chunk."""
    held = layers_of_parts([stack.depth for stack in stacks], schedule.parts)
    orders = schedule.stage_of.reshape(schedule.chunks, -1).tolist()
    rounds = []
    for stack, numbers in zip(stacks, held.reshape(len(held), schedule.chunks, -1), strict=True):
        size = len(stack) // schedule.chunks
        for chunk in np.flatnonzero(numbers.any(axis=1)).tolist():
            part = stack[chunk * size : (chunk + 1) * size]
            assert isinstance(part, nn.Stack)
            rounds.append(PipelinedStack(part, microbatches, order=tuple(orders[chunk])))
    return tuple(rounds)


def _among_all(x: Array, stages: int) -> Array:
    """The rows of this device's layers in their places among the layers of all devices, whose rows are zero."""
    whole = vary(jnp.zeros((stages * x.shape[0], *x.shape[1:]), x.dtype), varying_axes(x))
    return jax.lax.dynamic_update_slice_in_dim(whole, x, jax.lax.axis_index(PIPE) * x.shape[0], 0)


def _piece(x: Array, number: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, number, 0, False)


def _sent(x: Array, step: int, order: Sequence[int]) -> Array:
    """What the device of the stage `step` below has."""
    ring = [(device, order[(stage + step) % len(order)]) for stage, device in enumerate(order)]
    name = "activations between stages" if step == 1 else "inputs between stages"
    return x if len(order) == 1 else send.ppermute(name, x, PIPE, ring)


def _gathered(x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return send.all_gather("tokens for all stages", x, PIPE)
    numbers = send.all_gather("tokens for all stages", jax.random.key_data(x), PIPE)
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))


def _typed_like(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: vary(x, varying_axes(y)), tree, like)


def _settled(call: Callable[[Any], Any], given: PyTree) -> PyTree:
    """The carry, typed as varying over all axes that it comes to vary over when the call is iterated."""
    while True:
        grown = _typed_like(given, jax.eval_shape(lambda given=given: call(given)))
        if jax.tree.all(jax.tree.map(lambda x, y: varying_axes(x) == varying_axes(y), given, grown)):
            return given
        given = grown
