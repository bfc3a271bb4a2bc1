"""Stacks for layers of several kinds in a row: a stack for each run of a repeated pattern of kinds."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, runtime_checkable, TypeVar

import jax
from jaxtyping import Array, Key

from ...nn import Layer, Stack, SuperBlock


LayerKind = TypeVar("LayerKind", bound=Hashable)
_LONGEST_PERIOD = 128  # layers; without a bound, a thousand layers take seconds to divide into runs


@dataclasses.dataclass(frozen=True)
class Together(Generic[LayerKind]):
    """Kinds of consecutive layers that stay in one block, since the later layers read what the first one shares."""

    kinds: tuple[LayerKind, ...]


@dataclasses.dataclass(frozen=True)
class Run(Generic[LayerKind]):
    """A run of layers from number `first` on: a pattern of kinds, repeated `periods` times."""

    kinds: tuple[LayerKind, ...]
    periods: int
    first: int


def runs(kinds: tuple[LayerKind, ...]) -> tuple[Run[LayerKind], ...]:
    """Return the layers divided into runs that trace the fewest blocks, and among those divisions the fewest runs.

    26 layers of which each sixth differs are four periods of six layers and two periods of one.
    """
    # The cache is keyed by which layers are alike: keyed by kinds, it would give layers of kind True those of kind 1.
    numbers: dict[Hashable, int] = {}
    divisions = _divide(tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds))
    return tuple(Run(kinds[first : first + size], periods, first) for first, size, periods in divisions)


@functools.cache
def _divide(kind_numbers: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return the first layer, the layers of a period and the periods of each run."""
    best: dict[int, tuple[int, int, tuple[tuple[int, int, int], ...]]] = {len(kind_numbers): (0, 0, ())}
    for first in reversed(range(len(kind_numbers))):
        divisions = []
        longest = min(len(kind_numbers) - first, _LONGEST_PERIOD)
        for size in reversed(range(1, longest + 1)):  # of equally good divisions, one that starts with a period
            period, end, periods = kind_numbers[first : first + size], first, 0
            while kind_numbers[end : end + size] == period:
                end, periods = end + size, periods + 1
                traced, number, later = best[end]
                divisions.append((traced + size, number + 1, ((first, size, periods), *later)))
        best[first] = min(divisions, key=lambda division: division[:2])
    return best[0][2]


def stacks_of(
    block: Callable[[LayerKind, Key[Array, ""]], Layer],
    kinds: Sequence[LayerKind | Together[LayerKind]],
    *,
    key: Key[Array, ""],
) -> tuple[Stack, ...]:
    """Return stacks of `block(kind, key)` for these kinds of layers, of which some may stand `Together`."""
    layer_runs = runs(tuple(kinds))
    keys = jax.random.split(key, len(layer_runs))
    return tuple(
        Stack(functools.partial(_period, block, run.kinds), run.periods, key=key)
        for run, key in zip(layer_runs, keys, strict=True)
    )


def _period(
    block: Callable[[LayerKind, Key[Array, ""]], Layer],
    kinds: tuple[LayerKind | Together[LayerKind], ...],
    key: Key[Array, ""],
) -> Layer:
    """Return one period of a run: a layer, or a `SuperBlock` of several layers."""
    layer_kinds: list[LayerKind] = []
    for kind in kinds:
        layer_kinds += kind.kinds if isinstance(kind, Together) else (kind,)
    if len(layer_kinds) == 1:
        return block(layer_kinds[0], key)
    keys = jax.random.split(key, len(layer_kinds))
    return SuperBlock(tuple(block(kind, key) for kind, key in zip(layer_kinds, keys, strict=True)))


@runtime_checkable
class Windowed(Protocol):
    """Fields of a config of which some layers have a sliding window."""

    @property
    def layers(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def window_layers(self) -> tuple[int, ...]: ...


def layer_windows(config: Windowed) -> list[int | None]:
    """Return the window of each layer: the config's for its window layers, None for others."""
    return [config.window if layer in config.window_layers else None for layer in range(config.layers)]
