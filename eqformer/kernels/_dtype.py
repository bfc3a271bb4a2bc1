"""The dtype in which kernels accumulate sums."""

import jax.numpy as jnp
import numpy as np


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """Return float32 for a narrower floating-point dtype, and the dtype itself otherwise."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype("float32")
