"""Modules on rows sorted by group: what experts compute, however many rows each of them gets."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from ...kernels import capability_of, compilers
from .._linear import dense
from ._grouped_blocks import blocked, blocked_backward, blocked_forward
from ._grouped_hopper import has_kernels, HOPPER
from ._grouped_maps import map_linears, zero_of
from ._grouped_ragged import ragged, ragged_backward, ragged_forward
from ._grouped_unkept import unkept
from ._hopper_fp8 import hopper_in_8_bits


def grouped(
    modules: PyTree,
    x: Float[Array, "rows inputs"],
    sizes: Int[Array, "groups"],
    *,
    even: int | None = None,
    most: int | None = None,
) -> Float[Array, "rows outputs"]:
    """`modules[g](x[i])` for each row `i` of group `g`, where the first `sizes[0]` rows are of group 0, and so on.

    `modules` is an ensemble over groups whose parameters are all of linear maps of one dim to one; it maps rows one by
    one. Rows behind the last group give zeros. Maps that hold no weight, such as quantized ones, are decoded for groups
    that have rows, and again in the backward pass. On CPUs and GPUs each group has slots for as many rows as with an
    even load, which are computed together, and the other rows are computed in blocks of one group each, as in
    MegaBlocks (arXiv:2211.15841); where nothing is kept for gradients, CPUs have slots, in float32, for few rows or
    large weights alone, and blocks for all else. On TPUs each map is computed by kernels of our own, and so it is on
    Hopper GPUs, in 16 bits. Maps whose products are of 8 bits (`Fp8Matmul`) have such kernels on Hopper GPUs, and those
    of 16 bits on TPUs. (XLA would compute `lax.ragged_dot` for every group and row on CPUs and GPUs, and its weights'
    gradients on TPUs too.) The products' results are kept for the backward pass, which recomputes the rest; there are
    no second derivatives and no forward mode. Weights are cast to the dtype of `x`; sums are float32 at least.

    Args:
        modules: An ensemble over groups.
        x: The rows, sorted by group.
        sizes: How many rows each group has.
        even: How many rows a group has with an even load; None: an equal share of all rows, though some of
            these may be of no group.
        most: No group has more rows than this. TPUs, and GPUs without kernels, then have so many slots and nothing
            else.
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
    ways: dict[str, Sequence[Callable[..., Any]]] = {
        "default": (with_sizes(unkept), *with_gradient),
        "cuda": slotted,
        "tpu": (ragged, ragged_forward, ragged_backward) if most is None else slotted,
    }
    ways = {name: way for name, way in ways.items() if name in ("default", *platforms)}
    given: Any = {"kernels": HOPPER, "in_8_bits": hopper_in_8_bits()}
    hopper = [functools.partial(way, **given) for way in (ragged, ragged_forward, ragged_backward)]

    @functools.partial(jax.jit, static_argnums=0)
    def on_platform(which: int, *args: PyTree) -> PyTree:
        # Traced everywhere, and lowered for these GPUs alone: formulas of what a plan holds read the trace.
        own = ways | ({"cuda": hopper} if has_kernels(static, *args[:2]) else {})
        made = {name: _through_weights(way[which]) if which == 2 else way[which] for name, way in own.items()}
        found = {name: functools.partial(way, static) for name, way in made.items()}
        return jax.lax.platform_dependent(*args, **found)

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


def fp8_experts(chip: str) -> bool:
    """Whether experts' products of 8 bits are such on chips of a name, such as `NVIDIA H100` or `h100`.

    TPUs, and Hopper GPUs before JAX 0.12, have kernels of 16 bits; on a CPU and older GPUs a wider product multiplies
    numbers of 8 bits.
    """
    gpu = capability_of(chip)
    return gpu >= 10 or (gpu == 9 and hopper_in_8_bits() is not None)


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
