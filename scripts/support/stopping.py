"""Stopping a run by a signal: any process may get it, and all processes stop after the same step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


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


class Votes:
    """Lets all processes know, at the same step, whether any of them was asked to stop.

    The votes of a step are summed on the devices while the next step is prepared, so that no process waits: the answer
    is that of the step before.
    """

    def __init__(self, mesh: Mesh | AbstractMesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size,)
        self._sum = jax.jit(lambda votes: votes.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: Any = None

    def any(self, mine: bool) -> bool:
        """Cast this process's vote; returns whether any voted to stop at the step before (with one process: now)."""
        if jax.process_count() == 1:
            return mine
        vote = np.full(self._shape, int(mine), np.int32)
        pending, self._pending = (
            self._pending,
            self._sum(jax.make_array_from_callback(self._shape, self._sharding, vote.__getitem__)),
        )
        return pending is not None and int(pending) > 0
