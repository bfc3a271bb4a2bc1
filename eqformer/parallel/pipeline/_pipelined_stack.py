"""Stacks of layers over the stages of a pipeline: the placement of layers on devices, and the forward pass.

The layers of a stack are rows of its arrays. All devices hold the same number of rows. If devices have unequal numbers
of layers, some rows are padding, which the devices skip.
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
"""Array whose entry `[stage, chunk]` is the index of the model's part that device `stage` holds as chunk `chunk`."""
TakeRows = Callable[..., PyTree]
"""Function of an array and the indices of rows that returns these rows, like `take_layer_rows`."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRows:
    """Layers of a stack, one in each row of its arrays; some rows may be padding."""

    layer_of_row: Int[np.ndarray, "rows"]
    """Index of the layer in each row; `depth` if the row is padding."""
    depth: int
    """Number of layers of the stack."""

    @property
    def row_of_layer(self) -> Int[np.ndarray, "layers"]:
        """Row of each layer."""
        return np.argsort(self.layer_of_row, kind="stable")[: self.depth]

    @property
    def is_layer(self) -> Bool[np.ndarray, "rows"]:
        """Whether each row is a layer."""
        return self.layer_of_row < self.depth


def check_depth(layers: int, stages: int, chunks: int = 1) -> None:
    """Raise a `ValueError` unless each of `stages * chunks` parts has at least one layer."""
    if layers < (parts := stages * chunks):
        raise ValueError(
            f"check_depth(layers={layers}, stages={stages}, chunks={chunks}): each of the {parts} parts needs at least "
            f"one layer (a block of several layers counts once), but there are more parts than layers; take {parts} "
            "layers or more, or fewer stages or chunks."
        )


def count_layers(depths: Sequence[int], parts: int) -> Int[np.ndarray, "stacks parts"]:
    """Return the number of layers of each stack in each part; `depths` lists the layers of each stack.

    The layers of all stacks together are divided equally between the parts. A remainder goes to the first parts, one
    layer each, because the last part also computes the loss.
    """
    counts = np.full(parts, sum(depths) // parts) + (np.arange(parts) < sum(depths) % parts)
    part_ends, stack_ends = np.cumsum(counts), np.cumsum(depths)[:, None]
    stack_starts = stack_ends - np.array(depths)[:, None]
    return np.maximum(np.minimum(part_ends, stack_ends) - np.maximum(part_ends - counts, stack_starts), 0)


def place_layers(depths: Sequence[int], part_of: PartOf) -> list[LayerRows]:
    """Return the rows of each stack, ordered by device and then by chunk.

    Every part gets as many rows of a stack as the part with the most layers of the stack, so that all devices hold the
    same number of rows.
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
    """Return the index of the layer in each row of a single stack, or `layers` if the row is padding.

    If `take_layer_rows(array, layer_order(...))` is split evenly over the devices, each device has its own layers.
    """
    return place_layers([layers], part_of)[0].layer_of_row


