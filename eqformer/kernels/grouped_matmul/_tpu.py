"""Products of sorted rows and their groups' matrices on TPUs, in Pallas by Mosaic.

XLA's own ragged products copy the weights where they contract the last dim of these, and compute gradients of weights
for every group and row: as many times the work as there are groups. JAX's kernels (megablox), which these follow, do
neither, but compute a whole tile for each group that has rows in it. Here a group's own rows are computed alone, in
pieces that the tiles' heights do not bind.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._platform import varying_of
from ._call import GroupedMatmul, GroupedMatmulCall
from ._tpu_tiles import pallas, row_tiles, ROWS, sum_of_rows, Visits, visits_of


class TpuGroupedMatmul(GroupedMatmul):
    """Grouped products in Mosaic: in bfloat16, or in float32 for any other dtype.

    `interpret` runs the kernels as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return the reason why the kernels are not used for a call, or None."""
        if call.most is not None:
            return f"groups of up to {call.most} rows each are computed in as many slots at once"
        return None

    def forward(
        self,
        x: Float[Array, "rows inputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows outputs"]:
        """Return each row times its group's matrix."""
        return _multiply_rows(x, weight, sizes, transposed=True, interpret=self.interpret)

    def input_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows inputs"]:
        """Return the gradients of the rows."""
        return _multiply_rows(output_grad, weight, sizes, transposed=False, interpret=self.interpret)

    def weight_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the gradients of the matrices."""
        return _sum_outer_products(output_grad, x, sizes, dtype, self.interpret)


def _sum_outer_products(
    gradient: Float[Array, "rows outputs"],
    x: Float[Array, "rows inputs"],
    sizes: Int[Array, "groups"],
    dtype: DTypeLike,
    interpret: bool,
) -> Float[Array, "groups outputs inputs"]:
    tile, dtype = _tile(len(x)), jnp.dtype(dtype)
    gradient, x = (_padded(rows, tile) for rows in _narrow_alike(gradient, x))
    (rows, outputs), inputs, groups = gradient.shape, x.shape[1], len(sizes)
    pl, plt = pallas()
    sides = _part(outputs, 512), _part(inputs, 512)
    visits, number = visits_of(sizes, rows, tile, each=True)
    its = lambda side: lambda row, column, at, *visits: (Visits(*visits).tile[at], (row, column)[side])
    of_group = lambda row, column, at, *visits: (Visits(*visits).group[at], row, column)
    specs = {
        "in_specs": [pl.BlockSpec((tile, width), its(side)) for side, width in enumerate(sides)],
        "out_specs": pl.BlockSpec((None, *sides), of_group),
        "grid": (-(-outputs // sides[0]), -(-inputs // sides[1]), number),
        "scratch_shapes": [plt.VMEM(sides, jnp.float32)],
    }
    result = jax.ShapeDtypeStruct((groups, outputs, inputs), dtype)
    cost = _cost(rows * outputs * inputs, gradient, x, result)
    return _run(sum_of_rows, specs, result, cost, interpret, visits, gradient, x)


def _multiply_rows(x: Array, weight: Array, sizes: Array, *, transposed: bool, interpret: bool) -> Array:
    count, dtype, tile = len(x), x.dtype, _tile(len(x))
    x, weight = _narrow_alike(x, weight.astype(dtype))
    x, (pl, plt) = _padded(x, tile), pallas()
    (rows, inputs), columns = x.shape, weight.shape[1 if transposed else 2]
    own, width = _part(inputs, 4096 // x.dtype.itemsize), _part(columns, 768 if x.dtype.itemsize == 2 else 512)
    steps = -(-inputs // own)
    visits, number = visits_of(sizes, rows, tile)
    of_rows = lambda column, at, step, *visits: (Visits(*visits).tile[at], step)
    of_result = lambda column, at, step, *visits: (Visits(*visits).tile[at], column)

    def of_group(column: Any, at: Any, step: Any, *visits: Any) -> tuple[Any, ...]:
        return Visits(*visits).group[at], *((column, step) if transposed else (step, column))

    specs = {
        "in_specs": [
            pl.BlockSpec((tile, own), of_rows),
            pl.BlockSpec((None, *((width, own) if transposed else (own, width))), of_group),
        ],
        "out_specs": pl.BlockSpec((tile, width), of_result),
        "grid": (-(-columns // width), number, steps),
        "scratch_shapes": [plt.VMEM((tile, width), jnp.float32)] * (steps > 1),
    }
    result = jax.ShapeDtypeStruct((rows, columns), dtype)
    cost = _cost(rows * inputs * columns, x, weight, result)
    body = functools.partial(row_tiles, transposed, inputs)
    y = _run(body, specs, result, cost, interpret, visits, x, weight)[:count]
    is_real = jnp.arange(count, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    return jnp.where(is_real[:, None], y, 0)


def _run(
    body: Any, specs: dict[str, Any], result: Any, cost: dict[str, int], interpret: bool, visits: Visits, *given: Array
) -> Array:
    """A kernel on a grid whose last dims but the columns' go in order, as sums and what is written twice need."""
    pl, plt = pallas()
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(result.shape, result.dtype, manual_axis_type=varying_of((visits, given))),
        grid_spec=plt.PrefetchScalarGridSpec(num_scalar_prefetch=len(visits), **specs),
        compiler_params=plt.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(**cost, transcendentals=0),
        interpret=interpret,
        name="grouped_" + getattr(body, "func", body).__name__,
    )
    return call(*visits, *given)


def _cost(products: int, *arrays: Any) -> dict[str, int]:
    """Return the cost estimate for the compiler: two operations for each product, and each array once."""
    return {"flops": 2 * products, "bytes_accessed": sum(array.size * array.dtype.itemsize for array in arrays)}


def _narrow_alike(x: Array, other: Array) -> tuple[Array, Array]:
    """Both in bfloat16, if they are, or else in float32, the dtypes that the kernels have."""
    dtype = jnp.bfloat16 if x.dtype == other.dtype == jnp.bfloat16 else jnp.float32
    return x.astype(dtype), other.astype(dtype)


def _padded(x: Array, tile: int) -> Array:
    return jnp.pad(x, [(0, -len(x) % tile), (0, 0)]) if len(x) % tile else x


def _tile(rows: int) -> int:
    """Rows of a tile, which are on the chip at once: a group of several tiles reads its matrix for each anew."""
    return min(512, -(-rows // ROWS) * ROWS)


def _part(size: int, most: int) -> int:
    """Channels of a tile: parts as equal as multiples of 128 are, so that few are computed that are not there."""
    least = -(-size // most)
    if least == 1:
        return size
    width = lambda number: -(-size // (128 * number)) * 128
    return width(min(range(least, 2 * least + 1), key=lambda number: (number * width(number), number)))
