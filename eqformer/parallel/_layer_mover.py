"""Moving the layers of a training state between the order of the model and the rows of a pipeline's stages."""

from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ._placement import Placement
from .pipeline._stage_layers import TakeRows


ShardingsOf = Callable[[PyTree], PyTree]
"""A function from the shapes of a tree's arrays to their shardings."""


class LayerMover:
    """`Placement.shard` and `unshard` for large trees on the devices, such as a training state.

    The trees are donated, and one array is moved at a time, so there is never a second copy of more. Each program is
    compiled once, for all arrays of one sharding.
    """

    def __init__(self, plan: Placement):
        """Move layers as `plan` does."""
        self.plan = plan
        self._programs: dict[tuple[bool, NamedSharding], Callable[..., jax.Array]] = {}

    def shard(self, tree: PyTree, shardings_of: ShardingsOf) -> PyTree:
        """Return the tree as programs of the plan take it, with these shardings."""
        return self._move(tree, self.plan.shard, shardings_of)

    def unshard(self, tree: PyTree, shardings_of: ShardingsOf) -> PyTree:
        """Return the tree with the layers in the order of the model, with these shardings."""
        return self._move(tree, self.plan.unshard, shardings_of)

    def _move(self, tree: PyTree, move: Callable[[PyTree, TakeRows], PyTree], shardings_of: ShardingsOf) -> PyTree:
        arrays, static = eqx.partition(tree, eqx.is_array)
        orders = move(arrays, lambda x, order: order)  # An array that stays as it is stands for itself.
        if all(x is order for x, order in zip(jax.tree.leaves(arrays), jax.tree.leaves(orders), strict=True)):
            return tree
        moved_shapes = move(arrays, lambda x, order: jax.ShapeDtypeStruct((len(order), *x.shape[1:]), x.dtype))

        def move_array(x: jax.Array, order: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
            return x if x is order else self._take(x, np.asarray(order), sharding)

        return eqx.combine(jax.tree.map(move_array, arrays, orders, shardings_of(moved_shapes)), static)

    def _take(self, x: jax.Array, order: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """Return the rows of an array in an order, and donate the array; zeros for numbers beyond its last row."""
        keeps_length = len(order) == x.shape[0]
        if (key := (keeps_length, sharding)) not in self._programs:
            near = lambda x: jax.device_put(x, jax.memory.Space.Device)
            take = lambda x, order: near(x).at[order].get(mode="fill", fill_value=0)
            donated = (0,) if keeps_length else ()  # The memory of an array of another shape has no use.
            self._programs[key] = jax.jit(take, donate_argnums=donated, out_shardings=sharding)
        # Waiting keeps a single copy at a time; and simulated devices may run out of threads, see `take_layer_rows`.
        taken = jax.block_until_ready(self._programs[key](x, order))
        if not keeps_length:
            x.delete()
        return taken
