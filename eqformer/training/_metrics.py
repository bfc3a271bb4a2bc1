"""Metrics of a run (time, throughput, MFU, bits per byte), traces for profilers, and writers of metrics."""

import contextlib
import functools
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast, Protocol, runtime_checkable, SupportsInt

import jax
import numpy as np

from .._failures import load_extra
from .._files import JsonObject, open_regular, parse_json, write_atomic
from ..parallel import on_first_process
from ._loop import Callback, Every, Progress


class Clock:
    """A stopwatch for steps that excludes the time of some callbacks.

    The callbacks `[Log(10, write, clock.rate), *clock.excluding([validation, checkpoints])]` log the speed of a run
    without the time of its validations and checkpoints.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float | None = None,
        peak_flops: Callable[[], float] | None = None,
    ):
        """`flops_per_token` and the result of `peak_flops()`, which is called once, are passed to `throughput`."""
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._find_peak = peak_flops
        self._steps, self._seconds = 0, 0.0
        self._start_time: float | None = None

    def excluding(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return these callbacks with one before them that stops the clock, and one after them that starts it again."""
        return [Every(1, lambda run: self._stop()), *callbacks, _StartClock(self)]

    def rate(self, run: Progress) -> dict[str, int | float]:
        """Return the speed of the steps since the last call, as columns for `Log`, and stop the clock.

        The columns are `tokens` (so far), `step_seconds`, the columns of `throughput`, and `peak_bytes`. The last is
        the most memory that one of this process's devices has used so far; on a CPU, the memory of the process.
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
    """Return the peak memory of this process's devices, the largest of them; on a CPU, the peak of the process."""
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
            raise ValueError(
                f"Profile(first={first}, last={last}): steps count from 1, and the last must not be before the first."
            )
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
        """Write the trace if the run ends before the trace's last step, whether normally or by an error."""
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


Row = Mapping[str, object]
"""Metrics by name, with the number of a step as `step`."""


def bits_per_byte(nats_per_token: float, bytes_per_token: float = 1.0) -> float:
    """Return `nats / ln 2 / bytes`: the bits per byte of text, which are comparable between tokenizers."""
    if not bytes_per_token > 0:
        raise ValueError(
            f"bits_per_byte(bytes_per_token={bytes_per_token}): the bytes must be above 0; pass the mean bytes per "
            "token."
        )
    return nats_per_token / math.log(2) / bytes_per_token


