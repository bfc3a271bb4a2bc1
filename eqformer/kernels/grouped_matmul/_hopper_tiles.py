"""Work of a program on a Hopper GPU on one tile, in Pallas by Mosaic: copies, products, and copies back."""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


STEP = 64  # channels or rows that a product sums over at once: 128 bytes, as far as places in shared memory are mixed
ROWS = 8  # by which copies of tiles begin
_SHARED = 98304  # bytes of a program's tiles on their way, so that a multiprocessor has two programs


class Tile(NamedTuple):
    """The sizes of a piece of the result that one program computes."""

    rows: int
    columns: int

    @property
    def steps(self) -> int:
        """Return how many pieces of both factors are read or in flight."""
        return _SHARED // ((self.rows + self.columns) * STEP * 2)


def pallas() -> tuple[Any, Any]:
    """Pallas and its part for GPUs by Mosaic, which only programs for these need."""
    return tuple(map(importlib.import_module, ("jax.experimental.pallas", "jax.experimental.pallas.mosaic_gpu")))


def row_tiles(
    tile: Tile,
    is_transposed: bool,
    group_of: Any,
    begins: Any,
    starts: Any,
    counts: Any,
    number: Any,
    x: Any,
    weight: Any,
    y: Any,
) -> None:
    """The kernel of `times` and `back`: of each tile its rows by its group's matrix."""
    pl, plgpu = pallas()
    columns, inputs = y.shape[1] // tile.columns, x.shape[1]

    @plgpu.nd_loop((number[0] * columns,), collective_axes="program")
    def _(info: Any) -> None:
        place, column = in_panels(info.index[0], number[0], columns)
        group, begin, size = group_of[place], pl.multiple_of(begins[place], ROWS), counts[place]
        own = (tile.columns, STEP), lambda step: (column, step)
        own = own if is_transposed else (own[0][::-1], lambda step: (step, column))

        def step(_: Any, rows: Any, matrix: Any, *, total: Any) -> None:
            plgpu.wgmma(total, rows, matrix.transpose((1, 0)) if is_transposed else matrix)
            plgpu.wgmma_wait(1)  # what the product before this one read is overwritten next

        def sums(total: Any) -> Array:
            @pl.when(group < weight.shape[0])
            def _() -> None:
                specs = [((tile.rows, STEP), lambda step: (0, step)), own]
                plgpu.emit_pipeline(
                    functools.partial(step, total=total),
                    grid=(inputs // STEP,),
                    in_specs=[plgpu.BlockSpec(*spec, delay_release=1) for spec in specs],
                    max_concurrent_steps=tile.steps,
                )(x.at[pl.ds(begin, tile.rows), :], weight.at[group])

            return total[...]

        found = pl.run_scoped(sums, plgpu.ACC(tile))

        store_rows(found, y, starts[place] - begin, begin, size, column * tile.columns)


def store_rows(found: Array, y: Any, first: Array, begin: Array, size: Array, column: Array) -> None:
    """Store the rows of a tile's group, `size` from `first` on, in the result."""
    pl, plgpu = pallas()

    def store(written: Any) -> None:
        written[...] = found.astype(written.dtype)
        plgpu.commit_smem()
        _copy_rows(written, y, first, begin, size, column)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(store, plgpu.SMEM(found.shape, dtype=y.dtype))


def store_tile(found: Array, y: Any, group: Array, row: Array, column: Array) -> None:
    """Store a tile of a group's matrix in the result."""
    pl, plgpu = pallas()

    def store(written: Any) -> None:
        written[...] = found.astype(written.dtype)
        plgpu.commit_smem()
        into = (pl.ds(place * size, size) for place, size in zip((row, column), found.shape))
        plgpu.copy_smem_to_gmem(written, y.at[group, *into])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(store, plgpu.SMEM(found.shape, dtype=y.dtype, transforms=mixed_places(y.dtype)))


def _copy_rows(tile: Any, y: Any, first: Array, begin: Array, size: Array, column: Array) -> None:
    """A tile's own rows to their place: a copy has as many as it is compiled for, one of each power of two."""
    pl, plgpu = pallas()
    rows, columns = tile.shape
    for length in (1 << power for power in reversed(range(rows.bit_length()))):

        def copy(first: Array = first, length: int = length) -> None:
            into = pl.ds(begin + first, length), pl.ds(column, columns)
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(first, length)], y.at[into])

        pl.when(size & length != 0)(copy)
        first = first + (size & length)


def sum_of_rows(
    tile: Tile,
    number: tuple[int, int, int],
    starts: Any,
    ends: Any,
    firsts: Any,
    blocks: Any,
    gradient: Any,
    x: Any,
    y: Any,
) -> None:
    """The kernel of `outer`: tiles of each group's matrix, summed over the blocks that hold rows of the group."""
    pl, plgpu = pallas()
    mixed, (groups, *tiles) = mixed_places(gradient.dtype), number

    @plgpu.nd_loop((groups, tiles[0] * tiles[1]), collective_axes="program")
    def _(info: Any) -> None:
        group, (row, column) = info.index[0], in_panels(info.index[1], jnp.int32(tiles[0]), tiles[1])
        first = pl.multiple_of(firsts[group], STEP)

        def step(indices: Any, left: Any, right: Any, *, total: Any) -> None:
            begin = first + indices[0] * STEP
            low, high = starts[group] - begin, ends[group] - begin

            @pl.when((low > 0) | (high < STEP))  # others' rows
            def _() -> None:
                its = jax.lax.broadcasted_iota(jnp.int32, left.shape, 0)
                its = plgpu.layout_cast(its, plgpu.Layout.WGMMA)
                left[...] = jnp.where((its >= low) & (its < high), left[...], jnp.zeros((), left.dtype))
                plgpu.commit_smem()

            plgpu.wgmma(total, left.transpose((1, 0)), right)
            plgpu.wgmma_wait(1)

        def sums(total: Any) -> Array:
            @pl.when(blocks[group] > 0)
            def _() -> None:
                part = pl.ds(first, x.shape[0])  # behind the end nothing is read
                specs = [(tile.rows, lambda step: (step, row)), (tile.columns, lambda step: (step, column))]
                plgpu.emit_pipeline(
                    functools.partial(step, total=total),
                    grid=(blocks[group],),
                    in_specs=[plgpu.BlockSpec((STEP, n), to, delay_release=1, transforms=mixed) for n, to in specs],
                    max_concurrent_steps=tile.steps,
                )(gradient.at[part, :], x.at[part, :])

            return total[...]

        found = pl.run_scoped(sums, plgpu.ACC(tile))

        store_tile(found, y, group, row, column)


def in_panels(index: Array, rows: Array, columns: int) -> tuple[Array, Array]:
    """A tile's row and column, panel by panel of up to 16 columns, so that programs at work share what they read."""
    wide = max(width for width in range(1, 17) if columns % width == 0)
    inside, panel = jax.lax.rem(index, rows * wide), jax.lax.div(index, rows * wide)
    return jax.lax.div(inside, jnp.int32(wide)), panel * wide + jax.lax.rem(inside, jnp.int32(wide))


def mixed_places(dtype: Any) -> tuple[Any, ...]:
    """Return the layout of a tile in shared memory for tensor cores: rows of 128 bytes, swizzled by eights."""
    plgpu = pallas()[1]
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)
