"""Modules on rows sorted by group: what experts compute, however many rows each of them gets."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from ...kernels import (
    Choice,
    compilers,
    GROUPED_MATMUL,
    GroupedMatmul,
    GroupedMatmulCall,
    record_choice,
)
from .._dtype import add_float32, at_least_float32
from .._linear import dense, DenseMap, LinearMap
from .._matmul_precision import Fp8Matmul, MatmulPrecision
from ._grouped_blocks import blocked, blocked_backward, blocked_forward, unkept, WHOLE
from ._linear_replay import map_linears, Maps, Parameters, recorded, replayed, zero_of


def grouped(
    modules: PyTree,
    x: Float[Array, "rows inputs"],
    sizes: Int[Array, "groups"],
    *,
    even: int | None = None,
    most: int | None = None,
) -> Float[Array, "rows outputs"]:
    """Return `modules[g](x[i])` for each row `i` of group `g`: the first `sizes[0]` rows are of group 0, and so on.

    `modules` is an ensemble over groups whose parameters are all of linear maps of one dim to one; it maps rows one by
    one. Rows behind the last group give zeros. On a platform whose kernels (`kernels.GROUPED_MATMUL`) support all of
    its maps, each map is computed by them. Otherwise each group has slots for as many rows as with an even load, which
    are computed together, and the other rows are computed in blocks of one group each, as in MegaBlocks
    (arXiv:2211.15841); where nothing is kept for gradients, CPUs have slots, in float32, for few rows or large weights
    alone, and blocks for all else. Maps that hold no weight, such as quantized ones, are decoded for groups that have
    rows, and again in the backward pass. The products' results are kept for the backward pass, which recomputes the
    rest; there are no second derivatives and no forward mode. Weights are cast to the dtype of `x`; sums are float32 at
    least.

    Args:
        modules: An ensemble over groups.
        x: The rows, sorted by group.
        sizes: How many rows each group has.
        even: How many rows a group has with an even load; None: an equal share of all rows, though some of
            these may be of no group.
        most: No group has more rows than this; accelerators without kernels for such calls have so many slots and
            nothing else.
    """
    arrays, static = eqx.partition(modules, eqx.is_array)
    leaves, structure = jax.tree.flatten(static)
    # Within a shard_map of the caller's, gradients of what does not vary are summed by these additions' transposes.
    zero = zero_of(arrays, x, sizes)
    arrays, x = jax.tree.map(lambda a: _typed_like(a, zero), (arrays, x))
    return _make(structure, tuple(leaves), even, most, compilers())(arrays, x, sizes.astype(jnp.int32))


@functools.lru_cache(maxsize=256)
def _make(
    structure: Any, leaves: tuple, even: int | None, most: int | None, platforms: tuple[str, ...]
) -> Callable[[PyTree, Array, Array], Array]:
    """The function with its gradient; the same for the same modules, so that eager calls compile once."""
    static = jax.tree.unflatten(structure, leaves)
    with_sizes = lambda way, **more: functools.partial(way, even=even, **more)
    with_gradient = map(with_sizes, (blocked_forward, blocked_backward))
    slotted = [with_sizes(way, most=most) for way in (blocked, blocked_forward, blocked_backward)]
    without_kernels: dict[str, Sequence[Callable[..., Any]]] = {"default": (with_sizes(unkept), *with_gradient)}
    without_kernels |= dict.fromkeys(platforms, slotted)

    @functools.partial(jax.jit, static_argnums=0)
    def on_platform(which: int, arrays: PyTree, x: Array, sizes: Array, *residuals: PyTree) -> PyTree:
        supported, args = _kernel_platforms(static, arrays, x, sizes, most), (arrays, x, sizes, *residuals)
        ways = without_kernels | {name: _by_kernels(name, most) for name in supported}
        branches = {name: _through_weights(way[which]) if which == 2 else way[which] for name, way in ways.items()}
        return jax.lax.platform_dependent(*args, **{name: functools.partial(b, static) for name, b in branches.items()})

    @jax.custom_vjp
    def run(arrays: PyTree, x: Array, sizes: Array) -> Array:
        return on_platform(0, arrays, x, sizes)

    def forward(arrays: PyTree, x: Array, sizes: Array) -> tuple[Array, tuple]:
        y, kept = jax.tree.map(lambda y: checkpoint_name(y, "product"), on_platform(1, arrays, x, sizes))
        return y, (arrays, x, sizes, (*kept, y))

    def backward(saved: tuple, gradient: Array) -> tuple[PyTree, Array, None]:
        return *on_platform(2, *saved, gradient), None

    run.defvjp(forward, backward)
    return run


def _kernel_platforms(static: PyTree, arrays: PyTree, x: Array, sizes: Array, most: int | None) -> tuple[str, ...]:
    """Return the platforms whose kernels support all maps of an ensemble, of those that can be compiled for here."""
    if not compilers():
        return ()
    choices: list[Choice] = []

    def note(linear: LinearMap, x: Array) -> Array:
        weight = dense(linear).weight
        matrices, rows = jnp.zeros((len(sizes), *weight.shape), weight.dtype), jnp.zeros((count, x.shape[-1]), x.dtype)
        is_stored = isinstance(linear, DenseMap)
        call = GroupedMatmulCall(rows, matrices, sizes, isinstance(linear.products, Fp8Matmul), most, is_stored)
        choices.append(GROUPED_MATMUL.choose(call))
        return linear(x)

    count, noting = len(x), WHOLE._replace(forward=note)
    run = lambda arrays, x: recorded(eqx.combine(arrays, static), x, noting)
    jax.eval_shape(run, jax.tree.map(lambda a: a[0], arrays), x[:1])
    supported = [{name for name, _ in choice.by_platform} for choice in choices]
    common = set.intersection(*supported) if supported else set()
    for choice in choices:
        record_choice(choice._replace(by_platform=tuple(pair for pair in choice.by_platform if pair[0] in common)))
    return tuple(name for name in compilers() if name in common)


def _by_kernels(platform: str, most: int | None) -> Sequence[Callable[..., Any]]:
    """Return the three ways of a platform's kernels."""

    def kernel_for(call: GroupedMatmulCall) -> GroupedMatmul:
        kernel = GROUPED_MATMUL.implementation_for(call, platform)
        assert isinstance(kernel, GroupedMatmul), kernel
        return kernel

    return [
        functools.partial(way, kernel_for=kernel_for, most=most) for way in (ragged, ragged_forward, ragged_backward)
    ]