def throughput(
    tokens: int,
    seconds: float,
    *,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> dict[str, float]:
    """Return `tokens_per_second` and, given `flops_per_token` and `peak_flops`, `model_flops_per_second` and `mfu`.

    `flops_per_token` counts the model's matrix products, forward and backward, without recomputation; `peak_flops` is
    the FLOP/s of all devices in use, measured or from a data sheet. MFU = tokens/s x FLOPs/token / peak
    (arXiv 2204.02311, appendix B).
    """
    if not seconds > 0:
        raise ValueError(f"throughput(tokens={tokens}, seconds={seconds}): the time must be positive.")
    row = {"tokens_per_second": tokens / seconds}
    if flops_per_token is not None:
        row["model_flops_per_second"] = row["tokens_per_second"] * flops_per_token
        if peak_flops is not None:
            row["mfu"] = row["model_flops_per_second"] / peak_flops
    return row


@runtime_checkable
class MetricWriter(Protocol):
    """A writer of rows of metrics, each with its `step`."""

    def write(self, row: Row) -> None:
        """Write one row; values are numbers, zero-dimensional arrays, text, or lists of numbers."""
        ...

    def close(self) -> None:
        """Write all buffered rows, and close the writer."""
        ...


class JsonLines:
    """A writer of one JSON object per line, which flushes the file after each line.

    NaN and infinity become null, since JSON has neither. The writer appends to an existing file. `from_step` is the
    first step that will run again: the rows of that step and of later steps are dropped; `None` keeps all rows. The
    incomplete last line of a killed process is always dropped.
    """

    def __init__(self, path: str | Path, *, from_step: int | None = None):
        """Open the file; a file with rows to drop is rewritten first."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._drop_rows(from_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append the row to the file, and flush the file."""
        plain = {name: _finite_or_none(plain_number(value)) for name, value in row.items()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; another `JsonLines` may continue it."""
        self._file.close()

    def _drop_rows(self, from_step: int | None) -> None:
        """Drop the rows from `from_step` on, and the incomplete last line of a process that was killed."""
        with open_regular(self._path) as file:
            lines = file.readlines()
        kept_lines = []
        for number, line in enumerate(lines, 1):
            try:
                row = parse_row(line, f"JsonLines({str(self._path)!r}): line {number}")
            except ValueError:
                if number == len(lines) and not line.endswith(b"\n"):
                    continue
                raise
            if from_step is None or row["step"] < from_step:
                kept_lines.append(line if line.endswith(b"\n") else line + b"\n")
        if kept_lines != lines:
            # Written atomically: a process that is killed here loses no rows.
            write_atomic(self._path, b"".join(kept_lines).decode("utf-8"))


def parse_row(line: bytes, label: str) -> JsonObject:
    """Parse a line of `JsonLines` into a row of metrics; raises a `ValueError` that begins with `label`."""
    try:
        row = parse_json(line.decode("utf-8"))
    except ValueError:
        row = None
    match row:
        case {"step": int() | float() as step} if not isinstance(step, bool):
            return row
        case _:
            raise ValueError(
                f"{label} is not a JSON object with a number as its step, so the file cannot be continued or drawn; "
                "move it away or repair the line."
            )


class TensorBoard:
    """A writer of scalars for TensorBoard into a folder, by `tensorboardX` (the extra `metrics`).

    `from_step` is the first step that will run again: TensorBoard then hides that step and later ones in the event
    files that the folder already has.
    """

    def __init__(self, folder: str | Path, *, from_step: int | None = None):
        """Open a new event file in `folder`."""
        self._writer = self.package().SummaryWriter(str(folder), purge_step=from_step)

    @staticmethod
    def package() -> ModuleType:
        """Import the package `tensorboardX`; raises an `ImportError` if it is not installed."""
        return load_extra("tensorboardX", extra="metrics", call="TensorBoard(folder)")

    def write(self, row: Row) -> None:
        """Add each number of the row at the row's step; text and lists are ignored."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, _step(row))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A writer to Weights & Biases, by `wandb` (the extra `metrics`); `mode="offline"` needs no network or account."""

    def __init__(
        self,
        project: str,
        *,
        folder: str | Path,
        mode: str = "online",
        name: str | None = None,
        identifier: str | None = None,
        recipe: Mapping[str, object] | None = None,
    ):
        """Start or continue a run.

        Args:
            project: The run's project.
            folder: The folder of offline files.
            mode: `"online"`, `"offline"` or `"disabled"`.
            name: The run's name; None: Weights & Biases invents one.
            identifier: The run's identifier; a run that exists under it is continued.
            recipe: The settings to show with the run.
        """
        if mode not in ("online", "offline", "disabled"):
            raise ValueError(f"WeightsAndBiases(mode={mode!r}): the modes are online, offline, disabled.")
        self._run = self.package().init(
            project=project,
            dir=str(folder),
            mode=mode,
            name=name,
            id=identifier,
            resume=None if identifier is None else "allow",
            config=dict(recipe or {}),
        )

    @staticmethod
    def package() -> ModuleType:
        """Import the package `wandb`; raises an `ImportError` if it is not installed."""
        return load_extra("wandb", extra="metrics", call="WeightsAndBiases(project)")

    def write(self, row: Row) -> None:
        """Log the numbers of the row at the row's step."""
        self._run.log(_numbers(row), step=_step(row))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MetricWriters:
    """Several writers as one, for runs of one or more processes: all processes call the writer, and the first writes.

    If opening or writing fails in the first process, all processes raise the error. The end of a `with` block closes
    the writers.
    """

    def __init__(self, *opens: Callable[[], MetricWriter]):
        """Each of `opens` opens a writer; if one of them fails, the writers that are already open are closed again."""
        self._opened, self._writers = contextlib.ExitStack(), list[MetricWriter]()
        on_first_process(lambda: self._open(opens))

    def write(self, row: Row) -> None:
        """Write the row with each writer."""
        on_first_process(lambda: [writer.write(row) for writer in self._writers])

    def close(self) -> None:
        """Close all writers."""
        self._opened.close()

    def __enter__(self) -> "MetricWriters":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, opens: Sequence[Callable[[], MetricWriter]]) -> None:
        with self._opened:
            for open_writer in opens:
                self._writers.append(open_writer())
                self._opened.callback(self._writers[-1].close)
            self._opened = self._opened.pop_all()


def plain_number(value: object) -> object:
    """Convert a zero-dimensional array or a numpy number to a Python number; return any other value as it is."""
    is_scalar = getattr(value, "shape", None) == ()
    return cast(np.generic, value).item() if is_scalar else value


def _step(row: Row) -> int:
    return int(cast(SupportsInt, row["step"]))


def _numbers(row: Row) -> dict[str, int | float]:
    """Return the numbers of a row; its step, texts and lists are left out."""
    plain = {name: plain_number(value) for name, value in row.items() if name != "step"}
    return {name: value for name, value in plain.items() if isinstance(value, int | float)}


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
