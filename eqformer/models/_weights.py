"""Rules from published arrays to a model's leaves and back: one table a family, read in both directions."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import einops
import numpy as np

from ._config import Config


@dataclasses.dataclass(frozen=True)
class Weight:
    """Where a published array, or one for each of several layers and experts, stands in a model.

    `name` may hold `{layer}` and `{expert}`, which count the first dims of the leaf that `where` gives: its layer `i`
    is published as number `layers[i]`. `pattern` is einops', from the published dims to the leaf's own (those after
    layers and experts); without one they are the same. Where `where` gives a tuple of leaves, they are published as one
    array, one after another along its dim `axis`, or taking turns there: each of `groups` (say, heads) has a part of
    every leaf, or every leaf one number (`interleaved`).
    """

    name: str
    where: Callable[[Any], Any]
    pattern: str = ""
    layers: Sequence[int] = ()
    axis: int = 0
    interleaved: bool = False
    groups: int = 1

    def leaves(self, model: Any) -> tuple[Any, ...]:
        """The model's leaves, in the order in which they are published."""
        found = self.where(model)
        return found if isinstance(found, tuple) else (found,)

    @property
    def outer(self) -> int:
        """How many dims of a leaf count layers and experts."""
        return ("{layer}" in self.name) + ("{expert}" in self.name)

    def places(self, leaf: Any) -> Iterator[tuple[tuple[int, ...], str]]:
        """The places of the leaf's outer dims, and the name of the array published for each."""
        for place in itertools.product(*map(range, leaf.shape[: self.outer])):
            layer = self.layers[place[0]] if "{layer}" in self.name else None
            yield place, self.name.format(layer=layer, expert=place[-1] if place else None)

    def to_own(self, whole: np.ndarray, leaves: Sequence[Any], number: int) -> np.ndarray:
        """What of a published array is leaf `number`'s; raises a `ValueError` for a shape that does not fit."""
        parts = [self._published_shape(leaf.shape[self.outer :]) for leaf in leaves]
        wanted = list(parts[0])
        wanted[self.axis : self.axis + 1] = [sum(part[self.axis] for part in parts)] if wanted else []
        if whole.shape != tuple(wanted):
            raise ValueError(f"it has shape {whole.shape}, and the model's is {tuple(wanted)}")
        own = leaves[number].shape[self.outer :]
        if len(leaves) > 1:
            groups = self._groups(parts[0])
            start = sum(part[self.axis] for part in parts[:number]) // groups
            stop = start + parts[number][self.axis] // groups
            split = whole.reshape(*wanted[: self.axis], groups, -1, *wanted[self.axis + 1 :])
            whole = split[*(slice(None),) * (self.axis + 1), start:stop].reshape(parts[number])
        return einops.rearrange(whole, self.pattern, **self._sizes(own)) if self.pattern else whole

    def to_published(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The published array of what the leaves hold for one place."""
        back = " -> ".join(reversed(self.pattern.split(" -> ")))
        turned = [einops.rearrange(part, back, **self._sizes(part.shape)) if back else part for part in parts]
        if len(turned) == 1:
            return turned[0]
        groups, shape = self._groups(turned[0].shape), turned[0].shape
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        split = [part.reshape(*before, groups, -1, *after) for part in turned]
        return np.concatenate(split, axis=self.axis + 1).reshape(*before, -1, *after)

    def _groups(self, published: Sequence[int]) -> int:
        return published[self.axis] if self.interleaved else self.groups

    def _sizes(self, own: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.pattern.split(" -> ")[1].split(), own, strict=True))

    def _published_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        if not self.pattern:
            return tuple(own)
        sizes = self._sizes(own)
        dims = re.findall(r"\(([^)]*)\)|(\S+)", self.pattern.split(" -> ")[0])
        return tuple(math.prod(sizes.get(name, 1) for name in (merged or alone).split()) for merged, alone in dims)


@dataclasses.dataclass(frozen=True)
class Published:
    """How a family is published: its names there, and what turns configurations and weights into ours and back."""

    architecture: str
    model_type: str
    read: Callable[[Config], Any]  # a configuration to numbers
    write: Callable[[Any], dict[str, Any]]  # numbers to a configuration
    weights: Callable[[Any], list[Weight]]  # numbers to rules
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)  # of names of buffers, which say nothing
    ignored_prefixes: tuple[str, ...] = ()  # of names in parts that are not ours: predictors of further tokens
    prefix: str = ""  # which all names may have or lack
