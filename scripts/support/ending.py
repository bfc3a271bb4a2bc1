"""The end of a script: one message for bad input, one line after Ctrl-C, and silence after a closed pipe."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

import jax
from jax.errors import JaxRuntimeError

from eqformer import explain_error, is_lost_peer
from eqformer.training import CheckpointError, DivergedError
from support.stopping import interruptible


_SECONDS_FOR_PEERS = 3  # Time for the other processes to print their own messages.


@contextmanager
def one_message() -> Iterator[None]:
    """Run the code in the block as a script: bad input ends the script with one message and exit code 2.

    Ctrl-C ends the script with one line and exit code 130. A closed pipe ends it silently, with the status of SIGPIPE.
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
    """End the program with one message and exit code 2; for errors of the system, the message also has a fix."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    reason, fix = explain_error(error)
    is_foreign = isinstance(error, OSError | RuntimeError) or reason.startswith("UNKNOWN: ")
    print(f"error: {reason}; {fix}." if is_foreign and fix else f"error: {error}", file=sys.stderr, flush=True)
    if is_lost_peer(error) and jax.process_count() > 1:
        _end_without_peers()
    raise SystemExit(2)


def _end_without_peers() -> None:
    """End the process at once. In a normal exit, JAX would wait over a minute for a lost process and dump its stack.

    The first process waits a few seconds, because it runs the service by which other processes notice the lost process.
    """
    if jax.process_index() == 0:
        time.sleep(_SECONDS_FOR_PEERS)
    os._exit(2)


def _closed_streams() -> list[TextIO]:
    """Return the streams, of standard output and standard error, that are pipes whose reader has closed them."""
    streams = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a stream without a file descriptor
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if poll.poll(0):
                streams.append(stream)
    return streams
