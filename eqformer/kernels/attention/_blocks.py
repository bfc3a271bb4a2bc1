"""The arrangement of arrays in the blockwise core: heads before tokens, queries grouped by key head, all in blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._dtype import at_least_float32
from ._positions import TokenPositions


def grouped(
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch kv_seq kv_heads head_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    tokens: TokenPositions,
    kv_tokens: TokenPositions | None,
) -> tuple[Array, Array, Array, TokenPositions, TokenPositions]:
    """Arrays for the loops: one batch dim, heads before tokens, queries grouped by the key head that they read."""
    heads, kv_heads = query.shape[-2], key.shape[-2]
    batch, seq, kv_seq = query.shape[:-3], query.shape[-3], key.shape[-3]
    queries = query.reshape(-1, seq, kv_heads, heads // kv_heads, query.shape[-1]).transpose(0, 2, 3, 1, 4)
    keys = key.reshape(-1, kv_seq, kv_heads, key.shape[-1]).transpose(0, 2, 1, 3)
    values = value.reshape(-1, kv_seq, kv_heads, value.shape[-1]).transpose(0, 2, 1, 3)
    places = _places(tokens, batch, seq)
    return queries, keys, values, places, places if kv_tokens is None else _places(kv_tokens, batch, kv_seq)


def ungrouped(
    output: Float[Array, "_ kv_heads group seq v_dim"], batch: tuple[int, ...]
) -> Float[Array, "*batch seq heads v_dim"]:
    """Rows of queries as `grouped` arranges them, put back."""
    _, kv_heads, group, seq, v_dim = output.shape
    return output.transpose(0, 3, 1, 2, 4).reshape(*batch, seq, kv_heads * group, v_dim)


def _places(tokens: TokenPositions, batch: tuple[int, ...], seq: int) -> TokenPositions:
    """Positions and segments with one batch dim, as the arrays have it."""
    read = lambda x: jnp.broadcast_to(x, (*batch, seq)).reshape(-1, seq)
    return TokenPositions(read(tokens.positions), None if tokens.segments is None else read(tokens.segments))


_WIDEST = 16


def cut(most: int, rows, columns, places: TokenPositions, kv_places: TokenPositions):
    """Arrays of queries and of keys in blocks of up to `most` tokens, and a zero for carries, typed as they are.

    For few queries, as in decoding, blocks of keys are larger (up to `_WIDEST` times), so that a pair of blocks has as
    many scores.
    """
    block = min(most, places.positions.shape[-1])
    kv_block = min(most * min(most // max(block, 1), _WIDEST), kv_places.positions.shape[-1])
    here, there = (
        TokenPositions(
            _blocks(part.positions, 1, size, -1), None if part.segments is None else _blocks(part.segments, 1, size)
        )
        for part, size in ((places, block), (kv_places, kv_block))
    )
    zero = jnp.zeros_like(columns[0], at_least_float32(columns[0].dtype), shape=())
    rows = jax.tree.map(lambda x: _blocks(x, 3, block), rows)
    return rows, jax.tree.map(lambda x: _blocks(x, 2, kv_block), columns), here, there, zero


def _blocks(array: Array, dim: int, block: int, fill: int = 0) -> Array:
    """`array` cut along `dim` into blocks, counted by a new first dim; the last one is filled up with `fill`."""
    count = -(-array.shape[dim] // block)
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, count * block - array.shape[dim])
    array = jnp.pad(array, widths, constant_values=fill)
    return jnp.moveaxis(array.reshape(*array.shape[:dim], count, block, *array.shape[dim + 1 :]), dim, 0)


def joined(array: Array, dim: int, length: int) -> Array:
    """Blocks counted by the first dim, put together again along `dim`, and its first `length` entries."""
    array = jnp.moveaxis(array, 0, dim)
    whole = array.shape[dim] * array.shape[dim + 1]  # no -1, which is unknown where there are no rows
    return jax.lax.slice_in_dim(array.reshape(*array.shape[:dim], whole, *array.shape[dim + 2 :]), 0, length, axis=dim)


def block_of(tree, number: Int[Array, ""]):
    """One block of each array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), tree)
