"""Products of rows with one matrix a group: what experts compute, however many rows each of them gets."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._dtype import at_least_float32


def grouped_product(
    x: Float[Array, "rows inputs"], weight: Float[Array, "groups outputs inputs"], sizes: Int[Array, "groups"]
) -> Float[Array, "rows outputs"]:
    """`weight[g] @ x[i]` for each row `i` of group `g`, where the first `sizes[0]` rows are of group 0, and so on.

    Rows behind the last group give zeros. On GPUs and TPUs this is `jax.lax.ragged_dot`; on CPUs, where that would
    compute every group for every row, a loop over blocks of rows of one group each, as in MegaBlocks
    (arXiv:2211.15841). `weight` is cast to the dtype of `x`; sums are float32 at least.
    """
    return _grouped(x, weight.astype(x.dtype), sizes.astype(jnp.int32))


@jax.custom_vjp
def _grouped(x: Array, weight: Array, sizes: Array) -> Array:
    return _on_platform(_blocked_product, _ragged_product)(x, weight, sizes)


def _forward(x: Array, weight: Array, sizes: Array) -> tuple[Array, tuple]:
    return _grouped(x, weight, sizes), (x, weight, sizes)


def _backward(saved: tuple, gradient: Array) -> tuple[Array, Array, None]:
    x, weight, sizes = saved
    to_x = _on_platform(_blocked_product, _ragged_product)(gradient, jnp.swapaxes(weight, 1, 2), sizes)
    to_weight = _on_platform(_blocked_gradient, _ragged_gradient)(gradient, x, sizes)
    return to_x, to_weight, None


_grouped.defvjp(_forward, _backward)


def _on_platform(blocked: Callable[..., Array], ragged: Callable[..., Array]) -> Callable[..., Any]:
    return functools.partial(jax.lax.platform_dependent, cpu=blocked, default=ragged)


def _ragged_product(x: Array, weight: Array, sizes: Array) -> Array:
    exact = at_least_float32(x.dtype)
    return jax.lax.ragged_dot(x, jnp.swapaxes(weight, 1, 2), sizes, preferred_element_type=exact).astype(x.dtype)


def _ragged_gradient(gradient: Array, x: Array, sizes: Array) -> Array:
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    exact = at_least_float32(x.dtype)
    return jax.lax.ragged_dot_general(gradient, x, sizes, dims, preferred_element_type=exact).astype(x.dtype)


class _Blocks(NamedTuple):
    """Blocks of rows that cover the groups in turn: each one's group, first row and the row where its group ends."""

    group: Int[Array, "blocks"]
    start: Int[Array, "blocks"]
    end: Int[Array, "blocks"]
    count: Int[Array, ""]


def _blocks(rows: int, sizes: Array, block: int) -> _Blocks:
    groups = sizes.shape[0]
    ends = jnp.cumsum(sizes)
    blocks = (sizes + (block - 1)) // block
    last = jnp.cumsum(blocks)
    number = jnp.arange(rows // block + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, number, side="right").astype(jnp.int32), groups - 1)
    start = (ends - sizes)[group] + (number - (last - blocks)[group]) * block
    return _Blocks(group, start, ends[group], last[-1])


def block_size(rows: int, groups: int) -> int:
    """Rows a block: few enough that groups of average size leave little of their last block empty."""
    return min(256, max(32, 2 ** ((rows // groups).bit_length() - 2)))


def _blocked_product(x: Array, weight: Array, sizes: Array) -> Array:
    # Blocks are written in the order of their rows: what the last block of a group has too much, the next overwrites.
    rows, block = x.shape[0], block_size(x.shape[0], weight.shape[0])
    blocks, padded = _blocks(rows, sizes, block), jnp.pad(x, ((0, block), (0, 0)))

    def one(number: Array, y: Array) -> Array:
        start, end = blocks.start[number], blocks.end[number]
        piece = jax.lax.dynamic_slice_in_dim(padded, start, block)
        matrix = jax.lax.dynamic_index_in_dim(weight, blocks.group[number], keepdims=False)
        result = jnp.where(_is_before(end, start, block), piece @ matrix.T, 0)
        return jax.lax.dynamic_update_slice_in_dim(y, result, start, 0)

    empty = jnp.full((rows + block, weight.shape[1]), _zero(x, weight, sizes))
    return jax.lax.fori_loop(0, blocks.count, one, empty)[:rows]


def _blocked_gradient(gradient: Array, x: Array, sizes: Array) -> Array:
    rows, block, exact = x.shape[0], block_size(x.shape[0], sizes.shape[0]), at_least_float32(x.dtype)
    blocks = _blocks(rows, sizes, block)
    gradient, x = (jnp.pad(array, ((0, block), (0, 0))) for array in (gradient, x))

    def one(number: Array, sums: Array) -> Array:
        start, end, group = blocks.start[number], blocks.end[number], blocks.group[number]
        left, right = (jax.lax.dynamic_slice_in_dim(array, start, block) for array in (gradient, x))
        left = jnp.where(_is_before(end, start, block), left, 0)
        more = jnp.einsum("no,ni->oi", left, right, preferred_element_type=exact)
        old = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, old + more, group, 0)

    zero = _zero(gradient, x, sizes).astype(exact)
    empty = jnp.full((sizes.shape[0], gradient.shape[1], x.shape[1]), zero)
    return jax.lax.fori_loop(0, blocks.count, one, empty).astype(x.dtype)


def _is_before(end: Array, start: Array, block: int) -> Array:
    return (start + jnp.arange(block, dtype=jnp.int32) < end)[:, None]


def _zero(*arrays: Array) -> Array:
    # Made of the arrays, so that it varies over a mesh as they do.
    zero = jnp.zeros_like(arrays[0], shape=())
    for array in arrays[1:]:
        zero += jnp.zeros_like(array, zero.dtype, shape=())
    return zero
