"""Products of sorted rows and their groups' matrices in 8 bits on NVIDIA's Hopper GPUs, in Pallas by Mosaic.

Tensor cores take factors of 8 bits only with what is summed over in one row of memory. So weights are rounded into the
order of their use, forward and backward, and for weights' gradients both factors are transposed, each group's rows
beginning at a multiple of `DEEP`, with zeros between.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._fp8 import E4M3, E5M2, fp8_scale, round_to_fp8
from .._platform import capability_of, varying_as
from ._call import GroupedMatmul, GroupedMatmulCall
from ._hopper import hopper_reason, padded, run_kernel, tile_for, tiles_of
from ._hopper_tiles import in_panels, pallas, ROWS, store_rows, store_tile, Tile


DEEP = 128  # what a product sums over at once: 128 bytes, as for `STEP` numbers of 16 bits


class HopperFp8GroupedMatmul(GroupedMatmul):
    """Grouped products in Mosaic on Hopper GPUs in 8 bits: a row, and a group's matrix, has a scale of its own.

    `interpret` runs the kernels as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return the reason why the kernels cannot compute the call, or are not to, or None."""
        if not call.in_fp8:
            return "8 bits are not asked for"
        if not has_mixed_formats():
            return "JAX before 0.12 has no products of two 8-bit formats on tensor cores"
        return hopper_reason(call)

    def forward(
        self,
        x: Float[Array, "rows inputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows outputs"]:
        """Return each row times its group's matrix."""
        return self._scaled_rows(x, E4M3, weight, sizes, 2)

    def input_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows inputs"]:
        """Return the gradients of the rows."""
        return self._scaled_rows(output_grad, E5M2, weight, sizes, 1)

    def weight_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the gradients of the matrices."""
        codes, of_row = round_to_fp8(x, E4M3, -1)
        of_group, inverses = _scales_of_groups(output_grad, of_row, sizes)
        wide = output_grad.astype(of_row.dtype) * of_row * inverses.astype(of_row.dtype)
        return _sum_outer_products(wide.astype(E5M2), codes, of_group, sizes, dtype, interpret=self.interpret)

    def _scaled_rows(self, x: Array, dtype: DTypeLike, weight: Array, sizes: Array, contracts: int) -> Array:
        codes, of_row = round_to_fp8(x, dtype, -1)
        matrices, of_group = round_to_fp8(weight.astype(x.dtype), E4M3, (1, 2))
        how = {"contracts": contracts, "interpret": self.interpret}
        return _multiply_rows(codes, matrices, of_row, of_group[:, 0, 0], sizes, x.dtype, **how)


def fp8_grouped_matmul(chip: str) -> bool:
    """Return whether grouped products in 8 bits run as such on chips of a name, such as `NVIDIA H100` or `h100`.

    TPUs, and Hopper GPUs before JAX 0.12, have kernels of 16 bits; on a CPU and older GPUs a wider product multiplies
    numbers of 8 bits.
    """
    capability = capability_of(chip)
    return capability >= 10 or (capability == 9 and has_mixed_formats())


def has_mixed_formats() -> bool:
    """Return whether this JAX multiplies factors of two 8-bit formats on tensor cores."""
    return jax.__version_info__ >= (0, 12)


def _scales_of_groups(
    gradient: Float[Array, "rows outputs"], of_row: Float[Array, "rows 1"], sizes: Int[Array, "groups"]
) -> tuple[Float[Array, "groups"], Float[Array, "rows 1"]]:
    """Return the scale of each group's gradient times `of_row`, and its inverse per row: 0 behind the last group.

    The largest number of a row is also what the row's own scale is made of, so that a gradient is not read once more.
    """
    largest = jnp.max(jnp.abs(gradient), -1, keepdims=True).astype(of_row.dtype) * of_row
    ends, row = jnp.cumsum(sizes, dtype=jnp.int32), jnp.arange(len(gradient), dtype=jnp.int32)[:, None]
    is_own = (row >= ends - sizes) & (row < ends)
    scale, inverse = fp8_scale(jnp.max(jnp.where(is_own, largest, 0), 0, initial=0), E5M2)
    return scale, jnp.sum(jnp.where(is_own, inverse, 0), 1, keepdims=True)


def _multiply_rows(
    codes: Float[Array, "rows contracted"],
    matrices: Float[Array, "groups _ _"],
    of_row: Float[Array, "rows 1"],
    of_group: Float[Array, "groups"],
    sizes: Int[Array, "groups"],
    dtype: DTypeLike,
    *,
    contracts: int,
    interpret: bool,
) -> Float[Array, "rows columns"]:
    """Return each row times its group's matrix, times both scales, in `dtype`; `contracts` is the dim summed over."""
    matrices = matrices if contracts == 2 else matrices.swapaxes(1, 2)
    is_exact = contracts == 1  # sums of gradients
    count, columns = len(codes), matrices.shape[1]
    tile = tile_for(count, len(sizes), 64 if is_exact else columns)  # of an exact sum two are held
    long = max(tile.rows, -(-count // ROWS) * ROWS)
    codes, of_row, matrices = padded(codes, long), padded(of_row, long)[:, 0], _deep(matrices)
    body = functools.partial(coded_rows, tile, is_exact)
    y = run_kernel(body, jax.ShapeDtypeStruct((long, columns), dtype), interpret)
    return varying_as(y(*tiles_of(sizes, long, tile.rows), _deep(codes), matrices, of_row, of_group), codes)[:count]


def _sum_outer_products(
    gradient: Float[Array, "rows outputs"],
    codes: Float[Array, "rows inputs"],
    of_group: Float[Array, "groups"],
    sizes: Int[Array, "groups"],
    dtype: DTypeLike,
    *,
    interpret: bool,
) -> Float[Array, "groups outputs inputs"]:
    """Return the sums over each group's rows of outer products, times the groups' scales, in `dtype`.

    Rows behind the last group are not read.
    """
    (_, outputs), inputs, groups = gradient.shape, codes.shape[1], len(sizes)
    blocks = -(-sizes // DEEP)
    firsts = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks) * DEEP
    gradient, other = (_by_columns(one, sizes, firsts) for one in (gradient, codes))
    tile = Tile(128 if outputs % 128 == 0 else 64, 64)
    body = functools.partial(coded_sums, tile, (groups, outputs // tile.rows, inputs // tile.columns))
    y = run_kernel(body, jax.ShapeDtypeStruct((groups, outputs, inputs), dtype), interpret)
    return varying_as(y(firsts, blocks, gradient, other, of_group), codes)


def coded_rows(
    tile: Tile,
    is_exact: bool,
    group_of: Any,
    begins: Any,
    starts: Any,
    counts: Any,
    number: Any,
    codes: Any,
    matrices: Any,
    of_row: Any,
    of_group: Any,
    y: Any,
) -> None:
    """The kernel of `_multiply_rows`: of each tile its rows by its group's matrix, times their scales."""
    pl, plgpu = pallas()
    columns, groups = y.shape[1] // tile.columns, matrices.shape[0]

    @plgpu.nd_loop((number[0] * columns,), collective_axes="program")
    def _(info: Any) -> None:
        place, column = in_panels(info.index[0], number[0], columns)
        group, begin, size = group_of[place], pl.multiple_of(begins[place], ROWS), counts[place]
        mine = jnp.minimum(group, groups - 1)
        specs = [((tile.rows, DEEP), lambda step: (0, step)), ((tile.columns, DEEP), lambda step: (column, step))]
        given = codes.at[pl.ds(begin, tile.rows), :], matrices.at[mine]
        found = _sums(tile, group < groups, codes.shape[1] // DEEP, specs, given, is_exact)
        its = plgpu.load(of_row.at[pl.ds(begin, tile.rows)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        found = found * jax.lax.broadcast_in_dim(its, tile, (0,)) * of_group[mine]

        store_rows(found, y, starts[place] - begin, begin, size, column * tile.columns)


def coded_sums(
    tile: Tile,
    number: tuple[int, int, int],
    firsts: Any,
    blocks: Any,
    gradient: Any,
    codes: Any,
    of_group: Any,
    y: Any,
) -> None:
    """The kernel of `_sum_outer_products`: tiles of each group's matrix, summed over the blocks of its rows."""
    pl, plgpu = pallas()
    groups, *tiles = number

    @plgpu.nd_loop((groups, tiles[0] * tiles[1]), collective_axes="program")
    def _(info: Any) -> None:
        group, (row, column) = info.index[0], in_panels(info.index[1], jnp.int32(tiles[0]), tiles[1])
        part = pl.ds(pl.multiple_of(firsts[group], DEEP), codes.shape[1])  # behind the end nothing is read
        specs = [((tile.rows, DEEP), lambda step: (row, step)), ((tile.columns, DEEP), lambda step: (column, step))]
        given = gradient.at[:, part], codes.at[:, part]
        found = _sums(tile, blocks[group] > 0, blocks[group], specs, given, True) * of_group[group]

        store_tile(found, y, group, row, column)


def _sums(tile: Tile, is_any: Array, steps: Any, specs: list, given: tuple, is_exact: bool) -> Array:
    """A tile of the product of two matrices, both with what is summed over last, zeros where there is nothing.

    Tensor cores add numbers of 8 bits up in fewer digits than float32's. An exact sum adds what they give of each step.
    """
    pl, plgpu = pallas()
    specs = [plgpu.BlockSpec(*spec, delay_release=0 if is_exact else 1) for spec in specs]
    how = {"grid": (steps,), "in_specs": specs, "max_concurrent_steps": min(4, 98304 // (sum(tile) * DEEP))}

    def product(total: Any, left: Any, right: Any) -> None:
        plgpu.wgmma(total, left, right.transpose((1, 0)))

    def fast(total: Any) -> Array:
        @pl.when(is_any)
        def _() -> None:
            def step(_: Any, left: Any, right: Any) -> None:
                product(total, left, right)
                plgpu.wgmma_wait(1)  # what the product before this one read is overwritten next

            plgpu.emit_pipeline(step, **how)(*given)

        return total[...]

    def exact() -> Array:
        def step(_: Any, left: Any, right: Any, total: Array) -> Array:
            def alone(part: Any) -> Array:
                product(part, left, right)
                return part[...]

            return total + pl.run_scoped(alone, plgpu.ACC(tile))

        nothing = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), plgpu.Layout.WGMMA)
        add_up = lambda: plgpu.emit_pipeline(step, init_carry=nothing, **how)(*given)
        return jax.lax.cond(is_any, add_up, lambda: nothing)

    return exact() if is_exact else pl.run_scoped(fast, plgpu.ACC(tile))


def _deep(x: Array) -> Array:
    """With zeros behind the last dim, to a multiple of `DEEP`."""
    more = -x.shape[-1] % DEEP
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, more)]) if more else x


def _by_columns(x: Array, sizes: Array, firsts: Array) -> Array:
    """The rows as columns, each group's from `firsts` on, zeros between."""
    number = (-(-len(x) // DEEP) + len(sizes)) * DEEP
    place = jnp.arange(number, dtype=jnp.int32)
    group = jnp.sum(place[:, None] >= firsts, axis=1, dtype=jnp.int32) - 1
    within = place - firsts[group]
    row = jnp.cumsum(sizes, dtype=jnp.int32)[group] - sizes[group] + within
    own = x[jnp.where(within < sizes[group], row, 0)]
    return jnp.where((within < sizes[group])[:, None], own, jnp.zeros((), x.dtype)).T
