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
    array, one after another along its dim `axis`, or taking turns there (`interleaved`).
    """

    name: str
    where: Callable[[Any], Any]
    pattern: str = ""
    layers: Sequence[int] = ()
    axis: int = 0
    interleaved: bool = False

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
        before, own = (slice(None),) * self.axis, leaves[number].shape[self.outer :]
        if self.interleaved:
            whole = whole[*before, slice(number, None, len(leaves))]
        elif len(leaves) > 1:
            start = sum(part[self.axis] for part in parts[:number])
            whole = whole[*before, slice(start, start + parts[number][self.axis])]
        return einops.rearrange(whole, self.pattern, **self._sizes(own)) if self.pattern else whole

    def to_published(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The published array of what the leaves hold for one place."""
        back = " -> ".join(reversed(self.pattern.split(" -> ")))
        turned = [einops.rearrange(part, back, **self._sizes(part.shape)) if back else part for part in parts]
        if not self.interleaved:
            return turned[0] if len(turned) == 1 else np.concatenate(turned, axis=self.axis)
        shape = list(turned[0].shape)
        shape[self.axis] *= len(turned)
        return np.stack(turned, axis=self.axis + 1).reshape(shape)

    def _sizes(self, own: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.pattern.split(" -> ")[1].split(), own, strict=True))

    def _published_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        if not self.pattern:
            return tuple(own)
        sizes = self._sizes(own)
        dims = re.findall(r"\(([^)]*)\)|(\S+)", self.pattern.split(" -> ")[0])
        return tuple(math.prod(sizes[name] for name in (merged or alone).split()) for merged, alone in dims)


@dataclasses.dataclass(frozen=True)
class Published:
    """How a family is published: its names there, and what turns configurations and weights into ours and back."""

    architecture: str
    model_type: str
    read: Callable[[Config], Any]  # a configuration to numbers
    write: Callable[[Any], dict[str, Any]]  # numbers to a configuration
    weights: Callable[[Any], list[Weight]]  # numbers to rules
    ignored: tuple[str, ...] = ()  # ends of names of arrays that say nothing: buffers, tied copies
    prefix: str = ""  # which all names may have or lack
