"""Products of sorted rows and their groups' matrices on TPUs, by the kernels that come with JAX (megablox).

XLA's own ragged products copy the weights where they contract the last dim of these, and compute gradients of weights
for every group and row: as many times the work as there are groups. These do neither.
"""

import importlib
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._pallas import typed
from ._grouped_maps import Kernels


def times(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "groups outputs inputs"],
    sizes: Int[Array, "groups"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows outputs"]:
    """Each row by its group's matrix, in the dtype of `x`; zeros behind the last group."""
    return _by_rows(x, weight, sizes, transpose_rhs=True, interpret=interpret)


def back(
    gradient: Float[Array, "rows outputs"],
    weight: Float[Array, "groups outputs inputs"],
    sizes: Int[Array, "groups"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows inputs"]:
    """The gradients of the rows of `times`, in the dtype of `gradient`."""
    return _by_rows(gradient, weight, sizes, transpose_rhs=False, interpret=interpret)


def outer(
    gradient: Float[Array, "rows outputs"],
    x: Float[Array, "rows inputs"],
    sizes: Int[Array, "groups"],
    dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> Float[Array, "groups outputs inputs"]:
    """The gradients of the matrices of `times`: float32 sums, rounded to `dtype` once."""
    gradient, x = (_padded(rows, len(sizes)) for rows in _narrow_alike(gradient, x))
    tiling = _tile(len(x), len(sizes)), 512, 512
    product = typed(_kernels().tgmm, x)
    return product(gradient.swapaxes(0, 1), x, sizes, jnp.float32, tiling, interpret=interpret).astype(dtype)


TPU = Kernels(times, back, outer)


def _by_rows(x: Array, weight: Array, sizes: Array, *, transpose_rhs: bool, interpret: bool) -> Array:
    rows, dtype = len(x), x.dtype
    x, weight = _narrow_alike(x, weight.astype(dtype))
    x = _padded(x, len(sizes))
    contracted, others = x.shape[1], weight.shape[1 if transpose_rhs else 2]
    tiling = _tile(len(x), len(sizes)), min(contracted, 4096 // x.dtype.itemsize), min(others, 512)
    given: dict[str, Any] = {"transpose_rhs": transpose_rhs, "interpret": interpret}
    y = typed(_kernels().gmm, x)(x, weight, sizes, dtype, tiling, **given)[:rows]
    is_real = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    return jnp.where(is_real[:, None], y, 0)


def _kernels() -> Any:
    """The module of the kernels, which lies behind a function of the same name; only TPUs need it."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def _narrow_alike(x: Array, other: Array) -> tuple[Array, Array]:
    """Both in bfloat16, if they are, or else in float32, the dtypes that the kernels have."""
    dtype = jnp.bfloat16 if x.dtype == other.dtype == jnp.bfloat16 else jnp.float32
    return x.astype(dtype), other.astype(dtype)


def _padded(x: Array, groups: int) -> Array:
    return jnp.pad(x, [(0, -len(x) % _tile(len(x), groups)), (0, 0)])


def _tile(rows: int, groups: int) -> int:
    """Rows that are computed at once. Of a tile with rows of two groups all is computed for both."""
    return next((tile for tile in (512, 256) if 10 * tile * (groups - 1) <= rows), 128)
