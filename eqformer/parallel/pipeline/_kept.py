"""What a stage's forward pass leaves for its backward pass, which begins ticks later and does not run it again.

`jax.vjp` gives outputs and a pullback, a tree of arrays. Some of these are arguments of the stage, which the backward
pass has too; others do not vary over stages, so that they are the same in every tick. The rest has to be kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Literal
from jaxtyping import PyTree

from ..._shapes import Array
from .._axes import PIPE
from .._vary import varying_axes


class Kept:
    """Takes what has to be kept out of what a pass found, and puts it back; `shapes` are those of what is kept.

    `find()` gives what a pass found and all that it was given. It is traced once, and none of it runs but what computes
    the constants.
    """

    def __init__(self, find: Callable[[], tuple[PyTree, PyTree]]):
        noted: list[tuple[Any, list[tuple[int, int]], list[Any]]] = []

        def trace() -> tuple[list[Array], list[Array]]:
            found, given = find()
            places, constants, own = _parted(found, given)
            impls = [jax.random.key_impl(x) if _is_key(x) else None for x in own]
            noted.append((jax.tree.structure(found), places, impls))
            return constants, _numbers(own)

        program, (constants, self.shapes) = jax.make_jaxpr(trace, return_shape=True)()
        self.structure, self.places, self.impls = noted[-1]
        self.constants = jaxpr_as_fun(_first_results(program, len(constants)))()

    def of(self, found: PyTree, given: PyTree) -> list[Array]:
        """What has to be kept of a pass; keys as numbers."""
        return _numbers(_parted(found, given)[2])

    def restored(self, kept: Sequence[Array], given: PyTree) -> PyTree:
        """What a pass found, from what was kept of it and what it was given."""
        own = [x if impl is None else _keys(x, impl) for x, impl in zip(kept, self.impls, strict=True)]
        sources = jax.tree.leaves(given), self.constants, own
        return self.structure.unflatten([sources[source][place] for source, place in self.places])


def _parted(found: PyTree, given: PyTree) -> tuple[list[tuple[int, int]], list[Array], list[Array]]:
    """For each array found, its source (0 given, 1 constants, 2 its own) and place there; the constants; its own."""
    sources: tuple[list[Array], ...] = jax.tree.leaves(given), [], []
    places = {id(x): (0, place) for place, x in enumerate(sources[0])}
    leaves = jax.tree.leaves(found)
    for x in leaves:
        if id(x) not in places:
            source = 2 if PIPE in varying_axes(x) else 1
            places[id(x)] = source, len(sources[source])
            sources[source].append(x)
    return [places[id(x)] for x in leaves], *sources[1:]


def _first_results(program: ClosedJaxpr, number: int) -> ClosedJaxpr:
    """The program of the first results alone, without effects of what is left out, such as what users print."""
    results = program.jaxpr.outvars[:number]
    needed, eqns = {x for x in results if not isinstance(x, Literal)}, []
    for eqn in reversed(program.jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed |= {x for x in eqn.invars if not isinstance(x, Literal)}
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    info = program.jaxpr.debug_info._replace(result_paths=None)
    return program.replace(
        jaxpr=program.jaxpr.replace(eqns=eqns[::-1], outvars=results, effects=effects, debug_info=info)
    )


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _keys(numbers: Array, impl: Any) -> Array:
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=impl)


def _numbers(arrays: Sequence[Array]) -> list[Array]:
    return [jax.random.key_data(x) if _is_key(x) else x for x in arrays]
