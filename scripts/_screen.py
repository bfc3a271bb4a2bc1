"""What a person sees: one progress bar, notes above it, and plain lines where there is no terminal."""

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

from jax.errors import JaxRuntimeError
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from eqformer import reason_and_fix
from eqformer.training import CheckpointError, DivergedError


# Called with the steps done, a text of figures, and whether those are new, of this step.
Show = Callable[[int, str, bool], None]


class Screen:
    """Notes and progress on standard output; errors on standard error."""

    def __init__(self, *, silent: bool = False, errors: bool = False):
        """A `silent` one, of a process that does not speak for the run, shows errors alone.

        One on standard `errors` does not mix with what a script prints.
        """
        self.console: Console = _Console(highlight=False, soft_wrap=True, quiet=silent, stderr=errors)

    def note(self, text: str) -> None:
        """A line, above the bar if there is one."""
        self.console.print(text, markup=False)

    @contextmanager
    def steps(self, total: int, done: int) -> Iterator[Show]:
        """A bar over steps, or lines where there is no terminal; call what it gives after each step."""
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
            _Eta(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}", table_column=Column()),  # on a narrow terminal in two lines
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as progress:
            task = progress.add_task("train", total=total, completed=done, figures="compiling the step ...")
            yield lambda done, figures, is_new: progress.update(task, completed=done, figures=figures)

    @contextmanager
    def bytes(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """A bar over bytes, shown once there is something to wait for."""
        if self.console.quiet or not self.console.is_terminal:
            yield lambda done, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"))
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as progress:
            task = progress.add_task(title, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total or None)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the script end as it does where something else writes, and not as rich would have it."""
        raise


class _Eta(ProgressColumn):
    """Time left, from the steps of this session alone."""

    def render(self, task: Task) -> Text:
        return Text(_eta(task.time_remaining))


def _lines(total: int) -> Show:
    """Without a terminal: a line of new figures at most every five seconds, and the last one."""
    begun: list[tuple[float, int]] = []  # after the first step of this session, which compiled
    last = [-math.inf]

    def line(done: int, figures: str, is_new: bool) -> None:
        now = time.monotonic()
        if not begun:
            begun.append((now, done))
        since, first = begun[0]
        if is_new and (now - last[0] >= 5 or done == total):
            last[0] = now
            left = (now - since) / (done - first) * (total - done) if done > first else None
            print(f"step {done}/{total}  {figures}  {_eta(left)}", flush=True)

    return line


def _eta(left: float | None) -> str:
    """Seconds that are left, as text."""
    if left is None:
        return "ETA -:--"
    minutes, seconds = divmod(int(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"ETA {hours}:{minutes:02}:{seconds:02}" if hours else f"ETA {minutes}:{seconds:02}"


def warn(text: str) -> None:
    """Show a warning on standard error, where it does not mix with what a script prints."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def one_message() -> Iterator[None]:
    """What a script does: bad input ends it with one message and exit code 2, a reader that has left without any."""
    with _until_nobody_reads():
        try:
            yield
        except BrokenPipeError as error:
            if _unread():
                raise
            _fail(error)
        except (ValueError, OSError, ImportError, CheckpointError, DivergedError, JaxRuntimeError) as error:
            _fail(error)


def _fail(error: BaseException) -> NoReturn:
    """End the program with one clear message and exit code 2; an error of the system with what to do about it."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    reason, fix = reason_and_fix(error)
    is_foreign = isinstance(error, OSError | RuntimeError) or reason.startswith("UNKNOWN: ")
    print(f"error: {reason}; {fix}." if is_foreign and fix else f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextmanager
def _until_nobody_reads() -> Iterator[None]:
    """End with the code of a program that SIGPIPE ends where nobody reads what is written any more."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        for stream in _unread():  # what is left in the buffer would be written at exit, and fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _unread() -> list[TextIO]:
    """Of standard output and errors those that nobody reads: another pipe, of the network, is none of them."""
    found = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # one that is no file
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            found += [stream] if poll.poll(0) else []
    return found
