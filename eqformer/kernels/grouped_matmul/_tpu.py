"""Grouped matrix products on TPUs: Pallas (Mosaic) kernels.

XLA's own ragged products copy the weights when they contract the weights' last dim. For weight gradients, XLA
multiplies every row once per group, so the work is multiplied by the number of groups. JAX's megablox kernels, on which
these kernels are based, avoid both costs, but compute a whole tile for each group that has rows in the tile. The
kernels of this file compute only the rows of the group, in pieces that may begin and end inside a tile.

Rows are in tiles of equal height in vector memory (VMEM). A tile is visited once for each group that has rows in the
tile. A visit multiplies the group's rows in pieces. A piece has one of a few heights, and the kernel contains one
matrix product per height. A visit computes few extra rows: at most fifteen before the group's first row, for alignment,
and as many as the last piece needs to reach the next height.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._platform import Ref, varying_of
from ._call import GroupedMatmul, GroupedMatmulCall


ALIGNMENT = 16
"""Rows of a vector register of bfloat16; pieces begin at multiples of this number."""
HEIGHTS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Heights in rows that a piece may have, if the piece is not a whole tile."""
# Columns of one product of a piece. More columns would make the program longer; the widest matrix units have 256.
_COLUMNS = 256


class TpuGroupedMatmul(GroupedMatmul):
    """Grouped products on TPUs: in bfloat16, or in float32 for any other dtype.

    Blocks have up to 512 rows in VMEM, 4,096 bytes of inputs, and 768 outputs in bfloat16 (512 in float32); sums of
    outer products have tiles of 512 x 512. Tiles and matrices are fetched from main memory (HBM) by Pallas's pipeline.
    `interpret` runs the kernels as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return the reason why the kernels are not used for the call, or None."""
        if (rows := call.max_group_rows) is not None:
            return f"groups of at most {rows} rows are computed without kernels, in {rows} slots each"
        return None

    def multiply_rows(
        self,
        rows: Float[Array, "rows _"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
        *,
        transpose: bool,
    ) -> Float[Array, "rows _"]:
        """Return each row times its group's matrix."""
        count, dtype, tile = len(rows), rows.dtype, _tile_height(len(rows))
        rows, weight = _cast_to_kernel_dtype(rows, weight.astype(dtype))
        rows, (pl, plt) = _pad_rows(rows, tile), mosaic_tpu()
        (padded_count, inputs), columns = rows.shape, weight.shape[1 if transpose else 2]
        block_inputs = _block_channels(inputs, 4096 // rows.dtype.itemsize)
        block_columns = _block_channels(columns, 768 if rows.dtype.itemsize == 2 else 512)
        steps = -(-inputs // block_inputs)
        visits, visit_count = visit_tiles(sizes, padded_count, tile)
        rows_index = lambda column, visit, step, *visits: (Visits._make(visits).tile[visit], step)
        result_index = lambda column, visit, step, *visits: (Visits._make(visits).tile[visit], column)

        def weight_index(column: Array, visit: Array, step: Array, *visits: Ref) -> tuple[Array, ...]:
            return Visits._make(visits).group[visit], *((column, step) if transpose else (step, column))

        weight_block = (block_columns, block_inputs) if transpose else (block_inputs, block_columns)
        grid = _Grid(
            sizes=(-(-columns // block_columns), visit_count, steps),
            in_specs=[
                pl.BlockSpec((tile, block_inputs), rows_index),
                pl.BlockSpec((None, *weight_block), weight_index),
            ],
            out_specs=pl.BlockSpec((tile, block_columns), result_index),
            scratch_shapes=[plt.VMEM((tile, block_columns), jnp.float32)] * (steps > 1),
        )
        result = jax.ShapeDtypeStruct((padded_count, columns), dtype)
        cost = _estimate_cost(padded_count * inputs * columns, rows, weight, result)
        body = functools.partial(multiply_kernel, transpose, inputs)
        y = _call_kernel(body, grid, result, cost, self.interpret, visits, rows, weight)[:count]
        is_in_group = jnp.arange(count, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
        return jnp.where(is_in_group[:, None], y, 0)

    def sum_outer_products(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the sums of outer products over the rows of each group."""
        tile, dtype = _tile_height(len(x)), jnp.dtype(dtype)
        output_grad, x = (_pad_rows(rows, tile) for rows in _cast_to_kernel_dtype(output_grad, x))
        (rows, outputs), inputs, groups = output_grad.shape, x.shape[1], len(sizes)
        pl, plt = mosaic_tpu()
        block = _block_channels(outputs, 512), _block_channels(inputs, 512)
        visits, visit_count = visit_tiles(sizes, rows, tile, visit_empty=True)

        def rows_index(side: int) -> Callable[..., tuple[Array, Array]]:
            return lambda row, column, visit, *visits: (Visits._make(visits).tile[visit], (row, column)[side])

        result_index = lambda row, column, visit, *visits: (Visits._make(visits).group[visit], row, column)
        grid = _Grid(
            sizes=(-(-outputs // block[0]), -(-inputs // block[1]), visit_count),
            in_specs=[pl.BlockSpec((tile, width), rows_index(side)) for side, width in enumerate(block)],
            out_specs=pl.BlockSpec((None, *block), result_index),
            scratch_shapes=[plt.VMEM(block, jnp.float32)],
        )
        result = jax.ShapeDtypeStruct((groups, outputs, inputs), dtype)
        cost = _estimate_cost(rows * outputs * inputs, output_grad, x, result)
        return _call_kernel(outer_product_kernel, grid, result, cost, self.interpret, visits, output_grad, x)


class Visits(NamedTuple):
    """Visits of tiles: a visit computes rows `low` to `high` of a tile, which are of one group."""

    group: Int[Array, "visits"]
    tile: Int[Array, "visits"]
    low: Int[Array, "visits"]
    high: Int[Array, "visits"]
    is_first: Int[Array, "visits"]
    """Whether this visit is the group's first."""
    is_last: Int[Array, "visits"]
    """Whether this visit is the group's last."""


def mosaic_tpu() -> tuple[ModuleType, ModuleType]:
    """Import and return Pallas and its TPU backend, which only programs with these kernels need."""
    return importlib.import_module("jax.experimental.pallas"), importlib.import_module("jax.experimental.pallas.tpu")


def visit_tiles(
    sizes: Int[Array, "groups"], rows: int, tile: int, *, visit_empty: bool = False
) -> tuple[Visits, Int[Array, ""]]:
    """Return the visits in the order of the rows, and the number of visits that are used.

    With `visit_empty`, a group without rows also has one visit, in which its result is set to zero.
    """
    tiles, groups = rows // tile, len(sizes)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    first_tile = jnp.minimum(starts // tile, tiles - 1)
    count = jnp.where(sizes > 0, (ends - 1) // tile - first_tile + 1, int(visit_empty))
    end_visit = jnp.cumsum(count, dtype=jnp.int32)
    visit = jnp.arange(tiles + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(visit[:, None] >= end_visit, axis=1, dtype=jnp.int32), groups - 1)
    visit_of_group = visit - (end_visit - count)[group]
    visited_tile = jnp.minimum(first_tile[group] + visit_of_group, tiles - 1)
    low, high = (jnp.clip(border[group] - visited_tile * tile, 0, tile) for border in (starts, ends))
    edges = visit_of_group == 0, visit_of_group == count[group] - 1
    return Visits(group, visited_tile, low, high, *(edge.astype(jnp.int32) for edge in edges)), end_visit[-1]


class _Grid(NamedTuple):
    """The grid of a kernel: its sizes, the blocks that a program reads and writes, and its scratch memory in VMEM."""

    sizes: tuple[int | Array, ...]
    in_specs: Sequence[object]
    out_specs: object
    scratch_shapes: Sequence[object]


def _call_kernel(
    body: Callable[..., None],
    grid: _Grid,
    result: jax.ShapeDtypeStruct,
    cost: dict[str, int],
    interpret: bool,
    visits: Visits,
    *arrays: Array,
) -> Array:
    """Call a kernel whose grid runs in order along its last two dims.

    Sums need this order, and so do results that several visits write.
    """
    pl, plt = mosaic_tpu()
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(result.shape, result.dtype, manual_axis_type=varying_of((visits, arrays))),
        grid_spec=plt.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=grid.sizes,
            in_specs=grid.in_specs,
            out_specs=grid.out_specs,
            scratch_shapes=grid.scratch_shapes,
        ),
        compiler_params=plt.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(**cost, transcendentals=0),
        interpret=interpret,
        name="grouped_" + getattr(body, "func", body).__name__,
    )
    return call(*visits, *arrays)


def _estimate_cost(products: int, *arrays: Array | jax.ShapeDtypeStruct) -> dict[str, int]:
    """Return the cost estimate for the compiler: two operations per product, and each array read or written once."""
    return {"flops": 2 * products, "bytes_accessed": sum(array.size * array.dtype.itemsize for array in arrays)}


def _cast_to_kernel_dtype(left: Array, right: Array) -> tuple[Array, Array]:
    """Return both arrays in bfloat16 if they are in bfloat16, and in float32 otherwise."""
    dtype = jnp.bfloat16 if left.dtype == right.dtype == jnp.bfloat16 else jnp.float32
    return left.astype(dtype), right.astype(dtype)


def _pad_rows(x: Array, tile: int) -> Array:
    return jnp.pad(x, [(0, -len(x) % tile), (0, 0)]) if len(x) % tile else x


def _tile_height(rows: int) -> int:
    """Return the number of rows of a tile: many, because each tile reads its groups' matrices, but limited by VMEM."""
    return min(512, -(-rows // ALIGNMENT) * ALIGNMENT)


def _block_channels(size: int, limit: int) -> int:
    """Return the number of channels of a block: `size` if this is within `limit`, else a multiple of 128.

    The multiple is the one with which the blocks have the least padding after the last channel.
    """
    fewest = -(-size // limit)
    if fewest == 1:
        return size
    widths = {blocks: -(-size // (128 * blocks)) * 128 for blocks in range(fewest, 2 * fewest + 1)}
    _, best_blocks = min((blocks * width, blocks) for blocks, width in widths.items())
    return widths[best_blocks]


# The kernels.


@runtime_checkable
class RowSlice(Protocol):
    """A range of rows of a block, as `pallas.ds` returns it."""

    @property
    def start(self) -> int | Array:
        """The first row."""
        ...

    @property
    def size(self) -> int:
        """The number of rows."""
        ...


def multiply_kernel(transpose: bool, inputs: int, *refs: Ref) -> None:
    """Multiply the rows of a visit by their group's matrix. The grid is columns, visits, blocks of the `inputs`."""
    pl, _ = mosaic_tpu()
    visits, (x, weight, y, *sums) = Visits._make(refs[:6]), refs[6:]
    step, (tile, columns), block_inputs = pl.program_id(2), y.shape, x.shape[1]
    low, high, steps = visits.low[pl.program_id(1)], visits.high[pl.program_id(1)], -(-inputs // block_inputs)

    def multiply_columns(rows: RowSlice, width: int, start: int | Array, low: Array, high: Array) -> None:
        part = pl.ds(start, width)
        row_block, weight_block = x[rows, :], weight[part, :] if transpose else weight[:, part]
        if inputs % block_inputs:  # The last block extends beyond the last channel.
            factors = (row_block, 1), (weight_block, int(transpose))
            row_block, weight_block = (_zero_from(inputs - step * block_inputs, *factor) for factor in factors)
        dims = (((1,), (int(transpose),)), ((), ()))
        value = jax.lax.dot_general(row_block, weight_block, dims, preferred_element_type=jnp.float32)
        if sums:
            value += jnp.where(step == 0, 0, sums[0][rows, part])
            sums[0][rows, part] = value

        @pl.when(step == steps - 1)
        def _() -> None:
            inside = _rows_between(rows, value.shape, low, high)
            y[rows, part] = jnp.where(inside, value, y[rows, part].astype(jnp.float32)).astype(y.dtype)

    def multiply_piece(rows: RowSlice, low: Array, high: Array) -> None:
        width = _COLUMNS if rows.size < tile and columns % _COLUMNS == 0 else columns
        if width == columns:
            return multiply_columns(rows, width, 0, low, high)

        def multiply_part(index: Array, _: None) -> None:
            multiply_columns(rows, width, pl.multiple_of(index * width, width), low, high)

        jax.lax.fori_loop(0, columns // width, multiply_part, None)

    _loop_over_pieces(tile, low, high, multiply_piece)


def outer_product_kernel(*refs: Ref) -> None:
    """Sum a block of each group's matrix over the group's visits. The grid is rows, columns, visits."""
    pl, _ = mosaic_tpu()
    visits, (output_grad, x, y, total) = Visits._make(refs[:6]), refs[6:]
    visit = pl.program_id(2)

    @pl.when(visits.is_first[visit] == 1)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def add_piece(rows: RowSlice, low: Array, high: Array) -> None:
        grad = output_grad[rows, :]
        grad = jnp.where(_rows_between(rows, grad.shape, low, high), grad.astype(jnp.float32), 0).astype(grad.dtype)
        dims = (((0,), (0,)), ((), ()))
        total[...] += jax.lax.dot_general(grad, x[rows, :], dims, preferred_element_type=jnp.float32)

    _loop_over_pieces(output_grad.shape[0], visits.low[visit], visits.high[visit], add_piece)

    @pl.when(visits.is_last[visit] == 1)
    def _() -> None:
        y[...] = total[...].astype(y.dtype)


def piece_heights(tile: int) -> tuple[int, ...]:
    """Return the heights of pieces that are lower than a tile; if there are none, the height of the tile."""
    return tuple(height for height in HEIGHTS if height < tile) or (tile,)


def _loop_over_pieces(tile: int, low: Array, high: Array, piece: Callable[[RowSlice, Array, Array], None]) -> None:
    """Call `piece(rows, low, high)` for the rows of a visit: once for a whole tile, and otherwise for each piece.

    All pieces but the last have the largest height. The last piece has the smallest height that suffices.
    """
    pl, _ = mosaic_tpu()
    heights, is_whole = piece_heights(tile), (low == 0) & (high == tile)
    first = low & -ALIGNMENT

    @pl.when(is_whole)
    def _() -> None:
        piece(pl.ds(0, tile), low, high)

    def compute_piece(index: Array, _: None) -> None:
        begin = first + index * heights[-1]
        end = jnp.minimum(high, begin + heights[-1])
        for lower_height, height in zip((0, *heights), heights):

            @pl.when((end - begin > lower_height) & (end - begin <= height))
            def _(height: int = height) -> None:
                start = pl.multiple_of(jnp.minimum(begin, tile - height), ALIGNMENT)
                piece(pl.ds(start, height), jnp.maximum(low, begin), end)

    pieces = jax.lax.div(high - first + heights[-1] - 1, jnp.int32(heights[-1]))
    jax.lax.fori_loop(0, jnp.where(is_whole | (high <= low), 0, pieces), compute_piece, None)


def _rows_between(rows: RowSlice, shape: tuple[int, ...], low: Array, high: Array) -> Bool[Array, "..."]:
    """Return a mask of a piece: whether `low <= row < high`, with rows counted from the start of the tile."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + rows.start
    return (row >= low) & (row < high)


def _zero_from(end: Array, array: Array, axis: int) -> Array:
    """Set the array to zero from index `end` of an axis on."""
    is_inside = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis) < end
    return jnp.where(is_inside, array.astype(jnp.float32), 0).astype(array.dtype)
