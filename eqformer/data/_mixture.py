"""Several texts in one run, by weight."""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
from jaxtyping import Bool, Int

from .._shapes import Batch
from ._loader import example_numbers, Loader
from ._order import shuffled
from ._packing import as_examples


_BLOCK = 1024  # examples


class Mixture:
    """Batches whose rows are taken from several loaders, from each with a probability that is its weight.

    The n-th example of the mixture that is taken from a loader is the n-th example of that loader's own run, so each
    text has its own epochs and its own order, in which nothing is left out. Which loader an example is taken from
    depends on its number and the seed alone: each 1,024 examples have as many of every loader as its weight says, in a
    random order, rounded such that over any number of them a loader has its share to within half as many examples as
    there are loaders. So the batch at any step can be made at once, and the hosts' rows of it make up the whole, as
    with a `Loader`.

    Args:
        loaders: The texts by name, as loaders with the same `seq`, `batch` and packing.
        weights: The same names with numbers above 0; only their ratios matter.
        seed: Decides which example is of which text.

    **Raises:** `ValueError` where names or shapes differ or a weight is not a positive number.
    """

    def __init__(self, loaders: Mapping[str, Loader], weights: Mapping[str, float | int], *, seed: int):
        call = f"Mixture(loaders of {', '.join(loaders) or 'nothing'}, weights={dict(weights)})"
        if not loaders or {*loaders} != {*weights}:
            raise ValueError(
                f"{call}: each loader must have a weight and each weight a loader; give both the same names."
            )
        if bad := [name for name, weight in weights.items() if not (math.isfinite(weight) and weight > 0)]:
            raise ValueError(f"{call}: weights must be above 0 and finite, but that of {bad[0]} is {weights[bad[0]]}.")
        kinds = {name: (one.seq, one.batch_size, type(one.packing).__name__) for name, one in loaders.items()}
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"{call}: rows of one batch must have one shape, but (seq, batch, packing) are {kinds}; make all "
                f"loaders with the same."
            )
        self.loaders = dict(loaders)
        self.seq, self.batch_size, _ = next(iter(kinds.values()))
        self.seed = seed
        exact = [Fraction(str(float(weights[name]))) for name in loaders]  # 0.7 is 7/10 here
        self.weights: dict[str, float] = {name: float(one / sum(exact)) for name, one in zip(loaders, exact)}
        self._shares = [one / sum(exact[number:]) for number, one in enumerate(exact)]  # of what those before have left
        most = [one.packing.documents for one in loaders.values()]
        self._documents = None if None in most else max(number for number in most if number is not None)
        self._order = int.from_bytes(hashlib.blake2b(f"mixture {int(seed)}".encode(), digest_size=8).digest(), "big")
        self._block_at = functools.lru_cache(maxsize=4)(self._block)

    def batch(self, step: int) -> Batch:
        """The batch at a step, counted from 0 over the whole run."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop - 1` of the batch at a step, without making the others: the rows of one host."""
        return self.at(example_numbers("Mixture", self.batch_size, step, start, stop))

    def at(self, examples: Int[np.ndarray, "batch"]) -> Batch:
        """The rows of these examples, by their numbers over the whole run."""
        part, number = self.origin(examples)
        rows = [(part == index, loader) for index, loader in enumerate(self.loaders.values())]
        return _joined([(its, loader.at(number[its])) for its, loader in rows if its.any()], examples, self._documents)

    def origin(self, examples: Int[np.ndarray, "batch"]) -> tuple[Int[np.ndarray, "batch"], Int[np.ndarray, "batch"]]:
        """The index of each example's loader, and the example's number in that loader's own run."""
        part, number = np.empty((2, len(examples)), np.int64)
        blocks, places = np.divmod(examples, _BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            parts, numbers = self._block_at(int(block))
            part[here], number[here] = parts[places[here]], numbers[places[here]]
        return part, number

    def epochs(self, steps: int) -> dict[str, float]:
        """About how often a run of so many steps goes through each text."""
        counts = self._counts(steps * self.batch_size)
        return {name: count / one.rows_per_epoch for count, (name, one) in zip(counts, self.loaders.items())}

    def _counts(self, examples: int) -> list[int]:
        """How many of the first examples are of each loader, where these are whole blocks: integers of any size."""
        counts = []
        for share in self._shares:
            counts.append(math.floor((examples - sum(counts)) * share + Fraction(1, 2)))
        return counts

    def _block(self, block: int) -> tuple[Int[np.ndarray, "block"], Int[np.ndarray, "block"]]:
        """`origin` of the examples of one block."""
        first, after = self._counts(block * _BLOCK), self._counts((block + 1) * _BLOCK)
        sizes = [stop - start for start, stop in zip(first, after)]
        places = block * _BLOCK + np.arange(_BLOCK, dtype=np.int64)
        part = np.repeat(np.arange(len(sizes)), sizes)[shuffled(places, rows=_BLOCK, seed=self._order)]
        number = np.empty(_BLOCK, np.int64)
        for index, (start, size) in enumerate(zip(first, sizes)):
            number[part == index] = start + np.arange(size)
        return part, number


def _joined(
    parts: Sequence[tuple[Bool[np.ndarray, "batch"], Batch]],
    examples: Int[np.ndarray, "batch"],
    documents: int | None,
) -> Batch:
    """One batch of several, each with the rows that it fills; `documents` are the most of any row of the mixture."""
    like = parts[0][1]
    arrays = [field.name for field in fields(Batch) if isinstance(getattr(like, field.name), np.ndarray)]
    joined = {}
    for name in arrays:
        joined[name] = np.empty((len(examples), *getattr(like, name).shape[1:]), getattr(like, name).dtype)
        for rows, batch in parts:
            joined[name][rows] = getattr(batch, name)
    return replace(like, **joined | {"examples": as_examples(examples), "documents": documents})
