"""What a person sees: one progress bar, notes above it, and plain lines where there is no terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class Screen:
    """Notes and progress on standard output; errors on standard error."""

    def __init__(self, *, silent: bool = False, errors: bool = False):
        """A `silent` one, of a process that does not speak for the run, shows errors alone.

        One on standard `errors` does not mix with what a script prints.
        """
        self.console = Console(highlight=False, soft_wrap=True, quiet=silent, stderr=errors)

    def note(self, text: str) -> None:
        """A line, above the bar if there is one."""
        self.console.print(text, markup=False)

    @contextmanager
    def steps(self, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
        """A bar over steps; call what it gives with the steps done and a text of figures."""
        if self.console.quiet:
            yield lambda done, figures: None
            return
        if not self.console.is_terminal:
            yield self._lines(total)
            return
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            _Eta(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as progress:
            task = progress.add_task("train", total=total, completed=done, figures="compiling the step ...")
            yield lambda done, figures: progress.update(task, completed=done, figures=figures)

    def _lines(self, total: int) -> Callable[[int, str], None]:
        """Without a terminal a line at most every five seconds, and the last one."""
        last = [0.0]

        def line(done: int, figures: str) -> None:
            now = time.monotonic()
            if figures and (now - last[0] >= 5 or done == total):
                last[0] = now
                print(f"step {done}/{total}  {figures}", flush=True)

        return line

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


class _Eta(ProgressColumn):
    """Time left, from the steps of this session alone."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        if left is None:
            return Text("ETA -:--")
        minutes, seconds = divmod(int(left), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"ETA {hours}:{minutes:02}:{seconds:02}" if hours else f"ETA {minutes}:{seconds:02}")


def warn(text: str) -> None:
    """Show a warning on standard error, where it does not mix with what a script prints."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def fail(error: BaseException) -> None:
    """End the program with one clear message and exit code 2."""
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
