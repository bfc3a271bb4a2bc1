"""Run work in a separate process, which has a device for itself until it ends, and decide how XLA chooses kernels."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from eqformer._prepare import drop_user_options, format_flags, keep_known


class SeparateProcess:
    """Process that imports modules and then waits for its work, so that it can be started ahead of time."""

    def __init__(self, *modules: str):
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, modules))
        self._process.start()
        remote.close()

    def __call__(self, work: Callable[[], Any], seconds: float) -> Any:
        """Run `work`, a function that can be pickled, in the process; end the process, and return the result.

        Raises a `TimeoutError` after `seconds` seconds, and a `ChildProcessError` if the process ends without a result.
        """
        try:
            self._connection.send(work)
            if not self._connection.poll(seconds):
                raise TimeoutError(f"stopped after {seconds:.0f} seconds")
            result, error = self._connection.recv()
            self._process.join(10)  # The process ends the processes that it has started.
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
    """Run a function in a new process, and return its result, see `SeparateProcess`."""
    return SeparateProcess()(work, seconds)


def _serve(connection: Connection, modules: tuple[str, ...]) -> None:
    """Send the work's result, or the text of its error, because some errors cannot be pickled."""
    try:
        for module in modules:
            import_module(module)
        connection.send((connection.recv()(), None))
    except EOFError:  # The parent has closed the connection without sending work.
        pass
    except Exception as error:
        connection.send((None, RuntimeError(f"{type(error).__name__}: {error}")))


@contextmanager
def share_kernel_choices() -> Iterator[None]:
    """Let all processes that start in the block use the GPU kernels that the first process chooses for a product."""
    before = os.environ.get("XLA_FLAGS")
    with tempfile.TemporaryDirectory() as folder:
        _add_xla_flags({"xla_gpu_per_fusion_autotune_cache_dir": folder})
        try:
            yield
        finally:
            del os.environ["XLA_FLAGS"]
            os.environ.update({} if before is None else {"XLA_FLAGS": before})


def skip_autotuning() -> None:
    """Let XLA choose GPU kernels without measuring them, in a process where JAX has not started."""
    _add_xla_flags({"xla_gpu_autotune_level": 0})


def _add_xla_flags(options: Mapping[str, bool | int | str]) -> None:
    flags = format_flags(keep_known(drop_user_options(options)))
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
