"""The meaning of each collective, in numpy; and two of them implemented by messages between neighbours.

A `reference_*` function takes the pieces of all devices of an axis, stacked along a new first dim, and returns their
results stacked in the same way.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ._ring import circulate, collect, Ring


Pieces = Shaped[np.ndarray, "devices ..."]


def reference_psum(pieces: Pieces) -> Pieces:
    """Every device gets the sum."""
    return np.broadcast_to(pieces.sum(axis=0), pieces.shape)


def reference_all_gather(pieces: Pieces, *, tiled: bool = False) -> Pieces:
    """Every device gets all pieces: stacked, or `tiled`, joined along their first dim."""
    whole = np.concatenate(pieces) if tiled else pieces
    return np.broadcast_to(whole, (len(pieces), *whole.shape))


def reference_psum_scatter(pieces: Pieces, *, tiled: bool = False) -> Pieces:
    """Device `i` gets part `i` of the sum, whose first dim has one entry a device or, `tiled`, a slice a device."""
    total = pieces.sum(axis=0)
    return total.reshape(len(pieces), -1, *total.shape[1:]) if tiled else total


def reference_ppermute(pieces: Pieces, pairs: Sequence[tuple[int, int]]) -> Pieces:
    """The second of each pair gets the piece of the first; a device that is sent nothing gets zeros."""
    results = np.zeros_like(pieces)
    for source, destination in pairs:
        results[destination] = pieces[source]
    return results


def reference_all_to_all(pieces: Pieces, *, tiled: bool = False) -> Pieces:
    """Device `i` gets part `i` of each piece, in the order of their devices: a transpose over devices and first dim."""
    parts = pieces.reshape(len(pieces), len(pieces), -1, *pieces.shape[2:]) if tiled else pieces
    return parts.swapaxes(0, 1).reshape(pieces.shape)


def ring_all_gather(x: Float[Array, "..."], axis: str, *, tiled: bool = False) -> Float[Array, "..."]:
    """`jax.lax.all_gather` by passing pieces on to the next device: `n-1` messages of one piece each."""
    piece = x if tiled else x[None]
    whole = jnp.zeros((jax.lax.axis_size(axis) * piece.shape[0], *piece.shape[1:]), x.dtype)
    write = lambda whole, part, start: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0)
    return circulate(Ring("ring", axis), piece, 0, write, whole)


def ring_psum_scatter(x: Float[Array, "..."], axis: str, *, tiled: bool = False) -> Float[Array, "..."]:
    """`jax.lax.psum_scatter` by passing sums on towards their owner: `n-1` messages of one part each.

    Raises a `ValueError` where the first dim has no equal part for each device.
    """
    devices = jax.lax.axis_size(axis)
    if x.shape[0] % devices or not (tiled or x.shape[0] == devices):
        fix = f"a multiple of {devices}" if tiled else f"{devices}, or say tiled=True"
        raise ValueError(
            f"ring_psum_scatter(tiled={tiled}): the first dim of x is {x.shape[0]} and {axis!r} has {devices} devices; "
            f"make the dim {fix}."
        )
    part = lambda start, length: jax.lax.dynamic_slice_in_dim(x, start, length, 0)
    total = collect(Ring("ring", axis), x.shape[0] // devices, 0, part, x.dtype)
    return total if tiled else total[0]
