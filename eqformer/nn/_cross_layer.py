"""Values that a layer shares with later layers.

They are keys and values (Brandon et al. 2024, arXiv:2405.12981), or an indexer's selection of keys.
"""

import functools
from collections.abc import Iterable
from typing import TypeVar

import equinox as eqx
from jaxtyping import Array, Float, Int, PyTree

from ._module import map_modules, modules, take_members


class SharedKV(eqx.Module):
    """Keys and values that a mixer shares with mixers of later layers, which have no keys and values of their own."""

    keys: Float[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys, rotated."""
    values: Float[Array, "*batch kv_seq kv_heads v_dim"]
    """The values."""
    positions: Int[Array, "*batch kv_seq"] | None = None
    """Positions of the keys, if they come from a cache; None: the keys are those of the call's own tokens."""


class SharedValue(eqx.Module):
    """A value that a mixer shares with mixers of later layers, wrapped around its cache."""

    value: PyTree
    """A `SharedKV`, a `KeySelection`, or anything else that the later mixer understands."""
    wrapped: PyTree = None
    """The mixer's own cache, while a mixer is called with the value or returns it; None in a layer's aux."""
    name: str = eqx.field(static=True, default="")
    """The name by which later layers ask for the value."""


class ShareRequest(eqx.Module):
    """A mixer's cache, passed in this wrapper to ask the mixer for a `SharedValue` around its new cache."""

    cache: PyTree


Cache = TypeVar("Cache")


def unwrap_request(cache: Cache | ShareRequest) -> tuple[bool, Cache]:
    """Return whether a mixer's cache argument asks for a `SharedValue`, and the cache itself."""
    return (True, cache.cache) if isinstance(cache, ShareRequest) else (False, cache)


def answer_request(is_requested: bool, value: PyTree, cache: PyTree) -> PyTree:
    """Return a mixer's new cache, within a `SharedValue` if the mixer was asked for one."""
    return SharedValue(value, cache) if is_requested else cache


def find_shared(shared: Iterable[SharedValue], name: str) -> SharedValue:
    """Return the last shared value of this name; raise a `ValueError` if there is none."""
    matches = [value for value in shared if value.name == name]
    if not matches:
        names = sorted({value.name for value in shared})
        raise ValueError(
            f"Residual(reads={name!r}): layers before it share values under {names or 'no name'}; write "
            f"Residual(shares={name!r}) in one of them."
        )
    return matches[-1]


def collect_shared(aux: PyTree) -> list[SharedValue]:
    """Return the values that layers with this aux share, in the order of the layers."""
    return modules(aux, SharedValue)


def keep_shared(aux: PyTree, names: Iterable[str]) -> PyTree:
    """Return the aux with only the shared values of these names; other shared values become None."""
    return map_modules(lambda shared: shared if shared.name in names else None, aux, SharedValue)


def take_last_layer(aux: PyTree) -> PyTree:
    """Return a stack's aux with shared values of the last layer only; all else keeps its `layers` dim in front."""
    return map_modules(functools.partial(take_members, index=-1), aux, SharedValue)
