"""Bits per byte, tokens a second and MFU, from a step's loss and time."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .._atomic_write import write_atomic
from .._extra import load_extra
from .._read import open_regular, parse_json
from ..parallel import on_first_process


def bits_per_byte(nats_per_token: float, bytes_per_token: float = 1.0) -> float:
    """`nats / ln 2 / bytes`: the compression rate in bits per byte of text, comparable between tokenizers."""
    if not bytes_per_token > 0:
        raise ValueError(f"bits_per_byte(bytes_per_token={bytes_per_token}): a token stands for more than no bytes.")
    return nats_per_token / math.log(2) / bytes_per_token


def throughput(
    tokens: int,
    seconds: float,
    *,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> dict[str, float]:
    """`tokens_per_second` and, given `flops_per_token` and `peak_flops`, `model_flops_per_second` and `mfu`.

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
    """Writes rows of metrics, each with its `step`, until it is closed."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes one row; values are numbers, zero-dimensional arrays, text, or lists of numbers."""
        ...

    def close(self) -> None:
        """Writes what is still buffered, and closes."""
        ...


class JsonLines:
    """Writes one JSON object a line and flushes after each; numbers that are not finite become null, as JSON has none.

    An existing file is appended to. `from_step` is the first step that will be run again: its rows and later ones are
    dropped, and so is a last line that a killed process left half written. `None` keeps all rows.
    """

    def __init__(self, path: str | Path, *, from_step: int | None = None):
        """Opens the file; one with rows to drop is rewritten first."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._keep_before(from_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends the row; it is in the file when this returns."""
        plain = {name: _finite_or_none(plain_number(value)) for name, value in row.items()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; it may be opened again to continue."""
        self._file.close()

    def _keep_before(self, from_step: int | None) -> None:
        with open_regular(self._path) as file:
            lines = file.readlines()
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                row = parse_row(line, f"JsonLines({str(self._path)!r}): line {number}")
            except ValueError:
                if number == len(lines) and not line.endswith(b"\n"):
                    continue  # the process was killed while it wrote this line
                raise
            if from_step is None or row["step"] < from_step:
                kept.append(line if line.endswith(b"\n") else line + b"\n")
        if kept != lines:
            write_atomic(self._path, b"".join(kept).decode("utf-8"))  # so that a kill in between loses no rows


def parse_row(line: bytes, place: str) -> dict[str, Any]:
    """Return the row of metrics that a line of `JsonLines` holds; raises a `ValueError` that begins with `place`."""
    try:
        row = parse_json(line.decode("utf-8"))
    except ValueError:
        row = None
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(step, int | float) or isinstance(step, bool):
        raise ValueError(
            f"{place} is not a JSON object with a number as its step, so the file cannot be continued or drawn; move "
            "it away or repair the line."
        )
    return row


class TensorBoard:
    """Writes scalars for TensorBoard into a folder, by `tensorboardX` (the extra `metrics`).

    `from_step` is the first step that will be run again: TensorBoard then hides that step and later ones of the event
    files that are already there.
    """

    def __init__(self, folder: str | Path, *, from_step: int | None = None):
        """Opens a new event file in `folder`."""
        self._writer = self.package().SummaryWriter(str(folder), purge_step=from_step)

    @staticmethod
    def package() -> Any:
        """The package `tensorboardX`; raises an `ImportError` where it is not installed."""
        return load_extra("tensorboardX", extra="metrics", call="TensorBoard(folder)")

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds each number of the row at the row's step; text and lists are left out."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs rows to Weights & Biases, by `wandb` (the extra `metrics`); `mode="offline"` needs no network or account.

    The same `identifier` continues a run.
    """

    def __init__(
        self,
        project: str,
        *,
        folder: str | Path,
        mode: str = "online",
        name: str | None = None,
        identifier: str | None = None,
        recipe: Mapping[str, Any] | None = None,
    ):
        """Start or continue a run.

        Args:
            project: Its project.
            folder: Where offline files are kept.
            mode: `"online"`, `"offline"` or `"disabled"`.
            name: Its name; None: one is made up.
            identifier: Continues the run that has it.
            recipe: The settings to be shown with it.
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
    def package() -> Any:
        """The package `wandb`; raises an `ImportError` where it is not installed."""
        return load_extra("wandb", extra="metrics", call="WeightsAndBiases(project)")

    def write(self, row: Mapping[str, Any]) -> None:
        """Logs the numbers of the row at the row's step."""
        self._run.log(_numbers(row), step=int(row["step"]))

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MetricWriters:
    """Several writers as one, in a run of one process or more: all call it, and the first one alone writes.

    If opening or writing fails there, all processes raise. A context manager, which closes the writers.
    """

    def __init__(self, *opens: Callable[[], MetricWriter]):
        """Each of `opens` makes a writer; those made are closed again if a later one fails."""
        self._opened, self._writers = contextlib.ExitStack(), list[MetricWriter]()
        on_first_process(lambda: self._open(opens))

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the row by each writer."""
        on_first_process(lambda: [writer.write(row) for writer in self._writers])

    def close(self) -> None:
        """Closes all."""
        self._opened.close()

    def __enter__(self) -> "MetricWriters":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, opens: Sequence[Callable[[], MetricWriter]]) -> None:
        with self._opened:
            for make in opens:
                self._writers.append(make())
                self._opened.callback(self._writers[-1].close)
            self._opened = self._opened.pop_all()


def plain_number(value: Any) -> Any:
    """A Python number for a zero-dimensional array or a numpy number; anything else as it is."""
    is_scalar = getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def _numbers(row: Mapping[str, Any]) -> dict[str, int | float]:
    plain = {name: plain_number(value) for name, value in row.items() if name != "step"}
    return {name: value for name, value in plain.items() if isinstance(value, int | float)}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
