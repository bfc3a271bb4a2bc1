"""A stack whose layers lie on several devices, called like any stack."""

import functools
import operator
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from .. import _collectives as send
from .._mesh import PIPE
from .._shard_map import vary, vary_like, varying_axes, zeros
from ._schedule import Schedule
from ._stage_layers import count_layers


class PipelinedStack(nn.Module):
    """This device's layers of a stack that is split over the axis `pipe`; they run on one microbatch after the other.

    With m microbatches and p stages, a pass has `m + p - 1` ticks. In tick `t`, stage `i` runs its layers on microbatch
    `t - i`, or is idle. `order` holds the device of each stage, by default device `i` for stage `i`. The derivative is
    GPipe: the stages run backward in the opposite order. Each stage keeps only its inputs of all ticks, and recomputes
    its layers from them.

    Rows before and after the stack are replicated over the axis, or split over it (`splits_rows`). In each tick, a
    device of split rows sends a microbatch to the device before it: inputs move towards the first stage, and the last
    stage's outputs spread over all devices (as in GSPMD's pipelines and praxis).

    The rows of a microbatch are consecutive. They are the first dim of `x`, and the second of a cache's arrays, behind
    the dim of layers. A cache holds this device's layers for all rows.
    """

    inner: nn.LayerStack
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
        """Return the full stack's output, the cache of this device's layers, and the layers' aux.

        The aux of a device is that of its own layers, with zeros for other layers: the sum over `pipe` is the full aux.
        """
        stages, order = jax.lax.axis_size(PIPE), self.order or range(jax.lax.axis_size(PIPE))
        stage = jnp.asarray(np.argsort(order), jnp.int32)[jax.lax.axis_index(PIPE)]
        pieces = self._split(x, self._local_microbatches(x.shape[0], stages))
        tokens = self._gather_tokens(x, tokens, cache, stages)
        arrays, static = eqx.partition(self.inner, eqx.is_array)
        rows = pieces.shape[1]

        @jax.checkpoint
        def run(arrays: PyTree, x: Array, tokens: nn.Tokens, cache: PyTree, is_live: Array) -> tuple:
            def run_layers() -> tuple:
                results = eqx.combine(arrays, static)(x, tokens, cache)
                return jax.tree.map(vary_like, results, (x, cache, zero_aux))

            return jax.lax.cond(is_live, run_layers, lambda: (jnp.zeros_like(x), cache, zero_aux))

        def tick(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
            incoming, stream, cache, aux = carry
            microbatch = number - stage
            is_live = (microbatch >= 0) & (microbatch < self.microbatches)
            index = jnp.clip(microbatch, 0, self.microbatches - 1)
            stage_input = jnp.where(stage == 0, _piece(stream, self._input_slot(number, stream)), incoming)
            cache_rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * rows, rows, 1), cache)
            piece_tokens = jax.tree.map(lambda x: _piece(x, index), tokens)
            y, cache_rows, new_aux = run(arrays, stage_input, piece_tokens, cache_rows, is_live)
            write_rows = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index * rows, axis=1)
            cache = jax.tree.map(write_rows, cache, cache_rows)
            aux = jax.tree.map(jnp.add, aux, new_aux)
            return (_receive(y, 1, order), self._update_stream(stream, y, number, stages, stage), cache, aux), None

        first_piece, first_tokens = jax.tree.map(operator.itemgetter(0), (pieces, tokens))
        first_cache = jax.tree.map(lambda x: x[:, :rows], cache)

        def run_first(x: Array, cache: PyTree) -> tuple[Array, PyTree, PyTree]:
            y, new_cache, aux = eqx.combine(arrays, static)(x, first_tokens, cache)
            return y, new_cache, vary(aux, [PIPE])

        first_x, first_cache, aux_shapes = _settle_axes(run_first, vary(first_piece, [PIPE]), first_cache)
        zero_aux = zeros(aux_shapes)
        stream = vary(pieces, varying_axes(first_x))
        start = (jnp.zeros_like(stream[0]), stream, jax.tree.map(vary_like, cache, first_cache), zero_aux)
        ticks = jnp.arange(self.microbatches + stages - 1, dtype=jnp.int32)
        (_, stream, cache, aux), _ = jax.lax.scan(tick, start, ticks)
        aux = jax.tree.map(functools.partial(_pad_to_all_layers, stages=stages), aux)
        return self._output(stream, stages, stage).reshape(x.shape), cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return an empty cache of this device's layers."""
        return self.inner.init_cache(batch, capacity, dtype)

    def _local_microbatches(self, rows: int, stages: int) -> int:
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

    def _gather_tokens(self, x: Array, tokens: nn.Tokens | None, cache: PyTree, stages: int) -> nn.Tokens:
        """Return the tokens of all microbatches: every stage needs them, and they are small."""
        tokens = nn.tokens_or_default(tokens, x.shape[:-1], cache)
        all_rows = jax.tree.map(_gather, tokens) if self.splits_rows and stages > 1 else tokens
        return vary(jax.tree.map(functools.partial(self._split, pieces=self.microbatches), all_rows), [PIPE])

    def _input_slot(self, tick: Array, stream: Array) -> Array:
        """Return the slot of the first stage's next input."""
        return tick % len(stream) if self.splits_rows else jnp.minimum(tick, len(stream) - 1)

    def _update_stream(self, stream: Array, y: Array, tick: Array, stages: int, stage: Array) -> Array:
        """Write the last stage's output into the stream, in the place of an input that is no longer needed."""
        is_last = stage == stages - 1
        if self.splits_rows:
            slot = tick % len(stream)
            new = jnp.where(is_last, y, _receive(_piece(stream, slot), -1, range(stages)))
        else:
            slot = jnp.maximum(tick - (stages - 1), 0)
            new = jnp.where(is_last & (tick >= stages - 1), y, _piece(stream, slot))
        return jax.lax.dynamic_update_index_in_dim(stream, new, slot, 0)

    def _output(self, stream: Array, stages: int, stage: Array) -> Array:
        if self.splits_rows:
            # Microbatch k left the last stage in tick k + stages - 1, and was written into the slot of that tick.
            return jnp.roll(stream, -(stages - 1), 0)
        outputs = jnp.where(stage == stages - 1, stream, jnp.zeros_like(stream))
        return send.psum("outputs of the last stage", outputs, PIPE)


