"""The document of each token in its row, for layers that depend on the order of tokens: convolutions, recurrences."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ._tokens import Tokens


def documents_of(tokens: Tokens, shape: tuple[int, ...]) -> Int[Array, "*batch seq"]:
    """The documents of each row, numbered in order; number 0 continues the document in the cache.

    A document begins at position 0, and where the segment differs from the previous token's. Padding belongs to the
    document before it.
    """
    positions = jnp.broadcast_to(tokens.positions, shape)
    begins = positions == 0
    if tokens.segments is not None:
        segments = jnp.broadcast_to(tokens.segments, shape)
        begins |= jnp.pad(segments[..., 1:] != segments[..., :-1], [(0, 0)] * (len(shape) - 1) + [(1, 0)])
    return jnp.cumsum(begins & (positions >= 0), axis=-1, dtype=jnp.int32)


def continues(positions: Int[Array, "*batch seq"], lengths: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
    """Whether a row's first token is the next of those that a cache has read, or padding; another has no past."""
    first = positions[..., 0]
    return (first < 0) | (first == lengths)


def lengths_after(positions: Int[Array, "*batch seq"], lengths: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
    """The positions of the rows' next tokens after these; as before where all are padding."""
    last = jnp.max(positions, axis=-1).astype(jnp.int32)
    return jnp.where(last >= 0, last + 1, lengths)
