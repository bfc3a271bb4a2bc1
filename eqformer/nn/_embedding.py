"""Token embeddings with tied logits, and learned position embeddings."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._array_checks import checked
from ._dtype import lookup_rows, matmul_float32
from ._model_contracts import PositionEmbedding, TokenEmbedding


class Embedding(TokenEmbedding):
    """A table with a vector for each token id, for lookup and, if the head is tied to it, for the logits.

    Looked-up vectors are multiplied by `scale` (Gemma: `sqrt(embed)`). The vector of an id outside the table is NaN.
    """

    weight: Float[Array, "vocab embed"]
    scale: float | None = eqx.field(static=True)

    def __init__(self, *, vocab: int, embed: int, std: float = 0.02, scale: float | None = None, key: Key[Array, ""]):
        """Draw the table with standard deviation `std`."""
        self.weight = std * jax.random.normal(key, (vocab, embed), jnp.float32)
        self.scale = scale

    @property
    def has_transform(self) -> bool:
        """Whether vectors are scaled."""
        return self.scale is not None

    def transform(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Scale the vectors of a lookup."""
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)


class LearnedPositions(PositionEmbedding):
    """A table with a vector for each position, added to the token embeddings (GPT-2).

    The vector of a position outside the table is NaN.
    """

    weight: Float[Array, "max_seq embed"]

    def __init__(self, *, max_seq: int, embed: int, std: float = 0.01, key: Key[Array, ""]):
        """Draw the table with standard deviation `std`."""
        self.weight = std * jax.random.normal(key, (max_seq, embed), jnp.float32)

    @property
    def max_seq(self) -> int:
        """The number of positions in the table."""
        return self.weight.shape[0]

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up the vector of each position; padding, at position -1, gets the first vector."""
        return lookup_rows(self.weight, jnp.maximum(positions, 0))


@checked
def unembed(x: Float[Array, "*batch embed"], weight: Float[Array, "vocab embed"]) -> Float[Array, "*batch vocab"]:
    """Return `x W^T`: products in the dtype of `x`, sums and logits in float32 at least; the same for gradients."""
    return matmul_float32(x, weight)
