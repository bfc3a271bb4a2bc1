"""The speed of a run: a clock for its steps, and a trace by JAX's profiler."""

import functools
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from ._loop import Callback, Every, Progress
from ._metrics import throughput


class Clock:
    """A stopwatch for steps that excludes the time of some callbacks.

    `Log(10, write, clock.rate)` before `*clock.excluding([...])` among a loop's callbacks logs the speed without the
    time of validations and checkpoints.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float | None = None,
        peak_flops: Callable[[], float] | None = None,
    ):
        """`flops_per_token` is that of `throughput`; the first `rate` calls `peak_flops()` for its `peak_flops`."""
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._find_peak = peak_flops
        self._steps, self._seconds = 0, 0.0
        self._start_time: float | None = None

    def excluding(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return these callbacks between two that stop the clock and start it again."""
        return [Every(1, lambda run: self._stop()), *callbacks, _StartClock(self)]

    def rate(self, run: Progress) -> dict[str, int | float]:
        """Return the columns that `Log` writes beside the metrics, for the steps since the last call; stop the clock.

        The columns are `tokens` so far, `step_seconds`, `peak_bytes` (the most memory that a device of this process has
        used or, on a CPU, the process) and those of `throughput`.
        """
        self._stop()
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, 0.0
        row = {"tokens": run.step * self._tokens_per_step, "step_seconds": seconds / steps, "peak_bytes": _peak_bytes()}
        tokens = steps * self._tokens_per_step
        return row | throughput(tokens, seconds, flops_per_token=self._flops_per_token, peak_flops=self._peak)

    @functools.cached_property
    def _peak(self) -> float | None:
        return None if self._find_peak is None else self._find_peak()

    def _start(self) -> None:
        self._steps += 1
        self._start_time = time.perf_counter()

    def _stop(self) -> None:
        if self._start_time is not None:
            self._seconds += time.perf_counter() - self._start_time
            self._start_time = None


class _StartClock(Callback):
    """A callback that starts the clock before the first step, and again after each step."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def begin(self, run: Progress) -> None:
        self._clock._start()

    def after_step(self, run: Progress) -> None:
        self._clock._start()


def _peak_bytes() -> int:
    """Return the most bytes that one of this process's devices has used so far; on a CPU, those of the process."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    device_bytes = max(stats.get("peak_bytes_in_use", 0) for stats in statistics)
    unit = 1 if sys.platform == "darwin" else 1024
    return device_bytes or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Profile(Callback):
    """A callback that writes a trace of the steps `first` to `last` into a folder, for TensorBoard, XProf or Perfetto.

    The trace shows modules by their paths, see `nn.Module`, and collectives by their names, see `parallel.COLLECTIVES`.
    Tracing costs time: the metrics of these steps report a slower run.
    """

    def __init__(self, first: int, last: int, folder: str | Path):
        """Steps count from 1; raises a `ValueError` for numbers below 1, or a `first` after `last`."""
        if not 1 <= first <= last:
            raise ValueError(f"Profile(first={first}, last={last}): steps count from 1, and the first comes first.")
        self._first, self._last, self._folder = first, last, Path(folder)
        self._is_tracing = False

    def begin(self, run: Progress) -> None:
        """Start the trace if it includes the run's first step."""
        self._start(run)

    def after_step(self, run: Progress) -> None:
        """Start the trace before its first step, and write it after its last step or the run's last."""
        if not self._is_tracing:
            self._start(run)
        elif run.step >= min(self._last, run.steps):
            self.end(run)

    def end(self, run: Progress) -> None:
        """Write the trace if the run ends, also by an error, before the trace's last step."""
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
