"""Run work in a process of its own, which has a device for itself and gives it back."""

import multiprocessing
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any


class SeparateProcess:
    """Process that imports modules and waits for its work, so that it can be started ahead of its turn."""

    def __init__(self, *modules: str):
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, modules))
        self._process.start()
        remote.close()

    def __call__(self, work: Callable[[], Any], seconds: float) -> Any:
        """Run a work, which is pickled, in the process, and return its result; then the process is ended.

        Raises a `TimeoutError` after so many seconds, and a `ChildProcessError` if the process ends without a result.
        """
        try:
            self._connection.send(work)
            if not self._connection.poll(seconds):
                raise TimeoutError(f"stopped after {seconds:.0f} seconds")
            result, error = self._connection.recv()
            self._process.join(10)  # It ends what it has started itself.
        except (EOFError, BrokenPipeError) as ended:
            self._process.join()
            raise ChildProcessError(f"its process ended by itself, with exit code {self._process.exitcode}") from ended
        finally:
            self.close()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def run_apart(work: Callable[[], Any], seconds: float) -> Any:
    """Run a work in a new process, and return its result, see `SeparateProcess`."""
    return SeparateProcess()(work, seconds)


def _serve(connection: Connection, modules: tuple[str, ...]) -> None:
    """Send the work's result, or the words of its error, since not every error can be pickled."""
    try:
        for module in modules:
            import_module(module)
        connection.send((connection.recv()(), None))
    except EOFError:  # There is no work.
        pass
    except Exception as error:
        connection.send((None, RuntimeError(f"{type(error).__name__}: {error}")))
