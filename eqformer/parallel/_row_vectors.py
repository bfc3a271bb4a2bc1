"""Vectors of whole rows in a loss over a mesh: summed over a row's tokens, and gathered from all devices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import _collectives as send
from ._mesh import BATCH_AXES, CONTEXT, TENSOR
from ._shard_map import vary, varying_axes


def sum_row_vectors(x: Float[Array, "batch seq embed"]) -> tuple[Float[Array, "batch embed"], int]:
    """Return the sum over each row's tokens on all devices, and the number of devices that the row is split over.

    All devices that share a row compute the loss of its vector, so a loss divides by their number; gradients are then
    those of one device. Outside of `shard_map` these are the sums of `x`, and 1.
    """
    sums, devices = jnp.sum(x, axis=1), 1
    if CONTEXT in varying_axes(x):
        # As a varying value, the sum's gradient is added up over the devices that share the row.
        sums = vary(send.psum("row vectors", sums, CONTEXT), (CONTEXT,))
        devices = jax.lax.axis_size(CONTEXT)
    return replicate_rows(sums), devices


def replicate_rows(x: Float[Array, "batch *features"]) -> Float[Array, "batch *features"]:
    """Return values of rows that all devices of `tensor` have computed alike, typed as replicated over them.

    It is their mean, so that each device has its share of the gradient.
    """
    return send.pmean("row vectors over tensor", x, TENSOR) if TENSOR in varying_axes(x) else x


def gather_rows(x: Float[Array, "batch embed"]) -> tuple[Float[Array, "rows embed"], int | Int[Array, ""]]:
    """Return the rows of all devices that split the batch, and the index of this device's first row among them.

    The backward pass sums each row's gradients over the devices and returns them to the row's device. Outside of
    `shard_map` these are the rows of `x`, and 0.
    """
    axes = tuple(axis for axis in BATCH_AXES if axis in varying_axes(x))
    if not axes:
        return x, 0
    return send.all_gather("vectors of all rows", x, axes), jax.lax.axis_index(axes) * len(x)
