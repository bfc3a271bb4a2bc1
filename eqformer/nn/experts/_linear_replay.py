"""What the two ways of `grouped` share: a module with its linear maps computed in another way, or already known."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._linear import is_map, LinearMap, PrecomputedLinear
from .._matmul_precision import MatmulPrecision


Parameters = tuple[Array, Array | None]  # a weight and, where there is one, a bias


class Maps(NamedTuple):
    """How a linear map is computed, and the gradients of its parameters and its input by those of its output."""

    forward: Callable[[LinearMap, Array], Array]
    backward: Callable[[MatmulPrecision, Parameters, Array, Array], tuple[Parameters, Array]]


def map_linears(change: Callable[[Any], PyTree], module: PyTree) -> PyTree:
    """The module with each linear map changed."""
    return jax.tree.map(lambda node: change(node) if is_map(node) else node, module, is_leaf=is_map)


def recorded(module: PyTree, x: Array, maps: Maps) -> tuple[Array, list[Array]]:
    """The module's output, and those of its linear maps in the order of their calls, all but one that is the output."""
    kept: list[Array] = []

    def call(linear: LinearMap, x: Array) -> Array:
        kept.append(maps.forward(linear, x))
        return kept[-1]

    y = map_linears(lambda linear: PrecomputedLinear(linear, functools.partial(call, linear)), module)(x)
    return y, [one for one in kept if one is not y]


def replayed(module: PyTree, x: Array, maps: Maps, kept: Sequence[Array]) -> Array:
    """The module with the outputs of its linear maps given."""
    given = list(kept)

    def backward(
        products: MatmulPrecision, saved: tuple[Parameters, Array], gradient: Array
    ) -> tuple[Parameters, Array, None]:
        return *maps.backward(products, *saved, gradient), None

    known = jax.custom_vjp(lambda products, parameters, x, y: y, nondiff_argnums=(0,))
    known.defvjp(lambda products, parameters, x, y: (y, (parameters, x)), backward)
    call = lambda linear, x: known(linear.products, (linear.weight, linear.bias), x, given.pop(0))
    return map_linears(lambda linear: PrecomputedLinear(linear, functools.partial(call, linear)), module)(x)


def zero_of(tree: PyTree, *more: Array) -> Array:
    """A zero that varies over a mesh as all these arrays do, of the dtype of the first of `more`."""
    first, *others = more
    zero = jnp.zeros_like(first, shape=())
    for array in (*others, *jax.tree.leaves(tree)):
        zero += jnp.zeros_like(array, zero.dtype, shape=())
    return zero
