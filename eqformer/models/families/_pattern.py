"""Layers of several kinds in a row, held as stacks of periods: each kind once for each place that it repeats at."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from ...nn import Embedding, Layer, Linear, Period, RMSNorm, Stack, Transformer
from .._weights import Weight


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
        for size in reversed(range(1, len(kinds) - first + 1)):  # of equal cuts the one that starts with a period
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
    """Stacks of `block(kind, key)` for these kinds of layers."""
    cut = runs(tuple(kinds))
    keys = jax.random.split(key, len(cut))
    return tuple(
        Stack(functools.partial(_period, block, run.kinds), run.periods, key=key)
        for run, key in zip(cut, keys, strict=True)
    )


def decoder(
    numbers: Any,
    block: Callable[[Any, Key[Array, ""]], Layer],
    kinds: Sequence[Hashable],
    *,
    offset: float = 0.0,
    embedding_scale: float | None = None,
    logit_softcap: float | None = None,
    key: Key[Array, ""],
) -> Transformer:
    """Stacks of `block(kind, key)` for these kinds, between a table and an RMSNorm and, if not tied, a head."""
    embedding, stacks, head = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=numbers.embed, scale=embedding_scale, key=embedding),
        stacks=stacks_of(block, kinds, key=stacks),
        norm=RMSNorm("embed", embed=numbers.embed, eps=numbers.eps, offset=offset),
        head=None if numbers.tied else Linear("embed -> vocab", embed=numbers.embed, vocab=numbers.vocab, key=head),
        logit_softcap=logit_softcap,
    )


def places(kinds: Sequence[Hashable]) -> list[tuple[Callable[[Any], Any], range]]:
    """For each place of each period of `stacks_of`: where its blocks are in a model, and their layers' numbers."""
    found = []
    for stack, run in enumerate(runs(tuple(kinds))):
        size = len(run.kinds)
        for place in range(size):
            layers = range(run.first + place, run.first + size * run.periods, size)
            found.append((functools.partial(_block_at, stack, None if size == 1 else place), layers))
    return found


def layer_weights(
    kinds: Sequence[Any], rules: Callable[[Any, Callable[[Any], Any], Sequence[int]], list[Weight]]
) -> list[Weight]:
    """The rules of all layers: `rules(kind, where, layers)` for each place."""
    return [rule for where, layers in places(kinds) for rule in rules(kinds[layers[0]], where, layers)]


def windows_of(numbers: Any) -> list[int | None]:
    """Of each layer its window: that of the numbers for the layers that they call windowed."""
    return [numbers.window if layer in numbers.windowed else None for layer in range(numbers.layers)]


def every(period: int, layers: int) -> tuple[int, ...]:
    """The numbers of each `period`-th of so many layers."""
    return tuple(range(period - 1, layers, period))


def all_but_every(period: int, layers: int) -> tuple[int, ...]:
    """The numbers of the others."""
    return tuple(number for number in range(layers) if (number + 1) % period)


def _period(block: Callable[..., Layer], kinds: tuple[Any, ...], key: Key[Array, ""]) -> Layer:
    if len(kinds) == 1:
        return block(kinds[0], key)
    keys = jax.random.split(key, len(kinds))
    return Period(tuple(block(kind, key) for kind, key in zip(kinds, keys, strict=True)))


def _block_at(stack: int, place: int | None, model: Any) -> Any:
    blocks = model.stacks[stack].blocks
    return blocks if place is None else blocks.blocks[place]
