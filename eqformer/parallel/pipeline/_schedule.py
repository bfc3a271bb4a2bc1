"""What a pipeline does when, and which device holds which part of the model: a table, and nothing else."""

import dataclasses

import numpy as np
from jaxtyping import Int


IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Who does what at which tick, and which parts of the model each device holds.

    The model is cut into equal parts in a row; chunk `chunk` of device `stage` is part `part_of[stage, chunk]`, and a
    microbatch goes through the parts from device to device, see `ring_placement` and `v_placement`. In each column of
    `part_of` stand as many parts in a row as there are devices, in any order, so that a microbatch goes once through
    all devices for each chunk. An entry of a table is `chunk * microbatches + microbatch`, or `IDLE`. Within a tick a
    device does its forward, then its backward, then its weight entry; what it sends arrives before the next tick.
    Where `weight` has no entry at all, a backward gives the gradients of inputs and of weights; otherwise those of
    inputs alone, and the weights' come with the entry of `weight`, in that tick or later. Raises a `ValueError` for
    another placement.
    """

    name: str
    """Its name, in errors and pictures."""
    part_of: Int[np.ndarray, "stages chunks"]
    """Which part of the model is each chunk of each device."""
    microbatches: int
    """The microbatches of a step."""
    forward: Int[np.ndarray, "ticks stages"]
    """The forward entry of each device in each tick."""
    backward: Int[np.ndarray, "ticks stages"]
    """The backward entries."""
    weight: Int[np.ndarray, "ticks stages"]
    """The weight entries; none at all where a backward gives weights' gradients too."""

    def __post_init__(self):
        expected = np.arange(self.parts).reshape(self.chunks, self.stages).T
        if not np.array_equal(np.sort(self.part_of, axis=0), expected):
            raise ValueError(
                f"Schedule {self.name!r}: chunk c of the {self.stages} devices together are the parts "
                f"c * {self.stages} to c * {self.stages} + {self.stages - 1}, each once, but part_of is "
                f"{self.part_of.tolist()}; correct it, or take ring_placement or v_placement."
            )

    @property
    def stages(self) -> int:
        """How many devices there are."""
        return self.part_of.shape[0]

    @property
    def chunks(self) -> int:
        """How many parts each device holds."""
        return self.part_of.shape[1]

    @property
    def parts(self) -> int:
        """How many parts the model is cut into."""
        return self.part_of.size

    @property
    def stage_of(self) -> Int[np.ndarray, "parts"]:
        """The device that holds each part."""
        return np.argsort(self.part_of, axis=None) // self.chunks

    @property
    def chunk_of(self) -> Int[np.ndarray, "parts"]:
        """Which of its device's chunks each part is."""
        return np.argsort(self.part_of, axis=None) % self.chunks

    @property
    def shifts(self) -> Int[np.ndarray, "_"]:
        """How many devices up the ring the next part lies, for each part but the last: 0 is the same device.

        Activations go that far up, and gradients as far down.
        """
        return np.diff(self.stage_of) % self.stages

    @property
    def ticks(self) -> int:
        """How many turns the table has."""
        return self.forward.shape[0]

    @property
    def is_split(self) -> bool:
        """Whether the gradients of weights are computed apart from those of inputs."""
        return bool((self.weight != IDLE).any())


def ring_placement(stages: int, chunks: int = 1) -> Int[np.ndarray, "stages chunks"]:
    """Round the ring once a chunk: chunk c of device i is part `c * stages + i`."""
    return np.arange(stages * chunks).reshape(chunks, stages).T


def v_placement(stages: int) -> Int[np.ndarray, "stages 2"]:
    """Down the devices and back: device i holds the parts i and `2 * stages - 1 - i`, the first also the last."""
    down = np.arange(stages)
    return np.stack([down, 2 * stages - 1 - down], axis=1)


def check_counts(call: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    """Raise a `ValueError` for a count below 1."""
    for count, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{call}: a pipeline has at least 1 of {count}, but {count}={value}; give 1 or more.")
