"""Prefetch: a background thread computes batches a few steps ahead of training."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from .._shapes import Batch
from ._loader import Loader, Mixture


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
        rows: The start and stop of the rows that this host needs (`Loader.rows`).
        depth: The number of batches that are computed ahead.
        transform: A function that the thread applies to each batch, for example to send it to the devices.
        batch_of: A function from a step to the number of its batch in the loader; by default the step's number.
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

    `next` raises the exception that `make` raised for this step, and then the iterator is closed. `close` (or the end
    of a `with` block) waits for the thread to end.
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
        while len(self._waiting) < self._depth and (self._stop is None or self._next < self._stop):
            self._waiting.append(self._executor.submit(self._make, self._next))
            self._next += 1
