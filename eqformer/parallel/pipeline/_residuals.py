"""Residuals of stages between their forward and backward entries, and the slots that hold them in a scan's carry.

A backward entry comes ticks after its forward entry and does not run the forward pass again. `jax.vjp` gives outputs
and a pullback, a tree of arrays. Some of these are arguments of the stage, which the backward entry has too; others
depend on none of the arguments, so they are the same in every tick. The other arrays are the residuals to store.
(Types do not tell: indices of a mixture's tokens are not typed as varying over `pipe`, though they do.)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun, Literal
from jaxtyping import Int, PyTree

from ..._shapes import Array, ArrayOrShape
from .._axes import PIPE
from .._shard_map import vary
from ._schedule import IDLE


class ResidualPacker:
    """Packs the residuals of a forward pass into a list of arrays, and restores the pass's results from them.

    `run()` returns the results of a pass and all of its inputs. It is traced once; only the computation of constants
    runs. `shapes` are those of the residuals.
    """

    def __init__(self, run: Callable[[], tuple[PyTree, PyTree]]):
        traces: list[tuple[Any, list[tuple[int, int]], list[Any]]] = []

        def trace() -> list[Array]:
            results, inputs = run()
            sources, computed = _separate_inputs(results, inputs)
            key_impls = [jax.random.key_impl(x) if _is_key(x) else None for x in computed]
            traces.append((jax.tree.structure(results), sources, key_impls))
            return _as_slot_arrays(computed)

        program, shapes = jax.make_jaxpr(trace, return_shape=True)()
        self.structure, self.sources, self.key_impls = traces[-1]
        constant_programs = [_constant_program(program, index) for index in range(len(shapes))]
        self.constants = [None if constant is None else jaxpr_as_fun(constant)()[0] for constant in constant_programs]
        self.shapes = [shape for shape, constant in zip(shapes, constant_programs, strict=True) if constant is None]

    def pack(self, results: PyTree, inputs: PyTree) -> list[Array]:
        """Return the residuals of a pass, with random keys as numbers."""
        computed = _as_slot_arrays(_separate_inputs(results, inputs)[1])
        return [x for x, constant in zip(computed, self.constants, strict=True) if constant is None]

    def unpack(self, residuals: Sequence[Array], inputs: PyTree) -> PyTree:
        """Return the results of a pass from its residuals and its inputs."""
        remaining = iter(residuals)
        computed = [next(remaining) if constant is None else constant for constant in self.constants]
        computed = [x if impl is None else _wrap_key(x, impl) for x, impl in zip(computed, self.key_impls, strict=True)]
        arrays = jax.tree.leaves(inputs), computed
        return self.structure.unflatten([arrays[source][index] for source, index in self.sources])


def _separate_inputs(results: PyTree, inputs: PyTree) -> tuple[list[tuple[int, int]], list[Array]]:
    """Return each result's source (0 for an input, 1 for a computed array) with its index there, and the computed
    arrays."""
    computed: list[Array] = []
    sources = {id(x): (0, index) for index, x in enumerate(jax.tree.leaves(inputs))}
    leaves = jax.tree.leaves(results)
    for x in leaves:
        if id(x) not in sources:
            sources[id(x)] = 1, len(computed)
            computed.append(x)
    return [sources[id(x)] for x in leaves], computed


# A program is a `ClosedJaxpr`, which no public module of JAX 0.12 exports as a type.
def _constant_program(program: Any, index: int) -> Any:
    """Return the program of one result, without effects of other equations, or None if the result needs an input."""
    results = program.jaxpr.outvars[index : index + 1]
    needed, equations = {x for x in results if not isinstance(x, Literal)}, []
    for equation in reversed(program.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed |= {x for x in equation.invars if not isinstance(x, Literal)}
    constants = zip(program.jaxpr.constvars, program.consts, strict=True)
    if any(variable in needed and isinstance(value, Tracer) for variable, value in constants):
        return None
    effects = frozenset().union(*(equation.effects for equation in equations))
    info = program.jaxpr.debug_info._replace(result_paths=None)
    return program.replace(
        jaxpr=program.jaxpr.replace(eqns=equations[::-1], outvars=results, effects=effects, debug_info=info)
    )


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_slot_arrays(arrays: Sequence[Array]) -> list[Array]:
    """Return keys as numbers, and all arrays typed as varying over stages, like arrays that are read from slots."""
    return [vary(jax.random.key_data(x) if _is_key(x) else jnp.asarray(x), [PIPE]) for x in arrays]


def _wrap_key(numbers: Array, impl: Any) -> Array:
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=impl)


# Slots: trees of arrays with a leading dim of slots, carried by the scan over ticks.


def zeros(like: ArrayOrShape, axes: Iterable[str], *dims: int) -> jax.Array:
    """Return zeros of the shape and dtype of `like` with more leading dims, typed as varying over `axes`."""
    return vary(jnp.zeros((*dims, *like.shape), like.dtype), sorted(axes))


def read_slot(slots: PyTree, slot: Int[Array, ""]) -> PyTree:
    """Return the arrays in a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, False), slots)


def write_slot(slots: PyTree, slot: Int[Array, ""], tree: PyTree) -> PyTree:
    """Return the slots with one overwritten by `tree`; unchanged if the slot is `IDLE`."""

    def write(x: Array, y: Array) -> Array:
        index = jnp.maximum(slot, 0)
        old = jax.lax.dynamic_index_in_dim(x, index, 0, False)
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot == IDLE, old, y), index, 0)

    return jax.tree.map(write, slots, tree)


def accumulate(sums: PyTree, terms: PyTree) -> PyTree:
    """Add terms to sums, in the sums' dtypes; None adds nothing."""
    add = lambda x, y: x if y is None else x + y.astype(x.dtype)
    return jax.tree.map(add, sums, terms, is_leaf=lambda x: x is None)


def accumulate_group(sums: PyTree, group: Int[Array, ""], terms: PyTree) -> PyTree:
    """Add terms, as `accumulate` does, to one of the equal groups of rows of each array."""

    def add(x: Array | None, y: Array | None) -> Array | None:
        if x is None or y is None:
            return x
        start = group * y.shape[0]
        rows = jax.lax.dynamic_slice_in_dim(x, start, y.shape[0]) + y.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)

    return jax.tree.map(add, sums, terms, is_leaf=lambda x: x is None)
