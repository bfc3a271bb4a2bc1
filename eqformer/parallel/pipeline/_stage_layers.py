"""Which layers each part of a pipeline has, and which rows of the stacked arrays hold them (pipeline order)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ... import nn
from .._axes import PIPE
from .._shard_map import vary, varying_axes


PartOf = Int[np.ndarray, "stages chunks"]  # which part of the model each chunk of a device is
Taken = Callable[[Any, np.ndarray], Any]  # (array, order) -> rows in that order, as `taken_rows`


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Which of the `depth` layers of a stack lies in each row of its arrays; `depth` itself where a row is padding."""

    order: Int[np.ndarray, "rows"]
    depth: int

    @property
    def back(self) -> Int[np.ndarray, "layers"]:
        """In which row each layer lies."""
        return np.argsort(self.order, kind="stable")[: self.depth]

    @property
    def is_layer(self) -> Bool[np.ndarray, "rows"]:
        """Whether each row is a layer."""
        return self.order < self.depth


def check_depth(layers: int, stages: int, chunks: int = 1) -> None:
    """A `ValueError` unless each of `stages * chunks` parts has at least one of the layers."""
    if layers < (parts := stages * chunks):
        raise ValueError(
            f"check_depth(layers={layers}, stages={stages}, chunks={chunks}): each of the {parts} parts holds at least "
            f"one layer (a period or block of several counts once), but there are more parts than layers; take {parts} "
            "layers or more, or fewer stages or chunks."
        )


def layers_of_parts(depths: Sequence[int], parts: int) -> Int[np.ndarray, "stacks parts"]:
    """How many layers of each of the stacks, which follow each other, each part holds.

    All layers together are cut into equal parts; where they do not divide, the first parts have one more, since the
    last has the loss.
    """
    number = np.full(parts, sum(depths) // parts) + (np.arange(parts) < sum(depths) % parts)
    until, ends = np.cumsum(number), np.cumsum(depths)[:, None]
    starts = ends - np.array(depths)[:, None]
    return np.maximum(np.minimum(until, ends) - np.maximum(until - number, starts), 0)


def layer_rows(depths: Sequence[int], part_of: PartOf) -> list[Rows]:
    """The rows of each stack as the devices hold them: device after device, each with its chunks in turn.

    Every part has as many rows as the part with most layers of the stack, so that the rows split evenly over devices.
    """
    check_depth(sum(depths), *part_of.shape)
    found = []
    for depth, numbers in zip(depths, layers_of_parts(depths, part_of.size), strict=True):
        place = np.arange(numbers.max())
        order = np.where(place < numbers[:, None], (np.cumsum(numbers) - numbers)[:, None] + place, depth)
        found.append(Rows(order[part_of].reshape(-1), depth))
    return found


def layer_order(layers: int, part_of: PartOf) -> Int[np.ndarray, "rows"]:
    """The order in which the layers of a single stack lie on the devices; `layers` where a row is padding.

    `taken_rows(array, layer_order(...))`, split evenly over the devices, gives each its layers.
    """
    return layer_rows([layers], part_of)[0].order


def taken_rows(x: Array, order: Int[np.ndarray, "rows"]) -> Array:
    """The entries of an array along its first dim in an order; zeros for numbers beyond its last.

    Outside of `jit` they are waited for: on simulated devices many programs that wait for each other's messages can
    hold all threads.
    """
    return jax.block_until_ready(x[order] if order.max() < x.shape[0] else x.at[order].get(mode="fill", fill_value=0))


def in_pipeline_order(tree: PyTree, part_of: PartOf, taken: Taken = taken_rows) -> PyTree:
    """A model, or a tree of such, with the rows of each stack as in `layer_rows`; padding is zero."""
    return _of_each_model(tree, part_of, lambda stacks, rows: to_rows(stacks, rows, taken))


def in_reading_order(tree: PyTree, part_of: PartOf, taken: Taken = taken_rows) -> PyTree:
    """What `in_pipeline_order` gave, back in the order in which the model is read."""
    return _of_each_model(tree, part_of, lambda stacks, rows: from_rows(stacks, rows, taken))


def to_rows(trees: Sequence[PyTree], rows: Sequence[Rows], taken: Taken = taken_rows) -> tuple[PyTree, ...]:
    """A tree of arrays with a `layers` dim in front for each stack, from reading order into that of `layer_rows`."""
    return tuple(_moved(tree, each.order, each.depth, taken) for tree, each in zip(trees, rows, strict=True))


def from_rows(trees: Sequence[PyTree], rows: Sequence[Rows], taken: Taken = taken_rows) -> tuple[PyTree, ...]:
    """Undoes `to_rows`."""
    return tuple(_moved(tree, each.back, len(each.order), taken) for tree, each in zip(trees, rows, strict=True))


def _moved(tree: PyTree, order: Int[np.ndarray, "rows"], there: int, taken: Taken) -> PyTree:
    def one(x: PyTree) -> PyTree:
        if not nn.has_shape(x):
            return x
        if x.shape[0] != there:
            raise ValueError(
                f"Plan.to_pipeline_order, Plan.to_reading_order: an array of layers has {there} rows where it is moved "
                f"from, but this one has {x.shape[0]}; each is for what the other gave, or a plain model."
            )
        return x if np.array_equal(order, np.arange(there)) else taken(x, order)

    return jax.tree.map(one, tree)


def _of_each_model(tree: PyTree, part_of: PartOf, move: Callable[[Sequence[PyTree], list[Rows]], tuple]) -> PyTree:
    """The tree with each model's stacks moved together, since one part may hold layers of two stacks."""

    def one(node: PyTree) -> PyTree:
        if isinstance(node, nn.Stack):
            return move((node,), layer_rows([node.depth], part_of))[0]
        if not isinstance(node, nn.Transformer) or not all(isinstance(stack, nn.Stack) for stack in node.stacks):
            return node
        depths = [stack.depth for stack in node.stacks]
        return eqx.tree_at(lambda m: m.stacks, node, move(node.stacks, layer_rows(depths, part_of)))

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, nn.Stack | nn.Transformer))


class Skipping(nn.Module):
    """A block of a stack of which some rows are padding: these compute nothing, and return their input."""

    inner: PyTree
    is_layer: Bool[Array, "*layers"]

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """The block's results or, for padding, `x` and `cache` as they are, with zeros for aux."""
        run = lambda: self.inner(x, tokens, cache)
        shapes = jax.eval_shape(run)
        typed = lambda tree: jax.tree.map(lambda y, like: vary(y, varying_axes(like) | {PIPE}), tree, shapes)
        nothing = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes[2])
        return jax.lax.cond(self.is_layer, lambda: typed(run()), lambda: typed((x, cache, nothing)))

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """The block's."""
        return self.inner.init_cache(batch, capacity, dtype)


def pass_over_padding(stacks: Sequence[Any], rows: Sequence[int], part_of: PartOf) -> tuple[Any, ...]:
    """This device's stacks, with `Skipping` around the blocks of each that has padding in its `rows` of all devices."""
    found, changed = layer_rows([stack.depth for stack in stacks], part_of), []
    for stack, number, each in zip(stacks, rows, found, strict=True):
        if number != each.depth:
            mine = jnp.asarray(each.is_layer.reshape(part_of.shape[0], -1))[jax.lax.axis_index(PIPE)]
            stack = eqx.tree_at(lambda s: s.blocks, stack, Skipping(stack.blocks, mine))
        changed.append(stack)
    return tuple(changed)
