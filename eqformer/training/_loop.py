"""The training loop, its callbacks, and the errors and rollbacks of runs that diverge.

After a loss spike, a run returns to its last checkpoint and skips the batches that followed the checkpoint.
"""

import contextlib
import dataclasses
import signal
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Key, PyTree

from .._annotation_checks import name_class
from .._files import JsonObject
from ..parallel import Votes
from ._planned_state import PlannedState
from ._train_state import TrainState
from .checkpoint._checkpointer import Checkpointer


class DivergedError(RuntimeError):
    """An error for a run whose loss or gradients are not finite, or whose loss jumps."""


def check_finite(metrics: Mapping[str, Array], limit: int = 10, *, step: int | None = None) -> None:
    """Raise a `DivergedError` if the last `limit` steps were all skipped; blocks until these metrics are computed.

    `step` is the number of the step that returned the metrics; the error then names the first skipped step.
    """
    in_a_row = int(metrics["skipped_in_a_row"])
    if in_a_row >= limit:
        steps = "" if step is None else f", steps {step - in_a_row + 1} to {step},"
        raise DivergedError(
            f"{in_a_row} steps in a row{steps} had a loss or a gradient norm that was not finite (limit {limit}; last: "
            f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}). The parameters have not "
            "changed since the last finite step; lower the learning rate, lengthen the warmup, look at the data of "
            "these steps, or have DebugNans (--debug-nans) name the module."
        )


@dataclasses.dataclass
class Progress:
    """The progress of a run, which callbacks read and may change."""

    state: TrainState
    """The state after `step` steps; a callback that donates the state must assign a new one."""
    step: int
    """The number of steps taken."""
    steps: int
    """The number of steps of the whole run."""
    metrics: dict[str, Array]
    """The metrics of the last step, on the devices: reading one waits for the step. Empty before the first step."""
    batch: PyTree = None
    """The batch of the last step; None before the first step."""
    is_stopping: bool = False
    """Whether the run ends after this step; callbacks set it."""

    def is_due(self, every: int) -> bool:
        """Return whether the number of this step is a multiple of `every`, or this step is the run's last."""
        return self.step % every == 0 or self.step == self.steps


class Callback:
    """The base class of callbacks, which the loop calls between steps; each method does nothing here."""

    def begin(self, run: Progress) -> None:
        """Run before the first step, once the step is compiled."""

    def after_step(self, run: Progress) -> None:
        """Run after each step has been dispatched."""

    def end(self, run: Progress) -> None:
        """Run at the end of a run, also if a callback or an error ends it. Callbacks end in reverse order."""


@runtime_checkable
class TrainStep(Protocol):
    """Interface of a step that `train` takes, such as a `Step`."""

    def compile(self, state: PyTree, batch: PyTree, key: PyTree = None) -> "TrainStep":
        """Return the step compiled for arguments like these."""
        ...

    def __call__(self, state: Any, batch: Any, key: Any = None) -> tuple[TrainState, dict[str, Array]]:
        """Take one step; `state` is donated."""
        ...


