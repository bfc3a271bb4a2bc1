"""A stack whose layers lie on the stages of a pipeline: the rows of its arrays, and its calls.

All devices hold equally many rows of a stack. If stages have unequal numbers of layers, some rows are padding, which
the devices skip.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ... import nn
from .. import _collectives as send
from .._mesh import PIPE
from .._shard_map import vary, vary_like, varying_axes, zeros
from ._schedule import Schedule


PartOf = Int[np.ndarray, "stages chunks"]
"""The part of the model that each chunk of a device is."""
TakeRows = Callable[..., PyTree]
"""A function like `take_layer_rows`, of an array and an order, that returns the rows in that order."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRows:
    """The layer that lies in each row of a stack's arrays; `depth`, the number of layers, if the row is padding."""

    layer_of_row: Int[np.ndarray, "rows"]
    depth: int

    @property
    def row_of_layer(self) -> Int[np.ndarray, "layers"]:
        """The row of each layer."""
        return np.argsort(self.layer_of_row, kind="stable")[: self.depth]

    @property
    def is_layer(self) -> Bool[np.ndarray, "rows"]:
        """Whether each row is a layer."""
        return self.layer_of_row < self.depth


def check_depth(layers: int, stages: int, chunks: int = 1) -> None:
    """Raise a `ValueError` unless each of `stages * chunks` parts has at least one of the layers."""
    if layers < (parts := stages * chunks):
        raise ValueError(
            f"check_depth(layers={layers}, stages={stages}, chunks={chunks}): each of the {parts} parts holds at least "
            f"one layer (a period or block of several counts once), but there are more parts than layers; take {parts} "
            "layers or more, or fewer stages or chunks."
        )


