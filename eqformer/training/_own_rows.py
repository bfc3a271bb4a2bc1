"""The rows of a batch that each process loads, and their placement on its devices."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._shapes import Batch
from ..parallel import BATCH_AXES, Plan


class OwnRows:
    """The rows of a batch that this process loads: `start` to `stop - 1` of the whole batch, split as a plan says."""

    def __init__(self, plan: Plan, rows: int):
        """`rows` are those of the whole batch, over all processes."""
        self._sharding = NamedSharding(plan.mesh, PartitionSpec(BATCH_AXES))
        self._rows = rows
        pieces = self._sharding.addressable_devices_indices_map((rows,)).values()
        spans = [index[0].indices(rows) for index in pieces if index is not None]
        self.start, self.stop = min(span[0] for span in spans), max(span[1] for span in spans)

    def shapes(self, batch: Batch) -> Batch:
        """The shapes of the whole batch, from this process's rows."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self._rows, *x.shape[1:]), x.dtype), batch)

    def place(self, batch: Batch) -> Batch:
        """The whole batch on the mesh, from this process's rows, as numpy arrays, and those of the other processes."""

        def put(x: np.ndarray) -> jax.Array:
            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                first, last, _ = index[0].indices(self._rows)
                return x[first - self.start : last - self.start]

            return jax.make_array_from_callback((self._rows, *x.shape[1:]), self._sharding, piece)

        return jax.tree.map(put, batch)
