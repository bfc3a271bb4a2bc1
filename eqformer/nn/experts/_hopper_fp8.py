"""Products of sorted rows and their groups' matrices in 8 bits on NVIDIA's Hopper GPUs, in Pallas by Mosaic.

Tensor cores take factors of 8 bits only with what is summed over in one row of memory. So weights are rounded into the
order of their use, forward and backward, and for weights' gradients both factors are transposed, each group's rows
beginning at a multiple of `DEEP`, with zeros between.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ...kernels import varying_as
from ._grouped_fp8 import in_8_bits, OfCodes
from ._grouped_hopper import padded, run_kernel, tile_for, tiles_of
from ._grouped_maps import Kernels
from ._hopper_tiles import in_panels, pallas, ROWS, store_rows, store_tile, Tile


DEEP = 128  # what a product sums over at once: 128 bytes, as for `STEP` numbers of 16 bits


def rows(
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
    """See `OfCodes`."""
    matrices = matrices if contracts == 2 else matrices.swapaxes(1, 2)
    is_exact = contracts == 1  # sums of gradients
    count, columns = len(codes), matrices.shape[1]
    tile = tile_for(count, len(sizes), 64 if is_exact else columns)  # of an exact sum two are held
    long = max(tile.rows, -(-count // ROWS) * ROWS)
    codes, of_row, matrices = padded(codes, long), padded(of_row, long)[:, 0], _deep(matrices)
    body = functools.partial(coded_rows, tile, is_exact)
    y = run_kernel(body, jax.ShapeDtypeStruct((long, columns), dtype), interpret)
    return varying_as(y(*tiles_of(sizes, long, tile.rows), _deep(codes), matrices, of_row, of_group), codes)[:count]


def outer(
    gradient: Float[Array, "rows outputs"],
    codes: Float[Array, "rows inputs"],
    of_group: Float[Array, "groups"],
    sizes: Int[Array, "groups"],
    dtype: DTypeLike,
    *,
    interpret: bool,
) -> Float[Array, "groups outputs inputs"]:
    """See `OfCodes`."""
    (_, outputs), inputs, groups = gradient.shape, codes.shape[1], len(sizes)
    blocks = -(-sizes // DEEP)
    firsts = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks) * DEEP
    gradient, other = (_by_columns(one, sizes, firsts) for one in (gradient, codes))
    tile = Tile(128 if outputs % 128 == 0 else 64, 64)
    body = functools.partial(coded_sums, tile, (groups, outputs // tile.rows, inputs // tile.columns))
    y = run_kernel(body, jax.ShapeDtypeStruct((groups, outputs, inputs), dtype), interpret)
    return varying_as(y(firsts, blocks, gradient, other, of_group), codes)


def hopper_in_8_bits() -> Kernels | None:
    """The kernels; None of a JAX before 0.12, whose products on tensor cores have two factors of one format."""
    return in_8_bits(OfCodes(rows, outer)) if jax.__version_info__ >= (0, 12) else None


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
    """The kernel of `rows`: of each tile its rows by its group's matrix, times their scales."""
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
    """The kernel of `outer`: tiles of each group's matrix, summed over the blocks of its rows."""
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
