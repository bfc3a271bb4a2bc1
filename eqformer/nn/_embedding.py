"""Token embeddings, tied unembedding, and learned positions."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._array_checks import checked
from ._dtype import lookup_rows, matmul_float32
from ._model_contracts import PositionEmbedding, TokenEmbedding


class Embedding(TokenEmbedding):
    """A table with a vector for each token id, for lookup and, if tied, for the logits.

    `scale` multiplies looked-up vectors (Gemma: `sqrt(embed)`). An id outside the table gives NaN, never a neighbour.
    """

    weight: Float[Array, "vocab embed"]
    scale: float | None = eqx.field(static=True)

    def __init__(self, *, vocab: int, embed: int, std: float = 0.02, scale: float | None = None, key: Key[Array, ""]):
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
    """A table with a vector for each position, added to the embeddings (GPT-2); NaN for positions outside the table."""

    weight: Float[Array, "max_seq embed"]

    def __init__(self, *, max_seq: int, embed: int, std: float = 0.01, key: Key[Array, ""]):
        self.weight = std * jax.random.normal(key, (max_seq, embed), jnp.float32)

    @property
    def max_seq(self) -> int:
        """The number of positions in the table."""
        return self.weight.shape[0]

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up one vector a position; padding, at position -1, gets the first."""
        return lookup_rows(self.weight, jnp.maximum(positions, 0))


@checked
def unembed(x: Float[Array, "*batch embed"], weight: Float[Array, "vocab embed"]) -> Float[Array, "*batch vocab"]:
    """`x W^T` with products in the dtype of `x` and sums, and so logits, in float32 at least; gradients likewise."""
    return matmul_float32(x, weight)
