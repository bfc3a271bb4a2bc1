"""Reads the published arrays of a model's leaves into the shards that this process's devices hold."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from .. import nn
from ._published_arrays import code_leaves, MapFunction, PublishedArrays, read_map_codes
from ._weight_rules import Piece, ResolvedRule


Device = TypeVar("Device")
_ALIGNMENT, _THREADS = 64, 4


class LeafGroup(NamedTuple):
    """The leaves that one rule fills: plain weights, or the codes and scales of quantized maps in their place."""

    rule: ResolvedRule
    leaves: dict[str, jax.ShapeDtypeStruct]
    """By path, the shape of each leaf, and the dtype to which the leaf is converted when it is read."""
    maps: tuple[nn.QuantizedLinear, ...]
    """The shapes of the maps that hold codes; none for plain leaves."""

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves.values())

    @property
    def dtype(self) -> str:
        """The dtype of the first leaf."""
        return str(next(iter(self.leaves.values())).dtype)

    def read(
        self,
        arrays: PublishedArrays,
        name: str,
        index: int | None,
        rule: ResolvedRule,
        map_function: MapFunction,
        buffer: Shaped[np.ndarray, "numbers"],
    ) -> list[Shaped[np.ndarray, "..."]]:
        """Return the values of each leaf in one published array, or in one index of the array's first dim.

        Args:
            arrays: The published arrays.
            name: The array's name in the family's table.
            index: The index of the array's first dim; None: all of it.
            rule: The rule for the array or for this index.
            map_function: `map`, or a `map` with several threads; decodes the parts of an array.
            buffer: Memory for a decoded array.
        """
        if self.maps:
            return read_map_codes(arrays, name, index, rule, self.maps)
        if rule.ids_below:
            array = arrays.read_ids(name, rule.ids_below)
        else:
            array = arrays.read(name, self.dtype, index, map_function, buffer)
        return [rule.to_leaf(array, leaf_index) for leaf_index in range(len(rule.paths))]


def group_leaves(rule: ResolvedRule, dtype: str, quantized: Mapping[str, nn.QuantizedLinear]) -> LeafGroup:
    """Return the leaves that a rule fills, in this dtype.

    `quantized` has the maps that hold codes, by the path of the weight that the codes replace.
    """
    if not all(path in quantized for path in rule.paths):
        leaves = zip(rule.paths, rule.shapes, strict=True)
        return LeafGroup(rule, {path: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for path, shape in leaves}, ())
    maps = {path: quantized[path] for path in rule.paths}
    codes = {
        path.removesuffix("weight") + field: leaf
        for path, linear in maps.items()
        for field, leaf in code_leaves(linear).items()
    }
    return LeafGroup(rule, codes, tuple(maps.values()))


class _Shard(NamedTuple):
    """The part of a leaf that a device holds."""

    bounds: tuple[tuple[int, int], ...]
    """The start and the stop of the part in each dim of the leaf."""
    values: Shaped[np.ndarray, "..."]

    def holds(self, index: tuple[int, ...]) -> bool:
        """Return whether the shard holds values at this index of the leaf's outer dims."""
        return all(start <= position < stop for position, (start, stop) in zip(index, self.bounds))

    def fill(
        self, index: tuple[int, ...], array: Shaped[np.ndarray, "..."], map_function: MapFunction, first_row: int = 0
    ) -> None:
        """Copy the shard's part of `array`, the values of the leaf at this index of the outer dims.

        The array begins at row `first_row` of the leaf's first dim after layers and experts.
        """
        local = tuple(position - start for position, (start, _) in zip(index, self.bounds))
        values, bounds = self.values[(*local, ...)], self.bounds[len(index) :]
        if bounds:
            (first, last), *inner = bounds
            start, stop = max(first, first_row), min(last, first_row + len(array))
            if start >= stop:
                return
            values = values[start - first : stop - first]
            array = array[tuple(slice(*bound) for bound in ((start - first_row, stop - first_row), *inner))]
        target, source = np.atleast_1d(values), np.atleast_1d(array)
        step = max(1, -(-len(target) // _THREADS))

        def copy(start: int) -> None:  # Several threads copy, because the first access to memory is slow.
            target[start : start + step] = source[start : start + step]

        for _ in map_function(copy, range(0, len(target), step)):
            pass


def read_leaves(
    arrays: PublishedArrays, group: LeafGroup, shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, Array]:
    """Return the leaves of a group by path, placed by their shardings.

    Each published array is read once, and copied to every shard that holds a part of it. Arrays that are decoded are
    read one after another, each by all threads, so that one decoded array is in memory at a time.
    """
    shards = {
        path: _empty_shards(leaf, shardings[path].addressable_devices_indices_map(leaf.shape))
        for path, leaf in group.leaves.items()
    }
    distinct = [_distinct_shards(by_device.values()) for by_device in shards.values()]
    tasks = list(group.rule.pieces())
    decoded = [] if group.maps else [piece for piece in tasks if arrays.is_coded(piece.name)]
    copied = tasks if not decoded else [piece for piece in tasks if not arrays.is_coded(piece.name)]
    longest = max((math.prod(arrays.shape(piece.name)[-2:]) for piece in decoded), default=0)
    buffer = np.empty(longest, group.dtype)
    with ThreadPoolExecutor(_THREADS) as threads:
        copy = functools.partial(_copy_array, arrays, group, distinct, buffer)
        list(threads.map(functools.partial(copy, map), copied))
        for task in decoded:
            copy(threads.map, task)
    leaves: dict[str, Array] = {}
    for path, leaf in group.leaves.items():
        on_devices = [jax.device_put(shard.values, device) for device, shard in shards[path].items()]
        leaves[path] = jax.make_array_from_single_device_arrays(leaf.shape, shardings[path], on_devices)
    return leaves


def _copy_array(
    arrays: PublishedArrays,
    group: LeafGroup,
    shards: Sequence[Sequence[_Shard]],
    buffer: Shaped[np.ndarray, "numbers"],
    map_function: MapFunction,
    piece: Piece,
) -> None:
    """Copy one published array into the shards that hold a part of it.

    Args:
        arrays: The published arrays.
        group: The leaves that the array fills.
        shards: The distinct shards of each leaf.
        buffer: Memory for a decoded array, which the next array uses again.
        map_function: `map`, or a `map` with several threads; decodes and copies the parts of an array.
        piece: The published array, and the part of the leaves that it holds.
    """
    outer_index, name, rule = piece.index, piece.name, piece.rule
    try:
        rule.check_shape(arrays.shape(name))
        slices = arrays.slices(name)
        slice_rule = rule.slice_rule() if slices else None
        reads = [(None, outer_index, rule)]
        if slice_rule is not None:
            reads = [(position, (*outer_index, position), slice_rule) for position in slices]
        for position, index, read_rule in reads:
            if not any(shard.holds(index) for shard in itertools.chain(*shards)):
                continue
            parts = group.read(arrays, name, position, read_rule, map_function, buffer)
            for part, shards_of_leaf in zip(parts, shards, strict=True):
                for shard in shards_of_leaf:
                    if shard.holds(index):
                        shard.fill(index, part, map_function, piece.first_row)
    except ValueError as error:
        raise ValueError(f"{arrays.call}: {arrays.stored_name(name)}: {error}.") from None


def _distinct_shards(shards: Iterable[_Shard]) -> list[_Shard]:
    """Return one of the shards for each part of a leaf; devices that hold equal parts have the same shard."""
    return list({shard.bounds: shard for shard in shards}.values())


def _empty_shards(
    leaf: jax.ShapeDtypeStruct, indices: Mapping[Device, tuple[slice, ...] | None]
) -> dict[Device, _Shard]:
    """Return an empty shard for each device; devices that hold the same part of the leaf share a shard."""
    by_bounds: dict[tuple[tuple[int, int], ...], _Shard] = {}
    by_device = {}
    for device, index in indices.items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), leaf.shape, strict=True))
        if bounds not in by_bounds:
            by_bounds[bounds] = _Shard(bounds, _aligned_empty([stop - start for start, stop in bounds], leaf.dtype))
        by_device[device] = by_bounds[bounds]
    return by_device


def _aligned_empty(shape: Sequence[int], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Return an empty array at an address that JAX takes over on CPUs without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
