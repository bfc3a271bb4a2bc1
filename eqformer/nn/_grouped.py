"""Products of rows with one matrix a group: what experts compute, however many rows each of them gets."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._dtype import at_least_float32


THERE, BACK = "ni,oi->no", "no,oi->ni"  # rows by a matrix of outputs x inputs, or gradients of outputs by it


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
    return _product(x, weight, sizes, THERE)


def _forward(x: Array, weight: Array, sizes: Array) -> tuple[Array, tuple]:
    return _grouped(x, weight, sizes), (x, weight, sizes)


def _backward(saved: tuple, gradient: Array) -> tuple[Array, Array, None]:
    x, weight, sizes = saved
    to_x = _product(gradient, weight, sizes, BACK)
    to_weight = _on_platform(_blocked_gradient, _ragged_gradient)(gradient, x, sizes)
    return to_x, to_weight, None


_grouped.defvjp(_forward, _backward)


def _product(x: Array, weight: Array, sizes: Array, spec: str) -> Array:
    blocked, ragged = (functools.partial(one, spec=spec) for one in (_blocked_product, _ragged_product))
    return _on_platform(blocked, ragged)(x, weight, sizes)


def _on_platform(blocked: Callable[..., Array], ragged: Callable[..., Array]) -> Callable[..., Any]:
    return functools.partial(jax.lax.platform_dependent, cpu=blocked, default=ragged)


def _ragged_product(x: Array, weight: Array, sizes: Array, spec: str) -> Array:
    exact, weight = at_least_float32(x.dtype), weight if spec == BACK else jnp.swapaxes(weight, 1, 2)
    return jax.lax.ragged_dot(x, weight, sizes, preferred_element_type=exact).astype(x.dtype)


def _ragged_gradient(gradient: Array, x: Array, sizes: Array) -> Array:
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    exact = at_least_float32(x.dtype)
    return jax.lax.ragged_dot_general(gradient, x, sizes, dims, preferred_element_type=exact).astype(x.dtype)


def block_sizes(rows: int, groups: int) -> tuple[int, int]:
    """Rows of a large block and of a small one: a group is cut into large blocks, and what is left into small ones."""
    even = 2 ** max(0, (rows // groups).bit_length() - 1)
    return min(rows, max(32, min(256, even))), min(rows, 32)


def _blocked_product(x: Array, weight: Array, sizes: Array, spec: str) -> Array:
    if not x.shape[0]:
        return jnp.zeros((0, _columns(weight, spec)), x.dtype)
    ends = jnp.cumsum(sizes)

    def group(number: Array, y: Array) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(weight, number, keepdims=False)

        def block(start: Array, size: int, is_own: Array | None, y: Array) -> Array:
            piece = jax.lax.dynamic_slice_in_dim(x, start, size)
            found = jnp.einsum(spec, piece, matrix, preferred_element_type=at_least_float32(x.dtype)).astype(x.dtype)
            if is_own is not None:
                found = jnp.where(is_own, found, jax.lax.dynamic_slice_in_dim(y, start, size))
            return jax.lax.dynamic_update_slice_in_dim(y, found, start, 0)

        return _over_blocks(block, y, ends[number] - sizes[number], ends[number], len(x), len(sizes))

    empty = jnp.full((x.shape[0], _columns(weight, spec)), _zero(x, weight, sizes))
    return jax.lax.fori_loop(0, len(sizes), group, empty)


def _blocked_gradient(gradient: Array, x: Array, sizes: Array) -> Array:
    exact, ends = at_least_float32(x.dtype), jnp.cumsum(sizes)
    empty = jnp.full((gradient.shape[1], x.shape[1]), _zero(gradient, x, sizes).astype(exact))

    def group(_: None, given: tuple[Array, Array]) -> tuple[None, Array]:
        def block(start: Array, size: int, is_own: Array | None, total: Array) -> Array:
            left, right = (jax.lax.dynamic_slice_in_dim(array, start, size) for array in (gradient, x))
            if is_own is not None:
                left, right = jnp.where(is_own, left, 0), jnp.where(is_own, right, 0)
            return total + jnp.einsum("no,ni->oi", left, right, preferred_element_type=exact)

        end, size = given
        return None, _over_blocks(block, empty, end - size, end, len(x), len(sizes)).astype(x.dtype)

    if not x.shape[0]:
        return jnp.zeros((len(sizes), *empty.shape), x.dtype)
    return jax.lax.scan(group, None, (ends, sizes))[1]


def _over_blocks(
    step: Callable[[Array, int, Array | None, Array], Array],
    carry: Array,
    start: Array,
    end: Array,
    rows: int,
    groups: int,
) -> Array:
    """`step(start, size, is_own, carry)` for each block of a group; `is_own` marks its rows where others are beside."""
    large, small = block_sizes(rows, groups)
    number = (end - start) // large
    carry = jax.lax.fori_loop(0, number, lambda n, carry: step(start + n * large, large, None, carry), carry)
    left = start + number * large

    def rest(n: Array, carry: Array) -> Array:
        first = left + n * small
        begin = jnp.minimum(first, rows - small)  # the last block of all may begin within the one before
        place = begin + jnp.arange(small, dtype=jnp.int32)
        return step(begin, small, ((place >= first) & (place < end))[:, None], carry)

    return jax.lax.fori_loop(0, (end - left + (small - 1)) // small, rest, carry)


def _columns(weight: Array, spec: str) -> int:
    return weight.shape[2 if spec == BACK else 1]


def _zero(*arrays: Array) -> Array:
    # Made of the arrays, so that it varies over a mesh as they do.
    zero = jnp.zeros_like(arrays[0], shape=())
    for array in arrays[1:]:
        zero += jnp.zeros_like(array, zero.dtype, shape=())
    return zero
