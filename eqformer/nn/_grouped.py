"""Modules on rows sorted by group: what experts compute, however many rows each of them gets."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from ._dtype import at_least_float32
from ._linear import Linear


def grouped(
    modules: PyTree, x: Float[Array, "rows inputs"], sizes: Int[Array, "groups"]
) -> Float[Array, "rows outputs"]:
    """`modules[g](x[i])` for each row `i` of group `g`, where the first `sizes[0]` rows are of group 0, and so on.

    `modules` is an ensemble over groups whose parameters are all of `Linear`s of one dim to one; it maps rows one by
    one. Rows behind the last group give zeros. On CPUs this is a loop over blocks of rows of one group each, as in
    MegaBlocks (arXiv:2211.15841); on GPUs and TPUs each `Linear` is a `jax.lax.ragged_dot`, which a CPU, and a GPU
    without a kernel for it, computes for every group and row. The backward pass keeps what the `Linear`s gave and
    computes the rest again; it has no derivative of its own, and there is no forward mode. Weights are cast to the
    dtype of `x`; sums are float32 at least.
    """
    arrays, static = eqx.partition(modules, eqx.is_array)
    leaves, structure = jax.tree.flatten(static)
    # Within a shard_map of the caller's, gradients of what does not vary are summed by these additions' transposes.
    zero = _zero(arrays, x, sizes)
    arrays, x = jax.tree.map(lambda a: _typed_like(a, zero), (arrays, x))
    return _make(structure, tuple(leaves))(arrays, x, sizes.astype(jnp.int32))


def map_linears(change: Callable[[Linear], Any], module: Any) -> Any:
    """The module with each `Linear` changed."""
    is_linear = lambda node: isinstance(node, Linear)
    return jax.tree.map(lambda node: change(node) if is_linear(node) else node, module, is_leaf=is_linear)


Parameters = tuple[Array, Array | None]  # a weight and, where there is one, a bias


class Maps(NamedTuple):
    """How a `Linear` is computed, and the gradients of its parameters and its input by those of its output."""

    forward: Callable[[Linear, Array], Array]
    backward: Callable[[Parameters, Array, Array], tuple[Parameters, Array]]


@functools.lru_cache(maxsize=256)
def _make(structure: Any, leaves: tuple) -> Callable[[PyTree, Array, Array], Array]:
    """The function with its gradient; the same for the same modules, so that eager calls compile once."""
    static = jax.tree.unflatten(structure, leaves)
    ways = {"cpu": (_blocked_forward, _blocked_backward), "default": (_ragged_forward, _ragged_backward)}

    @functools.partial(jax.jit, static_argnums=0)
    def on_platform(which: int, *args: Any) -> Any:
        found = {name: functools.partial(way[which], static) for name, way in ways.items()}
        return jax.lax.platform_dependent(*args, **found)

    @jax.custom_vjp
    def run(arrays: PyTree, x: Array, sizes: Array) -> Array:
        return on_platform(0, arrays, x, sizes)[0]

    def forward(arrays: PyTree, x: Array, sizes: Array) -> tuple[Array, tuple]:
        y, kept = jax.tree.map(lambda y: checkpoint_name(y, "product"), on_platform(0, arrays, x, sizes))
        return y, (arrays, x, sizes, (*kept, y))

    def backward(saved: tuple, gradient: Array) -> tuple[PyTree, Array, None]:
        return *on_platform(1, *saved, gradient), None

    run.defvjp(forward, backward)
    return run


def _recorded(module: Any, x: Array, maps: Maps) -> tuple[Array, list[Array]]:
    """The module's output, and those of its `Linear`s in the order of their calls, all but one that is the output."""
    kept: list[Array] = []

    def call(linear: Linear, x: Array) -> Array:
        kept.append(maps.forward(linear, x))
        return kept[-1]

    y = map_linears(lambda linear: lambda x: call(linear, x), module)(x)
    return y, [one for one in kept if one is not y]


def _replayed(module: Any, x: Array, maps: Maps, kept: Sequence[Array]) -> Array:
    """The module with the outputs of its `Linear`s given."""
    given = list(kept)

    @jax.custom_vjp
    def known(parameters: Parameters, x: Array, y: Array) -> Array:
        return y

    def backward(saved: tuple[Parameters, Array], gradient: Array) -> tuple[Parameters, Array, None]:
        return *maps.backward(*saved, gradient), None

    known.defvjp(lambda parameters, x, y: (y, (parameters, x)), backward)
    call = lambda linear: lambda x: known((linear.weight, linear.bias), x, given.pop(0))
    return map_linears(call, module)(x)


