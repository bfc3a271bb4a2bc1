"""Products of sorted rows and their groups' matrices on NVIDIA's Hopper GPUs, in Pallas by Mosaic.

They follow the kernels that come with JAX, `ragged_dot_mgpu` and `transposed_ragged_dot_mgpu` in
`jax.experimental.pallas.ops.gpu`, which are not called: those load JAX's test tools, ask this machine for its GPU, look
for each tile's group by a loop that is unrolled over all groups, compute tiles that no group has, leave rows behind the
last group unwritten, give weights' gradients in the rows' dtype alone, and begin to overwrite what a product reads
without waiting for it. Here which rows a tile has is counted before the kernel, and tiles begin where groups do, or up
to seven rows before, as copies begin at multiples of eight.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._platform import gpu_capability, gpu_cores, varying_as
from ._call import GroupedMatmul, GroupedMatmulCall
from ._hopper_tiles import pallas, row_tiles, ROWS, STEP, sum_of_rows, Tile


_MOSAIC = "jax.experimental.pallas.mosaic_gpu"


class HopperGroupedMatmul(GroupedMatmul):
    """Grouped products in Mosaic on Hopper GPUs: in 16 bits, of matrices that are stored as they are.

    `interpret` runs the kernels as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return the reason why the kernels cannot compute the call, or None."""
        return hopper_reason(call)

    def forward(
        self,
        x: Float[Array, "rows inputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows outputs"]:
        """Return each row times its group's matrix."""
        return _multiply_rows(x, weight.astype(x.dtype), sizes, is_transposed=True, interpret=self.interpret)

    def input_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows inputs"]:
        """Return the gradients of the rows."""
        weight = weight.astype(output_grad.dtype)
        return _multiply_rows(output_grad, weight, sizes, is_transposed=False, interpret=self.interpret)

    def weight_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the gradients of the matrices."""
        return _sum_outer_products(output_grad, x, sizes, dtype, self.interpret)


def hopper_reason(call: GroupedMatmulCall) -> str | None:
    """Return the reason why kernels for Hopper GPUs cannot compute the call, or None."""
    if not len(call.x):
        return "there are no rows"
    if not call.is_stored:
        return "matrices that are decoded or put together of parts are cheaper group by group"
    if any(size % STEP for size in call.weight.shape[1:]):
        return f"it takes a multiple of {STEP} channels, not {list(call.weight.shape[1:])}"
    if (capability := gpu_capability()) != 9.0:
        return f"it runs on GPUs of compute capability 9.0, not {capability}"
    if call.x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, not {call.x.dtype}"
    if importlib.util.find_spec(_MOSAIC) is None:
        return f"this JAX has no {_MOSAIC}"
    return None


def _sum_outer_products(
    gradient: Float[Array, "rows outputs"],
    x: Float[Array, "rows inputs"],
    sizes: Int[Array, "groups"],
    dtype: DTypeLike,
    interpret: bool,
) -> Float[Array, "groups outputs inputs"]:
    gradient, x = (padded(rows, -(-len(rows) // STEP) * STEP) for rows in (gradient, x))
    (_, outputs), inputs, groups = gradient.shape, x.shape[1], len(sizes)
    tile = Tile(*(128 if size % 128 == 0 else 64 for size in (outputs, inputs)))
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    firsts = starts // STEP * STEP
    blocks = jnp.where(sizes > 0, -(-(ends - firsts) // STEP), 0)
    body = functools.partial(sum_of_rows, tile, (groups, outputs // tile.rows, inputs // tile.columns))
    y = run_kernel(body, jax.ShapeDtypeStruct((groups, outputs, inputs), dtype), interpret)
    return varying_as(y(starts, ends, firsts, blocks, gradient, x), x)


class Tiles(NamedTuple):
    """Rows of the tiles. Behind the last group's tiles are those of no group, which are zeros.

    A tile's group has `size` of its rows, from `start` on; those before and behind are its neighbours'.
    """

    group: Int[Array, "tiles"]
    begin: Int[Array, "tiles"]
    start: Int[Array, "tiles"]
    size: Int[Array, "tiles"]
    number: Int[Array, "1"]


def tiles_of(sizes: Int[Array, "groups"], rows: int, tile: int) -> Tiles:
    """Return the tiles of so many rows; `number` of them are used."""
    most = (rows + min(len(sizes) + 1, rows) * (tile + ROWS - 2)) // tile
    ends = jnp.concatenate([jnp.cumsum(sizes, dtype=jnp.int32), jnp.full(1, rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    firsts = starts // ROWS * ROWS
    last = jnp.cumsum(jnp.where(ends > starts, -(-(ends - firsts) // tile), 0), dtype=jnp.int32)
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(number[:, None] >= last, axis=1, dtype=jnp.int32), len(sizes))
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1]])
    begin = firsts[group] + (number - before[group]) * tile
    start = jnp.maximum(begin, starts[group])
    size = jnp.minimum(ends[group], begin + tile) - start
    return Tiles(group, jnp.clip(begin, 0, rows - tile), start, size, last[-1:])


def tile_for(rows: int, groups: int, columns: int) -> Tile:
    """Return the largest tiles that leave few rows of groups' last tiles empty, and give all multiprocessors some."""
    height = 128 if rows >= 640 * groups else 64
    tiles = max(rows // height, min(rows, groups))
    return Tile(height, 128 if columns % 128 == 0 and tiles * (columns // 128) >= gpu_cores() else 64)


def _multiply_rows(x: Array, weight: Array, sizes: Array, *, is_transposed: bool, interpret: bool) -> Array:
    count, columns = len(x), weight.shape[1 if is_transposed else 2]
    tile = tile_for(count, len(sizes), columns)
    x = padded(x, max(tile.rows, -(-count // ROWS) * ROWS))
    body = functools.partial(row_tiles, tile, is_transposed)
    y = run_kernel(body, jax.ShapeDtypeStruct((len(x), columns), x.dtype), interpret)
    return varying_as(y(*tiles_of(sizes, len(x), tile.rows), x, weight), x)[:count]


def run_kernel(body: Callable[..., None], result: jax.ShapeDtypeStruct, interpret: bool) -> Callable[..., Array]:
    """Two programs on each multiprocessor, which take turns at the tiles: one computes while the other writes."""
    plgpu = pallas()[1]
    how: Any = None
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret import params

        how = params.InterpretGPUParams()
    kernel = plgpu.kernel(
        body,
        out_type=result,
        grid=(2 if interpret else 2 * gpu_cores(),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=how,
        kernel_name="grouped_" + getattr(body, "func", body).__name__.strip("_"),
    )

    def call(*arrays: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # JAX's pipelines mix dtypes
            return kernel(*arrays)

    return call


def padded(rows: Array, number: int) -> Array:
    """Return so many rows, with zeros behind the last."""
    return rows if len(rows) == number else jnp.pad(rows, [(0, number - len(rows)), (0, 0)])
