"""How a run is asked to stop: by signals to any of its processes, and all stop after the same step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


@contextmanager
def signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask to stop after the step; a second one ends the program as usual."""

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
    """Whether any process has asked to stop, known by all at the same step.

    A step's votes are added up on the devices while the next step is set up, so that nobody waits for them: an
    answer is one step old.
    """

    def __init__(self, mesh: Mesh | AbstractMesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size,)
        self._sum = jax.jit(lambda votes: votes.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: Any = None

    def any(self, mine: bool) -> bool:
        """Cast this process's vote; whether there was any at the step before (of one process: now)."""
        if jax.process_count() == 1:
            return mine
        vote = np.full(self._shape, int(mine), np.int32)
        pending, self._pending = (
            self._pending,
            self._sum(jax.make_array_from_callback(self._shape, self._sharding, vote.__getitem__)),
        )
        return pending is not None and int(pending) > 0
