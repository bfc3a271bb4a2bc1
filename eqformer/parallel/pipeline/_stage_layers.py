"""Layers of a pipeline's stages: the rows of stacked arrays that hold each part's layers (pipeline order), and padding.

All devices hold equally many rows of a stack. If stages have unequal numbers of layers, some rows are padding, which
the devices skip.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ... import nn
from .._mesh import PIPE
from .._shard_map import vary_like, zeros


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
    """Return the order in which the layers of a single stack lie on the devices; `layers` for a row of padding.

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
