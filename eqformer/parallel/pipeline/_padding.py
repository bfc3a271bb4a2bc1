"""Stages of unequal numbers of layers: all devices hold equally many rows of a stack, and skip those of padding."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ... import nn
from .._axes import PIPE
from .._vary import vary, varying_axes
from ._depth import layer_rows, PartOf


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