def pipelined_rounds(
    stacks: Sequence[nn.LayerStack], schedule: Schedule, microbatches: int
) -> tuple[PipelinedStack, ...]:
    """Return a forward pass over `stacks` as rounds; a round runs one chunk of every device, in the devices' order.

    The rounds are in the order in which they run. A stack has a round for each chunk that holds any of its layers.
    """
    counts = count_layers([stack.depth for stack in stacks], schedule.parts)
    # A schedule's "stage" is a device. In a round it is a position, whose device `order` says.
    orders = schedule.stage_of.reshape(schedule.chunks, -1).tolist()
    rounds = []
    for stack, chunk_counts in zip(stacks, counts.reshape(len(counts), schedule.chunks, -1), strict=True):
        size = len(stack) // schedule.chunks
        for chunk in np.flatnonzero(chunk_counts.any(axis=1)).tolist():
            chunk_stack = stack[chunk * size : (chunk + 1) * size]
            rounds.append(PipelinedStack(chunk_stack, microbatches, order=tuple(orders[chunk])))
    return tuple(rounds)


def _pad_to_all_layers(x: Array, stages: int) -> Array:
    """Return rows for the layers of all devices: this device's rows at their position, zeros elsewhere."""
    all_layers = vary(jnp.zeros((stages * x.shape[0], *x.shape[1:]), x.dtype), varying_axes(x))
    return jax.lax.dynamic_update_slice_in_dim(all_layers, x, jax.lax.axis_index(PIPE) * x.shape[0], 0)


def _piece(x: Array, number: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, number, 0, False)


def _receive(x: Array, step: int, order: Sequence[int]) -> Array:
    """Return the `x` of the device whose stage is `step` below this device's stage."""
    ring = [(device, order[(stage + step) % len(order)]) for stage, device in enumerate(order)]
    name = "activations between stages" if step == 1 else "inputs between stages"
    return x if len(order) == 1 else send.ppermute(name, x, PIPE, ring)


def _gather(x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return send.all_gather("tokens for all stages", x, PIPE)
    numbers = send.all_gather("tokens for all stages", jax.random.key_data(x), PIPE)
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))


def _settle_axes(
    run: Callable[[Array, PyTree], tuple[Array, PyTree, PyTree]], x: Array, cache: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """Mark `x` and a cache as varying over more mesh axes until another `run` adds none.

    `run` returns the next `x`, the next cache and an aux. The result is the marked `x` and cache, as a loop over `run`
    needs them, and the shapes of the aux.
    """
    while True:
        next_x, next_cache, aux = jax.eval_shape(run, x, cache)
        old_axes = list(map(varying_axes, jax.tree.leaves((x, cache))))
        x, cache = jax.tree.map(vary_like, (x, cache), (next_x, next_cache))
        if old_axes == list(map(varying_axes, jax.tree.leaves((x, cache)))):
            return x, cache, aux
