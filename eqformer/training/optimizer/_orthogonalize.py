"""Parts of Muon: the coefficients of its Newton-Schulz iteration, and the row variance of NorMuon."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from ...nn import Matrix
from ._moments import is_masked


# The factors of x, x^3 and x^5 in a step of the iteration: the same in each step, or a row for each. The rows of Polar
# Express are the best polynomials for singular values from 0.001 to 1, one after another, made a hundredth smaller so
# that rounding cannot let the iteration diverge (arXiv 2505.16932).
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
    """Return `function(mark, update, *others)` for each update, except for those that optax masks: they stay.

    `marks` has an `nn.Matrix` for each matrix; the others are trees like `updates`.
    """

    def map_update(x: PyTree, mark: PyTree, *others: PyTree) -> PyTree:
        return x if is_masked(x) else function(mark, x, *others)

    return jax.tree.map(map_update, updates, marks, *others, is_leaf=is_masked)


class RowVarianceState(NamedTuple):
    """The state of `equalize_rows`."""

    count: Int[Array, ""]
    """The number of updates so far."""
    squares: PyTree
    """For each matrix, the mean square of each output's updates; the dims of the inputs have size 1."""


def equalize_rows(decay: float, marks: PyTree, eps: float = 1e-8) -> optax.GradientTransformation:
    """Return the second half of NorMuon: each output's update is divided by the root of its mean square over time.

    The mean square over an output's inputs is averaged over the updates, with a decay and with Adam's correction of the
    first updates. Each matrix is then scaled to a root mean square of 1 (arXiv 2510.05491).

    Args:
        decay: The decay of the mean squares.
        marks: A tree like the updates, with an `nn.Matrix` for each.
        eps: A constant that is added to the root.
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
