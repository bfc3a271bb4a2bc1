"""Spikes of the loss: the run returns to its last checkpoint and continues without the batches since."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from .._files import JsonObject
from ._loop import Callback, DivergedError, Progress


Result = TypeVar("Result")


class LossSpikeError(DivergedError):
    """An error for a loss far above the losses before; `step` is the number of the step with this loss."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class LossSpikes(Callback):
    """A callback that raises a `LossSpikeError` if the loss jumps; `retry` then continues the run without the batches.

    A spike is a loss above `factor` times the median of the `window` losses before it. As with PaLM (arXiv 2204.02311,
    section 5.1), the run returns to its last checkpoint and skips the batches of the steps since, the spike's own batch
    included. It does so at most `most` times, and then ends with the error.

    The skipped batches follow from the checkpoints alone, which save `record()`: a run that is killed and started again
    skips the same batches and computes the same numbers. Pass this callback before `Checkpoints`, so that no spike is
    saved. It waits for each step.
    """

    def __init__(self, factor: float | None, *, window: int = 50, most: int = 3):
        """`factor=None` looks for no spikes, waits for no step, and only skips the batches that a checkpoint names.

        Raises a `ValueError` for a factor of 1 or less, and for a window or a `most` below 1.
        """
        if factor is not None and not factor > 1:
            raise ValueError(f"LossSpikes(factor={factor}): a spike is above the losses before it; give more than 1.")
        if window < 1 or most < 1:
            raise ValueError(f"LossSpikes(window={window}, most={most}): give at least 1 for each of the two.")
        self._factor, self._most = factor, most
        self._losses: deque[float] = deque(maxlen=window)
        self._skipped: list[tuple[int, int]] = []
        self._spike_step: int | None = None

    @property
    def skipped_batches(self) -> tuple[tuple[int, int], ...]:
        """The ranges of batches that were skipped: the numbers of the first and the last of each range, from 0."""
        return tuple(self._skipped)

    def batch_number(self, step: int) -> int:
        """Return the number of the batch for a step; steps are counted from 0, as a loader counts."""
        for first, last in self._skipped:
            step += (last - first + 1) * (step >= first)
        return step

    def record(self) -> JsonObject:
        """Return what a checkpoint saves beside the state, as JSON."""
        return {"left_out": [list(first_and_last) for first_and_last in self._skipped], "losses": list(self._losses)}

    def start(self, step: int, record: JsonObject | None) -> None:
        """Start after `step` steps, with the `record` of the checkpoint; None if the checkpoint has none."""
        record = record or {"left_out": [], "losses": []}
        if self._spike_step is None:
            self._skipped = [(first, last) for first, last in record["left_out"]]
        else:
            self._skipped.append((self.batch_number(step), self.batch_number(self._spike_step - 1)))
            self._spike_step = None
        self._losses = deque(record["losses"], self._losses.maxlen)

    def retry(self, run: Callable[[], Result], note: Callable[[str], object] = lambda text: None) -> Result:
        """Call `run()` until no spike ends it, and return its result; `note` is called with a line about each spike.

        `run` restores the last checkpoint, calls `start`, and trains on batches numbered by `batch_number`.
        """
        while True:
            try:
                return run()
            except LossSpikeError as error:
                if len(self._skipped) >= self._most:
                    raise
                self._spike_step = error.step
                note(f"{error} The run goes back to its last checkpoint and leaves out the batches since.")

    def after_step(self, run: Progress) -> None:
        """Compare the loss with those before; a loss that is not finite has changed nothing and is not compared."""
        if self._factor is None:
            return
        loss = float(run.metrics["loss"])
        if not loss < float("inf"):
            return
        if len(self._losses) == self._losses.maxlen:
            median = statistics.median(self._losses)
            if loss > self._factor * median:
                raise LossSpikeError(
                    f"step {run.step}: the loss is {loss:.4g}, above {self._factor:g} times {median:.4g}, the median "
                    f"of the {len(self._losses)} steps before; the run has gone back {len(self._skipped)} of at most "
                    f"{self._most} times.",
                    run.step,
                )
        self._losses.append(loss)
