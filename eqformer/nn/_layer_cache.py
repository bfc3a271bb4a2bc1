"""Caches that a stack hands to each of its layers as they are, and how a layer finds its own part of them."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax
from jaxtyping import Array, Int


class LayerCache(eqx.Module):
    """A cache that a layer of a stack is given whole, all layers', with its own number as `layer`.

    The layer reads and writes where its part lies: a slice would be copied out and back in each step.
    """

    if TYPE_CHECKING:  # an abstract variable would be taken for an argument of each constructor
        layer: Array | None = eqx.field(init=False)
    else:
        layer: eqx.AbstractVar[Int[Array, ""] | None]


def index_layer(memory: Array, layer: Int[Array, ""] | None) -> Array:
    """Of an array of a stack's cache the part of a layer, or all where there is no dim of layers."""
    return memory if layer is None else jax.lax.dynamic_index_in_dim(memory, layer, 0, keepdims=False)


def update_layer(memory: Array, part: Array, layer: Int[Array, ""] | None) -> Array:
    """An array of a stack's cache with another part of a layer, or this alone where there is no dim of layers."""
    return part if layer is None else jax.lax.dynamic_update_index_in_dim(memory, part, layer, 0)
