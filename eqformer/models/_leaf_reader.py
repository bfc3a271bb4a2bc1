"""Copies published arrays into the shards of a model's leaves that this process's devices hold."""

import itertools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from .. import nn
from ._published_arrays import Arrays, Run
from ._quantized_weights import leaves_of, own_arrays
from ._weight_rules import Weight


class Filled(NamedTuple):
    """What one rule fills: the leaves that it names, or what holds their codes and scales in their places."""

    rule: Weight
    leaves: tuple
    targets: list[jax.ShapeDtypeStruct]
    dtypes: list[str]
    maps: list[nn.QuantizedLinear]

    @classmethod
    def of(cls, arrays: Arrays, rule: Weight, dtype: str, shapes: nn.Transformer, kept: Mapping[int, Any]) -> "Filled":
        """What a rule fills of a model of these shapes, whose `kept` maps hold codes."""
        leaves = rule.leaves(shapes)
        maps = [kept[id(leaf)] for leaf in leaves if id(leaf) in kept]
        targets = [leaf for one in maps for leaf in leaves_of(one)] if maps else list(leaves)
        return cls(rule, leaves, targets, [str(its.dtype) if maps else dtype for its in targets], maps)

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return sum(leaf.size * jnp.dtype(its).itemsize for leaf, its in zip(self.targets, self.dtypes, strict=True))

    def arrays(
        self, source: Arrays, name: str, piece: int | None, rule: Weight, run: Run, into: np.ndarray
    ) -> list[np.ndarray]:
        """What a published array, or a piece of it, that `rule` reads gives to each of the targets."""
        if self.maps:
            return own_arrays(source, name, piece, rule, self.maps)
        whole = source.read(name, self.dtypes[0], piece, run, into)
        return [rule.to_own(whole, self.leaves, number) for number in range(len(self.leaves))]


class _Part(NamedTuple):
    """What of a leaf a device holds: from where to where in each dim, and the values."""

    bounds: tuple[tuple[int, int], ...]
    values: np.ndarray

    def holds(self, place: tuple[int, ...]) -> bool:
        return all(start <= at < stop for at, (start, stop) in zip(place, self.bounds))

    def fill(self, place: tuple[int, ...], own: np.ndarray, run: Run) -> None:
        at = tuple(one - start for one, (start, _) in zip(place, self.bounds))
        target = np.atleast_1d(self.values[(*at, ...)])
        source = np.atleast_1d(own[tuple(slice(*bound) for bound in self.bounds[len(place) :])])
        step = max(1, -(-len(target) // _THREADS))

        def copy(start: int) -> None:  # memory that is touched for the first time takes longer than the copy
            target[start : start + step] = source[start : start + step]

        for _ in run(copy, range(0, len(target), step)):
            pass


def read(arrays: Arrays, filled: Filled, places: list[Sharding]) -> list[Array]:
    """What one rule fills; each published array is looked at once, and copied to whom it belongs.

    Those that are decoded are one after another, each by all threads, so that one is in memory at a time.
    """
    parts = [_parts(*each) for each in zip(filled.targets, places, filled.dtypes, strict=True)]
    distinct = [[*{part.bounds: part for part in its.values()}.values()] for its in parts]
    named = list(filled.rule.places(filled.leaves[0]))
    is_decoded = lambda task: arrays.is_coded(task[1]) and not filled.maps
    decoded = list(filter(is_decoded, named))
    into = np.empty(max((math.prod(arrays.shape(name)[-2:]) for _, name in decoded), default=0), filled.dtypes[0])
    with ThreadPoolExecutor(_THREADS) as threads:
        copy = lambda task, run: _copy(arrays, filled, distinct, task, run, into)
        list(threads.map(lambda task: copy(task, map), itertools.filterfalse(is_decoded, named)))
        for task in decoded:
            copy(task, threads.map)
    made = ([jax.device_put(part.values, device) for device, part in its.items()] for its in parts)
    return [
        jax.make_array_from_single_device_arrays(leaf.shape, place, pieces)
        for leaf, place, pieces in zip(filled.targets, places, made)
    ]


def _copy(
    arrays: Arrays,
    filled: Filled,
    distinct: list[list[_Part]],
    task: tuple[tuple[int, ...], str],
    run: Run,
    into: np.ndarray,
) -> None:
    """Copy one published array, at this place of the leaves' outer dims, into the parts that hold it.

    Args:
        arrays: What is published.
        filled: What the rule fills.
        distinct: The parts of each target.
        task: The place, and the array's name.
        run: Shares the work.
        into: Memory for what is decoded, used again for each array.
    """
    (place, name), rule, leaves = task, filled.rule, filled.leaves
    try:
        rule.check_shape(arrays.shape(name), leaves)
        pieces = arrays.pieces(name)
        inner = rule.inner(leaves) if pieces else None
        for piece in (None,) if inner is None else pieces:
            at, its = (place, rule) if inner is None or piece is None else ((*place, piece), inner)
            if any(part.holds(at) for of_target in distinct for part in of_target):
                for own, of_target in zip(filled.arrays(arrays, name, piece, its, run, into), distinct, strict=True):
                    for part in of_target:
                        if part.holds(at):
                            part.fill(at, own, run)
    except ValueError as error:
        raise ValueError(f"{arrays.call}: {arrays.stored_name(name)}: {error}.") from None


def _parts(leaf: jax.ShapeDtypeStruct, sharding: Any, dtype: str) -> dict[Any, _Part]:
    """By device its part, not yet filled; devices that hold the same have one together."""
    made: dict[tuple, _Part] = {}
    found = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        if bounds not in made:
            made[bounds] = _Part(bounds, _aligned([stop - start for start, stop in bounds], dtype))
        found[device] = made[bounds]
    return found


def _aligned(shape: list[int], dtype: str) -> np.ndarray:
    """An empty array at an address that JAX takes over on CPUs without a copy."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(jnp.dtype(dtype)).reshape(shape)


_ALIGNMENT, _THREADS = 64, 4
