"""The dtype in which sums, moments and norms are kept: float32 at least."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def widened(tree: PyTree) -> PyTree:
    """The tree with its bfloat16 and float16 arrays cast to float32; wider ones stay."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x, tree)