def train(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[PyTree] | Callable[[Progress], PyTree],
    key: Key[Array, ""] | None = None,
    *,
    steps: int,
    start: int = 0,
    callbacks: Sequence[Callback] = (),
) -> Progress:
    """Take the steps `start + 1` to `steps`, call the callbacks after each step, and return the final progress.

    The step is compiled once, for the first batch, unless it is already compiled. The loop does not wait for a step's
    results, so that the host prepares the next batch while the devices compute. Raises a `DivergedError` if many steps
    in a row have a loss or gradients that are not finite (see `check_finite`), and a `ValueError` if there are fewer
    batches than steps, or batches of different shapes.

    Args:
        step: The step, from `make_step`.
        state: The state after `start` steps, which is donated.
        batches: One batch per step, already in the memory where the step reads it (see `data.prefetch`). Or a function
            that makes each step's batch from the run's progress, after all callbacks of the previous step, such as
            `text.Rollouts`.
        key: The run's key, into which each step folds its number; None: no dropout, no router noise.
        steps: The number of the last step.
        start: The number of steps that the state has taken.
        callbacks: The callbacks, called in this order.
    """
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise ValueError(
                f"train(callbacks=...): callbacks[{index}] is {name_class(callback)}; pass a Callback, or wrap "
                "a function in Every(1, function), which calls it with the run's Progress."
            )
    run = Progress(state, start, steps, {})
    del state  # donated
    if start >= steps:
        return run
    # A function may read the state, and then waits for the step; an iterator prepares batches while devices compute.
    make_batch = batches if callable(batches) else None
    batch_iterator = iter(()) if callable(batches) else iter(batches)
    batch = make_batch(run) if make_batch else next(batch_iterator, None)
    if batch is None:
        raise ValueError(f"train(start={start}, steps={steps}): there is no batch; give one for each step.")
    shapes = _list_shapes(batch)
    step = step.compile(run.state, batch, key)
    with contextlib.ExitStack() as ends:
        for callback in callbacks:
            ends.callback(callback.end, run)
            callback.begin(run)
        while run.step < steps and not run.is_stopping:
            if batch is None:
                raise ValueError(f"train(steps={steps}): the batches ended after {run.step}; give one for each step.")
            if (new_shapes := _list_shapes(batch)) != shapes:
                new, expected = ([f"{dtype}{[*shape]}" for shape, dtype in pairs] for pairs in (new_shapes, shapes))
                raise ValueError(
                    f"train(steps={steps}): the batch of step {run.step + 1} has arrays of {new}, and the step was "
                    f"compiled for {expected}; give batches of one shape, filled up with rows whose weights are 0."
                )
            last_metrics, run.batch = run.metrics, batch
            run.state, run.metrics = step(run.state, batch, key)
            run.step += 1
            if last_metrics:  # the metrics of the step before, so that the host does not wait for this step
                check_finite(last_metrics, step=run.step - 1)
            batch = next(batch_iterator, None)
            for callback in callbacks:
                callback.after_step(run)
            if make_batch and run.step < steps and not run.is_stopping:
                batch = make_batch(run)
        check_finite(run.metrics, step=run.step)
    return run


class Every(Callback):
    """A callback that calls `function(run)` after each `every` steps, and after the last step."""

    def __init__(self, every: int, function: Callable[[Progress], object]):
        if every < 1:
            raise ValueError(f"{type(self).__name__}({every}, ...): the first number counts steps; give at least 1.")
        self.every, self.function = every, function

    def after_step(self, run: Progress) -> None:
        """Call the function if it is due."""
        if run.is_due(self.every):
            self.function(run)


