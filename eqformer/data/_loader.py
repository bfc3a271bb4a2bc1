"""The batch at a step, as a function of the seed and the step alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
from jaxtyping import Int

from .._shapes import Batch
from ._order import shuffled
from ._packing import as_examples, Documents, Windows
from ._store import TokenStore


class Loader:
    """Batches of `batch` rows of `seq` tokens, in an order that `seed` decides.

    A run is an endless sequence of examples: row `row` of the batch at `step` is example `step * batch + row`. An epoch
    is `rows_per_epoch` examples, which hold every row of the data once, each epoch in another order. A batch may span
    two epochs, so no row is dropped. `packing` is `"windows"` (`Windows`) or `"documents"` (`Documents`).

    **Raises:** `ValueError` if `batch` is not positive, the packing is unknown, or the packing refuses `seq`.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq: int,
        batch: int,
        seed: int,
        packing: Literal["windows", "documents"] = "windows",
    ):
        call = f"Loader(store, seq={seq}, batch={batch}, packing={packing!r})"
        if batch < 1:
            raise ValueError(f"{call}: a batch must have at least 1 row, but batch is {batch}; pass a positive number.")
        kinds = {"windows": Windows, "documents": Documents}
        if packing not in kinds:
            raise ValueError(f"{call}: packing must be one of {list(kinds)}, but is {packing!r}; pass one of them.")
        self.packing = kinds[packing](store, seq=seq)
        self.store = store
        self.seq = seq
        self.batch_size = batch
        self.seed = seed

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows that the data has, which is the number of examples in an epoch."""
        return self.packing.rows

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every row has been seen."""
        return -(-self.rows_per_epoch // self.batch_size)

    def batch(self, step: int) -> Batch:
        """The batch at a step, counted from 0 over the whole run."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop - 1` of the batch at a step, without making the others: the rows of one host."""
        return self.at(example_numbers("Loader", self.batch_size, step, start, stop))

    def at(self, examples: Int[np.ndarray, "batch"]) -> Batch:
        """The rows of these examples, by their numbers over the whole run."""
        rows = shuffled(examples, rows=self.rows_per_epoch, seed=self.seed)
        return replace(self.packing(rows), examples=as_examples(examples))

    def epoch(self, batches: int | None = None, *, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """One pass over the data in its own order, the same each time: for evaluation.

        It takes every row once or, if `batches` is too small for that, rows evenly spaced over the data. The last batch
        is padded with rows of weight 0, so that all have one shape; `examples` are the rows' numbers in the data.
        `start` and `stop` choose the rows of each batch that one host needs.
        """
        stop = self.batch_size if stop is None else stop
        if not 0 <= start < stop <= self.batch_size or (batches is not None and batches < 1):
            raise ValueError(
                f"Loader.epoch(batches={batches}, start={start}, stop={stop}): it must hold that "
                f"0 <= start < stop <= batch and batches >= 1, but batch is {self.batch_size}; "
                f"ask for rows of the batch, or batches=None for all."
            )
        count = self.steps_per_epoch if batches is None else min(batches, self.steps_per_epoch)
        return self._pass(min(self.rows_per_epoch, count * self.batch_size), count, start, stop)

    def _pass(self, total: int, count: int, start: int, stop: int) -> Iterator[Batch]:
        for number in range(count):
            places = number * self.batch_size + np.arange(start, stop, dtype=np.int64)
            made = self.packing(_spaced(np.minimum(places, total - 1), total, self.rows_per_epoch))
            weights = made.weights * (places < total).astype(np.float32)[:, None]
            yield replace(made, weights=weights)


def example_numbers(kind: str, batch: int, step: int, start: int, stop: int) -> Int[np.ndarray, "batch"]:
    """The examples that are rows `start` to `stop - 1` of the batch at a step; `ValueError` if there are none."""
    if step < 0 or not 0 <= start < stop <= batch:
        raise ValueError(
            f"{kind}.rows(step={step}, start={start}, stop={stop}): it must hold that 0 <= step and "
            f"0 <= start < stop <= batch, but batch is {batch}; ask for rows of the batch."
        )
    return step * batch + np.arange(start, stop, dtype=np.int64)


def _spaced(places: Int[np.ndarray, "batch"], total: int, rows: int) -> Int[np.ndarray, "batch"]:
    """Row numbers for places below `total`, evenly spaced over `rows`; the places themselves if `total` is `rows`."""
    return places * rows // total
