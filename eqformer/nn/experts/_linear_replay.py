"""Modules whose linear maps are computed in another way, or whose linear maps' outputs are known already.

The backward pass of grouped modules keeps the outputs of linear maps and recomputes everything between them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._linear import DenseMap, LinearMap, map_linears, PrecomputedLinear
from .._matmul_precision import MatmulPrecision


Parameters = tuple[Array, Array | None]
"""A weight and, where there is one, a bias."""


class LinearPasses(NamedTuple):
    """A forward and a backward pass of a linear map; both may be those of a kernel.

    The backward pass takes the precision of the map's products, its parameters, its input and the gradient of its
    output, and returns the gradients of the parameters and of the input.
    """

    forward: Callable[[LinearMap, Array], Array]
    backward: Callable[[MatmulPrecision, Parameters, Array, Array], tuple[Parameters, Array]]


def record_linears(module: PyTree, x: Array, passes: LinearPasses) -> tuple[Array, list[Array]]:
    """Return the module's output, and the outputs of its linear maps in the order of their calls.

    A linear map's output that is the module's output too is left out.
    """
    outputs: list[Array] = []

    def call(linear: LinearMap, x: Array) -> Array:
        outputs.append(passes.forward(linear, x))
        return outputs[-1]

    y = map_linears(lambda linear: PrecomputedLinear(linear, functools.partial(call, linear)), module)(x)
    return y, [output for output in outputs if output is not y]


def replay_linears(module: PyTree, x: Array, passes: LinearPasses, outputs: Sequence[Array]) -> Array:
    """Return the module's output, given the outputs of its linear maps; gradients are those of `passes`."""
    remaining = list(outputs)

    def backward(
        products: MatmulPrecision, residuals: tuple[Parameters, Array], gradient: Array
    ) -> tuple[Parameters, Array, None]:
        return *passes.backward(products, *residuals, gradient), None

    known_output = jax.custom_vjp(lambda products, parameters, x, y: y, nondiff_argnums=(0,))
    known_output.defvjp(lambda products, parameters, x, y: (y, (parameters, x)), backward)

    def call(linear: DenseMap, x: Array) -> Array:
        return known_output(linear.products, (linear.weight, linear.bias), x, remaining.pop(0))

    return map_linears(lambda linear: PrecomputedLinear(linear, functools.partial(call, linear)), module)(x)


def varying_zero(tree: PyTree, first: Array, *others: Array) -> Array:
    """Return a zero of the dtype of `first` that varies over the mesh axes over which any of these arrays varies."""
    zero = jnp.zeros_like(first, shape=())
    for array in (*others, *jax.tree.leaves(tree)):
        zero += jnp.zeros_like(array, zero.dtype, shape=())
    return zero
