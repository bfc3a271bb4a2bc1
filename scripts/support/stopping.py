"""Stopping a run by a signal."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and on Ctrl-C; a second signal ends the program as usual."""

    def ask(number: int, frame: Any) -> None:
        signal.signal(number, old[number])
        stop()

    old: dict[int, Any] = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
