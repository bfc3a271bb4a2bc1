"""Rules from published arrays to a model's leaves and back: one table a family, read in both directions."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import einops
import numpy as np

from .._shapes import ArrayOrShape
from ..nn import Layer, Predictor, Stack, SuperBlock, Transformer


Stacked = Transformer | Predictor  # what has stacks of layers and arrays beside them
Stored = Mapping[str, tuple[int, ...]]  # the shape of each array of a folder
NOTHING_STORED: Stored = MappingProxyType({})
_DIMS = re.compile(r"\(([^)]*)\)|(\S+)")  # of a pattern: names in brackets, or one


@dataclasses.dataclass(frozen=True)
class Weight:
    """Where a published array, or one for each of several layers and experts, stands in a model.

    `name` may hold `{layer}` and `{expert}`, which count the first dims of the leaf that `where` gives: its layer `i`
    is published as number `layers[i]`. `pattern` is einops', from the published dims to the leaf's own (those after
    layers and experts); without one they are the same. Where `where` gives a tuple of leaves, they are published as one
    array, one after another along its dim `axis`, or taking turns there: each of `groups` (say, heads) has a part of
    every leaf, or every leaf one number (`interleaved`). They have one pattern, or each its own. A leaf's dim may be
    two, one of them the groups: `"ids (groups mlp) -> ids (mlp groups)"`.
    """

    name: str
    where: Callable[[Any], Any]
    pattern: str | tuple[str, ...] = ""
    layers: Sequence[int] = ()
    axis: int = 0
    interleaved: bool = False
    groups: int = 1
    within: int = 0
    """How many further dims of the leaves count places within a published array, of which this rule reads one."""
    variant: bool = False

    def leaves(self, model: Stacked) -> tuple[Any, ...]:
        """The model's leaves, in the order in which they are published."""
        found = self.where(model)
        return found if isinstance(found, tuple) else (found,)

    def pattern_of(self, number: int) -> str:
        """The pattern of leaf `number`."""
        return self.pattern if isinstance(self.pattern, str) else self.pattern[number]

    @property
    def outer(self) -> int:
        """How many dims of a leaf count layers and experts."""
        return ("{layer}" in self.name) + ("{expert}" in self.name) + self.within

    def inner(self, leaves: Sequence[ArrayOrShape]) -> "Weight | None":
        """The rule of what stands at one place of a published array's first dim; None where that is no leaf's own."""
        if not isinstance(self.pattern, str):
            return None
        theirs, own = self.pattern.split(" -> ") if self.pattern else ("", "")
        (first, _, others), (its, _, rest) = theirs.partition(" "), own.partition(" ")
        if first != its or (len(leaves) > 1 and self.axis == 0):
            return None
        pattern = f"{others} -> {rest}" if self.pattern else ""
        return dataclasses.replace(self, pattern=pattern, axis=max(self.axis - 1, 0), within=self.within + 1)

    def places(self, leaf: ArrayOrShape) -> Iterator[tuple[tuple[int, ...], str]]:
        """The places of the leaf's outer dims, and the name of the array published for each."""
        for place in itertools.product(*map(range, leaf.shape[: self.outer])):
            layer = self.layers[place[0]] if "{layer}" in self.name else None
            yield place, self.name.format(layer=layer, expert=place[-1] if place else None)

    def fits(self, shape: tuple[int, ...], leaves: Sequence[ArrayOrShape]) -> bool:
        """Whether a published array of this shape is that of the leaves."""
        try:
            self.check_shape(shape, leaves)
        except ValueError:
            return False
        return True

    def check_shape(self, shape: tuple[int, ...], leaves: Sequence[ArrayOrShape]) -> None:
        """Raise a `ValueError` unless a published array has the shape that the leaves have together."""
        parts = self._published_shapes(leaves)
        wanted = list(parts[0])
        wanted[self.axis : self.axis + 1] = [sum(part[self.axis] for part in parts)] if wanted else []
        if shape != tuple(wanted):
            raise ValueError(f"it has shape {shape}, and the model's is {tuple(wanted)}")

    def to_own(self, whole: np.ndarray, leaves: Sequence[ArrayOrShape], number: int) -> np.ndarray:
        """What of a published array is leaf `number`'s; raises a `ValueError` for a shape that does not fit."""
        self.check_shape(whole.shape, leaves)
        parts, wanted, pattern = self._published_shapes(leaves), whole.shape, self.pattern_of(number)
        own = leaves[number].shape[self.outer :]
        if len(leaves) > 1:
            groups = self._groups(parts[0])
            start = sum(part[self.axis] for part in parts[:number]) // groups
            stop = start + parts[number][self.axis] // groups
            split = whole.reshape(*wanted[: self.axis], groups, -1, *wanted[self.axis + 1 :])
            whole = split[*(slice(None),) * (self.axis + 1), start:stop].reshape(parts[number])
        return einops.rearrange(whole, pattern, **_sizes(pattern, own, self.groups)) if pattern else whole

    def dim_of_last(self, number: int) -> int | None:
        """Along which dim of the published array, from its end, the last of leaf `number` lies, one after another."""
        if not (pattern := self.pattern_of(number)):
            return -1
        published, own = pattern.split(" -> ")
        dims = [(merged or alone).split() for merged, alone in _DIMS.findall(published)]
        found = [place for place, names in enumerate(dims) if names[-1:] == own.split()[-1:]]
        return found[0] - len(dims) if found else None

    def to_published(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The published array of what the leaves hold for one place."""
        turned = [_to_published(part, self.pattern_of(number), self.groups) for number, part in enumerate(parts)]
        if len(turned) == 1:
            return turned[0]
        groups, shape = self._groups(turned[0].shape), turned[0].shape
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        split = [part.reshape(*before, groups, -1, *after) for part in turned]
        return np.concatenate(split, axis=self.axis + 1).reshape(*before, -1, *after)

    def _groups(self, published: Sequence[int]) -> int:
        return published[self.axis] if self.interleaved else self.groups

    def _published_shapes(self, leaves: Sequence[ArrayOrShape]) -> list[tuple[int, ...]]:
        """Of each leaf the shape of its part of the published array."""
        shapes = enumerate(leaf.shape[self.outer :] for leaf in leaves)
        return [_published_shape(shape, self.pattern_of(number), self.groups) for number, shape in shapes]


def _to_published(part: np.ndarray, pattern: str, groups: int) -> np.ndarray:
    back = " -> ".join(reversed(pattern.split(" -> ")))
    return einops.rearrange(part, back, **_sizes(pattern, part.shape, groups)) if back else part


def _published_shape(own: Sequence[int], pattern: str, groups: int) -> tuple[int, ...]:
    if not pattern:
        return tuple(own)
    sizes = _sizes(pattern, own, groups)
    dims = _DIMS.findall(pattern.split(" -> ")[0])
    return tuple(math.prod(sizes.get(name, 1) for name in (merged or alone).split()) for merged, alone in dims)


def _sizes(pattern: str, own: Sequence[int], groups: int) -> dict[str, int]:
    """The sizes that a pattern names, of a leaf in which some dims may be one with that of the `groups`."""
    dims = zip(_DIMS.findall(pattern.split(" -> ")[1]), own, strict=True)
    sizes = {
        name: size // groups if merged else size for (merged, alone), size in dims for name in (merged or alone).split()
    }
    return sizes | {"groups": groups} if "(groups " in pattern else sizes


@dataclasses.dataclass(frozen=True)
class Rule:
    """A line of a family's table of weights: a published name, and the path of its leaf in a model.

    A rule applies only to a model or a layer that has its leaves.
    """

    name: str
    """The published name; with `{layer}` it stands for every layer's array."""
    path: str | tuple[str, ...]
    """The path of its leaf, from a layer where the name has one; several are published as one array."""
    pattern: str | tuple[str, ...] = ""
    """How einops rearranges a published array into a leaf, or its parts each into its own."""
    axis: int = 0
    """Along which several leaves are put together."""
    interleaved: bool = False
    """Whether leaves take turns number by number."""
    groups: int | str = 1
    """How many pieces of each leaf take turns, or the dim `groups` of the pattern has; or the field of the config that
    says so."""
    needs: str = ""
    """The rule applies only where there is something at this path."""
    lacks: str = ""
    """The rule applies only where there is nothing at this path."""
    variant: bool = False
    """The rule takes the place of others of its leaves where a folder has its arrays."""
    part: str = ""
    """The part of the model whose layers the name's `{layer}` counts, `"encoder"`, or none: the model itself."""

    def leaves(self, holder: Stacked | Layer) -> Any:
        """The leaf of a model or a layer, or a tuple of several; None where the rule does not apply."""
        if (self.needs and _at(holder, self.needs) is None) or (self.lacks and _at(holder, self.lacks) is not None):
            return None
        if isinstance(self.path, str):
            return _at(holder, self.path)
        found = tuple(_at(holder, path) for path in self.path)
        return None if any(leaf is None for leaf in found) else found


def weights_of(table: Sequence[Rule], config: object, model: Stacked, stored: Stored = NOTHING_STORED) -> list[Weight]:
    """The rules of a family's table that apply to a model of this config: the model's, then those of its layers.

    Variants are among them where a folder has `stored` their arrays; of several of one name the first that fits.
    """
    found = [_weight(rule, config, rule.leaves, ()) for rule in table if _says(rule, model, is_of_layers=False)]
    for part, where, layers in places(model):
        for rule in table:
            if rule.part == part and _says(rule, where(model), is_of_layers=True):
                leaves = lambda model, rule=rule, where=where: rule.leaves(where(model))
                found.append(_weight(rule, config, leaves, layers))
    leaves_of = {id(rule): {*map(id, rule.leaves(model))} for rule in found}
    variants = _variants(found, model, stored)
    replaced = {leaf for rule in variants for leaf in leaves_of[id(rule)]}
    return [rule for rule in found if rule in variants or not (rule.variant or leaves_of[id(rule)] & replaced)]


def _variants(rules: Sequence[Weight], model: Stacked, stored: Stored) -> list[Weight]:
    """The variants of which a folder has the arrays: of one name the first whose shape is that of the first array."""
    found: dict[str, Weight] = {}
    for rule in rules:
        leaves = rule.leaves(model)
        name = next(rule.places(leaves[0]))[1]
        if rule.variant and name in stored:
            other = found.setdefault(name, rule)
            if not other.fits(stored[name], other.leaves(model)) and rule.fits(stored[name], leaves):
                found[name] = rule
    return list(found.values())


def _says(rule: Rule, holder: Stacked | Layer, is_of_layers: bool) -> bool:
    return ("{layer}" in rule.name) == is_of_layers and rule.leaves(holder) is not None


def _weight(rule: Rule, config: object, where: Callable[[Any], Any], layers: Sequence[int]) -> Weight:
    groups = getattr(config, rule.groups) if isinstance(rule.groups, str) else rule.groups
    return Weight(rule.name, where, rule.pattern, layers, rule.axis, rule.interleaved, groups, variant=rule.variant)


def places(model: Stacked) -> list[tuple[str, Callable[[Any], Any], range]]:
    """For each place in each stack's period: the part of the model that the stack is in (`Rule.part`), a function from
    a model to the layers there, and the layers' numbers."""
    found = []
    for part in ("", "encoder"):
        first = 0
        for number, stack in enumerate(_stacks(part, model)):
            size = len(stack.blocks.blocks) if isinstance(stack.blocks, SuperBlock) else 1
            end = first + size * len(stack)
            for place in range(size):
                where = functools.partial(
                    _layer_at, part, number, place if isinstance(stack.blocks, SuperBlock) else None
                )
                found.append((part, where, range(first + place, end, size)))
            first = end
    return found


def _stacks(part: str, model: Stacked) -> tuple[Stack, ...]:
    holder = getattr(model, part, None) if part else model
    return () if holder is None else holder.stacks


def _layer_at(part: str, stack: int, place: int | None, model: Stacked) -> Layer:
    layers = _stacks(part, model)[stack].blocks
    return layers if place is None else layers.blocks[place]  # type: ignore[attr-defined]


def _at(holder: object, path: str) -> Any:
    """What is at a path of names, and of places in tuples; None where there is nothing."""
    for name in path.split("."):
        if isinstance(holder, tuple) and name.isdigit():
            holder = holder[int(name)] if int(name) < len(holder) else None
        else:
            holder = getattr(holder, name, None)
    return holder
