"""Grouped matrix products in 8 bits on NVIDIA's Hopper GPUs (compute capability 9.0): Pallas (Mosaic) kernels.

Tensor cores take 8-bit factors only if the dim that is summed over is the last in memory. So the rounded weights are
transposed for the gradients of the rows. For the gradients of the weights both factors are transposed, and the rows of
each group begin at a multiple of `DEPTH`, with zeros between the groups.
"""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._platform import capability_of, E4M3, E5M2, fp8_scale, Ref, round_to_fp8, varying_as
from . import _hopper as hopper
from ._call import GroupedMatmul, GroupedMatmulCall


DEPTH = 128
"""Numbers that one product sums over: 128 bytes, as many as in a `BLOCK` of the 16-bit kernels."""


class HopperFp8GroupedMatmul(GroupedMatmul):
    """Grouped products in 8 bits on Hopper GPUs: each row has a scale, and so has the matrix of each group.

    `interpret` runs the kernels as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return the reason why the kernels cannot compute the call, or should not, or None."""
        if not call.in_fp8:
            return "the call does not ask for 8 bits"
        if not has_mixed_formats():
            return "JAX before 0.12 cannot multiply two different 8-bit formats on tensor cores"
        return hopper.hopper_reason(call)

    def multiply_rows(
        self,
        rows: Float[Array, "rows _"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
        *,
        transpose: bool,
    ) -> Float[Array, "rows _"]:
        """Return each row times its group's matrix; rows are rounded to E4M3, or to E5M2 if they are gradients."""
        codes, row_scale = round_to_fp8(rows, E4M3 if transpose else E5M2, -1)
        matrices, group_scale = round_to_fp8(weight.astype(rows.dtype), E4M3, (1, 2))
        group_scale = group_scale[:, 0, 0]
        matrices = matrices if transpose else matrices.swapaxes(1, 2)
        is_exact = not transpose  # Gradients are summed in float32.
        count, columns = len(codes), matrices.shape[1]
        # An exact sum needs registers for two tiles, so its tiles are narrower.
        tile = hopper.choose_tile(count, len(sizes), 64 if is_exact else columns)
        padded_count = max(tile.rows, -(-count // hopper.ALIGNMENT) * hopper.ALIGNMENT)
        codes, row_scale = hopper.pad_rows_to(codes, padded_count), hopper.pad_rows_to(row_scale, padded_count)[:, 0]
        matrices = _pad_depth(matrices)
        body = functools.partial(multiply_fp8_kernel, tile, is_exact)
        y = hopper.make_kernel(body, jax.ShapeDtypeStruct((padded_count, columns), rows.dtype), self.interpret)
        row_tiles, scales = hopper.make_row_tiles(sizes, padded_count, tile.rows), (row_scale, group_scale)
        return varying_as(y(*row_tiles, _pad_depth(codes), matrices, *scales), codes)[:count]

    def sum_outer_products(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the sums of outer products over the rows of each group; rows after the last group are not read."""
        codes, row_scale = round_to_fp8(x, E4M3, -1)
        group_scale, inverses = _scale_groups(output_grad, row_scale, sizes)
        wide = output_grad.astype(row_scale.dtype) * row_scale * inverses.astype(row_scale.dtype)
        grad_codes = wide.astype(E5M2)
        (_, outputs), inputs, groups = grad_codes.shape, codes.shape[1], len(sizes)
        blocks = -(-sizes // DEPTH)
        first_columns = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks) * DEPTH
        grad_columns, columns = (_transpose_groups(rows, sizes, first_columns) for rows in (grad_codes, codes))
        tile = hopper.Tile(128 if outputs % 128 == 0 else 64, 64)
        counts = groups, outputs // tile.rows, inputs // tile.columns
        body = functools.partial(outer_product_fp8_kernel, tile, counts)
        y = hopper.make_kernel(body, jax.ShapeDtypeStruct((groups, outputs, inputs), dtype), self.interpret)
        return varying_as(y(first_columns, blocks, grad_columns, columns, group_scale), codes)


def has_fp8_grouped_matmul(chip: str) -> bool:
    """Return whether grouped products of 8-bit factors run at the speed of 8 bits on a chip such as `NVIDIA H100`.

    TPUs, and Hopper GPUs with JAX before 0.12, compute such products by kernels in 16 bits. CPUs and older GPUs round
    the factors to 8 bits and multiply them in a wider format.
    """
    capability = capability_of(chip)
    return capability >= 10 or (capability == 9 and has_mixed_formats())


def has_mixed_formats() -> bool:
    """Return whether this JAX multiplies factors of two 8-bit formats on tensor cores."""
    return jax.__version_info__ >= (0, 12)


def _scale_groups(
    output_grad: Float[Array, "rows outputs"], row_scale: Float[Array, "rows 1"], sizes: Int[Array, "groups"]
) -> tuple[Float[Array, "groups"], Float[Array, "rows 1"]]:
    """Return each group's scale of `output_grad * row_scale` and, for each row, the inverse of its group's scale.

    The inverse is 0 for rows after the last group. `multiply_rows` computes the same row maxima of `output_grad` for
    its scales, so XLA reads `output_grad` once for both.
    """
    largest = jnp.max(jnp.abs(output_grad), -1, keepdims=True).astype(row_scale.dtype) * row_scale
    ends, row = jnp.cumsum(sizes, dtype=jnp.int32), jnp.arange(len(output_grad), dtype=jnp.int32)[:, None]
    is_in_group = (row >= ends - sizes) & (row < ends)
    scale, inverse = fp8_scale(jnp.max(jnp.where(is_in_group, largest, 0), 0, initial=0), E5M2)
    return scale, jnp.sum(jnp.where(is_in_group, inverse, 0), 1, keepdims=True)


def _pad_depth(x: Array) -> Array:
    """Return the array with its last dim padded with zeros to a multiple of `DEPTH`."""
    missing = -x.shape[-1] % DEPTH
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)]) if missing else x


def _transpose_groups(x: Array, sizes: Array, first_columns: Array) -> Array:
    """Transpose rows to columns, so that each group's columns begin at `first_columns`, with zeros between groups."""
    columns = (-(-len(x) // DEPTH) + len(sizes)) * DEPTH
    column = jnp.arange(columns, dtype=jnp.int32)
    group = jnp.sum(column[:, None] >= first_columns, axis=1, dtype=jnp.int32) - 1
    index_in_group = column - first_columns[group]
    row = jnp.cumsum(sizes, dtype=jnp.int32)[group] - sizes[group] + index_in_group
    rows = x[jnp.where(index_in_group < sizes[group], row, 0)]
    return jnp.where((index_in_group < sizes[group])[:, None], rows, jnp.zeros((), x.dtype)).T


# The kernels.


def multiply_fp8_kernel(
    tile: hopper.Tile,
    is_exact: bool,
    group_of: Ref,
    begins: Ref,
    starts: Ref,
    counts: Ref,
    used: Ref,
    codes: Ref,
    matrices: Ref,
    row_scale: Ref,
    group_scale: Ref,
    y: Ref,
) -> None:
    """Multiply the rows of each tile by their group's matrix and by both scales.

    The references before `codes` are the arrays of `RowTiles`.
    """
    pl, plgpu = hopper.mosaic_gpu()
    columns, groups = y.shape[1] // tile.columns, matrices.shape[0]

    @plgpu.nd_loop((used[0] * columns,), collective_axes="program")
    def _(info: hopper.LoopStep) -> None:
        row_tile, column = hopper.order_in_panels(info.index[0], used[0], columns)
        group, begin, size = group_of[row_tile], pl.multiple_of(begins[row_tile], hopper.ALIGNMENT), counts[row_tile]
        matrix = jnp.minimum(group, groups - 1)
        specs = [((tile.rows, DEPTH), lambda step: (0, step)), ((tile.columns, DEPTH), lambda step: (column, step))]
        factors = codes.at[pl.ds(begin, tile.rows), :], matrices.at[matrix]
        product = _multiply_tiles(tile, group < groups, codes.shape[1] // DEPTH, specs, factors, is_exact)
        tile_rows = row_scale.at[pl.ds(begin, tile.rows)]
        scales = plgpu.load(tile_rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        product = product * jax.lax.broadcast_in_dim(scales, tile, (0,)) * group_scale[matrix]

        hopper.store_tile_rows(product, y, starts[row_tile] - begin, begin, size, column * tile.columns)


def outer_product_fp8_kernel(
    tile: hopper.Tile,
    counts: tuple[int, int, int],
    first_columns: Ref,
    blocks: Ref,
    grad_columns: Ref,
    columns: Ref,
    group_scale: Ref,
    y: Ref,
) -> None:
    """Compute the tiles of each group's matrix as sums over the group's columns.

    `counts` has the number of groups, of rows of tiles and of columns of tiles. The columns of a group are in
    `blocks` blocks of `DEPTH`; the first block begins at `first_columns`.
    """
    pl, plgpu = hopper.mosaic_gpu()
    groups, *tiles = counts

    @plgpu.nd_loop((groups, tiles[0] * tiles[1]), collective_axes="program")
    def _(info: hopper.LoopStep) -> None:
        group, (row, column) = info.index[0], hopper.order_in_panels(info.index[1], jnp.int32(tiles[0]), tiles[1])
        # The slice is too long, but no block after the last column is read.
        part = pl.ds(pl.multiple_of(first_columns[group], DEPTH), columns.shape[1])
        specs = [((tile.rows, DEPTH), lambda step: (row, step)), ((tile.columns, DEPTH), lambda step: (column, step))]
        factors = grad_columns.at[:, part], columns.at[:, part]
        product = _multiply_tiles(tile, blocks[group] > 0, blocks[group], specs, factors, True) * group_scale[group]

        hopper.store_tile(product, y, group, row, column)


def _multiply_tiles(
    tile: hopper.Tile,
    is_any: Array,
    steps: int | Array,
    specs: Sequence[tuple[tuple[int, int], Callable[[Array], tuple[Array | int, Array]]]],
    factors: tuple[Ref, Ref],
    is_exact: bool,
) -> Array:
    """Return a tile of the product of two matrices, with the sum over the last dim of both matrices.

    The tile is zero unless `is_any`. Tensor cores sum products of 8-bit numbers with fewer digits than float32 has. If
    `is_exact`, the result of each step is therefore added to the sum in float32 instead.
    """
    pl, plgpu = hopper.mosaic_gpu()
    block_specs = [plgpu.BlockSpec(*spec, delay_release=0 if is_exact else 1) for spec in specs]
    concurrent = min(4, 98304 // (sum(tile) * DEPTH))
    pipeline = functools.partial(
        plgpu.emit_pipeline, grid=(steps,), in_specs=block_specs, max_concurrent_steps=concurrent
    )

    def multiply(total: Ref, left: Ref, right: Ref) -> None:
        plgpu.wgmma(total, left, right.transpose((1, 0)))

    def sum_on_tensor_cores(total: Ref) -> Array:
        @pl.when(is_any)
        def _() -> None:
            def step(_: object, left: Ref, right: Ref) -> None:
                multiply(total, left, right)
                plgpu.wgmma_wait(1)  # Wait for the previous product, whose operands are overwritten next.

            pipeline(step)(*factors)

        return total[...]

    def sum_in_float32() -> Array:
        def step(_: object, left: Ref, right: Ref, total: Array) -> Array:
            def multiply_step(product: Ref) -> Array:
                multiply(product, left, right)
                return product[...]

            return total + pl.run_scoped(multiply_step, plgpu.ACC(tile))

        zeros = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), plgpu.Layout.WGMMA)
        return jax.lax.cond(is_any, lambda: pipeline(step, init_carry=zeros)(*factors), lambda: zeros)

    return sum_in_float32() if is_exact else pl.run_scoped(sum_on_tensor_cores, plgpu.ACC(tile))
