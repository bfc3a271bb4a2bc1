"""Every device of an axis hands what it holds to the next one."""

import jax
from jaxtyping import PyTree


def shift(tree: PyTree, axis: str, *, is_branched: bool = False) -> PyTree:
    """Each array of the device before this one along `axis`, the last device's on the first.

    `is_branched` says that the call stands in a branch that not all devices take, such as a pipeline's. XLA's CPU
    devices meet all at once for a permute, whatever its pairs, and would wait for ever for those that did not take the
    branch. There, and only on such devices, the pieces are gathered instead and one is kept.
    """
    size = jax.lax.axis_size(axis)
    pairs = [(place, (place + 1) % size) for place in range(size)]
    permuted = lambda x: jax.lax.ppermute(x, axis, pairs)

    def gathered(x: jax.Array) -> jax.Array:
        before = (jax.lax.axis_index(axis) - 1) % size
        return jax.lax.dynamic_index_in_dim(jax.lax.all_gather(x, axis), before, keepdims=False)

    if not is_branched:
        return jax.tree.map(permuted, tree)
    return jax.tree.map(lambda x: jax.lax.platform_dependent(x, cpu=gathered, default=permuted), tree)
