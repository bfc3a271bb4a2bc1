"""Products of matrices joined to the collective beside them, so that one hides the other.

The ring forms follow "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (Wang et al., ASPLOS 2023): a device multiplies the piece that it holds while the next one travels.
"""

from typing import get_args, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...nn import at_least_float32, ComputeDtypeMatmul, MatmulPrecision
from .. import _collectives as send
from .._ring import circulate, collect, Ring
from .._shard_map import vary, vary_like


Overlap = Literal["none", "ring", "bidirectional"]
OVERLAPS: tuple[str, ...] = get_args(Overlap)

Weights = tuple[Float[Array, "_ inputs"], ...]


@overload
def all_gather_matmul(
    x: Float[Array, "*batch seq inputs"],
    weight: Float[Array, "outputs inputs"],
    axis: str,
    *,
    overlap: str = "none",
    products: MatmulPrecision | tuple[MatmulPrecision, ...] = ComputeDtypeMatmul(),
    name: str = "all_gather_matmul",
) -> Float[Array, "*batch full_seq outputs"]:
    """One weight, one product."""


@overload
def all_gather_matmul(
    x: Float[Array, "*batch seq inputs"],
    weight: Weights,
    axis: str,
    *,
    overlap: str = "none",
    products: MatmulPrecision | tuple[MatmulPrecision, ...] = ComputeDtypeMatmul(),
    name: str = "all_gather_matmul",
) -> tuple[Float[Array, "*batch full_seq _"], ...]:
    """Several weights, a product of each."""


def all_gather_matmul(
    x: Float[Array, "*batch seq inputs"],
    weight: Float[Array, "outputs inputs"] | Weights,
    axis: str,
    *,
    overlap: str = "none",
    products: MatmulPrecision | tuple[MatmulPrecision, ...] = ComputeDtypeMatmul(),
    name: str = "all_gather_matmul",
) -> Float[Array, "*batch full_seq outputs"] | tuple[Float[Array, "*batch full_seq _"], ...]:
    """`all_gather(x, axis) @ weight.T` for this device's piece `x` of the sequence; several weights share one gather.

    Sends `(n-1)/n` of the gathered `x`. `overlap="none"` gathers, then multiplies; `"ring"` passes pieces round the
    axis and multiplies each while the next one travels; `"bidirectional"` passes halves both ways round. The rings
    gather again in the backward pass (for the weight's gradient) and never hold the whole `x`; `"none"` saves it,
    unless `jax.checkpoint` says otherwise. Products are summed in float32 at least and returned in the dtype of `x`;
    so are the gradients' sums, which travel in that dtype. Reverse mode only.

    In a pipeline's stages, off TPUs, pieces are passed by swaps of two (see `shift`): as many bytes both ways round,
    twice as many one way (beyond two devices).

    Args:
        x: This device's piece of the sequence.
        weight: One weight, or several.
        axis: The mesh axis.
        overlap: How the gather and the products overlap.
        products: How pieces are multiplied, of several weights each by its own; in the compute dtype by default.
        name: The collective's name in the compiled program.
    """
    weights = weight if isinstance(weight, tuple) else (weight,)
    each = products if isinstance(products, tuple) else (products,) * len(weights)
    x, weights = _alike("all_gather_matmul", x, weights, axis, overlap)
    if overlap == "none":
        full = send.all_gather(name, x, axis, -2)
        outputs = tuple(_product(of_one, full, one) for of_one, one in zip(each, weights, strict=True))
    else:
        outputs = _gathered(Ring(name, axis, overlap == "bidirectional"), each, x, weights)
    return outputs if isinstance(weight, tuple) else outputs[0]


def matmul_reduce_scatter(
    x: Float[Array, "*batch seq inputs"],
    weight: Float[Array, "outputs inputs"],
    axis: str,
    *,
    scatter: Literal["seq", "outputs"],
    overlap: str = "none",
    products: MatmulPrecision = ComputeDtypeMatmul(),
    name: str = "matmul_reduce_scatter",
) -> Float[Array, "*batch kept_seq kept_outputs"]:
    """`psum_scatter(x @ weight.T, axis)` over the sequence or the outputs, where devices hold slices of `inputs`.

    Sends `(n-1)/n` of the unreduced product. In a ring, the sum for a device is passed on towards it and each device
    computes its share of the next sum meanwhile; the backward pass is one ring that gathers the gradient. Dtypes and
    differentiation as in `all_gather_matmul`.

    Args:
        x: This device's slice of the inputs.
        weight: This device's slice of the weight.
        axis: The mesh axis.
        scatter: Which dim of the product is split.
        overlap: As in `all_gather_matmul`.
        products: How slices are multiplied; in the compute dtype by default.
        name: The collective's name.
    """
    x, (weight,) = _alike("matmul_reduce_scatter", x, (weight,), axis, overlap)
    devices = jax.lax.axis_size(axis)
    size = x.shape[-2] if scatter == "seq" else weight.shape[0]
    if size % devices:
        raise ValueError(
            f"matmul_reduce_scatter(scatter={scatter!r}): {size} {'tokens' if scatter == 'seq' else 'outputs'} cannot "
            f"be split evenly over the {devices} devices of {axis!r}; change one of the two."
        )
    if overlap == "none":
        product = _product(products, x, weight)
        return send.psum_scatter(name, product, axis, -2 if scatter == "seq" else -1)
    return _scattered(Ring(name, axis, overlap == "bidirectional"), products, scatter, x, weight)


