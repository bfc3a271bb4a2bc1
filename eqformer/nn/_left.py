"""What a layer leaves for later ones: keys and values (Brandon et al. 2024, arXiv:2405.12981), or which keys to see."""

import dataclasses
from collections.abc import Callable, Iterable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree


class KeysAndValues(eqx.Module):
    """What a mixer's queries may see, for mixers of later layers that make no keys and values of their own."""

    keys: Float[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys, rotated."""
    values: Float[Array, "*batch kv_seq kv_heads v_dim"]
    """The values."""
    positions: Int[Array, "*batch kv_seq"] | None = None
    """Of what stands in a cache; None: the keys are of the call's own tokens."""


class Left(eqx.Module):
    """What a mixer leaves for mixers of later layers."""

    what: PyTree
    """`KeysAndValues`, a `Choice` of keys, or anything else that the later mixer knows."""
    rest: PyTree = None
    """What stands here without it: of what a mixer is given or returns its cache, of a layer's aux that of its other
    sublayer."""
    name: str = eqx.field(static=True, default="")
    """By which later layers ask for it."""


class Leaving(eqx.Module):
    """What a mixer is given in the place of its cache if it is to return a `Left`, with the cache as its `rest`."""

    cache: PyTree


def of_name(left: Iterable[Left], name: str) -> Left:
    """The last that has this name; raises a `ValueError` where none has."""
    found = [one for one in left if one.name == name]
    if not found:
        names = sorted({one.name for one in left})
        raise ValueError(
            f"Residual(reads={name!r}): layers before it have left something under {names or 'no name'}; write "
            f"Residual(leaves={name!r}) in one of them."
        )
    return found[-1]


def with_rest(left: Left | None, aux: PyTree) -> PyTree:
    """A layer's aux, and what its mixer leaves, if it does."""
    return aux if left is None else dataclasses.replace(left, rest=aux)


def left_in(aux: PyTree) -> list[Left]:
    """What layers with this aux have left, in their order."""
    return [node for node in jax.tree.leaves(aux, is_leaf=_is_left) if isinstance(node, Left)]


def only(aux: PyTree, names: Iterable[str]) -> PyTree:
    """The aux without what was left under other names than these."""
    return _of_each(aux, lambda left: left if left.name in names else left.rest)


def last_layers(aux: PyTree) -> PyTree:
    """The aux of a stack, with a dim of layers in front, in which what was left is the last layer's."""

    def last(left: Left) -> Left:
        own = dataclasses.replace(left, rest=None)
        return dataclasses.replace(jax.tree.map(lambda x: x[-1], own), rest=left.rest)

    return _of_each(aux, last)


def _of_each(aux: PyTree, change: Callable[[Left], PyTree]) -> PyTree:
    return jax.tree.map(lambda node: change(node) if isinstance(node, Left) else node, aux, is_leaf=_is_left)


def _is_left(node: object) -> bool:
    return isinstance(node, Left)
