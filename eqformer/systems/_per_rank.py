"""A module for each device of a mesh axis, all of one structure."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree


class PerRank(eqx.Module):
    """Modules of one structure, one for each rank of a mesh axis, stacked along a new first dim.

    Shard the first dim over the axis (`PartitionSpec(axis)` for all leaves) and call inside `shard_map`: each device
    calls its own module. With `only`, the parameters of all other ranks are zero, as for a bias that is added before a
    sum over the axis.
    """

    modules: PyTree

    def __init__(
        self,
        make: Callable[[Key[Array, ""]], PyTree],
        ranks: int,
        *,
        only: int | None = None,
        key: Key[Array, ""],
    ):
        """Build the modules of all ranks in one trace.

        Args:
            make: Builds one module from a key.
            ranks: The number of ranks.
            only: The one rank whose parameters are not zero; None: all ranks.
            key: Split into one key for each rank.
        """
        if ranks < 1 or (only is not None and not 0 <= only < ranks):
            raise ValueError(
                f"PerRank(ranks={ranks}, only={only}): there must be at least 1 rank, and only must be None or one "
                "of 0 to ranks - 1."
            )
        modules = eqx.filter_vmap(make)(jax.random.split(key, ranks))

        def zero_other_ranks(x: PyTree) -> PyTree:
            if only is None or not eqx.is_inexact_array(x):
                return x
            return jnp.zeros_like(x).at[only].set(x[only])

        self.modules = jax.tree.map(zero_other_ranks, modules)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the module of this device."""
        return self.local_module()(*args, **kwargs)

    def local_module(self) -> PyTree:
        """Return the module of this device; call inside `shard_map`, over an axis with as many devices as ranks."""

        def take_rank(x: PyTree) -> PyTree:
            if not eqx.is_array(x):
                return x
            if x.shape[0] != 1:
                raise ValueError(
                    f"PerRank: a call needs one rank, but this device holds {x.shape[0]}; shard the first dim over "
                    f"an axis of {x.shape[0]} devices and call inside shard_map."
                )
            return x[0]

        return jax.tree.map(take_rank, self.modules)
