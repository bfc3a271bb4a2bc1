"""Layers of several kinds in a row, held as stacks of periods: each kind once for each place that it repeats at."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from ...nn import Layer, Stack, SuperBlock


_LONGEST_PERIOD = 128  # layers; without a bound, a thousand layers take seconds to cut


class Together(NamedTuple):
    """Kinds of layers in a row that no cut parts, since the later ones read what the first one leaves."""

    kinds: tuple[Any, ...]


class Run(NamedTuple):
    """Layers from number `first` on: `periods` times these kinds."""

    kinds: tuple[Any, ...]
    periods: int
    first: int


@functools.cache
def runs(kinds: tuple[Hashable, ...]) -> tuple[Run, ...]:
    """The layers cut into runs that trace the fewest blocks together, and of those the fewest runs.

    26 layers of which each sixth is unlike the others are four periods of six and two periods of one.
    """
    best: dict[int, tuple[int, int, tuple[Run, ...]]] = {len(kinds): (0, 0, ())}
    for first in reversed(range(len(kinds))):
        found = []
        longest = min(len(kinds) - first, _LONGEST_PERIOD)
        for size in reversed(range(1, longest + 1)):  # of equal cuts the one that starts with a period
            period, end, periods = kinds[first : first + size], first, 0
            while kinds[end : end + size] == period:
                end, periods = end + size, periods + 1
                traced, number, rest = best[end]
                found.append((traced + size, number + 1, (Run(period, periods, first), *rest)))
        best[first] = min(found, key=lambda cut: cut[:2])
    return best[0][2]


def stacks_of(
    block: Callable[[Any, Key[Array, ""]], Layer],
    kinds: Sequence[Hashable],
    *,
    key: Key[Array, ""],
) -> tuple[Stack, ...]:
    """Stacks of `block(kind, key)` for these kinds of layers, of which some may stand `Together`."""
    cut = runs(tuple(kinds))
    keys = jax.random.split(key, len(cut))
    return tuple(
        Stack(functools.partial(_period, block, run.kinds), run.periods, key=key)
        for run, key in zip(cut, keys, strict=True)
    )


def windows_of(config: Any) -> list[int | None]:
    """Of each layer its window: the config's for its window layers."""
    return [config.window if layer in config.window_layers else None for layer in range(config.layers)]


def _period(block: Callable[..., Layer], kinds: tuple[Any, ...], key: Key[Array, ""]) -> Layer:
    kinds = tuple(own for kind in kinds for own in (kind.kinds if isinstance(kind, Together) else (kind,)))
    if len(kinds) == 1:
        return block(kinds[0], key)
    keys = jax.random.split(key, len(kinds))
    return SuperBlock(tuple(block(kind, key) for kind, key in zip(kinds, keys, strict=True)))
