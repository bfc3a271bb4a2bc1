"""Updates of matrices: the Newton-Schulz iteration of Muon, the row variance of NorMuon, and SOAP.

SOAP (arXiv 2409.11321) is Adam in the eigenbasis of Shampoo's preconditioners, which QR decompositions refresh.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from ...kernels import cpu_or
from ...nn import Matrix
from ._moments import is_masked, Preconditioner


# The factors of x, x^3 and x^5 in a step of the Newton-Schulz iteration. QUINTIC holds for every step. POLAR_EXPRESS
# has one row for each step; the rows are the best successive polynomials for singular values from 0.001 to 1. They are
# applied to x / 1.01, so that rounding cannot let the iteration diverge (arXiv 2505.16932).
QUINTIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115952949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)


def coefficients(iteration: str, steps: int) -> tuple[float, float, float] | tuple[tuple[float, float, float], ...]:
    """Return the coefficients of an iteration; raise a `ValueError` for an unknown name or number of steps."""
    if iteration == "quintic":
        return QUINTIC
    if iteration != "polar-express":
        raise ValueError(
            f"muon(iteration={iteration!r}): the iterations are quintic and polar-express; pass one of these."
        )
    if not 1 <= steps <= len(POLAR_EXPRESS):
        raise ValueError(
            f"muon(iteration={iteration!r}, newton_schulz_steps={steps}): this iteration has {len(POLAR_EXPRESS)} "
            f"steps; pass a number from 1 to {len(POLAR_EXPRESS)}."
        )
    return POLAR_EXPRESS[:steps]


def map_marked(function: Callable[..., PyTree], marks: PyTree, updates: PyTree, *others: PyTree) -> PyTree:
    """Return `function(mark, update, *others)` for each update; updates that optax masks are returned unchanged.

    `marks` has an `nn.Matrix` for each matrix; `others` are trees like `updates`.
    """

    def map_update(x: PyTree, mark: PyTree, *others: PyTree) -> PyTree:
        return x if is_masked(x) else function(mark, x, *others)

    return jax.tree.map(map_update, updates, marks, *others, is_leaf=is_masked)


class RowVarianceState(NamedTuple):
    """The state of `equalize_rows`."""

    count: Int[Array, ""]
    """The number of updates so far."""
    squares: PyTree
    """For each matrix, the mean square of each output's updates, with size 1 in the dims of the inputs."""


def equalize_rows(decay: float, marks: PyTree, eps: float = 1e-8) -> optax.GradientTransformation:
    """Return the second half of NorMuon: each output's update is divided by the root of its mean square over time.

    The mean square over an output's inputs is averaged over the updates, with a decay and with Adam's correction of the
    first updates. Each matrix is then scaled to a root mean square of 1 (arXiv 2510.05491).

    Args:
        decay: The decay of the mean squares.
        marks: A tree like the updates, with an `nn.Matrix` for each update.
        eps: A constant that is added to the root of the mean square.
    """

    def zeros(mark: Matrix, x: Array) -> Array:
        outputs = mark.ensemble + mark.outputs
        return jnp.zeros((*x.shape[:outputs], *(1 for _ in x.shape[outputs:])), x.dtype)

    def init(params: PyTree) -> RowVarianceState:
        # Optax passes a placeholder without leaves, to see where the state holds arrays of parameters.
        squares = map_marked(zeros, marks, params) if jax.tree.leaves(params) else params
        return RowVarianceState(jnp.zeros((), jnp.int32), squares)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, RowVarianceState]:
        count = state.count + 1

        def mean_square(mark: Matrix, x: Array, earlier: Array) -> Array:
            inputs = tuple(range(mark.ensemble + mark.outputs, x.ndim))
            return decay * earlier + (1 - decay) * jnp.mean(jnp.square(x), inputs, keepdims=True)

        def equalize(mark: Matrix, x: Array, squares: Array) -> Array:
            rows = x / (jnp.sqrt(squares / (1 - decay**count)) + eps)
            matrix = tuple(range(mark.ensemble, x.ndim))
            return rows * jax.lax.rsqrt(jnp.mean(jnp.square(rows), matrix, keepdims=True) + eps**2)

        squares = map_marked(mean_square, marks, updates, state.squares)
        return map_marked(equalize, marks, updates, squares), RowVarianceState(count, squares)

    return optax.GradientTransformation(init, update)


