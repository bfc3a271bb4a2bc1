"""Reference collectives in numpy, and two collectives built from messages around a ring of neighbors.

A `reference_*` function takes the inputs of all devices of an axis, stacked along a new first dim, and returns their
outputs stacked in the same way.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ..parallel._ring import circulate, collect, Ring


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
    total = collect(Ring("ring", axis), x.shape[0] // devices, 0, take_part, x.dtype)
    return total if tiled else total[0]
