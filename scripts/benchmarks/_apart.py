"""Work in a process of its own, which has a device for itself and gives it back."""

import multiprocessing
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any


class Apart:
    """A new process, which imports modules and waits for its work, so that it can be started ahead of its turn."""

    def __init__(self, *modules: str):
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, modules))
        self._process.start()
        there.close()

    def __call__(self, work: Callable[[], Any], seconds: float) -> Any:
        """What a work, which is pickled, gives or raises there; the process is ended then, or after so many seconds.

        Raises a `TimeoutError` then, and a `ChildProcessError` where the process ends without a word.
        """
        try:
            self._here.send(work)
            if not self._here.poll(seconds):
                raise TimeoutError(f"stopped after {seconds:.0f} seconds")
            found, error = self._here.recv()
            self._process.join(10)  # with what it has started itself
        except (EOFError, BrokenPipeError) as ended:
            self._process.join()
            raise ChildProcessError(f"its process ended by itself, with exit code {self._process.exitcode}") from ended
        finally:
            self.close()
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._here.close()
        self._process.kill()
        self._process.join()


def apart(work: Callable[[], Any], seconds: float) -> Any:
    """What a work gives or raises in a new process: see `Apart`."""
    return Apart()(work, seconds)


def _serve(there: Connection, modules: tuple[str, ...]) -> None:
    """Send what the work gives; of an error its words, since not every kind can be pickled."""
    try:
        for module in modules:
            import_module(module)
        there.send((there.recv()(), None))
    except EOFError:  # no work came
        pass
    except Exception as error:
        there.send((None, RuntimeError(f"{type(error).__name__}: {error}")))
