"""Work of a TPU on tiles of sorted rows, in Pallas by Mosaic: the rows of one group after another.

Rows lie in tiles of equal height, and a tile is visited for each group that has rows in it. A visit multiplies the
group's own rows, in pieces of one of few heights, for each of which the kernel has a product: of what they need, at
most fifteen rows before and what is missing to the next height are computed beside.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


ROWS = 16  # by which pieces begin: the rows of a register of bfloat16
HEIGHTS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # of pieces; a whole tile is one more
_COLUMNS = 256  # of a piece's product at once, so that programs of many heights stay short: the width of wide units


class Visits(NamedTuple):
    """Which rows of which tile belong to a group, `low` to `high`, counted from the tile's first."""

    group: Int[Array, "visits"]
    tile: Int[Array, "visits"]
    low: Int[Array, "visits"]
    high: Int[Array, "visits"]
    is_first: Int[Array, "visits"]
    """Whether it is the group's first."""
    is_last: Int[Array, "visits"]


def pallas() -> tuple[Any, Any]:
    """Pallas and its part for TPUs, which only programs for these need."""
    return tuple(map(importlib.import_module, ("jax.experimental.pallas", "jax.experimental.pallas.tpu")))


def visits_of(
    sizes: Int[Array, "groups"], rows: int, tile: int, *, each: bool = False
) -> tuple[Visits, Int[Array, ""]]:
    """The visits in the order of the rows, and how many are used; with `each`, groups of no rows have one too."""
    tiles, groups = rows // tile, len(sizes)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    first = jnp.minimum(starts // tile, tiles - 1)
    count = jnp.where(sizes > 0, (ends - 1) // tile - first + 1, int(each))
    last = jnp.cumsum(count, dtype=jnp.int32)
    number = jnp.arange(tiles + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(number[:, None] >= last, axis=1, dtype=jnp.int32), groups - 1)
    place = number - (last - count)[group]
    at = jnp.minimum(first[group] + place, tiles - 1)
    low, high = (jnp.clip(border[group] - at * tile, 0, tile) for border in (starts, ends))
    edges = place == 0, place == count[group] - 1
    return Visits(group, at, low, high, *(edge.astype(jnp.int32) for edge in edges)), last[-1]


def row_tiles(transposed: bool, inputs: int, *refs: Any) -> None:
    """The kernel of `times` and `back`: of each visit its rows by its group's matrix, `inputs` of it in all."""
    pl, _ = pallas()
    visits, (x, weight, y, *sums) = Visits(*refs[:6]), refs[6:]
    step, (tile, columns), own = pl.program_id(2), y.shape, x.shape[1]
    low, high, steps = visits.low[pl.program_id(1)], visits.high[pl.program_id(1)], -(-inputs // own)

    def product(rows: Any, width: int, place: Any, low: Array, high: Array) -> None:
        part = pl.ds(place, width)
        left, right = x[rows, :], weight[part, :] if transposed else weight[:, part]
        if inputs % own:  # what lies behind the last channel is not theirs
            left, right = (_before(inputs - step * own, *one) for one in ((left, 1), (right, int(transposed))))
        dims = (((1,), (int(transposed),)), ((), ()))
        value = jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
        if sums:
            value += jnp.where(step == 0, 0, sums[0][rows, part])
            sums[0][rows, part] = value

        @pl.when(step == steps - 1)
        def _() -> None:
            inside = _rows(rows, value.shape, low, high)
            y[rows, part] = jnp.where(inside, value, y[rows, part].astype(jnp.float32)).astype(y.dtype)

    def piece(rows: Any, low: Array, high: Array) -> None:
        width = _COLUMNS if rows.size < tile and columns % _COLUMNS == 0 else columns
        if width == columns:
            return product(rows, width, 0, low, high)
        one = lambda number, _: product(rows, width, pl.multiple_of(number * width, width), low, high)
        jax.lax.fori_loop(0, columns // width, one, None)

    _in_pieces(tile, low, high, piece)


def sum_of_rows(*refs: Any) -> None:
    """The kernel of `outer`: a tile of each group's matrix, summed over its visits."""
    pl, _ = pallas()
    visits, (gradient, x, y, total) = Visits(*refs[:6]), refs[6:]
    at = pl.program_id(2)

    @pl.when(visits.is_first[at] == 1)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def piece(rows: Any, low: Array, high: Array) -> None:
        left = gradient[rows, :]
        left = jnp.where(_rows(rows, left.shape, low, high), left.astype(jnp.float32), 0).astype(left.dtype)
        dims = (((0,), (0,)), ((), ()))
        total[...] += jax.lax.dot_general(left, x[rows, :], dims, preferred_element_type=jnp.float32)

    _in_pieces(gradient.shape[0], visits.low[at], visits.high[at], piece)

    @pl.when(visits.is_last[at] == 1)
    def _() -> None:
        y[...] = total[...].astype(y.dtype)


def heights_of(tile: int) -> tuple[int, ...]:
    """The heights that pieces of a tile may have, but for the whole."""
    return tuple(height for height in HEIGHTS if height < tile) or (tile,)


def _in_pieces(tile: int, low: Array, high: Array, piece: Callable[[Any, Array, Array], None]) -> None:
    """The rows of a visit: all of a tile at once, or else in pieces of the largest height and one of the rest."""
    pl, _ = pallas()
    heights, is_whole = heights_of(tile), (low == 0) & (high == tile)
    first = low & -ROWS

    @pl.when(is_whole)
    def _() -> None:
        piece(pl.ds(0, tile), low, high)

    def one(number: Array, _: None) -> None:
        begin = first + number * heights[-1]
        end = jnp.minimum(high, begin + heights[-1])
        for before, height in zip((0, *heights), heights):

            @pl.when((end - begin > before) & (end - begin <= height))
            def _(height: int = height) -> None:
                start = pl.multiple_of(jnp.minimum(begin, tile - height), ROWS)
                piece(pl.ds(start, height), jnp.maximum(low, begin), end)

    number = jax.lax.div(high - first + heights[-1] - 1, jnp.int32(heights[-1]))
    jax.lax.fori_loop(0, jnp.where(is_whole | (high <= low), 0, number), one, None)


def _rows(rows: Any, shape: tuple[int, ...], low: Array, high: Array) -> Array:
    """Which of some rows lie between two."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + rows.start
    return (row >= low) & (row < high)


def _before(end: Array, array: Array, axis: int) -> Array:
    """Zeros from a place of an axis on."""
    is_its = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis) < end
    return jnp.where(is_its, array.astype(jnp.float32), 0).astype(array.dtype)
