"""Sums over the tokens of rows that the axis `context` cuts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import _send as send
from .._axes import CONTEXT
from .._vary import varying_axes


def row_sums(x: Float[Array, "batch seq"]) -> tuple[Float[Array, "batch"], int]:
    """The sum over each row's tokens, wherever they are, and over how many devices the row is cut.

    Outside of `shard_map` these are the sums of `x`, and 1.
    """
    sums = jnp.sum(x, axis=-1)
    if CONTEXT not in varying_axes(x):
        return sums, 1
    return send.psum("sums of rows", sums, CONTEXT), jax.lax.axis_size(CONTEXT)
