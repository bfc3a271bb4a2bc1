"""The intermediate form of a program: operations in the order in which they run, read from a jaxpr or from HLO."""

import dataclasses
import re
from collections.abc import Container


FURTHER_ROUNDS = "further rounds of choices"
"""Named scope of loops that run only if the load of experts is uneven, such as the rounds of an exchange after the
first. The costs of a program leave these loops out."""

# Operations that run one of their bodies, in jaxprs and in HLO.
CONDITIONALS = ("cond", "conditional")

# HLO's names of collectives.
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)


def sent_share(kind: str, devices: int) -> float:
    """Return the bytes that each device of a group sends for each byte of its operands.

    The figures hold for ring algorithms (Patarasuk and Yuan 2009).
    """
    match kind:
        case "all-reduce":
            return 2 * (devices - 1) / devices
        case "all-gather":
            return float(devices - 1)
        case "collective-permute":
            return 1.0
        case _:
            return (devices - 1) / devices


def count_ragged_bytes(operand: int, output: int, *_: int) -> int:
    """Return the bytes that a ragged all-to-all exchanges with an even load.

    These are the bytes of the smaller array, because the larger array has unused rows.
    """
    return min(operand, output)


def split_scopes(name: str) -> tuple[str, ...]:
    """Return the scopes of a name such as `while/body/transpose(jvp(maps))/psum`, without JAX's transformations.

    An operation of a backward pass has the scopes of the forward operation that it differentiates. If XLA merged
    several operations into one, the name lists all of them (`a/(b/psum:c/psum)`), and the result has the scopes of all
    of them.
    """
    return tuple(filter(None, (re.sub(r"^(?:[\w<>]*\()*|\)*$", "", scope) for scope in re.split("[/:]", name))))


def in_backward_pass(name: str) -> bool:
    """Return whether an operation belongs to a backward pass, by its name in the form that `split_scopes` takes."""
    return "transpose(" in name


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a program."""

    kind: str
    """Name of the collective in HLO."""
    axes: tuple[str, ...] | None
    """Mesh axes that the collective runs over; None if no mesh was given or the groups follow no axes."""
    devices: int
    """Size of a group; for a permute the number of devices that send."""
    sent: float
    """Bytes that each device sends in one run; for a permute the average over the mesh."""
    times: int | None
    """Number of runs; None inside a loop of unknown length."""
    scopes: tuple[str, ...] = ()
    """Names of the scopes around the collective (`jax.named_scope`, loops, functions), the innermost last."""
    hidden: bool = False
    """Whether a matrix product or a kernel runs between the collective's start and its end."""

    @property
    def total(self) -> float | None:
        """Bytes that a device sends in a run of the program; None if the number of runs is unknown."""
        return None if self.times is None else self.sent * self.times

    @property
    def min_total(self) -> float:
        """Minimum of the bytes that a device sends in a run: a loop of unknown length counts as one iteration."""
        return self.sent if self.times is None else self.sent * self.times

    def named(self, names: Container[str]) -> str | None:
        """Return the innermost scope that is one of `names`; None if there is none."""
        return next((scope for scope in reversed(self.scopes) if scope in names), None)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program. The costs count one run of the operation, without its `bodies`."""

    kind: str
    """The primitive of a jaxpr, or the opcode of HLO."""
    reads: tuple[int | None, ...]
    """Indices of the values that the operation reads; None for a constant."""
    writes: tuple[int, ...]
    """Indices of the values that the operation writes."""
    scopes: tuple[str, ...] = ()
    """Names of the scopes around the operation, the innermost last, without JAX's transformations."""
    is_backward: bool = False
    """Whether the operation belongs to a backward pass."""
    bodies: tuple["Program", ...] = ()
    """Programs that the operation runs: the body of a loop, the branches of a conditional."""
    trips: int | None = 1
    """Number of iterations of a loop; None if it is unknown."""
    consts: int = 0
    """Number of values that a loop reads unchanged in each iteration; they are the first of `reads`."""
    carry: int = 0
    """Number of values that a loop passes from iteration to iteration; they follow the constants in `reads`, and come
    first in `writes`."""
    flops: float = 0.0
    """Floating-point operations of a matrix product; 0 for kernels (Mosaic, Triton, cuDNN), whose text is not read."""
    cycles: float = 0.0
    """Cycles that a TPU's compiler estimates, including the body of a fusion; 0 if there is no estimate."""
    moved: float = 0.0
    """Bytes read from the device's main memory and written there; 0 for a jaxpr, since a compiler fuses operations."""
    transfer: Transfer | None = None
    """The transfer of a collective; None for any other operation."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in the order in which they run. A value that they read or write is an index into `sizes`."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    """Bytes of each value in the memory of the device."""
    host_sizes: tuple[int, ...]
    """Bytes of each value in the memory of the device's host."""
    inputs: tuple[int, ...]
    """Indices of the program's input values."""
    results: tuple[int | None, ...]
    """Indices of the values that the program returns; None for a constant."""
