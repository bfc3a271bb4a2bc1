"""Reference collectives in numpy, collectives built from messages around a ring, and a module for each device.

A `reference_*` function takes the inputs of all devices of an axis, stacked along a new first dim, and returns their
outputs stacked in the same way.
"""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree, Shaped

from ..parallel._ring import circulate, Ring, ring_reduce_scatter


Pieces = Shaped[np.ndarray, "devices ..."]


def reference_psum(pieces: Pieces) -> Pieces:
    """Return the sum of all pieces on every device."""
    return np.broadcast_to(pieces.sum(axis=0), pieces.shape)


def reference_all_gather(pieces: Pieces, *, tiled: bool = False) -> Pieces:
    """Return all pieces on every device: stacked or, with `tiled`, concatenated along their first dim."""
    gathered = np.concatenate(pieces) if tiled else pieces
    return np.broadcast_to(gathered, (len(pieces), *gathered.shape))


def reference_psum_scatter(pieces: Pieces, *, tiled: bool = False) -> Pieces:
    """Return part `i` of the sum on device `i`: one entry of the first dim or, with `tiled`, one slice of it."""
    total = pieces.sum(axis=0)
    return total.reshape(len(pieces), -1, *total.shape[1:]) if tiled else total


def reference_ppermute(pieces: Pieces, pairs: Sequence[tuple[int, int]]) -> Pieces:
    """Send the piece of each pair's first device to its second; a device that receives nothing gets zeros."""
    results = np.zeros_like(pieces)
    for source, destination in pairs:
        results[destination] = pieces[source]
    return results


def reference_all_to_all(pieces: Pieces, *, tiled: bool = False) -> Pieces:
    """Return part `i` of every piece on device `i`, in device order: a transpose of devices and first dim."""
    parts = pieces.reshape(len(pieces), len(pieces), -1, *pieces.shape[2:]) if tiled else pieces
    return parts.swapaxes(0, 1).reshape(pieces.shape)


def ring_all_gather(x: Float[Array, "..."], axis: str, *, tiled: bool = False) -> Float[Array, "..."]:
    """Compute `jax.lax.all_gather` as a ring: each device sends `n-1` messages of one piece to the next device."""
    piece = x if tiled else x[None]
    gathered = jnp.zeros((jax.lax.axis_size(axis) * piece.shape[0], *piece.shape[1:]), x.dtype)
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return circulate(Ring("ring", axis), piece, 0, write, gathered)


def ring_psum_scatter(x: Float[Array, "..."], axis: str, *, tiled: bool = False) -> Float[Array, "..."]:
    """Compute `jax.lax.psum_scatter` as a ring: partial sums travel to their owner in `n-1` messages of one part.

    Raises a `ValueError` if the devices do not divide the first dim.
    """
    devices = jax.lax.axis_size(axis)
    if x.shape[0] % devices or not (tiled or x.shape[0] == devices):
        fix = f"a multiple of {devices}" if tiled else f"{devices}, or pass tiled=True"
        raise ValueError(
            f"ring_psum_scatter(tiled={tiled}): the first dim of x is {x.shape[0]} and {axis!r} has {devices} devices; "
            f"make the dim {fix}."
        )
    take_part = functools.partial(jax.lax.dynamic_slice_in_dim, x, axis=0)
    total = ring_reduce_scatter(Ring("ring", axis), x.shape[0] // devices, 0, take_part, x.dtype)
    return total if tiled else total[0]


class PerRank(eqx.Module):
    """Modules of one structure, one for each rank of a mesh axis, stacked along a new first dim.

    Shard the first dim over the axis (`PartitionSpec(axis)` for all leaves) and call inside `shard_map`: each device
    calls its own module. With `only`, the parameters of all other ranks are zero. A bias that is added before a sum
    over the axis needs this, because the sum would otherwise count the bias once for each rank.
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
                f"PerRank(ranks={ranks}, only={only}): there must be at least 1 rank, and only must be None or a "
                "number from 0 to ranks - 1."
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
