"""Pairs of a block of queries and a block of keys that may hold a visible pair of tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ._mask import Mask, OF_SOURCE
from ._positions import TokenPositions


def possible_pairs(mask: Mask, queries: TokenPositions, keys: TokenPositions) -> Bool[Array, "_ _"]:
    """Return whether each pair of a query block and a key block may hold a visible pair of tokens, by their ranges.

    The ranges are those of positions and segments, row by row, so that packed and shuffled rows are handled alike. A
    query sees keys of its own segment only, so the mask's rule for positions also holds for the order by (segment,
    position), which is the order of the tokens in a packed row. So blocks after the query's, or further back than the
    window, are excluded, though positions restart in each document.
    """
    is_packed = queries.segments is not None and keys.segments is not None
    (low, high), (kv_low, kv_high) = (_range(part.positions, part.positions) for part in (queries, keys))
    low, high, kv_low, kv_high = low[:, None], high[:, None], kv_low[None], kv_high[None]
    possible = (high >= 0) & (kv_high >= 0)
    if mask.chunk is not None:
        possible &= (low // mask.chunk <= kv_high // mask.chunk) & (kv_low // mask.chunk <= high // mask.chunk)
    (first, last), (kv_first, kv_last) = (_ends(part, is_packed) for part in (queries, keys))
    first, last = jax.tree.map(lambda x: x[:, None], (first, last))
    kv_first, kv_last = jax.tree.map(lambda x: x[None], (kv_first, kv_last))
    possible &= (first[0] <= kv_last[0]) & (kv_first[0] <= last[0])
    if mask.is_causal:
        possible &= _not_after(kv_first, last)
    for reach, ahead in ((mask.window, mask.ahead), (mask.chunk, None)):
        if reach is not None:
            possible &= _not_after(first, (kv_last[0], kv_last[1] + reach - 1))
            possible &= _not_after(kv_first, (last[0], last[1] + (ahead or reach) - 1))
    if mask.source:
        possible |= (high >= 0) & jnp.any(keys.positions == OF_SOURCE, axis=-1)[None]
    return jnp.any(possible, axis=-1)


def _ends(tokens: TokenPositions, is_packed: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return segment and position of the first and the last token of each block and row, by segment, then position."""
    positions = tokens.positions
    if not is_packed or tokens.segments is None:
        low, high = _range(positions, positions)
        return (jnp.zeros_like(low), low), (jnp.zeros_like(high), high)
    segments = tokens.segments
    first, last = _range(segments, positions)
    low, _ = _range(positions, jnp.where(segments == first[..., None], positions, -1))
    _, high = _range(positions, jnp.where(segments == last[..., None], positions, -1))
    return (first, low), (last, high)


def _not_after(left: tuple[Array, Array], right: tuple[Array, Array]) -> Bool[Array, "_ _ _"]:
    """Return whether the left (segment, position) is not after the right one."""
    return (left[0] < right[0]) | ((left[0] == right[0]) & (left[1] <= right[1]))


def _range(numbers: Int[Array, "_ batch _"], positions: Int[Array, "_ batch _"]) -> tuple[Array, Array]:
    """Return the least and the greatest number of each block and row, without padding."""
    real, most = positions >= 0, jnp.iinfo(numbers.dtype).max // 2
    return jnp.min(jnp.where(real, numbers, most), axis=-1), jnp.max(jnp.where(real, numbers, -most), axis=-1)


def spans(possible: Bool[Array, "_ _"]) -> tuple[Int[Array, "_"], Int[Array, "_"]]:
    """Return each row's first possible column and the column after its last; equal if no column is possible."""
    first = jnp.argmax(possible, axis=1)
    stop = possible.shape[1] - jnp.argmax(possible[:, ::-1], axis=1)
    return first, jnp.where(jnp.any(possible, axis=1), stop, first)