# On CPUs: a module at a time, on blocks of its rows.


def _whole_backward(parameters: Parameters, x: Array, gradient: Array) -> tuple[Parameters, Array]:
    (weight, bias), exact = parameters, at_least_float32(x.dtype)
    to_weight = jnp.einsum("no,ni->oi", gradient, x, preferred_element_type=exact).astype(weight.dtype)
    to_bias = None if bias is None else jnp.sum(gradient, 0, dtype=exact).astype(bias.dtype)
    to_x = jnp.einsum("no,oi->ni", gradient, weight.astype(x.dtype), preferred_element_type=exact)
    return (to_weight, to_bias), to_x.astype(x.dtype)


_WHOLE = Maps(lambda linear, x: linear(x), _whole_backward)


def block_sizes(rows: int, groups: int) -> tuple[int, int]:
    """Rows of a large block and of a small one: a group is cut into large blocks, and what is left into small ones."""
    even = 2 ** max(0, (rows // groups).bit_length() - 1)
    return min(rows, max(64, min(256, even))), min(rows, 64)


def _blocked_forward(static: PyTree, arrays: PyTree, x: Array, sizes: Array) -> tuple[Array, list[Array]]:
    of_rows = lambda arrays, x: _recorded(eqx.combine(arrays, static), x, _WHOLE)
    shapes = jax.eval_shape(of_rows, jax.tree.map(lambda a: a[0], arrays), x[:1])
    zero, ends = _zero(arrays, x, sizes), jnp.cumsum(sizes)
    results = jax.tree.map(lambda s: jnp.full((len(x), *s.shape[1:]), zero.astype(s.dtype)), shapes)
    if not len(x):
        return results

    def group(number: Array, results: Any) -> Any:
        own = _of_group(arrays, number)

        def block(start: Array, size: int, is_own: Array | None, results: Any) -> Any:
            found = of_rows(own, jax.lax.dynamic_slice_in_dim(x, start, size))
            return jax.tree.map(lambda old, new: _written(old, new, start, is_own), results, found)

        return _over_blocks(block, results, ends[number] - sizes[number], ends[number], len(x), len(sizes))

    # Who has no rows is passed over: in decoding, most.
    one = lambda number, results: jax.lax.cond(sizes[number] > 0, group, lambda _, same: same, number, results)
    return jax.lax.fori_loop(0, len(sizes), one, results)


def _blocked_backward(
    static: PyTree, arrays: PyTree, x: Array, sizes: Array, kept: Sequence[Array], gradient: Array
) -> tuple[PyTree, Array]:
    zero, ends = _zero((arrays, kept, gradient), x, sizes), jnp.cumsum(sizes)
    to_x = jnp.full(x.shape, zero)
    if not len(x):
        return jax.tree.map(lambda a: jnp.full(a.shape, zero.astype(a.dtype)), arrays), to_x

    empty = lambda a: jnp.full(a.shape[1:], zero.astype(a.dtype))

    def group(to_x: Array, number: Array) -> tuple[Array, PyTree]:
        own = jax.tree.map(lambda a: a.astype(at_least_float32(a.dtype)), _of_group(arrays, number))

        def block(start: Array, size: int, is_own: Array | None, carry: tuple) -> tuple:
            to_x, totals = carry
            cut = lambda rows: _cut(rows, start, size, is_own)
            again = lambda own, x: _replayed(eqx.combine(own, static), x, _WHOLE, list(map(cut, kept)))
            more, to_piece = jax.vjp(again, own, cut(x))[1](cut(gradient))
            return _written(to_x, to_piece, start, is_own), jax.tree.map(jnp.add, totals, more)

        totals = jax.tree.map(lambda a: jnp.full(a.shape, zero.astype(a.dtype)), own)
        start, end = ends[number] - sizes[number], ends[number]
        to_x, totals = _over_blocks(block, (to_x, totals), start, end, len(x), len(sizes))
        return to_x, jax.tree.map(lambda total, a: total.astype(a.dtype), totals, arrays)

    def one(to_x: Array, number: Array) -> tuple[Array, PyTree]:
        nothing = lambda to_x, _: (to_x, jax.tree.map(empty, arrays))
        return jax.lax.cond(sizes[number] > 0, group, nothing, to_x, number)

    to_x, to_arrays = jax.lax.scan(one, to_x, jnp.arange(len(sizes), dtype=jnp.int32))
    return to_arrays, to_x


def _over_blocks(
    step: Callable[[Array, int, Array | None, Any], Any], carry: Any, start: Array, end: Array, rows: int, groups: int
) -> Any:
    """`step(start, size, is_own, carry)` for each block of a group; `is_own` marks its rows where others are beside."""
    large, small = block_sizes(rows, groups)
    number = (end - start) // large
    carry = jax.lax.fori_loop(0, number, lambda n, carry: step(start + n * large, large, None, carry), carry)
    left = start + number * large

    def rest(n: Array, carry: Any) -> Any:
        first = left + n * small
        begin = jnp.minimum(first, rows - small)  # the last block of all may begin within the one before
        place = begin + jnp.arange(small, dtype=jnp.int32)
        return step(begin, small, ((place >= first) & (place < end))[:, None], carry)

    return jax.lax.fori_loop(0, (end - left + (small - 1)) // small, rest, carry)


def _of_group(arrays: PyTree, number: Array) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False), arrays)


def _cut(rows: Array, start: Array, size: int, is_own: Array | None) -> Array:
    piece = jax.lax.dynamic_slice_in_dim(rows, start, size)
    return piece if is_own is None else jnp.where(is_own, piece, 0)


def _written(old: Array, new: Array, start: Array, is_own: Array | None) -> Array:
    if is_own is not None:
        new = jnp.where(is_own, new, jax.lax.dynamic_slice_in_dim(old, start, len(new)))
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, 0)


