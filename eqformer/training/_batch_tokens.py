"""What layers read of a batch beside its ids."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from .._array_checks import checked
from .._shapes import Batch
from ..nn import packed_in_order, positions_like, Source, token_keys, Tokens, with_source


@checked
def batch_tokens(batch: Batch, key: Key[Array, ""] | None = None) -> Tokens:
    """The `Tokens` that layers read: positions, documents, a source and, given a `key`, a random key for each token.

    A token's random key depends on its example and its place in the row, not on its position, since positions restart
    in each packed document.
    """

    def keys_of(shape: tuple[int, ...]) -> Key[Array, "batch seq"] | None:
        places = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return None if key is None else token_keys(key, jnp.asarray(batch.examples), places)

    tokens = _tokens(batch.positions, batch.segments, keys_of(batch.ids.shape), batch.ids.shape, batch.documents)
    if batch.source_ids is None:
        return tokens
    shape = batch.source_ids.shape
    read = _tokens(batch.source_positions, batch.source_segments, keys_of(shape), shape, None)
    return with_source(tokens, Source(jnp.asarray(batch.source_ids), read))


def _tokens(positions: Any, segments: Any, keys: Any, shape: tuple[int, ...], documents: int | None) -> Tokens:
    if positions is None:
        return positions_like(shape, keys)
    positions = jnp.asarray(positions)
    if segments is None:
        return Tokens(positions, None, keys)
    segments = jnp.asarray(segments)
    if documents is None:
        return Tokens(positions, segments, keys)
    return packed_in_order(positions, segments, keys, documents=documents)