_SHIFT = 1e-6  # The power method adds this share of the sum of all eigenvalues to each eigenvalue.


class SoapState(NamedTuple):
    """The state of `scale_by_soap`."""

    count: Int[Array, ""]
    """The number of updates so far."""
    mean: PyTree
    """For each matrix, the mean of its gradients."""
    squares: PyTree
    """For each matrix, the mean of its squared gradients in the eigenbasis."""
    preconditioners: PyTree
    """For each matrix, its `Preconditioner`."""


def scale_by_soap(
    marks: PyTree, *, b1: float, b2: float, eps: float, frequency: int, max_size: int
) -> optax.GradientTransformation:
    """Return the transformation that turns gradients of matrices into the directions of SOAP.

    A matrix's gradient is transformed into the eigenbasis of the means of `G G^T` and `G^T G`. In this basis, Adam
    divides the mean of gradients by the root of their mean square. The result is transformed back.

    The first basis is the identity. The basis is refreshed after the first update, and after each update whose number
    is a multiple of `frequency`: by a step of the power method and a QR decomposition, which orders the basis vectors
    by their eigenvalues. The refresh comes after the update, so a basis does not depend on the gradients of the first
    update that uses it.

    Args:
        marks: A tree like the updates, with an `nn.Matrix` for each update.
        b1: The decay of the mean of gradients.
        b2: The decay of the mean of squared gradients, and of the means of `G G^T` and `G^T G`.
        eps: A constant that is added to the root of the mean square.
        frequency: The number of updates between two refreshments of the basis.
        max_size: The longest side of a matrix (rows or columns) that gets a basis; longer sides are not transformed.
    """

    def init(params: PyTree) -> SoapState:
        # Optax passes a placeholder without leaves, to see where the state holds arrays of parameters.
        has_arrays = bool(jax.tree.leaves(params))
        preconditioners = map_marked(new_preconditioner, marks, params) if has_arrays else params
        mean, squares = (optax.tree.zeros_like(params) if has_arrays else params for _ in range(2))
        return SoapState(jnp.zeros((), jnp.int32), mean, squares, preconditioners)

    def new_preconditioner(mark: Matrix, x: Array) -> Preconditioner:
        ensemble, outputs, inputs = _split_shape(x, mark)
        left_mean, left_basis = _new_side(ensemble, outputs, max_size, x.dtype)
        right_mean, right_basis = _new_side(ensemble, inputs, max_size, x.dtype)
        return Preconditioner(left_mean, right_mean, left_basis, right_basis, mark.ensemble, mark.outputs)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, SoapState]:
        count = state.count + 1

        def turned_square(mark: Matrix, x: Array, squares: Array, preconditioner: Preconditioner) -> Array:
            return b2 * squares + (1 - b2) * jnp.square(_turn(mark, x, preconditioner))

        def direction(mark: Matrix, x: Array, squares: Array, preconditioner: Preconditioner) -> Array:
            turned = _turn(mark, x, preconditioner) / (1 - b1**count)
            adam = turned / (jnp.sqrt(squares / (1 - b2**count)) + eps)
            return _turn(mark, adam, preconditioner, back=True)

        def add_gradient(mark: Matrix, x: Array, preconditioner: Preconditioner) -> Preconditioner:
            return _add_gradient(mark, x, preconditioner, b2)

        def refresh_all(squares: PyTree, preconditioners: PyTree) -> tuple[PyTree, PyTree]:
            leaves, structure = jax.tree.flatten(squares)
            leaf_marks = jax.tree.leaves(map_marked(lambda mark, _: mark, marks, squares))
            refreshed = map(_refresh, leaf_marks, leaves, structure.flatten_up_to(preconditioners))
            new_squares, new_preconditioners = zip(*refreshed, strict=True) if leaves else ((), ())
            return structure.unflatten(new_squares), structure.unflatten(new_preconditioners)

        def keep_all(squares: PyTree, preconditioners: PyTree) -> tuple[PyTree, PyTree]:
            return squares, preconditioners

        mean = jax.tree.map(lambda x, earlier: b1 * earlier + (1 - b1) * x, updates, state.mean)
        squares = map_marked(turned_square, marks, updates, state.squares, state.preconditioners)
        directions = map_marked(direction, marks, mean, squares, state.preconditioners)
        preconditioners = map_marked(add_gradient, marks, updates, state.preconditioners)
        is_due = (count == 1) | (count % frequency == 0)
        squares, preconditioners = jax.lax.cond(is_due, refresh_all, keep_all, squares, preconditioners)
        return directions, SoapState(count, mean, squares, preconditioners)

    return optax.GradientTransformation(init, update)


