"""The training loop: steps one after another, and callbacks for what is done between them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from ._planned_state import PlannedState
from ._step import Step
from ._train_state import TrainState
from .checkpoint._checkpointer import Checkpointer


@dataclasses.dataclass
class Progress:
    """Where a run is: what callbacks read, and may change."""

    state: TrainState
    """The state after `step` steps; a callback that consumes it puts another in its place."""
    step: int
    """Steps done."""
    steps: int
    """Steps of the whole run."""
    metrics: dict[str, Array]
    """Those of the last step, on the devices: to read one waits for the step. Empty before the first."""
    batch: PyTree = None
    """That of the last step; None before the first."""
    is_stopping: bool = False
    """Set by a callback to end the run after this step."""

    def is_due(self, every: int) -> bool:
        """Whether this step is one of each `every`, or the run's last."""
        return self.step % every == 0 or self.step == self.steps


class Callback:
    """What is done between steps; each method does nothing here."""

    def begin(self, run: Progress) -> None:
        """Called before the first step, once it is compiled."""

    def after_step(self, run: Progress) -> None:
        """Called after each step has been started."""

    def end(self, run: Progress) -> None:
        """Called once the run has ended, at its last step, by a callback or by an error; last callbacks first."""


def train(
    step: Step,
    state: TrainState,
    batches: Iterable[PyTree],
    key: Key[Array, ""] | None = None,
    *,
    steps: int,
    start: int = 0,
    callbacks: Sequence[Callback] = (),
) -> Progress:
    """Takes the steps `start + 1` to `steps`, calls each callback after each of them, and returns where it ended.

    The step is compiled once, for the first batch, unless it is compiled already. Its results are not waited for, so
    that the host prepares the next batch while the devices compute. Raises a `DivergedError` for a run whose numbers
    are not finite, see `check_finite`, and a `ValueError` where batches end before the steps do, or change shape.

    Args:
        step: The step, from `make_step`.
        state: The state after `start` steps, which is donated.
        batches: One for each step, where the step takes it from, as `data.prefetch` gives them.
        key: The run's key, which steps fold their number into; None: no dropout, no router noise.
        steps: The number of the last step.
        start: The number of steps that the state has taken.
        callbacks: Called in this order.
    """
    for place, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise ValueError(
                f"train(callbacks=...): callbacks[{place}] is a {type(callback).__name__}; give a Callback, of a "
                "function Every(1, function), which is called with the run."
            )
    run, source = Progress(state, start, steps, {}), iter(batches)
    del state  # donated
    if start >= steps:
        return run
    batch = next(source, None)
    if batch is None:
        raise ValueError(f"train(start={start}, steps={steps}): there is no batch; give one for each step.")
    shapes = _shapes_of(batch)
    step = step.compiled(run.state, batch, key)
    with contextlib.ExitStack() as ends:
        for callback in callbacks:
            ends.callback(callback.end, run)
            callback.begin(run)
        while run.step < steps and not run.is_stopping:
            if batch is None:
                raise ValueError(f"train(steps={steps}): the batches ended after {run.step}; give one for each step.")
            if (others := _shapes_of(batch)) != shapes:
                found, wanted = ([f"{dtype}{[*shape]}" for shape, dtype in its] for its in (others, shapes))
                raise ValueError(
                    f"train(steps={steps}): the batch of step {run.step + 1} has arrays of {found}, and the step was "
                    f"compiled for {wanted}; give batches of one shape, filled up with rows whose weights are 0."
                )
            before, run.batch = run.metrics, batch
            run.state, run.metrics = step(run.state, batch, key)
            run.step += 1
            if before:  # of the step before, so that the host does not wait for this one
                check_finite(before, step=run.step - 1)
            batch = next(source, None)
            for callback in callbacks:
                callback.after_step(run)
        check_finite(run.metrics, step=run.step)
    return run


class Every(Callback):
    """Calls `function(run)` after each `every` steps, and after the last."""

    def __init__(self, every: int, function: Callable[[Progress], Any]):
        if every < 1:
            raise ValueError(f"{type(self).__name__}({every}, ...): it counts steps, so give at least 1.")
        self.every, self.function = every, function

    def after_step(self, run: Progress) -> None:
        """Call it if it is due."""
        if run.is_due(self.every):
            self.function(run)


class Log(Every):
    """Writes a step's metrics as plain numbers, with its number: `write({"step": 10, "loss": 5.1, ...})`."""

    def __init__(
        self,
        every: int,
        write: Callable[[dict[str, Any]], Any],
        more: Callable[[Progress], Mapping[str, Any]] = lambda run: {},
    ):
        """`more(run)` gives what is written beside them, once they are computed: the speed, by a clock."""
        super().__init__(every, self._write)
        self._to, self._more = write, more

    def _write(self, run: Progress) -> None:
        row = {"step": run.step} | {name: _number(value) for name, value in run.metrics.items()}
        self._to(row | dict(self._more(run)))


class Checkpoints(Every):
    """Saves the state after each `every` steps, and after the last, also of a run that is stopped."""

    def __init__(
        self,
        every: int,
        checkpointer: Checkpointer,
        metadata: Callable[[int], Mapping[str, Any]],
        states: PlannedState | None = None,
    ):
        """`metadata(step)` is kept beside the state, see `run_metadata`; `states` are those of a run under a plan."""
        super().__init__(every, self._save)
        self._checkpointer, self._metadata, self._states = checkpointer, metadata, states

    def after_step(self, run: Progress) -> None:
        """Save if it is due, or if the run ends here."""
        if run.is_due(self.every) or run.is_stopping:
            self._save(run)

    def _save(self, run: Progress) -> None:
        check_finite(run.metrics, step=run.step)
        about = self._metadata(run.step)
        if self._states is None:
            self._checkpointer.save(run.state, run.step, about)
        else:
            run.state = self._states.save(self._checkpointer, run.state, run.step, about)


def _shapes_of(batch: PyTree) -> list[tuple]:
    """The shape and dtype of each array, which is asked before each step."""
    return [(kind.shape, kind.dtype) for kind in map(jax.typeof, jax.tree.leaves(batch))]


def _number(value: Array) -> Any:
    array = np.asarray(value)
    if array.ndim:
        return array.round(6).tolist()
    number = array.item()
    return number if isinstance(number, int) else float(number)


class DivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite."""


def check_finite(metrics: dict[str, Any], limit: int = 10, *, step: int | None = None) -> None:
    """Raises `DivergedError` if the last `limit` steps were all skipped; blocks until these metrics are computed.

    The error names the first such step, where `step` is the number of these metrics' own.
    """
    in_a_row = int(metrics["skipped_in_a_row"])
    if in_a_row >= limit:
        which = "" if step is None else f", steps {step - in_a_row + 1} to {step},"
        raise DivergedError(
            f"{in_a_row} steps in a row{which} had a loss or a gradient norm that was not finite (limit {limit}; last: "
            f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}). Parameters are those of the "
            "last finite step; lower the learning rate, lengthen the warmup, look at the data of these steps, or have "
            "DebugNans (--debug-nans) name the module."
        )
