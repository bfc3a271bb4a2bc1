"""Layers of several kinds as few stacks, and the rules for what stands in them."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
from jaxtyping import Array, Key

from ..nn import Layer, Period, Stack
from ._weights import Weight


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers `start`, `start + 1`, ... of the kinds of one period, repeated: one stack."""

    stack: int
    kinds: tuple[Any, ...]
    start: int
    repeats: int

    def places(self) -> Iterator[tuple[Any, Callable[[Any], Any], range]]:
        """Each kind of the period, where a model has its blocks, and which layers they are."""
        for place, kind in enumerate(self.kinds):
            where = lambda model, place=place: self._block(model.stacks[self.stack].blocks, place)
            first = self.start + place
            yield kind, where, range(first, first + len(self.kinds) * self.repeats, len(self.kinds))

    def _block(self, blocks: Any, place: int) -> Any:
        return blocks if len(self.kinds) == 1 else blocks.blocks[place]


@lru_cache
def runs_of(kinds: tuple[Hashable, ...]) -> tuple[Run, ...]:
    """The layers' kinds as periods that repeat, in as few different blocks and then as few stacks as can be."""
    best: list[tuple[int, tuple[tuple[int, int], ...]]] = [(0, ())]  # for the last layers: blocks, (period, repeats)
    for start in reversed(range(len(kinds))):
        found = []
        for period in range(1, min(len(kinds) - start, _LONGEST) + 1):
            repeats, cycle = 1, kinds[start : start + period]
            while True:
                rest = best[len(kinds) - start - period * repeats]
                found.append((period + rest[0], ((period, repeats), *rest[1])))
                if kinds[start + period * repeats : start + period * (repeats + 1)] != cycle:
                    break
                repeats += 1
        best.append(min(found, key=lambda option: (option[0], len(option[1]))))
    runs, start = [], 0
    for period, repeats in best[-1][1]:
        runs.append(Run(len(runs), kinds[start : start + period], start, repeats))
        start += period * repeats
    return tuple(runs)


def stacks_of(
    kinds: Sequence[Any],
    block: Callable[[Any, Key[Array, ""]], Layer],
    *,
    remat: str,
    unroll: int,
    key: Key[Array, ""],
) -> tuple[Stack, ...]:
    """The stacks of layers of these kinds, `block(kind, key)` each."""

    def layer(run: Run, key: Key[Array, ""]) -> Layer:
        if len(run.kinds) == 1:
            return block(run.kinds[0], key)
        return Period(tuple(map(block, run.kinds, jax.random.split(key, len(run.kinds)))))

    runs = runs_of(tuple(kinds))
    pairs = zip(runs, jax.random.split(key, len(runs)), strict=True)
    return tuple(
        Stack(lambda key, run=run: layer(run, key), run.repeats, remat=remat, unroll=unroll, key=key)
        for run, key in pairs
    )


def layer_weights(
    kinds: Sequence[Any], rules: Callable[[Any, Callable[[Any], Any], Sequence[int]], list[Weight]]
) -> list[Weight]:
    """The rules of all layers: `rules(kind, where, layers)` for each block that the stacks hold."""
    return [rule for run in runs_of(tuple(kinds)) for place in run.places() for rule in rules(*place)]


def norm_weights(where: Callable[[Any], Any], layers: Sequence[int], names: Mapping[str, str]) -> list[Weight]:
    """Scales of a block's norms: by our attribute the name published."""
    found = []
    for own, published in names.items():
        name = f"model.layers.{{layer}}.{published}.weight"
        found.append(Weight(name, lambda m, own=own: getattr(where(m), own).weight, "", layers))
    return found


def query_key_norm_weights(where: Callable[[Any], Any], layers: Sequence[int], pattern: str = "") -> list[Weight]:
    """Of an attention's norms of queries and keys, published as `q_norm` and `k_norm`."""
    found = []
    for own, its in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        name = f"model.layers.{{layer}}.self_attn.{its}.weight"
        found.append(Weight(name, lambda m, own=own: getattr(where(m).attention, own).weight, pattern, layers))
    return found


def joined_gated_weights(where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
    """Of a block's `GatedMLP`, whose first two maps are published as one."""
    fed, prefix = lambda m: where(m).feed_forward, "model.layers.{layer}.mlp."
    ups = lambda m: (fed(m).gate.weight, fed(m).up.weight)
    down = Weight(f"{prefix}down_proj.weight", lambda m: fed(m).down.weight, "", layers)
    return [Weight(f"{prefix}gate_up_proj.weight", ups, "", layers), down]


def layer_types(config: Any, layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have a window, of `layer_types` or, where it is missing, by `default`."""
    names = config.take("layer_types", None)
    if names is None:
        return tuple(map(default, range(layers)))
    known = {"sliding_attention": True, "full_attention": False}
    if len(names) != layers or not set(names) <= set(known):
        raise ValueError(f"layer_types={names!r} is not one of {sorted(known)} for each of {layers} layers.")
    return tuple(known[name] for name in names)


def layer_type_names(windowed: Sequence[bool]) -> list[str]:
    """The same the other way."""
    return ["sliding_attention" if has_window else "full_attention" for has_window in windowed]


_LONGEST = 8  # layers of a period
