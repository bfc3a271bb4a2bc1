"""Blocks of a fixed number of a document's tokens: the last token of each block, and the tokens in it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._tokens import Tokens


def find_ends(tokens: Tokens, size: int) -> tuple[Int[Array, "*batch blocks"], Int[Array, "*batch blocks"]]:
    """Return the index in the row and the position of the last token of each complete block of `size` tokens.

    The results are padded to the maximum number of blocks that a row can complete. Padding has position -1 and any
    index.
    """
    positions = tokens.positions
    # Rounded up, because a row that begins within a block may complete that block too.
    count = -(-positions.shape[-1] // size)
    completes = completes_block(positions, size)
    ends = jnp.argsort(~completes, axis=-1, stable=True)[..., :count].astype(jnp.int32)
    is_end = jnp.take_along_axis(completes, ends, axis=-1)
    return ends, jnp.where(is_end, jnp.take_along_axis(positions, ends, axis=-1), -1)


def completes_block(positions: Int[Array, "*batch seq"], size: int) -> Bool[Array, "*batch seq"]:
    """Return whether each token is the last of a block of `size` tokens."""
    return (positions >= 0) & ((positions + 1) % size == 0)


def find_block_tokens(
    tokens: Tokens, ends: Int[Array, "*batch blocks"], end_positions: Int[Array, "*batch blocks"], width: int
) -> tuple[Int[Array, "*batch blocks width"], Int[Array, "*batch blocks width"], Bool[Array, "*batch blocks width"]]:
    """Return the indices and positions of the `width` tokens up to each end, and whether each is present.

    A token is present if it is in the row and in the document of the end.
    """
    back = jnp.arange(width - 1, -1, -1, dtype=jnp.int32)
    rows, positions = ends[..., None] - back, end_positions[..., None] - back
    is_present = (rows >= 0) & (positions >= 0) & (take_block_rows(tokens.positions, rows) == positions)
    if tokens.segments is not None:
        documents = jnp.take_along_axis(tokens.segments, ends, axis=-1)
        is_present &= take_block_rows(tokens.segments, rows) == documents[..., None]
    return rows, positions, is_present


def take_block_rows(memory: Array, rows: Int[Array, "*batch blocks width"]) -> Array:
    """Return the entries of `memory` (`*batch seq ...`) at the rows; rows below 0 give the first entry."""
    batch = rows.ndim - 2
    flat_rows = jnp.maximum(rows, 0).reshape(*rows.shape[:-2], -1)
    taken = jnp.take_along_axis(memory, jnp.expand_dims(flat_rows, tuple(range(batch + 1, memory.ndim))), axis=batch)
    return taken.reshape(*rows.shape, *memory.shape[batch + 1 :])
