"""Blocks of equally many tokens of a document: their last tokens, and the tokens that belong to each."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._tokens import Tokens


def find_ends(tokens: Tokens, rate: int) -> tuple[Int[Array, "*batch blocks"], Int[Array, "*batch blocks"]]:
    """Return, for each token that completes a block of `rate` tokens, its index in its row and its position.

    The results have as many entries as a row can have such tokens; entries after the last have position -1.
    """
    positions = tokens.positions
    # A row that begins within a block completes it, and so may complete one block more than it has whole ones.
    count = -(-positions.shape[-1] // rate)
    completes = completes_block(positions, rate)
    ends = jnp.argsort(~completes, axis=-1, stable=True)[..., :count].astype(jnp.int32)
    is_end = jnp.take_along_axis(completes, ends, axis=-1)
    return ends, jnp.where(is_end, jnp.take_along_axis(positions, ends, axis=-1), -1)


def completes_block(positions: Int[Array, "*batch seq"], rate: int) -> Bool[Array, "*batch seq"]:
    """Return whether each token is the last of a block of `rate` tokens."""
    return (positions >= 0) & ((positions + 1) % rate == 0)


def find_block_tokens(
    tokens: Tokens, ends: Int[Array, "*batch blocks"], end_positions: Int[Array, "*batch blocks"], width: int
) -> tuple[Int[Array, "*batch blocks width"], Int[Array, "*batch blocks width"], Bool[Array, "*batch blocks width"]]:
    """Return the indices and positions of the `width` tokens up to each end, and whether each is in the row.

    A token that is in the row belongs to the document of the end.
    """
    back = jnp.arange(width - 1, -1, -1, dtype=jnp.int32)
    rows, positions = ends[..., None] - back, end_positions[..., None] - back
    in_row = (rows >= 0) & (positions >= 0) & (take_rows(tokens.positions, rows) == positions)
    if tokens.segments is not None:
        documents = jnp.take_along_axis(tokens.segments, ends, axis=-1)
        in_row &= take_rows(tokens.segments, rows) == documents[..., None]
    return rows, positions, in_row


def take_rows(memory: Array, rows: Int[Array, "*batch blocks width"]) -> Array:
    """Return the entries of `memory` (`*batch seq ...`) at the rows; rows below 0 give the first entry."""
    batch = rows.ndim - 2
    flat_rows = jnp.maximum(rows, 0).reshape(*rows.shape[:-2], -1)
    taken = jnp.take_along_axis(memory, jnp.expand_dims(flat_rows, tuple(range(batch + 1, memory.ndim))), axis=batch)
    return taken.reshape(*rows.shape, *memory.shape[batch + 1 :])