def take_layer_rows(x: Array | jax.ShapeDtypeStruct, order: Int[np.ndarray, "rows"]) -> Array | jax.ShapeDtypeStruct:
    """Return the rows of an array, or of its shape, in the given order; zeros for indices beyond the last row.

    Outside of `jit`, the function waits for the result. Otherwise, on simulated devices, unfinished programs that wait
    for messages could occupy all threads.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(order), *x.shape[1:]), x.dtype)
    return jax.block_until_ready(x[order] if order.max() < x.shape[0] else x.at[order].get(mode="fill", fill_value=0))


def order_for_pipeline(tree: PyTree, part_of: PartOf, take: TakeRows = take_layer_rows) -> PyTree:
    """Put the rows of each stack in pipeline order, by device and then by chunk; rows of padding are zero.

    `tree` is a model, or a tree of models.
    """
    return _move_models(tree, part_of, functools.partial(layers_to_rows, take=take))


def order_for_reading(tree: PyTree, part_of: PartOf, take: TakeRows = take_layer_rows) -> PyTree:
    """Undo `order_for_pipeline`: return the layers in the order in which they run, without padding."""
    return _move_models(tree, part_of, functools.partial(rows_to_layers, take=take))


def layers_to_rows(
    trees: Sequence[PyTree], rows: Sequence[LayerRows], take: TakeRows = take_layer_rows
) -> tuple[PyTree, ...]:
    """Order the rows of arrays with a leading dim `layers` by device and chunk; `trees` has a tree for each stack."""
    return tuple(
        _move_rows(tree, placement.layer_of_row, placement.depth, take)
        for tree, placement in zip(trees, rows, strict=True)
    )


def rows_to_layers(
    trees: Sequence[PyTree], rows: Sequence[LayerRows], take: TakeRows = take_layer_rows
) -> tuple[PyTree, ...]:
    """Undo `layers_to_rows`: return the layers in the order in which they run, without padding."""
    return tuple(
        _move_rows(tree, placement.row_of_layer, len(placement.layer_of_row), take)
        for tree, placement in zip(trees, rows, strict=True)
    )


def _move_rows(tree: PyTree, order: Int[np.ndarray, "rows"], source_rows: int, take: TakeRows) -> PyTree:
    """Return all arrays, which have `source_rows` rows, with their rows in the given order."""

    def move(x: PyTree) -> PyTree:
        if not nn.has_shape(x):
            return x
        if x.shape[0] != source_rows:
            raise ValueError(
                f"Plan.shard, Plan.unshard: the arrays of this stack must have {source_rows} rows, but one has "
                f"{x.shape[0]}; pass a plain model to shard, and the result of shard or a tree like it to unshard."
            )
        return x if np.array_equal(order, np.arange(source_rows)) else take(x, order)

    return jax.tree.map(move, tree)


def _move_models(tree: PyTree, part_of: PartOf, move: Callable[[Sequence[PyTree], list[LayerRows]], tuple]) -> PyTree:
    """Apply `move` to the stacks of each model together, because one part may hold layers of two stacks."""

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
    """Wrapper of a stack's blocks that skips rows of padding: they compute nothing and return their input."""

    inner: PyTree
    is_layer: Bool[Array, "*layers"]

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the results of the block or, for padding, the unchanged `x` and `cache` and an aux of zeros."""

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
    """Wrap the blocks of each stack that has padding in a `PaddedBlock`.

    `stacks` are the stacks of this device. `rows` has the number of rows of each stack on all devices together.
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
    """Stack of layers that is split over the axis `pipe`, and runs on one microbatch after the other.

    `inner` has this device's layers, which are a stage. With m microbatches and p stages, a forward pass has m + p - 1
    ticks. In tick `t`, stage `i` runs its layers on microbatch `t - i`, or is idle if there is no such microbatch.
    `order[i]` is the device of stage `i`, by default device `i`. As in GPipe, the backward pass runs the stages in
    reverse order. The pass recomputes the layers from the stage's inputs, which are saved for each tick.

    The batch rows of the input and of the output are replicated over the axis or, with `splits_rows`, split over the
    axis. If the rows are split, each device holds a buffer with its microbatches. In each tick every device sends a
    microbatch of the buffer to the previous device: inputs move to the first stage, and the outputs of the last stage
    spread over all devices, as in the pipelines of GSPMD and praxis.

    The rows of a microbatch are consecutive. Rows are the first dim of `x` and the second dim of a cache's arrays,
    after the dim of layers. The cache has this device's layers and all rows.
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
                f"PipelinedStack(splits_rows=True, order={self.order}): split rows are sent along the devices in their "
                "own order 0, 1, 2, ...; leave out one of the two arguments."
            )

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(
        self, x: Float[Array, "batch *dims embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "batch *dims embed"], PyTree, PyTree]:
        """Return the output of all stages, the cache of this device's layers, and an aux with rows for all layers.

        The rows of other devices' layers in the aux are zero, so that its sum over `pipe` is the aux of all layers.
        """
        stages, order = jax.lax.axis_size(PIPE), self.order or range(jax.lax.axis_size(PIPE))
        stage = jnp.asarray(np.argsort(order), jnp.int32)[jax.lax.axis_index(PIPE)]
        microbatches = self._split(x, self._local_microbatches(x.shape[0], stages))
        tokens = nn.tokens_or_default(tokens, x.shape[:-1], cache)
        # Parameters that all layers read are not split into microbatches.
        rotary_alpha = vary(tokens.rotary_alpha, [PIPE])
        tokens = self._gather_tokens(tokens.replace(rotary_alpha=None), stages)
        arrays, static = eqx.partition(self.inner, eqx.is_array)
        rows = microbatches.shape[1]

        @jax.checkpoint
        def run(arrays: PyTree, x: Array, tokens: nn.Tokens, cache: PyTree, is_busy: Array) -> tuple:
            def run_layers() -> tuple:
                results = eqx.combine(arrays, static)(x, tokens.replace(rotary_alpha=rotary_alpha), cache)
                return jax.tree.map(vary_like, results, (x, cache, zero_aux))

            return jax.lax.cond(is_busy, run_layers, lambda: (jnp.zeros_like(x), cache, zero_aux))

        def run_tick(carry: tuple, tick: Int[Array, ""]) -> tuple[tuple, None]:
            received, buffer, cache, aux = carry
            microbatch = tick - stage
            is_busy = (microbatch >= 0) & (microbatch < self.microbatches)
            index = jnp.clip(microbatch, 0, self.microbatches - 1)
            stage_input = jnp.where(stage == 0, _take(buffer, self._input_slot(tick, buffer)), received)
            cache_rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * rows, rows, 1), cache)
            microbatch_tokens = jax.tree.map(lambda x: _take(x, index), tokens)
            y, cache_rows, new_aux = run(arrays, stage_input, microbatch_tokens, cache_rows, is_busy)
            write_rows = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index * rows, axis=1)
            cache = jax.tree.map(write_rows, cache, cache_rows)
            aux = jax.tree.map(jnp.add, aux, new_aux)
            return (_receive(y, 1, order), self._update_buffer(buffer, y, tick, stages, stage), cache, aux), None

        # Trace the first microbatch for the shapes of the aux and the mesh axes over which the carry varies.
        first_x, first_tokens = jax.tree.map(operator.itemgetter(0), (microbatches, tokens))
        first_cache = jax.tree.map(lambda x: x[:, :rows], cache)

        def run_first(x: Array, cache: PyTree) -> tuple[Array, PyTree, PyTree]:
            run_tokens = first_tokens.replace(rotary_alpha=rotary_alpha)
            y, new_cache, aux = eqx.combine(arrays, static)(x, run_tokens, cache)
            return y, new_cache, vary(aux, [PIPE])

        first_x, first_cache, aux_shapes = _settle_axes(run_first, vary(first_x, [PIPE]), first_cache)
        zero_aux = zeros(aux_shapes)
        # The buffer begins with the microbatches of the input, which the outputs of the last stage replace.
        buffer = vary(microbatches, varying_axes(first_x))
        start = (jnp.zeros_like(buffer[0]), buffer, jax.tree.map(vary_like, cache, first_cache), zero_aux)
        ticks = jnp.arange(self.microbatches + stages - 1, dtype=jnp.int32)
        (_, buffer, cache, aux), _ = jax.lax.scan(run_tick, start, ticks)
        aux = jax.tree.map(functools.partial(_pad_to_all_layers, stages=stages), aux)
        return self._take_output(buffer, stages, stage).reshape(x.shape), cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return an empty cache of this device's layers."""
        return self.inner.init_cache(batch, capacity, dtype)

    def _local_microbatches(self, rows: int, stages: int) -> int:
        """Return the number of microbatches in this device's rows of the input."""
        call = f"PipelinedStack(microbatches={self.microbatches})"
        if self.splits_rows and self.microbatches % stages:
            raise ValueError(
                f"{call}: with splits_rows each of {stages} stages holds the same number of microbatches; take a "
                f"multiple of {stages}, such as {-(-self.microbatches // stages) * stages}."
            )
        count = self.microbatches // stages if self.splits_rows else self.microbatches
        if rows % count:
            raise ValueError(
                f"{call}: the {rows} rows of a device must divide evenly into {count} microbatches, but "
                f"{rows % count} rows would be left; change one of the two numbers."
            )
        return count

    def _split(self, x: Array, count: int) -> Array:
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    def _gather_tokens(self, tokens: nn.Tokens, stages: int) -> nn.Tokens:
        """Return the tokens of all microbatches on every stage, with a leading dim of microbatches."""
        all_rows = jax.tree.map(_gather, tokens) if self.splits_rows and stages > 1 else tokens
        return vary(jax.tree.map(functools.partial(self._split, count=self.microbatches), all_rows), [PIPE])

    def _input_slot(self, tick: Array, buffer: Array) -> Array:
        """Return the slot of the buffer that has the first stage's input of this tick."""
        return tick % len(buffer) if self.splits_rows else jnp.minimum(tick, len(buffer) - 1)

    def _update_buffer(self, buffer: Array, y: Array, tick: Array, stages: int, stage: Array) -> Array:
        """Write the last stage's output into its buffer, over an input that is no longer needed.

        If rows are split, all other devices write the microbatch that they receive from the next device.
        """
        is_last = stage == stages - 1
        if self.splits_rows:
            slot = tick % len(buffer)
            new = jnp.where(is_last, y, _receive(_take(buffer, slot), -1, range(stages)))
        else:
            slot = jnp.maximum(tick - (stages - 1), 0)
            new = jnp.where(is_last & (tick >= stages - 1), y, _take(buffer, slot))
        return jax.lax.dynamic_update_index_in_dim(buffer, new, slot, 0)

    def _take_output(self, buffer: Array, stages: int, stage: Array) -> Array:
        """Return the output's microbatches in order, from the buffer after the last tick."""
        if self.splits_rows:
            # Microbatch k left the last stage in tick k + stages - 1, and was written into the slot of that tick.
            return jnp.roll(buffer, -(stages - 1), 0)
        outputs = jnp.where(stage == stages - 1, buffer, jnp.zeros_like(buffer))
        return send.psum("outputs of the last stage", outputs, PIPE)


