"""Work done in a process of its own, which has a GPU's whole memory, since nothing else of the command holds any."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar


Found = TypeVar("Found")


def apart(work: Callable[[], Found], seconds: float) -> Found:
    """What `work()`, which can be pickled, gives or raises in a new process, which is ended after so many seconds.

    Raises a `TimeoutError` then, and a `ChildProcessError` where the process ends without a word.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, work))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            raise TimeoutError(f"stopped after {seconds:.0f} seconds")
        found, error = here.recv()
        process.join(10)  # with what it has started itself
    except EOFError as ended:
        process.join()
        raise ChildProcessError(f"its process ended by itself, with exit code {process.exitcode}") from ended
    finally:
        here.close()
        process.kill()
        process.join()
    if error is not None:
        raise error
    return found


def _answer(there: Connection, work: Callable[[], Any]) -> None:
    """Send what the work gives; of an error its words, since not every kind can be pickled."""
    try:
        there.send((work(), None))
    except Exception as error:
        there.send((None, RuntimeError(f"{type(error).__name__}: {error}")))
