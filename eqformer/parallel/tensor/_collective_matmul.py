"""Collective matmuls: matrix products that overlap with an all-gather before them or a reduce-scatter after them.

The rings follow "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"
(Wang et al., ASPLOS 2023): a device multiplies one piece while it receives the next.
"""

import functools
from typing import get_args, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...nn import at_least_float32, ComputeDtypeMatmul, MatmulPrecision
from .. import _collectives as send
from .._ring import circulate, Ring, ring_reduce_scatter
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
    """Return one product for a single weight."""


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
    """Return a tuple with a product for each weight."""


def all_gather_matmul(
    x: Float[Array, "*batch seq inputs"],
    weight: Float[Array, "outputs inputs"] | Weights,
    axis: str,
    *,
    overlap: str = "none",
    products: MatmulPrecision | tuple[MatmulPrecision, ...] = ComputeDtypeMatmul(),
    name: str = "all_gather_matmul",
) -> Float[Array, "*batch full_seq outputs"] | tuple[Float[Array, "*batch full_seq _"], ...]:
    """Return `all_gather(x, axis) @ weight.T`, where `x` is this device's piece of the sequence.

    Several weights share one gather. Each device sends `(n-1)/n` of the gathered `x`, for `n` devices. Products
    accumulate in float32 at least and are returned in the dtype of `x`. The gradient of `x` is a sum over devices, sent
    in the dtype of `x`: a ring adds in float32 at least, and `"none"` leaves the addition to a reduce-scatter. `"none"`
    saves the gathered `x` for the backward pass, unless a `jax.checkpoint` policy prevents it. The rings never hold the
    gathered `x`: in the backward pass, the pieces pass round the ring again for the weight gradients. Only reverse-mode
    differentiation is supported.

    On CPUs and GPUs, inside the stages of a pipeline, other collectives replace the permutes of a ring (see `shift` in
    `_ring.py`). For an even number of devices above two, these collectives send twice the bytes of the permutes with
    `"ring"`, and the same bytes with `"bidirectional"`. For an odd number of devices, each of the `n-1` steps is an
    all-gather, and `n-1` times the bytes are sent.

    Args:
        x: This device's piece of the sequence.
        weight: A weight, or a tuple of weights.
        axis: The mesh axis that splits the sequence.
        overlap: `"none"` gathers `x`, then multiplies. `"ring"` passes pieces round the axis, and multiplies each piece
            while the next is sent. `"bidirectional"` passes halves of the pieces in both directions.
        products: The precision of the products, for all weights or a tuple with one for each weight.
        name: The collective's name in the compiled program.
    """
    has_several = isinstance(weight, tuple)
    weights = weight if has_several else (weight,)
    precisions = products if isinstance(products, tuple) else (products,) * len(weights)
    x, weights = _unify_types("all_gather_matmul", x, weights, axis, overlap)
    if overlap == "none":
        full = send.all_gather(name, x, axis, -2)
        outputs = tuple(_multiply(precision, full, w) for precision, w in zip(precisions, weights, strict=True))
    else:
        outputs = _gather_matmul(Ring(name, axis, overlap == "bidirectional"), precisions, x, weights)
    return outputs if has_several else outputs[0]


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
    """Return `psum_scatter(x @ weight.T, axis)`, where each device has a slice of the contracted dim `inputs`.

    Each device sends `(n-1)/n` of its product, for `n` devices. In a ring, each piece of the sum passes from device to
    device. While a device sends a piece, it computes its partial product for the next piece. In the backward pass, the
    pieces of the gradient pass round one ring. For dtypes and pipelines see `all_gather_matmul`.

    Args:
        x: This device's slice of the inputs.
        weight: This device's slice of the weight.
        axis: The mesh axis that splits `inputs`, and the result.
        scatter: The dim of the result that is split over the axis: the sequence or the outputs.
        overlap: `"none"` multiplies, then reduces. For the rings see `all_gather_matmul`.
        products: The precision of the products.
        name: The collective's name in the compiled program.
    """
    x, (weight,) = _unify_types("matmul_reduce_scatter", x, (weight,), axis, overlap)
    devices = jax.lax.axis_size(axis)
    size = x.shape[-2] if scatter == "seq" else weight.shape[0]
    if size % devices:
        raise ValueError(
            f"matmul_reduce_scatter(scatter={scatter!r}): {size} {'tokens' if scatter == 'seq' else 'outputs'} cannot "
            f"be split evenly over the {devices} devices of {axis!r}; change one of the two numbers."
        )
    if overlap == "none":
        product = _multiply(products, x, weight)
        return send.psum_scatter(name, product, axis, -2 if scatter == "seq" else -1)
    return _matmul_scatter(Ring(name, axis, overlap == "bidirectional"), products, scatter, x, weight)