def _split_shape(x: Array, mark: Matrix) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a matrix's ensemble dims, of its output dims and of its input dims."""
    first, last = mark.ensemble, mark.ensemble + mark.outputs
    return x.shape[:first], x.shape[first:last], x.shape[last:]


def _flatten(x: Array, mark: Matrix) -> Float[Array, "*ensemble rows columns"]:
    """Return a matrix with its output dims flattened into rows, and its input dims flattened into columns."""
    ensemble, outputs, inputs = _split_shape(x, mark)
    return x.reshape(*ensemble, math.prod(outputs), math.prod(inputs))


def _flatten_side(x: Array, ensemble: int) -> Float[Array, "*ensemble size size"]:
    """Return an array of a preconditioner reshaped to square matrices."""
    return x.reshape(*x.shape[:ensemble], x.shape[-1], x.shape[-1])


def _new_side(
    ensemble: tuple[int, ...], sizes: tuple[int, ...], max_size: int, dtype: jnp.dtype
) -> tuple[Array | None, Array | None]:
    """Return the first mean (zeros) and basis (the identity) of a matrix's side; None if it exceeds `max_size`."""
    size = math.prod(sizes)
    if size > max_size:
        return None, None
    shape = (*ensemble, *sizes, size)
    return jnp.zeros(shape, dtype), jnp.broadcast_to(jnp.eye(size, dtype=dtype).reshape(*sizes, size), shape)


def _turn(mark: Matrix, x: Array, preconditioner: Preconditioner, *, back: bool = False) -> Array:
    """Transform a matrix into the eigenbasis or, with `back`, from the eigenbasis back to the original basis."""
    turned = _flatten(x, mark)
    if preconditioner.left_basis is not None:
        basis = _flatten_side(preconditioner.left_basis, mark.ensemble)
        turned = (basis if back else jnp.matrix_transpose(basis)) @ turned
    if preconditioner.right_basis is not None:
        basis = _flatten_side(preconditioner.right_basis, mark.ensemble)
        turned = turned @ (jnp.matrix_transpose(basis) if back else basis)
    return turned.reshape(x.shape)


def _add_gradient(mark: Matrix, x: Array, preconditioner: Preconditioner, decay: float) -> Preconditioner:
    """Return the preconditioner after adding the gradient `x` to its means of `G G^T` and `G^T G`."""
    matrix = _flatten(x, mark)

    def average(mean: Array | None, product: Array) -> Array | None:
        return None if mean is None else decay * mean + (1 - decay) * product.reshape(mean.shape)

    left_mean = average(preconditioner.left, matrix @ jnp.matrix_transpose(matrix))
    right_mean = average(preconditioner.right, jnp.matrix_transpose(matrix) @ matrix)
    return dataclasses.replace(preconditioner, left=left_mean, right=right_mean)


