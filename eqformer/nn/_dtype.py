"""The dtype of reductions."""

import jax.numpy as jnp
import numpy as np


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """float32 for narrower floating-point dtypes, and any wider one itself."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype("float32")
