"""What a pipeline does when: a table, and nothing else."""

import dataclasses

import numpy as np
from jaxtyping import Int


IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Who does what at which tick, for `stages` devices that hold `chunks` parts of the model each.

    Part `chunk * stages + stage` of the model is chunk `chunk` of device `stage`: with several chunks, a microbatch
    goes round the ring of devices once a chunk. An entry of a table is `chunk * microbatches + microbatch`, or
    `IDLE`. Within a tick a device does its forward, then its backward, then its weight entry; what it sends arrives
    before the next tick. Where `weight` has no entry at all, a backward gives the gradients of inputs and of weights;
    otherwise those of inputs alone, and the weights' come with the entry of `weight`, in that tick or later.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward: Int[np.ndarray, "ticks stages"]
    backward: Int[np.ndarray, "ticks stages"]
    weight: Int[np.ndarray, "ticks stages"]

    @property
    def ticks(self) -> int:
        """How many turns the table has."""
        return self.forward.shape[0]

    @property
    def is_split(self) -> bool:
        """Whether the gradients of weights are computed apart from those of inputs."""
        return bool((self.weight != IDLE).any())