def pipelined_rounds(
    stacks: Sequence[nn.LayerStack], schedule: Schedule, microbatches: int
) -> tuple[PipelinedStack, ...]:
    """Split a forward pass over `stacks` into rounds, and return the rounds in order.

    Round `c` of a stack runs the stack's layers in chunk `c` of all devices. If no device has layers of the stack in
    chunk `c`, the stack has no round `c`.
    """
    counts = count_layers([stack.depth for stack in stacks], schedule.parts)
    # Stages of a `Schedule` are devices. Stages of a `PipelinedStack` are positions; `order` maps positions to devices.
    orders = schedule.stage_of.reshape(schedule.chunks, -1).tolist()
    rounds = []
    for stack, chunk_counts in zip(stacks, counts.reshape(len(counts), schedule.chunks, -1), strict=True):
        size = len(stack) // schedule.chunks
        for chunk in np.flatnonzero(chunk_counts.any(axis=1)).tolist():
            chunk_stack = stack[chunk * size : (chunk + 1) * size]
            rounds.append(PipelinedStack(chunk_stack, microbatches, order=tuple(orders[chunk])))
    return tuple(rounds)


def _pad_to_all_layers(x: Array, stages: int) -> Array:
    """Return rows for the layers of all devices: this device's rows in their place, zeros elsewhere."""
    all_layers = vary(jnp.zeros((stages * x.shape[0], *x.shape[1:]), x.dtype), varying_axes(x))
    return jax.lax.dynamic_update_slice_in_dim(all_layers, x, jax.lax.axis_index(PIPE) * x.shape[0], 0)