def count_layers(depths: Sequence[int], parts: int) -> Int[np.ndarray, "stacks parts"]:
    """Return the number of layers of each stack in each part; the stacks follow each other.

    All layers together are cut into equal parts. If the parts do not divide the layers, the first parts have one layer
    more, since the last part has the loss.
    """
    counts = np.full(parts, sum(depths) // parts) + (np.arange(parts) < sum(depths) % parts)
    part_ends, stack_ends = np.cumsum(counts), np.cumsum(depths)[:, None]
    stack_starts = stack_ends - np.array(depths)[:, None]
    return np.maximum(np.minimum(part_ends, stack_ends) - np.maximum(part_ends - counts, stack_starts), 0)


def place_layers(depths: Sequence[int], part_of: PartOf) -> list[LayerRows]:
    """Return the rows of each stack in the order of the devices, and of each device's chunks.

    Every part has as many rows as the part with most layers of the stack, so that the rows split evenly over devices.
    """
    check_depth(sum(depths), *part_of.shape)
    placements = []
    for depth, counts in zip(depths, count_layers(depths, part_of.size), strict=True):
        index = np.arange(counts.max())
        starts = (np.cumsum(counts) - counts)[:, None]
        layer_of_row = np.where(index < counts[:, None], starts + index, depth)
        placements.append(LayerRows(layer_of_row[part_of].reshape(-1), depth))
    return placements


def layer_order(layers: int, part_of: PartOf) -> Int[np.ndarray, "rows"]:
    """Return the order in which a single stack's layers lie on the devices; a row of padding is number `layers`.

    `take_layer_rows(array, layer_order(...))`, split evenly over the devices, gives each its layers.
    """
    return place_layers([layers], part_of)[0].layer_of_row


def take_layer_rows(x: Array | jax.ShapeDtypeStruct, order: Int[np.ndarray, "rows"]) -> Array | jax.ShapeDtypeStruct:
    """Return the rows of an array, or of its shape, in an order; rows of zeros for numbers beyond the last row.

    Outside of `jit` this waits for the result: on simulated devices, many programs that wait for each other's messages
    can occupy all threads.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(order), *x.shape[1:]), x.dtype)
    return jax.block_until_ready(x[order] if order.max() < x.shape[0] else x.at[order].get(mode="fill", fill_value=0))


def order_for_pipeline(tree: PyTree, part_of: PartOf, take: TakeRows = take_layer_rows) -> PyTree:
    """Put the rows of each stack of a model, or of a tree of models, in pipeline order; padding is zero."""
    return _move_models(tree, part_of, functools.partial(layers_to_rows, take=take))


def order_for_reading(tree: PyTree, part_of: PartOf, take: TakeRows = take_layer_rows) -> PyTree:
    """Put the layers of `order_for_pipeline`'s result back into reading order."""
    return _move_models(tree, part_of, functools.partial(rows_to_layers, take=take))


def layers_to_rows(
    trees: Sequence[PyTree], rows: Sequence[LayerRows], take: TakeRows = take_layer_rows
) -> tuple[PyTree, ...]:
    """Move arrays with a leading `layers` dim, a tree for each stack, from reading order into rows of devices."""
    return tuple(
        _move_rows(tree, placement.layer_of_row, placement.depth, take)
        for tree, placement in zip(trees, rows, strict=True)
    )


def rows_to_layers(
    trees: Sequence[PyTree], rows: Sequence[LayerRows], take: TakeRows = take_layer_rows
) -> tuple[PyTree, ...]:
    """Undo `layers_to_rows`."""
    return tuple(
        _move_rows(tree, placement.row_of_layer, len(placement.layer_of_row), take)
        for tree, placement in zip(trees, rows, strict=True)
    )


def _move_rows(tree: PyTree, order: Int[np.ndarray, "rows"], source_rows: int, take: TakeRows) -> PyTree:
    """Take the rows of all arrays, which have `source_rows` rows, in an order."""

    def move(x: PyTree) -> PyTree:
        if not nn.has_shape(x):
            return x
        if x.shape[0] != source_rows:
            raise ValueError(
                f"Plan.shard, Plan.unshard: an array of layers has {source_rows} rows before it is moved, but this one "
                f"has {x.shape[0]}; give shard a plain model, and unshard what shard returned or a tree like it."
            )
        return x if np.array_equal(order, np.arange(source_rows)) else take(x, order)

    return jax.tree.map(move, tree)


def _move_models(tree: PyTree, part_of: PartOf, move: Callable[[Sequence[PyTree], list[LayerRows]], tuple]) -> PyTree:
    """Move each model's stacks together, since one part may hold layers of two stacks."""

    def move_node(node: nn.LayerStack | nn.LanguageModel) -> PyTree:
        if isinstance(node, nn.LayerStack):
            return move((node,), place_layers([node.depth], part_of))[0]
        if not all(isinstance(stack, nn.LayerStack) for stack in node.stacks):
            return node
        depths = [stack.depth for stack in node.stacks]
        return eqx.tree_at(lambda m: m.stacks, node, move(node.stacks, place_layers(depths, part_of)))

    return nn.map_modules(move_node, tree, (nn.LayerStack, nn.LanguageModel))


# Padding.


class PaddedBlock(nn.Module):
    """A block of a stack with rows of padding, which compute nothing and return their input."""

    inner: PyTree
    is_layer: Bool[Array, "*layers"]

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the block's results or, for padding, `x` and `cache` unchanged, with zeros for aux."""

        def run() -> tuple:
            return vary_like(self.inner(x, tokens, cache), self.is_layer)

        shapes = jax.eval_shape(run)

        def skip() -> tuple:
            return jax.tree.map(vary_like, (x, cache, zeros(shapes[2])), shapes)

        return jax.lax.cond(self.is_layer, run, skip)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the block's empty cache."""
        return self.inner.init_cache(batch, capacity, dtype)


def skip_padding(stacks: Sequence[nn.LayerStack], rows: Sequence[int], part_of: PartOf) -> tuple[nn.LayerStack, ...]:
    """Return this device's stacks, with `PaddedBlock` around the blocks of each stack with padding.

    `rows` are the numbers of rows of the stacks on all devices together.
    """
    placements, padded = place_layers([stack.depth for stack in stacks], part_of), []
    for stack, row_count, placement in zip(stacks, rows, placements, strict=True):
        if row_count != placement.depth:
            is_layer_by_stage = jnp.asarray(placement.is_layer.reshape(part_of.shape[0], -1))
            blocks = PaddedBlock(stack.blocks, is_layer_by_stage[jax.lax.axis_index(PIPE)])
            stack = eqx.tree_at(lambda s: s.blocks, stack, blocks)
        padded.append(stack)
    return tuple(padded)


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
