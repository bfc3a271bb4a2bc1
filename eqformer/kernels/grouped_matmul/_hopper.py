"""Grouped matrix products on NVIDIA's Hopper GPUs (compute capability 9.0): Pallas (Mosaic) kernels.

A program copies blocks of both factors from main memory (GMEM) to shared memory (SMEM), multiplies them on tensor cores
with sums in registers, and copies the tile of the result back through SMEM. Which rows belong to a tile is computed
before the kernel starts. The first tile of a group begins at the group's first row, or up to seven rows before it,
because copies begin at multiples of eight rows.

The kernels follow JAX's own kernels, `ragged_dot_mgpu` and `transposed_ragged_dot_mgpu` in
`jax.experimental.pallas.ops.gpu`. JAX's kernels are not called, for these reasons:

- They load JAX's test tools, and ask the machine that traces a program for its GPU.
- They search for each tile's group in a loop that is unrolled over all groups, and compute tiles that no group has.
- They leave rows after the last group unwritten, and return the weights' gradients only in the dtype of the rows.
- They begin to overwrite the operands of a product before the product has finished.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._platform import gpu_capability, gpu_cores, Ref, varying_as
from ._call import GroupedMatmul, GroupedMatmulCall


BLOCK = 64
"""Channels or rows that one product sums over: 128 bytes of 16-bit numbers, the width of a swizzle in SMEM."""
ALIGNMENT = 8
"""Copies of tiles begin at multiples of this number of rows."""
_SHARED_BYTES = 98304  # SMEM for a program's blocks in flight, so that a multiprocessor has room for two programs
_MOSAIC = "jax.experimental.pallas.mosaic_gpu"


class HopperGroupedMatmul(GroupedMatmul):
    """Grouped products on Hopper GPUs: in 16 bits, with matrices that are parameters.

    Tiles of the result are 64 or 128 rows by 64 or 128 columns. `interpret` runs the kernels as plain JAX on any
    platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return the reason why the kernels cannot compute the call, or None."""
        return hopper_reason(call)

    def multiply_rows(
        self,
        rows: Float[Array, "rows _"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
        *,
        transpose: bool,
    ) -> Float[Array, "rows _"]:
        """Return each row times its group's matrix."""
        weight = weight.astype(rows.dtype)
        count, columns = len(rows), weight.shape[1 if transpose else 2]
        tile = choose_tile(count, len(sizes), columns)
        rows = pad_rows_to(rows, max(tile.rows, -(-count // ALIGNMENT) * ALIGNMENT))
        body = functools.partial(multiply_tiles, tile, transpose)
        y = make_kernel(body, jax.ShapeDtypeStruct((len(rows), columns), rows.dtype), self.interpret)
        return varying_as(y(*make_row_tiles(sizes, len(rows), tile.rows), rows, weight), rows)[:count]

    def sum_outer_products(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the sums of outer products over the rows of each group."""
        output_grad, x = (pad_rows_to(rows, -(-len(rows) // BLOCK) * BLOCK) for rows in (output_grad, x))
        (_, outputs), inputs, groups = output_grad.shape, x.shape[1], len(sizes)
        tile = Tile(*(128 if size % 128 == 0 else 64 for size in (outputs, inputs)))
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        starts = ends - sizes
        first_rows = starts // BLOCK * BLOCK
        blocks = jnp.where(sizes > 0, -(-(ends - first_rows) // BLOCK), 0)
        body = functools.partial(sum_tiles, tile, (groups, outputs // tile.rows, inputs // tile.columns))
        y = make_kernel(body, jax.ShapeDtypeStruct((groups, outputs, inputs), dtype), self.interpret)
        return varying_as(y(starts, ends, first_rows, blocks, output_grad, x), x)


def hopper_reason(call: GroupedMatmulCall) -> str | None:
    """Return the reason why kernels for Hopper GPUs cannot compute the call, or None."""
    if not len(call.x):
        return "there are no rows"
    if not call.is_stored:
        return "matrices that are decoded or assembled for the call are cheaper one group at a time"
    if any(size % BLOCK for size in call.weight.shape[1:]):
        return f"it takes a multiple of {BLOCK} channels, not {list(call.weight.shape[1:])}"
    if (capability := gpu_capability()) != 9.0:
        return f"it runs on GPUs of compute capability 9.0, not {capability}"
    if call.x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, not {call.x.dtype}"
    if importlib.util.find_spec(_MOSAIC) is None:
        return f"this JAX has no {_MOSAIC}"
    return None


class Tile(NamedTuple):
    """The sizes of a part of the result that one program computes at a time."""

    rows: int
    columns: int

    @property
    def steps(self) -> int:
        """Return how many pairs of blocks, one of each factor, are in shared memory at once."""
        return _SHARED_BYTES // ((self.rows + self.columns) * BLOCK * 2)


def choose_tile(rows: int, groups: int, columns: int) -> Tile:
    """Return the largest tile with little padding in the groups' last tiles and with work for all multiprocessors."""
    height = 128 if rows >= 640 * groups else 64
    tiles = max(rows // height, min(rows, groups))
    return Tile(height, 128 if columns % 128 == 0 and tiles * (columns // 128) >= gpu_cores() else 64)


class RowTiles(NamedTuple):
    """The rows of each tile, in the order of the groups.

    The rows after the last group are in tiles whose `group` is the number of groups; these are filled with zeros.
    """

    group: Int[Array, "tiles"]
    """The group of the tile."""
    begin: Int[Array, "tiles"]
    """The first row of the tile, a multiple of `ALIGNMENT`."""
    start: Int[Array, "tiles"]
    """The first row of the tile that belongs to its group; earlier rows belong to the previous group."""
    size: Int[Array, "tiles"]
    """The number of rows of the tile, from `start` on, that belong to its group."""
    used: Int[Array, "1"]
    """The number of tiles that are used; the arrays are long enough for any sizes of groups."""


def make_row_tiles(sizes: Int[Array, "groups"], rows: int, tile: int) -> RowTiles:
    """Return tiles of height `tile` that cover `rows` rows, sorted by group; group `i` has `sizes[i]` of the rows."""
    limit = (rows + min(len(sizes) + 1, rows) * (tile + ALIGNMENT - 2)) // tile
    ends = jnp.concatenate([jnp.cumsum(sizes, dtype=jnp.int32), jnp.full(1, rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first_rows = starts // ALIGNMENT * ALIGNMENT
    end_tile = jnp.cumsum(jnp.where(ends > starts, -(-(ends - first_rows) // tile), 0), dtype=jnp.int32)
    tile_index = jnp.arange(limit, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile_index[:, None] >= end_tile, axis=1, dtype=jnp.int32), len(sizes))
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), end_tile[:-1]])
    begin = first_rows[group] + (tile_index - first_tile[group]) * tile
    start = jnp.maximum(begin, starts[group])
    size = jnp.minimum(ends[group], begin + tile) - start
    return RowTiles(group, jnp.clip(begin, 0, rows - tile), start, size, end_tile[-1:])


def make_kernel(body: Callable[..., None], result: jax.ShapeDtypeStruct, interpret: bool) -> Callable[..., Array]:
    """Return a kernel with two programs on each multiprocessor: one computes while the other writes its result.

    The tiles are dealt out to the programs in turn.
    """
    plgpu = mosaic_gpu()[1]
    interpreter: object = None
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret import params

        interpreter = params.InterpretGPUParams()
    kernel = plgpu.kernel(
        body,
        out_type=result,
        grid=(2 if interpret else 2 * gpu_cores(),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpreter,
        kernel_name="grouped_" + getattr(body, "func", body).__name__.strip("_"),
    )

    def call(*arrays: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # JAX's pipelines mix dtypes
            return kernel(*arrays)

    return call


def pad_rows_to(rows: Array, count: int) -> Array:
    """Return the rows with zeros after the last row, `count` rows in all."""
    return rows if len(rows) == count else jnp.pad(rows, [(0, count - len(rows)), (0, 0)])


def mosaic_gpu() -> tuple[ModuleType, ModuleType]:
    """Import and return Pallas and its Mosaic backend for GPUs, which only programs with these kernels need."""
    pallas = importlib.import_module("jax.experimental.pallas")
    return pallas, importlib.import_module("jax.experimental.pallas.mosaic_gpu")


# The kernels.


@runtime_checkable
class LoopStep(Protocol):
    """A step of `plgpu.nd_loop`, which deals out the steps of a loop to all programs."""

    @property
    def index(self) -> tuple[Array, ...]:
        """The indices of the step in the loop's grid."""
        ...


def multiply_tiles(
    tile: Tile,
    transpose: bool,
    group_of: Ref,
    begins: Ref,
    starts: Ref,
    counts: Ref,
    used: Ref,
    x: Ref,
    weight: Ref,
    y: Ref,
) -> None:
    """Multiply the rows of each tile by their group's matrix.

    The references before `x` are the arrays of `RowTiles`.
    """
    pl, plgpu = mosaic_gpu()
    columns, inputs = y.shape[1] // tile.columns, x.shape[1]

    @plgpu.nd_loop((used[0] * columns,), collective_axes="program")
    def _(info: LoopStep) -> None:
        row_tile, column = order_in_panels(info.index[0], used[0], columns)
        group, begin, size = group_of[row_tile], pl.multiple_of(begins[row_tile], ALIGNMENT), counts[row_tile]
        weight_spec = (tile.columns, BLOCK), lambda step: (column, step)
        weight_spec = weight_spec if transpose else (weight_spec[0][::-1], lambda step: (step, column))

        def multiply_blocks(_: object, rows: Ref, matrix: Ref, *, total: Ref) -> None:
            plgpu.wgmma(total, rows, matrix.transpose((1, 0)) if transpose else matrix)
            plgpu.wgmma_wait(1)  # Wait for the previous product, whose operands are overwritten next.

        def sum_products(total: Ref) -> Array:
            @pl.when(group < weight.shape[0])
            def _() -> None:
                specs = [((tile.rows, BLOCK), lambda step: (0, step)), weight_spec]
                plgpu.emit_pipeline(
                    functools.partial(multiply_blocks, total=total),
                    grid=(inputs // BLOCK,),
                    in_specs=[plgpu.BlockSpec(*spec, delay_release=1) for spec in specs],
                    max_concurrent_steps=tile.steps,
                )(x.at[pl.ds(begin, tile.rows), :], weight.at[group])

            return total[...]

        product = pl.run_scoped(sum_products, plgpu.ACC(tile))

        store_tile_rows(product, y, starts[row_tile] - begin, begin, size, column * tile.columns)


def sum_tiles(
    tile: Tile,
    counts: tuple[int, int, int],
    starts: Ref,
    ends: Ref,
    first_rows: Ref,
    blocks: Ref,
    output_grad: Ref,
    x: Ref,
    y: Ref,
) -> None:
    """Compute the tiles of each group's matrix as sums over the group's rows.

    `counts` has the number of groups, of rows of tiles and of columns of tiles. The rows of a group are in
    `blocks` blocks; the first block begins at `first_rows`.
    """
    pl, plgpu = mosaic_gpu()
    swizzle, (groups, *tiles) = swizzled_layout(output_grad.dtype), counts

    @plgpu.nd_loop((groups, tiles[0] * tiles[1]), collective_axes="program")
    def _(info: LoopStep) -> None:
        group, (row, column) = info.index[0], order_in_panels(info.index[1], jnp.int32(tiles[0]), tiles[1])
        first = pl.multiple_of(first_rows[group], BLOCK)

        def add_block(indices: tuple[int | Array], left: Ref, right: Ref, *, total: Ref) -> None:
            begin = first + indices[0] * BLOCK
            low, high = starts[group] - begin, ends[group] - begin

            @pl.when((low > 0) | (high < BLOCK))  # Rows of other groups in the block are set to zero.
            def _() -> None:
                block_row = jax.lax.broadcasted_iota(jnp.int32, left.shape, 0)
                block_row = plgpu.layout_cast(block_row, plgpu.Layout.WGMMA)
                is_in_group = (block_row >= low) & (block_row < high)
                left[...] = jnp.where(is_in_group, left[...], jnp.zeros((), left.dtype))
                plgpu.commit_smem()

            plgpu.wgmma(total, left.transpose((1, 0)), right)
            plgpu.wgmma_wait(1)

        def sum_blocks(total: Ref) -> Array:
            @pl.when(blocks[group] > 0)
            def _() -> None:
                part = pl.ds(first, x.shape[0])  # The slice is too long, but no block after the last row is read.
                specs = [(tile.rows, lambda step: (step, row)), (tile.columns, lambda step: (step, column))]
                plgpu.emit_pipeline(
                    functools.partial(add_block, total=total),
                    grid=(blocks[group],),
                    in_specs=[plgpu.BlockSpec((BLOCK, n), to, delay_release=1, transforms=swizzle) for n, to in specs],
                    max_concurrent_steps=tile.steps,
                )(output_grad.at[part, :], x.at[part, :])

            return total[...]

        product = pl.run_scoped(sum_blocks, plgpu.ACC(tile))

        store_tile(product, y, group, row, column)


def store_tile_rows(tile: Array, y: Ref, first: Array, begin: Array, size: Array, column: Array) -> None:
    """Store `size` rows of a tile, from its row `first` on, in the result, by way of shared memory.

    Row 0 of the tile is row `begin` of the result.
    """
    pl, plgpu = mosaic_gpu()

    def store(shared: Ref) -> None:
        shared[...] = tile.astype(shared.dtype)
        plgpu.commit_smem()
        _copy_rows(shared, y, first, begin, size, column)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(store, plgpu.SMEM(tile.shape, dtype=y.dtype))


def store_tile(tile: Array, y: Ref, group: Array, row: Array, column: Array) -> None:
    """Store a tile of a group's matrix in the result, by way of shared memory."""
    pl, plgpu = mosaic_gpu()

    def store(shared: Ref) -> None:
        shared[...] = tile.astype(shared.dtype)
        plgpu.commit_smem()
        target = (pl.ds(index * size, size) for index, size in zip((row, column), tile.shape))
        plgpu.copy_smem_to_gmem(shared, y.at[group, *target])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(store, plgpu.SMEM(tile.shape, dtype=y.dtype, transforms=swizzled_layout(y.dtype)))


def _copy_rows(tile: Ref, y: Ref, first: Array, begin: Array, size: Array, column: Array) -> None:
    """Copy `size` rows of a tile from shared memory to the result.

    The number of rows of one copy is fixed when the kernel is compiled. So the kernel has copies of 1, 2, 4, ... rows,
    and runs the copies whose rows add up to `size`.
    """
    pl, plgpu = mosaic_gpu()
    rows, columns = tile.shape
    for length in (1 << power for power in reversed(range(rows.bit_length()))):

        def copy(first: Array = first, length: int = length) -> None:
            target = pl.ds(begin + first, length), pl.ds(column, columns)
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(first, length)], y.at[target])

        pl.when(size & length != 0)(copy)
        first = first + (size & length)


def order_in_panels(index: Array, rows: Array, columns: int) -> tuple[Array, Array]:
    """Return the row and the column of the tile `index`, if tiles are counted in panels of up to 16 columns.

    In this order, programs that run at the same time read the same blocks.
    """
    width = max(width for width in range(1, 17) if columns % width == 0)
    index_in_panel, panel = jax.lax.rem(index, rows * width), jax.lax.div(index, rows * width)
    row = jax.lax.div(index_in_panel, jnp.int32(width))
    return row, panel * width + jax.lax.rem(index_in_panel, jnp.int32(width))


def swizzled_layout(dtype: jax.typing.DTypeLike) -> tuple[object, ...]:
    """Return the layout of a tile in shared memory for tensor cores: rows of 128 bytes, swizzled by eights."""
    plgpu = mosaic_gpu()[1]
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)