def _alike(call: str, x: Array, weights: tuple[Array, ...], axis: str, overlap: str) -> tuple[Array, tuple[Array, ...]]:
    """`x` and the weights in one dtype, all typed as varying over the same mesh axes.

    A custom gradient must be typed as its argument is. Done out here, the transpose of the cast sums the gradient of
    a weight over the axes that it is the same on.
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"{call}(overlap={overlap!r}): choose one of {', '.join(map(repr, OVERLAPS))}.")
    weights = tuple(weight.astype(x.dtype) for weight in weights)
    x = vary(vary_like(x, weights), [axis])
    return x, vary_like(weights, x)


def _product(products: MatmulPrecision, x: Array, weight: Array) -> Array:
    """A product that is differentiated, summed in float32 at least and returned in the dtype of `x`."""
    return products(x, weight, at_least_float32(x.dtype)).astype(x.dtype)


def _take(array: Array, start: Array, length: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, start, length, array.ndim - 2)


def _put(array: Array, part: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), start, array.ndim - 2)


def _gathered_plainly(
    ring: Ring, products: tuple[MatmulPrecision, ...], x: Float[Array, "*batch seq inputs"], weights: Weights
) -> tuple[Array, ...]:
    rows, exact = (*x.shape[:-2], x.shape[-2] * ring.devices), at_least_float32(x.dtype)

    def write(outputs: tuple[Array, ...], piece: Array, start: Array) -> tuple[Array, ...]:
        each = zip(outputs, products, weights)
        return tuple(_put(output, one.forward(piece, weight, exact), start) for output, one, weight in each)

    return circulate(ring, x, -2, write, tuple(jnp.zeros((*rows, weight.shape[0]), x.dtype) for weight in weights))


_gathered = jax.custom_vjp(_gathered_plainly, nondiff_argnums=(0, 1))


def _gathered_forward(ring: Ring, products: tuple[MatmulPrecision, ...], x: Array, weights: tuple[Array, ...]):
    return _gathered(ring, products, x, weights), (x, weights)


def _gathered_backward(ring: Ring, products: tuple[MatmulPrecision, ...], saved: tuple, gradients: tuple[Array, ...]):
    x, weights = saved
    exact = at_least_float32(x.dtype)

    def share(start: Array, length: int) -> Array:
        each = zip(products, gradients, weights, strict=True)
        first, *others = (one.to_input(_take(g, start, length), weight, exact) for one, g, weight in each)
        return sum(others, start=first)

    def grow(sums: tuple[Array, ...], piece: Array, start: Array) -> tuple[Array, ...]:
        rows = (_take(gradient, start, piece.shape[-2]) for gradient in gradients)
        return tuple(total + one.to_weight(part, piece, exact) for total, one, part in zip(sums, products, rows))

    to_x = collect(ring, x.shape[-2], -2, share, x.dtype)
    to_weights = circulate(ring, x, -2, grow, tuple(jnp.zeros(weight.shape, exact) for weight in weights))
    return to_x, tuple(one.astype(x.dtype) for one in to_weights)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _scattered_plainly(
    ring: Ring,
    products: MatmulPrecision,
    scatter: str,
    x: Float[Array, "*batch seq inputs"],
    weight: Float[Array, "outputs inputs"],
) -> Array:
    exact = at_least_float32(x.dtype)

    def share(start: Array, length: int) -> Array:
        if scatter == "seq":
            return products.forward(_take(x, start, length), weight, exact)
        return products.forward(x, _take(weight, start, length), exact)

    dim, whole = (-2, x.shape[-2]) if scatter == "seq" else (-1, weight.shape[0])
    return collect(ring, whole // ring.devices, dim, share, x.dtype)


_scattered = jax.custom_vjp(_scattered_plainly, nondiff_argnums=(0, 1, 2))


def _scattered_forward(ring: Ring, products: MatmulPrecision, scatter: str, x: Array, weight: Array):
    return _scattered(ring, products, scatter, x, weight), (x, weight)


def _scattered_backward(ring: Ring, products: MatmulPrecision, scatter: str, saved: tuple, gradient: Array):
    x, weight = saved
    exact = at_least_float32(x.dtype)
    back = lambda gradient, weight: products.to_input(gradient, weight, exact)
    outer = lambda gradient, x: products.to_weight(gradient, x, exact)

    def from_rows(carry: tuple[Array, Array], piece: Array, start: Array) -> tuple[Array, Array]:
        to_x, to_weight = carry
        rows = _take(x, start, piece.shape[-2])
        return _put(to_x, back(piece, weight), start), to_weight + outer(piece, rows)

    def from_outputs(carry: tuple[Array, Array], piece: Array, start: Array) -> tuple[Array, Array]:
        to_x, to_weight = carry
        rows = _take(weight, start, piece.shape[-1])
        return to_x + back(piece, rows), _put(to_weight, outer(piece, x), start)

    dim, visit = (-2, from_rows) if scatter == "seq" else (-1, from_outputs)
    empty = jnp.zeros(x.shape, exact), jnp.zeros(weight.shape, exact)
    to_x, to_weight = circulate(ring, gradient, dim, visit, empty)
    return to_x.astype(x.dtype), to_weight.astype(weight.dtype)


_scattered.defvjp(_scattered_forward, _scattered_backward)
