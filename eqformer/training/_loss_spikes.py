"""LossSpikes of the loss: back to the last checkpoint, and on without the batches since."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._loop import Callback, DivergedError, Progress


Result = TypeVar("Result")


class LossSpikeError(DivergedError):
    """A step's loss is far above those before it; `step` is its number."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class LossSpikes(Callback):
    """Ends a stretch of a run with a `LossSpikeError` where its loss jumps, and has it go on without those batches.

    A spike is a loss above `factor` times the median of the `window` losses before it. As with PaLM (arXiv 2204.02311,
    section 5.1), the run goes back to its last checkpoint and leaves out the batches of the steps since, the spike's
    own included. It does so `most` times at most, and then ends with the error.

    What is left out follows from checkpoints alone, which keep `record()`: a run that is killed and started again
    leaves out the same batches and has the same numbers. Pass it before `Checkpoints`, so that no spike is saved. It
    waits for each step.
    """

    def __init__(self, factor: float | None, *, window: int = 50, most: int = 3):
        """`factor=None` watches for none, waits for no step, and only leaves out what a checkpoint says.

        Raises a `ValueError` for a factor of 1 or less, and for a window or a `most` below 1.
        """
        if factor is not None and not factor > 1:
            raise ValueError(f"LossSpikes(factor={factor}): a spike is above the losses before it; give more than 1.")
        if window < 1 or most < 1:
            raise ValueError(f"LossSpikes(window={window}, most={most}): both count, so give at least 1.")
        self._factor, self._most = factor, most
        self._losses: deque[float] = deque(maxlen=window)
        self._left_out: list[tuple[int, int]] = []
        self._spike: int | None = None

    @property
    def skipped_batches(self) -> tuple[tuple[int, int], ...]:
        """The ranges of batches that were left out: the numbers of the first and the last of each, from 0."""
        return tuple(self._left_out)

    def batch_number(self, step: int) -> int:
        """The number of the batch that a step takes; steps are counted from 0, as a loader counts."""
        for first, last in self._left_out:
            step += (last - first + 1) * (step >= first)
        return step

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state, as JSON."""
        return {"left_out": [list(each) for each in self._left_out], "losses": list(self._losses)}

    def start(self, step: int, record: Mapping[str, Any] | None) -> None:
        """Begin a stretch of the run after `step` steps, with the `record` that the checkpoint has, if there is one."""
        record = record or {"left_out": [], "losses": []}
        if self._spike is None:
            self._left_out = [(first, last) for first, last in record["left_out"]]
        else:
            self._left_out.append((self.batch_number(step), self.batch_number(self._spike - 1)))
            self._spike = None
        self._losses = deque(record["losses"], self._losses.maxlen)

    def retry(self, stretch: Callable[[], Result], note: Callable[[str], Any] = lambda text: None) -> Result:
        """The result of `stretch()`, which is called again after each spike; `note` is given a line about it.

        `stretch` restores the last checkpoint, calls `start`, and trains on batches numbered by `batch_number`.
        """
        while True:
            try:
                return stretch()
            except LossSpikeError as error:
                if len(self._left_out) >= self._most:
                    raise
                self._spike = error.step
                note(f"{error} The run goes back to its last checkpoint and leaves out the batches since.")

    def after_step(self, run: Progress) -> None:
        """Compare the loss; one that is not finite has changed nothing, and is none of those that are compared."""
        if self._factor is None:
            return
        loss = float(run.metrics["loss"])
        if not loss < float("inf"):
            return
        if len(self._losses) == self._losses.maxlen:
            usual = statistics.median(self._losses)
            if loss > self._factor * usual:
                raise LossSpikeError(
                    f"step {run.step}: the loss is {loss:.4g}, above {self._factor:g} times {usual:.4g}, the median of "
                    f"the {len(self._losses)} steps before; the run has gone back {len(self._left_out)} of at most "
                    f"{self._most} times.",
                    run.step,
                )
        self._losses.append(loss)
