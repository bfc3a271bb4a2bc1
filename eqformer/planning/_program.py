"""What a compiled program holds, executes and sends, as plain data that can be kept."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ._communication import communication, text_of, Transfer
from ._executed import executed
from ._liveness import Buffer, largest_buffers
from ._moved_bytes import moved_bytes


MOST_BUFFERS = 10


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program by its compiler's own figures and, but for the first three, by its text."""

    argument: int
    """Bytes of its arguments on a device."""
    temporary: int
    """Bytes of its temporaries."""
    peak: int
    """The most bytes at once, by the compiler; arguments and temporaries where it does not say."""
    buffers: tuple[Buffer, ...] = ()
    """The largest temporary buffers of those that are there at once, as far as the text tells."""
    operations: float = 0.0
    """Operations of products of matrices; those in kernels (Mosaic, Triton, cuDNN) are not seen."""
    moved: float = 0.0
    """Bytes read from main memory and written there, by `moved_bytes`."""
    cycles: int = 0
    """Cycles as a TPU's compiler estimates them, loops multiplied out; 0 where it says none."""
    transfers: tuple[Transfer, ...] = ()
    """What it sends."""
    unread: str = ""
    """Why its text, and all that is read off it, cannot be had."""
    on_host: int = 0
    """Bytes of arguments and temporaries in the memory of the device's host, beside those on the device."""

    @property
    def total(self) -> int:
        """Bytes of arguments and temporaries."""
        return self.argument + self.temporary

    @property
    def sent(self) -> float:
        """Bytes sent by a device, those in loops of unknown length once."""
        return float(sum(each.sent * (each.times or 1) for each in self.transfers))

    @property
    def hidden(self) -> float:
        """Those of them that are sent beside other work."""
        return float(sum(each.sent * (each.times or 1) for each in self.transfers if each.hidden))

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return dataclasses.asdict(self) | {"buffers": [each._asdict() for each in self.buffers]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Program":
        """What `as_dict` gave, also after it was written as JSON."""
        buffers = tuple(Buffer(**each | {"scopes": tuple(each["scopes"])}) for each in data["buffers"])
        transfers = []
        for each in data["transfers"]:
            axes = None if each["axes"] is None else tuple(each["axes"])
            transfers.append(Transfer(**each | {"axes": axes, "scopes": tuple(each["scopes"])}))
        return cls(**data | {"buffers": buffers, "moved": data["moved"], "transfers": tuple(transfers)})


def program_of(compiled: jax.stages.Compiled, mesh: Mesh | AbstractMesh | None = None) -> Program:
    """What is read off a compiled program; with the `mesh` it was compiled for, the axes that it sends over."""
    memory: Any = compiled.memory_analysis()
    held, more = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    far = memory.host_argument_size_in_bytes
    on_host = far + memory.host_temp_size_in_bytes
    # The most at once has what is on the host in it: of temporaries those that are there then, which it does not say.
    peak = min((getattr(memory, "peak_memory_in_bytes", 0) or held + more + far) - far, held + more)
    try:
        text = text_of(compiled)
    except ValueError as error:
        return Program(held, more, peak, unread=str(error).partition(": ")[2], on_host=on_host)
    operations, cycles = executed(text)
    buffers = tuple(largest_buffers(text)[1][:MOST_BUFFERS])
    sent = communication(text, mesh=mesh)
    return Program(held, more, peak, buffers, operations, moved_bytes(text), cycles, sent, on_host=on_host)
