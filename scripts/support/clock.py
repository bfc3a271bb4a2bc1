"""Measures how fast a run trains."""

import functools
import resource
import sys
import time

import jax
from recipes import Recipe

from eqformer import parallel, planning, training


class Clock(training.Callback):
    """A stopwatch that counts the seconds spent in steps, without what is done between them."""

    def __init__(self, recipe: Recipe, plan: parallel.Plan, flops_per_token: float):
        self._tokens_per_step, self._flops_per_token = recipe.batch * recipe.seq, flops_per_token
        # The peak of all devices together; simulated devices share their CPU's.
        one = jax.local_devices()[0]
        number = jax.process_count() if one.platform == "cpu" else plan.mesh.size
        self._peak = number * _peak_of_one(recipe.precision.compute)
        self._steps, self._seconds = 0, 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Begin a step."""
        self._steps += 1
        self._since = time.perf_counter()

    def stop(self) -> None:
        """End the step, if it has not ended."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def begin(self, run: training.Progress) -> None:
        """Begin the first step."""
        self.start()

    def after_step(self, run: training.Progress) -> None:
        """End the step."""
        self.stop()

    def rate(self, run: training.Progress) -> dict[str, float]:
        """The throughput of the steps since the last call, with tokens so far and memory; it ends the step."""
        self.stop()
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, 0.0
        row = {"tokens": run.step * self._tokens_per_step, "step_seconds": seconds / steps, "peak_bytes": _peak_bytes()}
        tokens = steps * self._tokens_per_step
        return row | training.throughput(tokens, seconds, flops_per_token=self._flops_per_token, peak_flops=self._peak)


@functools.cache
def _peak_of_one(dtype: str) -> float:
    """The measured peak of a device, in FLOP/s; measured once a process."""
    return planning.matmul_peak(dtype, device=jax.local_devices()[0], seconds=0.25)


def _peak_bytes() -> int:
    """The most bytes that one of this process's devices has held so far; on a CPU those of the whole process."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    of_devices = max(one.get("peak_bytes_in_use", 0) for one in statistics)
    unit = 1 if sys.platform == "darwin" else 1024
    return of_devices or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