def _zero(tree: PyTree, *more: Array) -> Array:
    # Made of the arrays, so that it varies over a mesh as they do; of the first array's dtype.
    first, *others = more
    zero = jnp.zeros_like(first, shape=())
    for array in (*others, *jax.tree.leaves(tree)):
        zero += jnp.zeros_like(array, zero.dtype, shape=())
    return zero


def _typed_like(array: Array, zero: Array) -> Array:
    axes = lambda x: jax.typeof(x).manual_axis_type.varying
    return array if axes(array) >= axes(zero) else array + zero.astype(array.dtype)


# On GPUs and TPUs: all rows at once, a ragged product for each `Linear`.


def _ragged_maps(sizes: Array, rows: int) -> Maps:
    owners = jnp.repeat(jnp.arange(len(sizes), dtype=jnp.int32), sizes, total_repeat_length=rows)
    summed = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

    def product(x: Array, weight: Array) -> Array:
        exact = at_least_float32(x.dtype)
        return jax.lax.ragged_dot(x, weight.astype(x.dtype), sizes, preferred_element_type=exact).astype(x.dtype)

    def forward(linear: Linear, x: Array) -> Array:
        y = product(x, jnp.swapaxes(linear.weight, 1, 2))
        return y if linear.bias is None else y + linear.bias.astype(y.dtype)[owners]

    def backward(parameters: Parameters, x: Array, gradient: Array) -> tuple[Parameters, Array]:
        (weight, bias), exact = parameters, at_least_float32(x.dtype)
        to_weight = jax.lax.ragged_dot_general(gradient, x, sizes, summed, preferred_element_type=exact)
        to_bias = None
        if bias is not None:
            to_bias = jax.ops.segment_sum(gradient.astype(exact), owners, len(sizes)).astype(bias.dtype)
        return (to_weight.astype(weight.dtype), to_bias), product(gradient, weight)

    return Maps(forward, backward)


def _ragged_forward(static: PyTree, arrays: PyTree, x: Array, sizes: Array) -> tuple[Array, list[Array]]:
    y, kept = _recorded(eqx.combine(arrays, static), x, _ragged_maps(sizes, len(x)))
    return jnp.where(_is_real(x, sizes), y, 0), kept


def _ragged_backward(
    static: PyTree, arrays: PyTree, x: Array, sizes: Array, kept: Sequence[Array], gradient: Array
) -> tuple[PyTree, Array]:
    maps, gradient = _ragged_maps(sizes, len(x)), jnp.where(_is_real(x, sizes), gradient, 0)
    again = lambda arrays, x: _replayed(eqx.combine(arrays, static), x, maps, kept)
    to_arrays, to_x = jax.vjp(again, arrays, x)[1](gradient)
    return to_arrays, jnp.where(_is_real(x, sizes), to_x, 0)


def _is_real(x: Array, sizes: Array) -> Array:
    return (jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[:, None]
