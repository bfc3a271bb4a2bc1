"""Costs of a compiled program, as its compiler and its text give them: plain data that can be written to a file."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ._buffers import Buffer, largest_buffers
from ._communication import list_transfers
from ._costs import count_cycles, count_flops, count_moved_bytes
from ._hlo import read_hlo, text_of
from ._ir import Transfer


MOST_BUFFERS = 10


@dataclasses.dataclass(frozen=True)
class CompiledCosts:
    """Memory, operations and communication of a compiled program.

    The first three are the compiler's own figures. The others but for `on_host` and `platform` are read from the
    program's text.
    """

    argument: int
    """Bytes of its arguments on a device."""
    temporary: int
    """Bytes of its temporaries."""
    peak: int
    """The most bytes at once, by the compiler; arguments and temporaries where it does not say."""
    buffers: tuple[Buffer, ...] = ()
    """The largest temporary buffers of those that are there at once, as far as the text tells."""
    operations: float = 0.0
    """Floating-point operations of matrix products, by `count_flops`."""
    moved: float = 0.0
    """Bytes read from main memory and written there, by `count_moved_bytes`."""
    cycles: int = 0
    """Cycles as a TPU's compiler estimates them, by `count_cycles`; 0 where it says none."""
    transfers: tuple[Transfer, ...] = ()
    """What it sends, by `list_transfers`."""
    unread: str = ""
    """Why its text, and all figures that are read from it, cannot be had."""
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
        """Bytes sent by a device; those in loops of unknown length count once."""
        return float(sum(transfer.least for transfer in self.transfers))

    @property
    def hidden(self) -> float:
        """Bytes that a device sends beside other work."""
        return float(sum(transfer.least for transfer in self.transfers if transfer.hidden))

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return dataclasses.asdict(self) | {"buffers": [buffer._asdict() for buffer in self.buffers]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "CompiledCosts":
        """Restore what `as_dict` returned, also after it was written as JSON."""
        buffers = tuple(Buffer(**row | {"scopes": tuple(row["scopes"])}) for row in data["buffers"])
        transfers = []
        for row in data["transfers"]:
            axes = None if row["axes"] is None else tuple(row["axes"])
            transfers.append(Transfer(**row | {"axes": axes, "scopes": tuple(row["scopes"])}))
        return cls(**data | {"buffers": buffers, "moved": data["moved"], "transfers": tuple(transfers)})


def read_compiled(compiled: jax.stages.Compiled, mesh: Mesh | AbstractMesh | None = None) -> CompiledCosts:
    """Return the costs of a compiled program; with the `mesh` it was compiled for, also the axes that it sends over."""
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
    program = read_hlo(text, mesh=mesh)
    return dataclasses.replace(
        memory_only,
        buffers=tuple(largest_buffers(text)[1][:MOST_BUFFERS]),
        operations=count_flops(program),
        moved=count_moved_bytes(program),
        cycles=count_cycles(program),
        transfers=list_transfers(program),
    )


def _platform(compiled: jax.stages.Compiled) -> str:
    """Return the platform that a program was compiled for; empty where it has no arguments to read it from."""
    shardings = jax.tree.leaves(compiled.input_shardings)
    return next((device.platform for sharding in shardings for device in sharding.device_set), "")