def _through_weights(backward: Callable[..., tuple[PyTree, Array]]) -> Callable[..., tuple[PyTree, Array]]:
    """Gradients of what maps are made of, by those of their weights, which are decoded here."""

    def run(static: PyTree, arrays: PyTree, *rest: PyTree) -> tuple[PyTree, Array]:
        moving, codes = eqx.partition(arrays, eqx.is_inexact_array)
        parts = lambda moving: eqx.partition(map_linears(dense, eqx.combine(moving, codes, static)), eqx.is_array)
        weights, back = jax.vjp(lambda moving: parts(moving)[0], moving)
        to_weights, to_x = backward(parts(moving)[1], weights, *rest)
        return *back(to_weights), to_x

    return run


def _typed_like(array: Array, zero: Array) -> Array:
    axes = lambda x: jax.typeof(x).manual_axis_type.varying
    return array if axes(array) >= axes(zero) else array + zero.astype(array.dtype)


KernelFor = Callable[[GroupedMatmulCall], GroupedMatmul]
"""The kernel that computes a call."""


def ragged(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernel_for: KernelFor,
    most: int | None = None,
) -> Array:
    """Return the rows' outputs, of maps that are computed by the kernel of `kernel_for` each."""
    return ragged_forward(static, arrays, x, sizes, kernel_for=kernel_for, most=most)[0]


def ragged_forward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernel_for: KernelFor,
    most: int | None = None,
) -> tuple[Array, list[Array]]:
    """Return the rows' outputs, and those of the modules' linear maps."""
    maps, made = _maps(sizes, len(x), kernel_for, most), []

    def forward(linear: LinearMap, x: Array) -> Array:
        made.append(maps.forward(linear, x))
        return made[-1]

    y, kept = recorded(eqx.combine(arrays, static), x, maps._replace(forward=forward))
    # A map's output has zeros behind the last group.
    return (y if any(y is one for one in made) else jnp.where(_is_real(x, sizes), y, 0)), kept


def ragged_backward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    kept: Sequence[Array],
    gradient: Array,
    *,
    kernel_for: KernelFor,
    most: int | None = None,
) -> tuple[PyTree, Array]:
    """Return the gradients of the parameters and of the rows; `kept` ends in the output."""
    maps = _maps(sizes, len(x), kernel_for, most)
    again = lambda arrays, x: replayed(eqx.combine(arrays, static), x, maps, kept)
    to_arrays, to_x = jax.vjp(again, arrays, x)[1](gradient)
    return to_arrays, jnp.where(_is_real(x, sizes), to_x, 0)


def _maps(sizes: Array, rows: int, kernel_for: KernelFor, most: int | None) -> Maps:
    owners = jnp.repeat(jnp.arange(len(sizes), dtype=jnp.int32), sizes, total_repeat_length=rows)

    def kernel_of(products: MatmulPrecision, x: Array, weight: Array) -> GroupedMatmul:
        return kernel_for(GroupedMatmulCall(x, weight, sizes, isinstance(products, Fp8Matmul), most))

    def forward(linear: LinearMap, x: Array) -> Array:
        weight = dense(linear).weight
        y = kernel_of(linear.products, x, weight).forward(x, weight, sizes)
        return add_float32(y, None if linear.bias is None else jnp.where(_is_real(x, sizes), linear.bias[owners], 0))

    def backward(
        products: MatmulPrecision, parameters: Parameters, x: Array, output_grad: Array
    ) -> tuple[Parameters, Array]:
        (weight, bias), wide = parameters, at_least_float32(x.dtype)
        kernel, bias_grad = kernel_of(products, x, weight), None
        weight_grad = kernel.weight_grad(output_grad, x, sizes, weight.dtype)
        if bias is not None:
            of_rows = jnp.where(_is_real(x, sizes), output_grad, 0)
            bias_grad = jax.ops.segment_sum(of_rows.astype(wide), owners, len(sizes)).astype(bias.dtype)
        return (weight_grad, bias_grad), kernel.input_grad(output_grad, weight, sizes)

    return Maps(forward, backward)


def _is_real(x: Array, sizes: Array) -> Array:
    return (jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[:, None]