class StopSignals(Callback):
    """A callback that ends the run after its current step once any of its processes gets SIGTERM or Ctrl-C.

    Signals are caught inside the callback's `with` block; a second signal ends the program as usual. Outside of the
    main thread, no signal is caught.

        with training.StopSignals(plan.mesh) as stop:
            training.train(step, state, batches, steps=100, callbacks=[stop, checkpoints])
    """

    def __init__(self, mesh: Mesh | AbstractMesh, note: Callable[[], object] = lambda: None):
        """`mesh` is the run's mesh; `note` is called at the first signal."""
        self._votes, self._note, self._is_requested = Votes(mesh), note, False
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        # Python handles signals in its main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGTERM, signal.SIGINT) if is_main else ():
            self._old_handlers[number] = signal.signal(number, self._request_stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def after_step(self, run: Progress) -> None:
        """End the run after this step if any process was asked to stop."""
        run.is_stopping = self._votes.any(self._is_requested)

    def _request_stop(self, number: int, frame: object) -> None:
        signal.signal(number, self._old_handlers[number])
        self._is_requested = True
        self._note()


class Log(Every):
    """A callback that writes a step's metrics as plain numbers: `write({"step": 10, "loss": 5.1, ...})`."""

    def __init__(
        self,
        every: int,
        write: Callable[[dict[str, object]], object],
        more: Callable[[Progress], Mapping[str, object]] | None = None,
    ):
        """`more(run)` returns further columns, such as the speed; `more` is called after the step has been computed."""
        super().__init__(every, self._write_row)
        self._write, self._more = write, more

    def _write_row(self, run: Progress) -> None:
        row: dict[str, object] = {"step": run.step}
        row |= {name: _to_plain(value) for name, value in run.metrics.items()}
        self._write(row | dict(self._more(run) if self._more else {}))


class Checkpoints(Every):
    """A callback that saves the state after each `every` steps, and after the last step, also of a stopped run."""

    def __init__(
        self,
        every: int,
        checkpointer: Checkpointer,
        metadata: Callable[[int], Mapping[str, object]],
        states: PlannedState | None = None,
    ):
        """`metadata(step)` is saved with the state, see `run_metadata`; under a plan, pass the run's `PlannedState`."""
        super().__init__(every, self._save)
        self._checkpointer, self._metadata, self._states = checkpointer, metadata, states

    def after_step(self, run: Progress) -> None:
        """Save the state if a checkpoint is due, or if the run ends here."""
        if run.is_due(self.every) or run.is_stopping:
            self._save(run)

    def _save(self, run: Progress) -> None:
        check_finite(run.metrics, step=run.step)
        metadata = self._metadata(run.step)
        if self._states is None:
            self._checkpointer.save(run.state, run.step, metadata)
        else:
            run.state = self._states.save(self._checkpointer, run.state, run.step, metadata)


def _list_shapes(batch: PyTree) -> list[tuple]:
    """Return the shape and dtype of each array; `jax.typeof` is fast enough to call before each step."""
    return [(array_type.shape, array_type.dtype) for array_type in map(jax.typeof, jax.tree.leaves(batch))]


def _to_plain(value: Array) -> int | float | list:
    """Convert a metric to a Python number, or to nested lists of numbers with six decimals."""
    array = np.asarray(value)
    if array.ndim:
        return array.round(6).tolist()
    number = array.item()
    return number if isinstance(number, int) else float(number)


Result = TypeVar("Result")


class LossSpikeError(DivergedError):
    """An error for a loss far above the previous losses; `step` is the number of the step with this loss."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class LossSpikes(Callback):
    """A callback that raises a `LossSpikeError` if the loss jumps; `retry` then skips the batches before the jump.

    A spike is a loss above `factor` times the median of the `window` losses before it. As with PaLM (arXiv 2204.02311,
    section 5.1), the run returns to its last checkpoint and skips the batches of all steps since that checkpoint, the
    spike's own batch included. After `max_rollbacks` such returns, the next spike ends the run with the error.

    Checkpoints save the ranges of skipped batches, with `record()`. A run that is killed and started again therefore
    skips the same batches and computes the same numbers. Pass this callback before `Checkpoints`, so that no spike is
    saved. The callback waits for the loss of each step.
    """

    def __init__(self, factor: float | None, *, window: int = 50, max_rollbacks: int = 3):
        """Define a spike, and the number of rollbacks.

        With `factor=None` the callback looks for no spikes and waits for no step. It still skips the batches of a
        checkpoint's record (see `start`). Raises a `ValueError` for a factor of 1 or less, and for a `window` or
        `max_rollbacks` below 1.
        """
        if factor is not None and not factor > 1:
            raise ValueError(f"LossSpikes(factor={factor}): a spike is above the losses before it; give more than 1.")
        if window < 1 or max_rollbacks < 1:
            raise ValueError(
                f"LossSpikes(window={window}, max_rollbacks={max_rollbacks}): give at least 1 for each of the two."
            )
        self._factor, self._max_rollbacks = factor, max_rollbacks
        self._losses: deque[float] = deque(maxlen=window)
        self._skipped: list[tuple[int, int]] = []
        self._spike_step: int | None = None

    @property
    def skipped_batches(self) -> tuple[tuple[int, int], ...]:
        """The ranges of skipped batches: the first and the last batch of each range, numbered from 0."""
        return tuple(self._skipped)

    def batch_number(self, step: int) -> int:
        """Return the number of the batch for a step; steps are counted from 0, as a loader counts."""
        number = step
        for first, last in self._skipped:
            if number >= first:
                number += last - first + 1
        return number

    def record(self) -> JsonObject:
        """Return the skipped ranges and the last losses as JSON, which a checkpoint saves beside the state."""
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
                if len(self._skipped) >= self._max_rollbacks:
                    raise
                self._spike_step = error.step
                note(f"{error} The run goes back to its last checkpoint and skips the batches since that checkpoint.")

    def after_step(self, run: Progress) -> None:
        """Raise a `LossSpikeError` if the loss is a spike; a loss that is not finite is ignored."""
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
                    f"{self._max_rollbacks} times.",
                    run.step,
                )
        self._losses.append(loss)
