"""What a stage's forward pass leaves for its backward pass, which begins ticks later and does not run it again.

`jax.vjp` gives outputs and a pullback, a tree of arrays. Some of these are arguments of the stage, which the backward
pass has too; others are computed from none of these, so that they are the same in every tick. The rest has to be kept.
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
from .._vary import vary
from ._schedule import IDLE


class Kept:
    """Takes what has to be kept out of what a pass found, and puts it back; `shapes` are those of what is kept.

    `find()` gives what a pass found and all that it was given. It is traced once, and none of it runs but what computes
    the constants.
    """

    def __init__(self, find: Callable[[], tuple[PyTree, PyTree]]):
        noted: list[tuple[Any, list[tuple[int, int]], list[Any]]] = []

        def trace() -> list[Array]:
            found, given = find()
            places, own = _parted(found, given)
            impls = [jax.random.key_impl(x) if _is_key(x) else None for x in own]
            noted.append((jax.tree.structure(found), places, impls))
            return _as_kept(own)

        program, shapes = jax.make_jaxpr(trace, return_shape=True)()
        self.structure, self.places, self.impls = noted[-1]
        alone = [_alone(program, place) for place in range(len(shapes))]
        self.constants = [None if one is None else jaxpr_as_fun(one)()[0] for one in alone]
        self.shapes = [shape for shape, one in zip(shapes, alone, strict=True) if one is None]

    def of(self, found: PyTree, given: PyTree) -> list[Array]:
        """What has to be kept of a pass; keys as numbers."""
        own = _as_kept(_parted(found, given)[1])
        return [x for x, constant in zip(own, self.constants, strict=True) if constant is None]

    def restored(self, kept: Sequence[Array], given: PyTree) -> PyTree:
        """What a pass found, from what was kept of it and what it was given."""
        rest = iter(kept)
        own = [next(rest) if constant is None else constant for constant in self.constants]
        own = [x if impl is None else _keys(x, impl) for x, impl in zip(own, self.impls, strict=True)]
        sources = jax.tree.leaves(given), own
        return self.structure.unflatten([sources[source][place] for source, place in self.places])


def _parted(found: PyTree, given: PyTree) -> tuple[list[tuple[int, int]], list[Array]]:
    """For each array found, its source (0 given, 1 its own) and place there; and its own."""
    own: list[Array] = []
    places = {id(x): (0, place) for place, x in enumerate(jax.tree.leaves(given))}
    leaves = jax.tree.leaves(found)
    for x in leaves:
        if id(x) not in places:
            places[id(x)] = 1, len(own)
            own.append(x)
    return [places[id(x)] for x in leaves], own


def _alone(program: Any, place: int) -> Any:
    """A closed jaxpr's program of one result, without effects of what is left out; None if it needs what is given."""
    results = program.jaxpr.outvars[place : place + 1]
    needed, eqns = {x for x in results if not isinstance(x, Literal)}, []
    for eqn in reversed(program.jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed |= {x for x in eqn.invars if not isinstance(x, Literal)}
    given = zip(program.jaxpr.constvars, program.consts, strict=True)
    if any(var in needed and isinstance(value, Tracer) for var, value in given):
        return None
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    info = program.jaxpr.debug_info._replace(result_paths=None)
    return program.replace(
        jaxpr=program.jaxpr.replace(eqns=eqns[::-1], outvars=results, effects=effects, debug_info=info)
    )


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_kept(arrays: Sequence[Array]) -> list[Array]:
    """Keys as numbers, and all typed as varying over stages, as what is read from slots is."""
    return [vary(jax.random.key_data(x) if _is_key(x) else jnp.asarray(x), [PIPE]) for x in arrays]


def _keys(numbers: Array, impl: Any) -> Array:
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=impl)


def zeros(like: ArrayOrShape, axes: Iterable[str], *dims: int) -> jax.Array:
    """Zeros of the shape and dtype of `like` with more dims in front, typed as varying over `axes`."""
    return vary(jnp.zeros((*dims, *like.shape), like.dtype), sorted(axes))


def get(stash: PyTree, slot: Int[Array, ""]) -> PyTree:
    """What is in a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, False), stash)


def put(stash: PyTree, slot: Int[Array, ""], new: PyTree) -> PyTree:
    """The stash with a slot overwritten; unchanged where the slot is `IDLE`."""

    def one(x: Array, y: Array) -> Array:
        place = jnp.maximum(slot, 0)
        old = jax.lax.dynamic_index_in_dim(x, place, 0, False)
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot == IDLE, old, y), place, 0)

    return jax.tree.map(one, stash, new)


def add(sums: PyTree, more: PyTree) -> PyTree:
    """Sums in their own dtype; None adds nothing."""
    one = lambda x, y: x if y is None else x + y.astype(x.dtype)
    return jax.tree.map(one, sums, more, is_leaf=lambda x: x is None)


def add_rows(sums: PyTree, group: Int[Array, ""], more: PyTree) -> PyTree:
    """`add` to one of the equal groups of rows of each array."""

    def one(x: Array | None, y: Array | None) -> Array | None:
        if x is None or y is None:
            return x
        start = group * y.shape[0]
        rows = jax.lax.dynamic_slice_in_dim(x, start, y.shape[0]) + y.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)

    return jax.tree.map(one, sums, more, is_leaf=lambda x: x is None)
