"""A module of which each device of an axis has an instance of its own."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree


class PerRank(eqx.Module):
    """`ranks` modules, each made with a key of its own, stacked along a new first dim: one for each device.

    Split over an axis along that dim (`PartitionSpec(axis)` for the whole module), each device calls its own module
    inside `shard_map`. With `only`, the parameters of all other ranks are zero, as for a bias that is added before a
    sum over the axis.
    """

    modules: PyTree

    def __init__(
        self,
        make: Callable[[Key[Array, ""]], Any],
        ranks: int,
        *,
        only: int | None = None,
        key: Key[Array, ""],
    ):
        """Build `make(key)` for `ranks` keys, in one trace."""
        if ranks < 1 or (only is not None and not 0 <= only < ranks):
            raise ValueError(
                f"PerRank(ranks={ranks}, only={only}): `only` is one of 0 to ranks - 1, of at "
                "least one rank; change either."
            )
        modules = eqx.filter_vmap(make)(jax.random.split(key, ranks))

        def keep(x: PyTree) -> PyTree:
            if only is None or not eqx.is_inexact_array(x):
                return x
            return jnp.zeros_like(x).at[only].set(x[only])

        self.modules = jax.tree.map(keep, modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of this device's own module."""
        return self.own()(*args, **kwargs)

    def own(self) -> PyTree:
        """This device's module; inside `shard_map`, over an axis of as many devices as ranks."""

        def one(x: PyTree) -> PyTree:
            if not eqx.is_array(x):
                return x
            if x.shape[0] != 1:
                raise ValueError(
                    f"PerRank: a call needs one rank, but {x.shape[0]} are here; split the arrays' first dim "
                    f"over an axis of {x.shape[0]} devices and call inside shard_map."
                )
            return x[0]

        return jax.tree.map(one, self.modules)
