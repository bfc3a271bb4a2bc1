"""Output for people: a progress bar with notes above it, or lines without a terminal; and error messages."""

import datetime
import functools
import math
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

import jax
from jax.errors import JaxRuntimeError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from eqformer import explain_error, is_lost_peer
from eqformer.parallel import is_first_process
from eqformer.training import CheckpointError, DivergedError
from support.stopping import interruptible


SECONDS_A_LINE = 5.0  # Between lines of progress without a terminal.
_SECONDS_FOR_PEERS = 3  # Time for the other processes to print their own messages.

# Called with the steps done, the metrics as text, and whether they are of this step.
Show = Callable[[int, str, bool], None]


class Screen:
    """Notes and progress on standard output; errors on standard error."""

    def __init__(self, *, silent: bool = False, errors: bool = False):
        """`silent` shows errors only, for processes other than the first; `errors` writes to standard error, so that
        it does not mix with what a script prints.
        """
        self.console: Console = _Console(highlight=False, soft_wrap=True, quiet=silent, stderr=errors)

    @property
    def has_colors(self) -> bool:
        """Whether colours are shown."""
        return self.console.color_system is not None and self.console.is_terminal

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, markup=False)

    @contextmanager
    def steps(self, total: int, done: int) -> Iterator[Show]:
        """Show a progress bar over steps, or lines without a terminal; call the function it yields after each step."""
        if self.console.quiet:
            yield lambda done, figures, is_new: None
            return
        if not self.console.is_terminal:
            yield _lines(total)
            return
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", table_column=Column()),  # on a narrow terminal in two lines
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as progress:
            task = progress.add_task("train", total=total, completed=done, figures="compiling the step ...")
            yield lambda done, figures, is_new: progress.update(task, completed=done, figures=figures)

    @contextmanager
    def bar(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show a progress bar in a terminal, from the first call of the function that it yields.

        Call that with a title, the amount that is done (bytes, or plans), and the whole amount (0: unknown).
        """
        if self.console.quiet or not self.console.is_terminal:
            yield lambda title, done, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"))
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as progress:
            task = progress.add_task("", total=None, visible=False)
            shown = functools.partial(progress.update, task, visible=True)
            yield lambda title, done, total: shown(description=title, completed=done, total=total or None)

    @contextmanager
    def counting(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show a progress bar as `bar` does or, without a terminal, a line at most every five seconds."""
        if self.console.is_terminal:
            with self.bar() as show:
                yield show
            return
        start_times: dict[str, float] = {}
        last = time.monotonic()

        def line(title: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            started = start_times.setdefault(title, now)
            if now - last >= SECONDS_A_LINE:
                last = now
                eta = f", ETA {_format_time((now - started) / done * (total - done))}" if done and total else ""
                self.note(f"{title}: {done} of {total}{eta}")

        yield line

    @contextmanager
    def working(self, title: str) -> Iterator[None]:
        """Say what is being done, and for how long: in a terminal each second, else every five seconds."""
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self.console, transient=True) as progress:
                progress.add_task(title, total=None)
                yield
            return
        self.note(title)
        ended, started = threading.Event(), time.monotonic()

        def report() -> None:
            while not ended.wait(SECONDS_A_LINE):
                self.note(f"{title}: {_format_time(time.monotonic() - started)} so far")

        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Re-raise, so that `one_message` handles a closed pipe, instead of rich."""
        raise


def _format_time(seconds: float) -> str:
    """Return a time as `0:01:05`."""
    return str(datetime.timedelta(seconds=int(seconds)))


def _lines(total: int) -> Show:
    """Return a function that prints new metrics at most every five seconds, and those of the last step."""
    first_step: list[tuple[float, int]] = []  # Time and step after the first step, which included compilation.
    last = [-math.inf]

    def line(done: int, figures: str, is_new: bool) -> None:
        now = time.monotonic()
        if not first_step:
            first_step.append((now, done))
        since, first = first_step[0]
        if is_new and (now - last[0] >= 5 or done == total):
            last[0] = now
            seconds = int((now - since) / (done - first) * (total - done)) if done > first else None
            time_left = "-:--:--" if seconds is None else datetime.timedelta(seconds=seconds)
            print(f"step {done}/{total}  {figures}  ETA {time_left}", flush=True)

    return line


def warn(text: str) -> None:
    """Show a warning on standard error, where it does not mix with what a script prints."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def print_warnings() -> Iterator[None]:
    """Show each warning of a library inside on a line of its own, once for all processes of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught) if caught and is_first_process() else ():
        warn(text)


@contextmanager
def one_message() -> Iterator[None]:
    """Run a script: bad input ends it with one message and exit code 2, Ctrl-C with one line and 130.

    A closed pipe ends it silently, with SIGPIPE's status.
    """
    try:
        try:
            with interruptible():
                yield
        except (ValueError, OSError, ImportError, CheckpointError, DivergedError, JaxRuntimeError) as error:
            if isinstance(error, BrokenPipeError) and _closed_streams():
                raise
            _fail(error)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        for stream in _closed_streams():  # Buffered output would be written at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _fail(error: BaseException) -> NoReturn:
    """End the program with one message and exit code 2; for errors of the system the message says what to do."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    reason, fix = explain_error(error)
    is_foreign = isinstance(error, OSError | RuntimeError) or reason.startswith("UNKNOWN: ")
    print(f"error: {reason}; {fix}." if is_foreign and fix else f"error: {error}", file=sys.stderr, flush=True)
    if is_lost_peer(error) and jax.process_count() > 1:
        _end_without_peers()
    raise SystemExit(2)


def _end_without_peers() -> None:
    """End the process at once: as it usually ends, JAX waits over a minute for a lost one, and then dumps its stack.

    The first process waits first, since the service by which the others learn of each other ends with it.
    """
    if jax.process_index() == 0:
        time.sleep(_SECONDS_FOR_PEERS)
    os._exit(2)


def _closed_streams() -> list[TextIO]:
    """Return which of standard output and standard error have a pipe that its reader has closed."""
    streams = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a stream without a file descriptor
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            streams += [stream] if poll.poll(0) else []
    return streams
