"""A trace of a few steps, by JAX's profiler."""

from pathlib import Path

import jax

from ._loop import Callback, Progress


class Profile(Callback):
    """Writes a trace of the steps `first` to `last` into a folder, for TensorBoard, XProf or Perfetto.

    Modules stand in it under their paths, see `nn.Module`, and collectives under their names, see
    `parallel.COLLECTIVES`. Tracing costs time: metrics of these steps
    are slower than the run's.
    """

    def __init__(self, first: int, last: int, folder: str | Path):
        """Steps count from 1; raises a `ValueError` for steps that are none or in the wrong order."""
        if not 1 <= first <= last:
            raise ValueError(f"Profile(first={first}, last={last}): steps count from 1, and the first comes first.")
        self._first, self._last, self._folder = first, last, Path(folder)
        self._is_tracing = False

    def begin(self, run: Progress) -> None:
        """Begin to trace, where the run's first step is among them."""
        self._start(run)

    def after_step(self, run: Progress) -> None:
        """Begin before the first step of the trace, and write it after its last or the run's."""
        if not self._is_tracing:
            self._start(run)
        elif run.step >= min(self._last, run.steps):
            self.end(run)

    def end(self, run: Progress) -> None:
        """Write the trace of a run that ends among its steps, by an error too: no trace outlives its run."""
        if not self._is_tracing:
            return
        self._is_tracing = False
        try:
            jax.block_until_ready(run.metrics)
        finally:
            jax.profiler.stop_trace()

    def _start(self, run: Progress) -> None:
        if self._first <= run.step + 1 <= self._last and run.step < run.steps:
            jax.block_until_ready(run.metrics)
            jax.profiler.start_trace(str(self._folder))
            self._is_tracing = True
