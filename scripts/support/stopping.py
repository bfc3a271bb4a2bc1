"""Stop a script by a signal."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


INTERRUPTED = 128 + signal.SIGINT  # The exit status after Ctrl-C.
_LINE = "stopped by Ctrl-C"


def end_at_interrupt() -> None:
    """Let Ctrl-C end the process at once, with one line, while a script is imported and nothing needs cleaning up."""
    signal.signal(signal.SIGINT, _end_with_a_line)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise an error in the block, so that its context managers end; then print one line.

    The exit status is 130. Once the line is printed, another Ctrl-C ends the process of a script at once.
    """
    is_script = threading.current_thread() is threading.main_thread()
    is_script = is_script and signal.getsignal(signal.SIGINT) is _end_with_a_line
    if is_script:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        if is_script:
            signal.signal(signal.SIGINT, _end)
        with suppress(OSError):
            sys.stdout.flush()
            print(_LINE, file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        if is_script and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            end_at_interrupt()


def _end(number: int, frame: Any) -> None:
    os._exit(INTERRUPTED)


def _end_with_a_line(number: int, frame: Any) -> None:
    os.write(sys.stderr.fileno(), f"{_LINE}\n".encode())
    os._exit(INTERRUPTED)
