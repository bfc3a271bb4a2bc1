"""Batches of one text or several, in shuffled order; a batch depends only on the seed and the step.

A background thread computes batches ahead of use.
"""

import copy
import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from math import isqrt
from typing import Any, Generic, Literal, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Int, UInt

from .._files import JsonObject
from .._shapes import Batch
from ._completion_rows import LabelledPacking, PairPacking
from ._packing import as_examples, DocumentPacking, list_rows, WindowPacking
from ._stored_rows import ComputedRows, store_rows, StoredRows
from ._text_rows import LabelledTextPacking, TextGroupPacking
from ._token_store import TokenStore


# Shuffled order.

_ROUNDS = 8


def shuffle_indices(indices: Int[np.ndarray, "batch"], *, rows: int, seed: int) -> Int[np.ndarray, "batch"]:
    """Return the row at each index of an endless shuffled sequence over rows 0 to `rows - 1`.

    Indices 0 to `rows - 1` are the first epoch, a permutation of all rows; the next `rows` indices are the second
    epoch, in another order; and so on. The row at an index depends only on the index and the seed. The permutation is a
    Feistel network over pairs (row // b, row % b) with cycle walking: the network is applied again until the result is
    below `rows` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The order is computed and not
    stored, so it takes no memory, and any index takes the same time.
    """
    if rows < 1 or np.any(indices < 0):
        raise ValueError(
            f"shuffle_indices(indices, rows={rows}, seed={seed}): indices count from 0 and rows from 1, but the "
            f"smallest index is {indices.min(initial=0)}; pass a step that is not negative and data that is not empty."
        )
    epochs, values = np.divmod(indices.astype(np.uint64), np.uint64(rows))
    start = np.frombuffer(hashlib.blake2b(str(int(seed)).encode(), digest_size=8).digest(), np.uint64)
    keys = _mix_bits(_mix_bits(start ^ epochs) + np.arange(_ROUNDS, dtype=np.uint64)[:, None])
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _permute_feistel(values[walking], keys[:, walking], rows)
        walking = walking[values[walking] >= rows]
    return values.astype(np.int64)