def _unify_types(
    call: str, x: Array, weights: tuple[Array, ...], axis: str, overlap: str
) -> tuple[Array, tuple[Array, ...]]:
    """Cast the weights to the dtype of `x`, and mark all arrays as varying over the same mesh axes.

    A custom backward pass must return gradients of the types of its arguments. So `vary` marks the arguments before the
    call. The transpose of `vary` runs outside of the custom backward pass, and sums the gradient of each array over the
    axes along which the array is replicated.
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"{call}(overlap={overlap!r}): choose one of {', '.join(map(repr, OVERLAPS))}.")
    weights = tuple(weight.astype(x.dtype) for weight in weights)
    x = vary(vary_like(x, weights), [axis])
    return x, vary_like(weights, x)


def _multiply(products: MatmulPrecision, x: Array, weight: Array) -> Array:
    """Return `x @ weight.T`, summed in float32 at least, in the dtype of `x`; the result is differentiable."""
    return products(x, weight, at_least_float32(x.dtype)).astype(x.dtype)


def _read_rows(array: Array, start: Array, length: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, start, length, array.ndim - 2)


def _write_rows(array: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), start, array.ndim - 2)


def _gather_matmul_primal(
    ring: Ring, products: tuple[MatmulPrecision, ...], x: Float[Array, "*batch seq inputs"], weights: Weights
) -> tuple[Array, ...]:
    """Return the products of `all_gather_matmul`, written piece by piece as the pieces of `x` arrive."""
    gathered_shape, sum_dtype = (*x.shape[:-2], x.shape[-2] * ring.devices), at_least_float32(x.dtype)

    def write(outputs: tuple[Array, ...], piece: Array, start: Array) -> tuple[Array, ...]:
        return tuple(
            _write_rows(output, precision.forward(piece, weight, sum_dtype), start)
            for output, precision, weight in zip(outputs, products, weights)
        )

    outputs = tuple(jnp.zeros((*gathered_shape, weight.shape[0]), x.dtype) for weight in weights)
    return circulate(ring, x, -2, write, outputs)


_gather_matmul = jax.custom_vjp(_gather_matmul_primal, nondiff_argnums=(0, 1))


def _gather_matmul_forward(ring: Ring, products: tuple[MatmulPrecision, ...], x: Array, weights: tuple[Array, ...]):
    return _gather_matmul(ring, products, x, weights), (x, weights)


def _gather_matmul_backward(
    ring: Ring, products: tuple[MatmulPrecision, ...], residuals: tuple, gradients: tuple[Array, ...]
):
    """Return the gradients of `x`, by a ring of partial sums, and of the weights, by a ring of the pieces of `x`."""
    x, weights = residuals
    sum_dtype = at_least_float32(x.dtype)

    def compute_input_grad(start: Array, length: int) -> Array:
        """Return this device's gradient of some rows of the gathered `x`, summed over the weights."""
        first, *further = (
            precision.input_grad(_read_rows(gradient, start, length), weight, sum_dtype)
            for precision, gradient, weight in zip(products, gradients, weights, strict=True)
        )
        return sum(further, start=first)

    def add_piece(sums: tuple[Array, ...], piece: Array, start: Array) -> tuple[Array, ...]:
        rows = (_read_rows(gradient, start, piece.shape[-2]) for gradient in gradients)
        return tuple(
            total + precision.weight_grad(gradient_rows, piece, sum_dtype)
            for total, precision, gradient_rows in zip(sums, products, rows)
        )

    x_grad = ring_reduce_scatter(ring, x.shape[-2], -2, compute_input_grad, x.dtype)
    weight_grads = circulate(ring, x, -2, add_piece, tuple(jnp.zeros(weight.shape, sum_dtype) for weight in weights))
    return x_grad, tuple(gradient.astype(x.dtype) for gradient in weight_grads)


_gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


def _matmul_scatter_primal(
    ring: Ring,
    products: MatmulPrecision,
    scatter: str,
    x: Float[Array, "*batch seq inputs"],
    weight: Float[Array, "outputs inputs"],
) -> Array:
    """Return this device's piece of the summed product."""
    sum_dtype = at_least_float32(x.dtype)

    def multiply_part(start: Array, length: int) -> Array:
        if scatter == "seq":
            return products.forward(_read_rows(x, start, length), weight, sum_dtype)
        return products.forward(x, _read_rows(weight, start, length), sum_dtype)

    dim, size = (-2, x.shape[-2]) if scatter == "seq" else (-1, weight.shape[0])
    return ring_reduce_scatter(ring, size // ring.devices, dim, multiply_part, x.dtype)


_matmul_scatter = jax.custom_vjp(_matmul_scatter_primal, nondiff_argnums=(0, 1, 2))


def _matmul_scatter_forward(ring: Ring, products: MatmulPrecision, scatter: str, x: Array, weight: Array):
    return _matmul_scatter(ring, products, scatter, x, weight), (x, weight)


def _matmul_scatter_backward(ring: Ring, products: MatmulPrecision, scatter: str, residuals: tuple, gradient: Array):
    """Return the gradients of `x` and the weight, by one ring of the pieces of the result's gradient."""
    x, weight = residuals
    sum_dtype = at_least_float32(x.dtype)
    input_grad = functools.partial(products.input_grad, dtype=sum_dtype)
    weight_grad = functools.partial(products.weight_grad, dtype=sum_dtype)

    def add_tokens(carry: tuple[Array, Array], piece: Array, start: Array) -> tuple[Array, Array]:
        x_grad, w_grad = carry
        rows = _read_rows(x, start, piece.shape[-2])
        return _write_rows(x_grad, input_grad(piece, weight), start), w_grad + weight_grad(piece, rows)

    def add_outputs(carry: tuple[Array, Array], piece: Array, start: Array) -> tuple[Array, Array]:
        x_grad, w_grad = carry
        rows = _read_rows(weight, start, piece.shape[-1])
        return x_grad + input_grad(piece, rows), _write_rows(w_grad, weight_grad(piece, x), start)

    dim, visit = (-2, add_tokens) if scatter == "seq" else (-1, add_outputs)
    zeros = jnp.zeros(x.shape, sum_dtype), jnp.zeros(weight.shape, sum_dtype)
    x_grad, w_grad = circulate(ring, gradient, dim, visit, zeros)
    return x_grad.astype(x.dtype), w_grad.astype(weight.dtype)


_matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)
