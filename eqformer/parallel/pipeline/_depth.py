"""How layers fall into the parts of a pipeline."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PyTree

from ... import nn


Placement = Int[np.ndarray, "stages chunks"]  # which part of the model each chunk of a device is
Taken = Callable[[Any, np.ndarray], Any]  # the entries of an array along its first dim, in an order


def check_depth(layers: int, stages: int, chunks: int = 1) -> None:
    """A `ValueError` that names the nearest depths, unless `layers` divide evenly into `stages * chunks` parts."""
    parts = stages * chunks
    if layers < parts or layers % parts:
        below, above = layers // parts * parts, (layers // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        wrong = f"{layers % parts} would be left over" if below else "there are more parts than layers"
        raise ValueError(
            f"check_depth(layers={layers}, stages={stages}, chunks={chunks}): each of the {parts} parts holds equally "
            f"many layers of the stack (a period or block of several counts once), but {wrong}; take {nearest} layers, "
            "or other stages or chunks."
        )


def layer_order(layers: int, part_of: Placement) -> Int[np.ndarray, "layers"]:
    """The order in which layers lie on the devices of a schedule: device after device, each with its chunks in turn.

    `array[layer_order(layers, schedule.part_of)]`, split evenly over the devices, gives each its layers; `argsort` of
    it goes back.
    """
    check_depth(layers, *part_of.shape)
    return np.arange(layers).reshape(part_of.size, -1)[part_of].reshape(-1)


def in_ring_order(tree: PyTree, part_of: Placement, taken: Taken = operator.getitem) -> PyTree:
    """The tree with every array that has a `layers` dim in front in `layer_order`."""
    return _with_layers(tree, ring_mover(part_of, taken))


def in_reading_order(tree: PyTree, part_of: Placement, taken: Taken = operator.getitem) -> PyTree:
    """What `in_ring_order` gave, back in the order in which the model is read."""
    return _with_layers(tree, reading_mover(part_of, taken))


def ring_mover(part_of: Placement, taken: Taken = operator.getitem) -> Callable[[Any], Any]:
    """Puts an array's layers in the order of the ring; an array that is in it already stays as it is."""
    return lambda x: _moved(x, layer_order(x.shape[0], part_of), taken)


def reading_mover(part_of: Placement, taken: Taken = operator.getitem) -> Callable[[Any], Any]:
    """Undoes `ring_mover`."""
    return lambda x: _moved(x, np.argsort(layer_order(x.shape[0], part_of)), taken)


def _moved(x: Any, order: Int[np.ndarray, "layers"], taken: Taken) -> Any:
    return x if np.all(np.diff(order) == 1) else taken(x, order)


def _with_layers(tree: PyTree, move: Callable[[Any], Any]) -> PyTree:
    is_layers = lambda names, x: nn.has_shape(x) and names.startswith("layers")
    return jax.tree.map(lambda names, x: move(x) if is_layers(names, x) else x, nn.dims(tree), tree)