def _take(x: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, False)


def _receive(x: Array, step: int, order: Sequence[int]) -> Array:
    """Send `x` to the device whose stage is `step` after this device's stage, and return the received array."""
    ring = [(device, order[(stage + step) % len(order)]) for stage, device in enumerate(order)]
    name = "activations between stages" if step == 1 else "inputs between stages"
    return x if len(order) == 1 else send.ppermute(name, x, PIPE, ring)


def _gather(x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return send.all_gather("tokens for all stages", x, PIPE)
    key_data = send.all_gather("tokens for all stages", jax.random.key_data(x), PIPE)
    return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(x))


def _settle_axes(
    run: Callable[[Array, PyTree], tuple[Array, PyTree, PyTree]], x: Array, cache: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """Mark `x` and a cache as varying over all mesh axes that a loop over `run` needs for its carry.

    `run` returns the next `x`, the next cache and an aux. `run` is traced until the results vary over no more axes than
    the arguments. Return the marked `x`, the marked cache, and the shapes of the aux.
    """
    while True:
        next_x, next_cache, aux = jax.eval_shape(run, x, cache)
        old_axes = list(map(varying_axes, jax.tree.leaves((x, cache))))
        x, cache = jax.tree.map(vary_like, (x, cache), (next_x, next_cache))
        if old_axes == list(map(varying_axes, jax.tree.leaves((x, cache)))):
            return x, cache, aux