def _refresh(mark: Matrix, squares: Array, preconditioner: Preconditioner) -> tuple[Array, Preconditioner]:
    """Return the mean squares in the order of the new basis vectors, and the preconditioner with the new bases."""
    matrix = _flatten(squares, mark)
    left_basis, right_basis = preconditioner.left_basis, preconditioner.right_basis
    if preconditioner.left is not None and left_basis is not None:
        left_basis, order = _refresh_basis(preconditioner.left, left_basis, mark.ensemble)
        matrix = jnp.take_along_axis(matrix, order[..., :, None], axis=-2)
    if preconditioner.right is not None and right_basis is not None:
        right_basis, order = _refresh_basis(preconditioner.right, right_basis, mark.ensemble)
        matrix = jnp.take_along_axis(matrix, order[..., None, :], axis=-1)
    refreshed = dataclasses.replace(preconditioner, left_basis=left_basis, right_basis=right_basis)
    return matrix.reshape(squares.shape), refreshed


def _refresh_basis(mean: Array, basis: Array, ensemble: int) -> tuple[Array, Int[Array, "*ensemble size"]]:
    """Return the next basis of the power method, and the order of the old basis vectors by falling eigenvalue."""
    symmetric, vectors = _flatten_side(mean, ensemble), _flatten_side(basis, ensemble)
    # Without the shift, a vector whose eigenvalue is zero would become a vector of rounding errors.
    trace = jnp.trace(symmetric, axis1=-2, axis2=-1)
    shift = _SHIFT * trace[..., None, None]
    values = jnp.sum(vectors * (symmetric @ vectors), axis=-2)
    order = jnp.argsort(values, axis=-1, descending=True)
    sorted_vectors = jnp.take_along_axis(vectors, order[..., None, :], axis=-1)
    product = symmetric @ sorted_vectors + shift * sorted_vectors
    return cpu_or(orthogonal_factor, _qr_factor, product).reshape(basis.shape), order


def _qr_factor(x: Float[Array, "*ensemble size size"]) -> Float[Array, "*ensemble size size"]:
    return jnp.linalg.qr(x)[0]


def orthogonal_factor(x: Float[Array, "*ensemble size size"]) -> Float[Array, "*ensemble size size"]:
    """Return the orthogonal factor of the QR decomposition of square matrices, by Householder's reflections.

    CPUs use this function instead of LAPACK, which becomes very slow if many simulated devices share a CPU's threads.
    """
    size = x.shape[-1]
    rows = jnp.arange(size)

    def reflect(k: Int[Array, ""], factors: tuple[Array, Array]) -> tuple[Array, Array]:
        upper, orthogonal = factors
        column = jnp.where(rows >= k, jax.lax.dynamic_index_in_dim(upper, k, axis=-1, keepdims=False), 0)
        norm = jnp.sqrt(jnp.sum(jnp.square(column), axis=-1, keepdims=True))
        head = jnp.sum(jnp.where(rows == k, column, 0), axis=-1, keepdims=True)
        normal = column + jnp.where(rows == k, jnp.where(head < 0, -norm, norm), 0)
        square = jnp.sum(jnp.square(normal), axis=-1, keepdims=True)
        scaled = normal * jnp.where(square > 0, 2 / jnp.where(square > 0, square, 1), 0)
        upper = upper - scaled[..., :, None] * jnp.einsum("...i,...ij->...j", normal, upper)[..., None, :]
        turned = jnp.einsum("...ij,...j->...i", orthogonal, normal)
        return upper, orthogonal - turned[..., :, None] * scaled[..., None, :]

    identity = jnp.broadcast_to(jnp.eye(size, dtype=x.dtype), x.shape)
    return jax.lax.fori_loop(0, size - 1, reflect, (x, identity))[1]
