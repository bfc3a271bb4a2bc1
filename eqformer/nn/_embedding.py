"""Token embeddings, tied unembedding, and learned positions."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._array_checks import checked
from ._dtype import lookup_rows, matmul_float32
from ._module import Module


class Embedding(Module):
    """A table with a vector for each token id, for lookup and, if tied, for the logits.

    `scale` multiplies looked-up vectors (Gemma: `sqrt(embed)`). An id outside the table gives NaN, never a neighbour.
    """

    weight: Float[Array, "vocab embed"]
    scale: float | None = eqx.field(static=True)

    def __init__(self, *, vocab: int, embed: int, std: float = 0.02, scale: float | None = None, key: Key[Array, ""]):
        self.weight = std * jax.random.normal(key, (vocab, embed), jnp.float32)
        self.scale = scale

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up one vector a token."""
        x = lookup_rows(self.weight, ids)
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits by the same table (Press and Wolf 2017), accumulated in float32 at least."""
        return unembed(x, self.weight)


class LearnedPositions(Module):
    """A table with a vector for each position, added to the embeddings (GPT-2); NaN for positions outside the table."""

    weight: Float[Array, "max_seq embed"]

    def __init__(self, *, max_seq: int, embed: int, std: float = 0.01, key: Key[Array, ""]):
        self.weight = std * jax.random.normal(key, (max_seq, embed), jnp.float32)

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up one vector a position; padding, at position -1, gets the first."""
        return lookup_rows(self.weight, jnp.maximum(positions, 0))


@checked
def unembed(x: Float[Array, "*batch embed"], weight: Float[Array, "vocab embed"]) -> Float[Array, "*batch vocab"]:
    """`x W^T` with products in the dtype of `x` and sums, and so logits, in float32 at least; gradients likewise."""
    return matmul_float32(x, weight)