def _permute_feistel(
    values: UInt[np.ndarray, "batch"], keys: UInt[np.ndarray, "_ batch"], rows: int
) -> UInt[np.ndarray, "batch"]:
    """Permute 0 to a * b - 1, where a and b are about the square root of `rows` and a * b is at least `rows`."""
    a = isqrt(rows - 1) + 1
    a, b = np.uint64(a), np.uint64(-(-rows // a))
    high, low = np.divmod(values, b)
    for even, odd in zip(keys[::2], keys[1::2]):
        high = (high + _mix_bits(low ^ even) % a) % a
        low = (low + _mix_bits(high ^ odd) % b) % b
    return high * b + low


def _mix_bits(values: UInt[np.ndarray, "*shape"]) -> UInt[np.ndarray, "*shape"]:
    """Apply the finalizer of SplitMix64, a hash in which every bit of the result depends on every bit of the value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Batches of one text.

Packing = Literal["windows", "documents", "pairs", "labelled", "groups", "classes"]


class Loader:
    """Batches of `batch` rows of `seq` tokens, in an order that `seed` decides.

    A run is an endless sequence of examples: row `row` of the batch at `step` is example `step * batch + row`. An epoch
    is `rows_per_epoch` examples, which contain every row of the data once; each epoch has a different order. A batch
    may span two epochs, so no row is dropped. `packing` is `"windows"` (`WindowPacking`), `"documents"`
    (`DocumentPacking`), `"pairs"` (`PairPacking`), `"labelled"` (`LabelledPacking`), `"groups"` (`TextGroupPacking`),
    or `"classes"` (`LabelledTextPacking`). Shuffling never separates the two rows of a pair, or the rows of a group.

    **Raises:** `ValueError` if `batch` is not positive or splits a pair or group, the packing is unknown, or the
    packing refuses `seq`.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq: int,
        batch: int,
        seed: int,
        packing: Packing = "windows",
    ):
        call = f"Loader(store, seq={seq}, batch={batch}, packing={packing!r})"
        if batch < 1:
            raise ValueError(f"{call}: a batch must have at least 1 row, but batch is {batch}; pass a positive number.")
        packings = {
            "windows": WindowPacking,
            "documents": DocumentPacking,
            "pairs": PairPacking,
            "labelled": LabelledPacking,
            "groups": TextGroupPacking,
            "classes": LabelledTextPacking,
        }
        if packing not in packings:
            raise ValueError(f"{call}: packing must be one of {list(packings)}, but is {packing!r}; pass one of them.")
        self.packing = packings[packing](store, seq=seq)
        if batch % self.packing.group:
            rows = self.packing.group
            rule = "pair is two rows, so a batch must have an even number" if rows == 2 else f"group is {rows} rows"
            raise ValueError(f"{call}: a {rule}; pass another batch, a multiple of {rows}.")
        self.store = store
        self.seq = seq
        self.batch_size = batch
        self.seed = seed
        self.stored: StoredRows | None = None

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows of the data, which is the number of examples in an epoch."""
        return self.packing.rows * self.packing.group

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps that visit every row."""
        return -(-self.rows_per_epoch // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Return the batch at a step, counted from 0 over the whole run."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return rows `start` to `stop - 1` of the batch at a step; no other row is computed."""
        return self.at(example_numbers("Loader", self.batch_size, step, start, stop))

    def at(self, examples: Int[np.ndarray, "batch"]) -> Batch:
        """Return the rows of the examples with these indices in the whole run; pairs and groups must be complete."""
        groups = _number_groups(examples, self.packing.group)
        rows = shuffle_indices(groups, rows=self.packing.rows, seed=self.seed)
        return replace(self.read(rows), examples=as_examples(examples))

    def read(self, rows: Int[np.ndarray, "rows"]) -> Batch:
        """Return the rows (or whole pairs or groups) with these indices, with the stored arrays of each row."""
        batch = self.packing(rows)
        return batch if self.stored is None else self.stored.add_to(batch, rows)

    @property
    def settings(self) -> JsonObject:
        """The token folder, the packing and the row length, as JSON; stored arrays must have the same settings."""
        return {"tokens": self.store.path.name, "packing": type(self.packing).__name__, "seq": self.seq}

    def with_row_arrays(
        self, arrays: ComputedRows, *, progress: Callable[[int, int], object] | None = None
    ) -> "Loader":
        """Compute arrays once for all rows, and return a loader whose batches have these arrays too.

        The arrays are stored in a folder beside the tokens. The folder's name depends on the tokens, the rows and
        `arrays.settings`. If the folder exists, nothing is computed; if an earlier process ended before all rows were
        done, only the missing rows are computed. `progress` is called with the number of finished rows (or pairs) and
        the total number.
        """
        group, (start, stop) = self.packing.group, arrays.rows

        def compute(numbers: Int[np.ndarray, "rows"]) -> Mapping[str, np.ndarray]:
            results = arrays(self.packing(numbers[start // group : stop // group]))
            return {name: x.reshape(len(numbers), group, *x.shape[1:]) for name, x in results.items()}

        settings, batch = {**arrays.settings, **self.settings}, self.batch_size // group
        stored = store_rows(
            self.store.path,
            self.packing.rows,
            compute,
            settings,
            batch=batch,
            on_writer=arrays.on_writer,
            progress=progress,
        )
        return self.with_stored(stored)

    def with_stored(self, stored: StoredRows) -> "Loader":
        """Return a loader whose batches also have the stored arrays of their rows.

        Raises a `ValueError` for arrays of other tokens or of other rows.
        """
        differing = {name: value for name, value in self.settings.items() if stored.settings.get(name) != value}
        if differing:
            saved = {name: stored.settings.get(name) for name in differing}
            raise ValueError(
                f"Loader.with_stored({stored.path.name}): the arrays must be of the loader's rows, but were computed "
                f"for {saved}, and the loader has {differing}; compute the arrays for this loader."
            )
        loader = copy.copy(self)
        loader.stored = stored
        return loader

    def epoch(self, batches: int | None = None, *, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Iterate over the data once in its stored order, for evaluation.

        The batches contain every row once. If `batches` is too small for all rows, they contain rows that are evenly
        spaced over the data. The last batch is padded with rows of weight 0, so that all batches have one shape.
        `examples` are the rows' indices in the data. `start` and `stop` choose the rows of each batch that one host
        needs.
        """
        stop = self.batch_size if stop is None else stop
        if not 0 <= start < stop <= self.batch_size or (batches is not None and batches < 1):
            raise ValueError(
                f"Loader.epoch(batches={batches}, start={start}, stop={stop}): 0 <= start < stop <= batch and "
                f"batches >= 1 must hold, but batch is {self.batch_size}; ask for rows of the batch, or batches=None "
                f"for all."
            )
        count = self.steps_per_epoch if batches is None else min(batches, self.steps_per_epoch)
        return self._iterate_epoch(min(self.rows_per_epoch, count * self.batch_size), count, start, stop)

    def _iterate_epoch(self, total: int, count: int, start: int, stop: int) -> Iterator[Batch]:
        for number in range(count):
            numbers = number * self.batch_size + np.arange(start, stop, dtype=np.int64)
            groups, total_groups = _number_groups(numbers, self.packing.group), total // self.packing.group
            rows = _space_evenly(np.minimum(groups, total_groups - 1), total_groups, self.packing.rows)
            batch = self.read(rows)
            weights = batch.weights * (numbers < total).astype(np.float32)[:, None]
            yield replace(batch, weights=weights)


def _number_groups(rows: Int[np.ndarray, "batch"], group: int) -> Int[np.ndarray, "_"]:
    """Return the indices of the groups (of `group` rows each) to which these rows belong."""
    groups = rows[::group] // group
    if not np.array_equal(list_rows(groups, group), rows):
        raise ValueError(
            f"Loader(packing='pairs' or 'groups'): a pair or group of {group} rows is never split, but rows {rows[0]} "
            f"to {rows[-1]} would split a group; ask for a first row and a number of rows that are multiples of "
            f"{group}."
        )
    return groups


def example_numbers(kind: str, batch: int, step: int, start: int, stop: int) -> Int[np.ndarray, "batch"]:
    """Return the indices, among all examples of the run, of rows `start` to `stop - 1` of the batch at a step.

    Raises a `ValueError` for rows that the batch does not have.
    """
    if step < 0 or not 0 <= start < stop <= batch:
        raise ValueError(
            f"{kind}.rows(step={step}, start={start}, stop={stop}): 0 <= step and 0 <= start < stop <= batch must "
            f"hold, but batch is {batch}; ask for rows of the batch."
        )
    return step * batch + np.arange(start, stop, dtype=np.int64)


def _space_evenly(numbers: Int[np.ndarray, "batch"], total: int, rows: int) -> Int[np.ndarray, "batch"]:
    """Map the numbers 0 to `total - 1` to rows that are evenly spaced over 0 to `rows - 1`."""
    return numbers * rows // total


# Batches of several texts.

_BLOCK = 1024  # examples


class Mixture:
    """Batches whose rows come from several loaders, in proportion to the loaders' weights.

    The n-th example that the mixture takes from a loader is the n-th example of that loader's run, so each text has its
    own epochs and order, and no row is left out. The loader of an example depends only on the example's index and the
    seed, so the batch of any step can be computed directly, and each host can compute its own rows, as with a `Loader`.
    Each block of 1,024 examples contains examples of all loaders in proportion to the weights, in a random order.
    Counts are rounded so that, over any number of blocks, a loader's count differs from its exact share by at most half
    the number of loaders. Pairs and groups are never split: here, an example is a whole pair or group.

    Args:
        loaders: The texts by name, as loaders with the same `seq`, `batch` and packing.
        weights: The same names with numbers above 0; only their ratios matter.
        seed: The seed of the choice of a text for each example.

    **Raises:** `ValueError` if names or shapes differ or a weight is not a positive number.
    """

    def __init__(self, loaders: Mapping[str, Loader], weights: Mapping[str, float | int], *, seed: int):
        call = f"Mixture(loaders of {', '.join(loaders) or 'nothing'}, weights={dict(weights)})"
        if not loaders or {*loaders} != {*weights}:
            raise ValueError(
                f"{call}: each loader must have a weight and each weight a loader; give both the same names."
            )
        if bad := [name for name, weight in weights.items() if not (math.isfinite(weight) and weight > 0)]:
            raise ValueError(f"{call}: weights must be above 0 and finite, but {bad[0]} has {weights[bad[0]]}.")
        kinds = {
            name: (loader.seq, loader.batch_size, type(loader.packing).__name__) for name, loader in loaders.items()
        }
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"{call}: rows of one batch must have one shape, but (seq, batch, packing) are {kinds}; make all "
                f"loaders with the same seq, batch and packing."
            )
        self.loaders = dict(loaders)
        self.seq, self.batch_size, _ = next(iter(kinds.values()))
        self.group = next(iter(loaders.values())).packing.group
        self.seed = seed
        # `str` makes the weight 0.7 the fraction 7/10.
        exact = [Fraction(str(float(weights[name]))) for name in loaders]
        self.weights: dict[str, float] = {name: float(weight / sum(exact)) for name, weight in zip(loaders, exact)}
        # Each loader's share of the examples that are left after all previous loaders have taken their shares.
        self._shares = [weight / sum(exact[number:]) for number, weight in enumerate(exact)]
        documents = [loader.packing.documents for loader in loaders.values()]
        self._documents = None if None in documents else max(count for count in documents if count is not None)
        self._order_seed = int.from_bytes(
            hashlib.blake2b(f"mixture {int(seed)}".encode(), digest_size=8).digest(), "big"
        )
        self._cached_block = functools.lru_cache(maxsize=4)(self._assign_block)

    def with_loaders(self, loaders: Mapping[str, Loader]) -> "Mixture":
        """Return the mixture with other loaders of the same rows, for example the results of `Loader.with_stored`."""
        mixture = copy.copy(self)
        mixture.loaders = dict(loaders)
        return mixture

    def batch(self, step: int) -> Batch:
        """Return the batch at a step, counted from 0 over the whole run."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return rows `start` to `stop - 1` of the batch at a step; no other row is computed."""
        return self.at(example_numbers("Mixture", self.batch_size, step, start, stop))

    def at(self, examples: Int[np.ndarray, "batch"]) -> Batch:
        """Return the rows of the examples with these indices in the whole run."""
        owner, number = self.origin(_number_groups(examples, self.group))
        owner, number = np.repeat(owner, self.group), list_rows(number, self.group)
        masks = [(owner == index, loader) for index, loader in enumerate(self.loaders.values())]
        parts = [(mask, loader.at(number[mask])) for mask, loader in masks if mask.any()]
        return _join_batches(parts, examples, self._documents)

    def origin(self, examples: Int[np.ndarray, "batch"]) -> tuple[Int[np.ndarray, "batch"], Int[np.ndarray, "batch"]]:
        """Return the index of each example's loader, and the example's index in that loader's run.

        For loaders of pairs or groups, each pair or group counts as one example.
        """
        owner, number = np.empty((2, len(examples)), np.int64)
        blocks, offsets = np.divmod(examples, _BLOCK)
        for block in np.unique(blocks):
            mask = blocks == block
            block_owner, block_number = self._cached_block(int(block))
            owner[mask], number[mask] = block_owner[offsets[mask]], block_number[offsets[mask]]
        return owner, number

    def epochs(self, steps: int) -> dict[str, float]:
        """Return the approximate number of epochs of each text in a run of this many steps."""
        counts = self._count_examples(steps * self.batch_size // self.group)
        return {name: count / loader.packing.rows for count, (name, loader) in zip(counts, self.loaders.items())}

    def _count_examples(self, examples: int) -> list[int]:
        """Return the number of examples of each loader among the first `examples` of the mixture.

        The counts are exact at the ends of blocks. They add up to `examples`, because each loader's count is rounded
        after the previous counts are subtracted. Python's integers and fractions cannot overflow.
        """
        counts = []
        for share in self._shares:
            counts.append(math.floor((examples - sum(counts)) * share + Fraction(1, 2)))
        return counts

    def _assign_block(self, block: int) -> tuple[Int[np.ndarray, "block"], Int[np.ndarray, "block"]]:
        """Return `origin` of the examples of one block."""
        starts, stops = self._count_examples(block * _BLOCK), self._count_examples((block + 1) * _BLOCK)
        sizes = [stop - start for start, stop in zip(starts, stops)]
        indices = block * _BLOCK + np.arange(_BLOCK, dtype=np.int64)
        owner = np.repeat(np.arange(len(sizes)), sizes)[shuffle_indices(indices, rows=_BLOCK, seed=self._order_seed)]
        number = np.empty(_BLOCK, np.int64)
        for index, (start, size) in enumerate(zip(starts, sizes)):
            number[owner == index] = start + np.arange(size)
        return owner, number


def _join_batches(
    parts: Sequence[tuple[Bool[np.ndarray, "batch"], Batch]],
    examples: Int[np.ndarray, "batch"],
    documents: int | None,
) -> Batch:
    """Join batches into one batch; the mask of each batch selects the rows that it fills.

    `documents` is the maximum number of documents in a row of the mixture.
    """

    def join(*arrays: np.ndarray) -> np.ndarray:
        joined = np.empty((len(examples), *arrays[0].shape[1:]), arrays[0].dtype)
        for (mask, _), array in zip(parts, arrays, strict=True):
            joined[mask] = array
        return joined

    batches = [replace(batch, documents=documents) for _, batch in parts]
    return replace(jax.tree.map(join, *batches), examples=as_examples(examples))


# Batches are computed ahead of their use.

Result = TypeVar("Result")


def prefetch(
    loader: Loader | Mixture,
    start_step: int = 0,
    stop_step: int | None = None,
    *,
    rows: tuple[int, int] | None = None,
    depth: int = 2,
    transform: Callable[[Batch], Any] | None = None,
    batch_of: Callable[[int], int] = lambda step: step,
) -> "Prefetch[Any]":
    """Iterate over the batches of a loader, step by step, computed ahead of use in a background thread.

    Use the iterator in a `with` statement, or close it.

    Args:
        loader: The loader or mixture of the batches.
        start_step: The first step.
        stop_step: The step after the last one; None: the iterator is endless.
        rows: The first row of each batch that this host needs, and the row after the last (`Loader.rows`).
        depth: The number of batches that are computed ahead.
        transform: A function that the thread applies to each batch, for example to send it to the devices.
        batch_of: A function from a step to the index of its batch in the loader; by default the step itself.
    """
    if start_step < 0 or (stop_step is not None and stop_step < start_step):
        raise ValueError(
            f"prefetch(loader, start_step={start_step}, stop_step={stop_step}): 0 <= start_step <= stop_step must "
            f"hold; pass steps in order."
        )
    start, stop = (0, loader.batch_size) if rows is None else rows

    def make(step: int) -> Any:
        batch = loader.rows(batch_of(step), start, stop)
        return batch if transform is None else transform(batch)

    return Prefetch(make, start_step, stop_step, depth=depth)


class Prefetch(Generic[Result]):
    """Iterator over `make(start), make(start + 1), ...`, computed by one thread that keeps `depth` results ready.

    If `make` raised an exception for a step, `next` raises it and closes the iterator. `close` (or the end of a `with`
    block) waits for the thread to end.
    """

    def __init__(self, make: Callable[[int], Result], start: int = 0, stop: int | None = None, *, depth: int = 2):
        if depth < 1:
            raise ValueError(
                f"Prefetch(depth={depth}): at least 1 result must be computed ahead; pass a depth of 1 or more."
            )
        self._make = make
        self._next = start
        self._stop = stop
        self._depth = depth
        self._waiting: deque[Future[Result]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="eqformer-prefetch")
        self._fill()

    def __iter__(self) -> "Prefetch[Result]":
        return self

    def __next__(self) -> Result:
        if not self._waiting:
            self.close()
            raise StopIteration
        future = self._waiting.popleft()
        self._fill()
        try:
            return future.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the thread: it finishes and drops the result in progress, and begins no other."""
        self._stop = self._next
        self._waiting.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch[Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        """Start to compute results until `depth` of them are ready or being computed."""
        while len(self._waiting) < self._depth and (self._stop is None or self._next < self._stop):
            self._waiting.append(self._executor.submit(self._make, self._next))
            self._next += 1
