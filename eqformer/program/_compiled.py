"""What a compiled program holds, executes and sends, as plain data that can be kept."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ._buffers import Buffer, largest_buffers
from ._communication import list_transfers, text_of, Transfer
from ._flops import executed
from ._traffic import moved_bytes


MOST_BUFFERS = 10


@dataclasses.dataclass(frozen=True)
class CompiledCosts:
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
    platform: str = ""
    """Platform of the devices that the program was compiled for, as JAX names it; empty where it has no arguments."""

    @property
    def held(self) -> int:
        """Bytes that a device must have to run the program.

        A TPU's compiler places every array and refuses a program whose peak is above the memory, so its peak counts;
        its temporaries also count room that is free while the most is held. Other platforms allocate all temporaries
        as one block.
        """
        return self.peak if self.platform == "tpu" else self.argument + self.temporary

    def fits(self, memory: int) -> bool:
        """Return whether a device of so many bytes can run the program; a TPU's that compiled always can."""
        return self.platform == "tpu" or self.held <= memory

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
    def from_dict(cls, data: dict[str, Any]) -> "CompiledCosts":
        """What `as_dict` gave, also after it was written as JSON."""
        buffers = tuple(Buffer(**each | {"scopes": tuple(each["scopes"])}) for each in data["buffers"])
        transfers = []
        for each in data["transfers"]:
            axes = None if each["axes"] is None else tuple(each["axes"])
            transfers.append(Transfer(**each | {"axes": axes, "scopes": tuple(each["scopes"])}))
        return cls(**data | {"buffers": buffers, "moved": data["moved"], "transfers": tuple(transfers)})


def read_compiled(compiled: jax.stages.Compiled, mesh: Mesh | AbstractMesh | None = None) -> CompiledCosts:
    """Read a compiled program; with the `mesh` it was compiled for, also the axes that it sends over."""
    memory: Any = compiled.memory_analysis()
    argument, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    argument_on_host = memory.host_argument_size_in_bytes
    # The compiler's peak counts the host's arrays too; it does not say how many temporaries of the host are among them.
    peak = getattr(memory, "peak_memory_in_bytes", 0) or argument + temporary + argument_on_host
    memory_only = CompiledCosts(
        argument,
        temporary,
        peak=min(peak - argument_on_host, argument + temporary),
        on_host=argument_on_host + memory.host_temp_size_in_bytes,
        platform=_platform(compiled),
    )
    try:
        text = text_of(compiled)
    except ValueError as error:
        return dataclasses.replace(memory_only, unread=str(error).partition(": ")[2])
    operations, cycles = executed(text)
    return dataclasses.replace(
        memory_only,
        buffers=tuple(largest_buffers(text)[1][:MOST_BUFFERS]),
        operations=operations,
        moved=moved_bytes(text),
        cycles=cycles,
        transfers=list_transfers(text, mesh=mesh),
    )


def _platform(compiled: jax.stages.Compiled) -> str:
    """Return the platform that a program was compiled for; empty where it has no arguments to read it from."""
    shardings = jax.tree.leaves(compiled.input_shardings)
    return next((device.platform for sharding in shardings for device in sharding.device_set), "")
