"""Attention that sharpens with the position of the query, for rows longer than those of training."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._dtype import at_least_float32
from .._module import Module


class LogTemperature(Module):
    """`1 + strength * log(1 + floor((position + offset) / every))`, which multiplies a query.

    Over longer rows a softmax spreads its weight over more keys; scores that grow with the logarithm of their number
    keep it where it was (Nakanishi 2025, arXiv:2501.19399). Below position `every - offset` nothing changes. Llama
    4 counts tokens (`offset=1`), Ministral 3 positions (`offset=0`).
    """

    every: int = eqx.field(static=True)
    strength: float = eqx.field(static=True)
    offset: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        if self.every < 1:
            raise ValueError(f"LogTemperature(every={self.every}): every counts tokens and must be at least 1.")

    def __call__(
        self, positions: Int[Array, "*batch seq"], dtype: DTypeLike = jnp.float32
    ) -> Float[Array, "*batch seq"]:
        """The factor of each token's query, in this dtype, or in float32 instead of a narrower one."""
        steps = (positions + self.offset) // self.every
        return 1 + self.strength * jnp.log1p(steps.astype(at_least_float32(jnp.dtype(dtype))))
