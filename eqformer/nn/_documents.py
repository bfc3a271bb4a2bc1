"""The document of each token in its row, for layers that depend on the order of tokens: convolutions, recurrences."""

import jax.numpy as jnp
from jaxtyping import Array, Int

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
