"""The intermediate form of a program: operations in the order in which they run, read from a jaxpr or from HLO."""

import dataclasses
import re
from collections.abc import Container


FURTHER_ROUNDS = "further rounds of choices"
"""Named scope of loops that only an uneven load of experts enters, such as rounds of an exchange behind the first: the
costs of a program leave them out."""

# Operations that run one of their bodies, in jaxprs and in HLO.
CONDITIONALS = ("cond", "conditional")

# Collectives, in HLO's words.
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

    The figures are those of rings (Patarasuk and Yuan 2009).
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
    """Return the bytes of the rows of a ragged all-to-all with an even load: one array may have more room than that."""
    return min(operand, output)


def split_scopes(name: str) -> tuple[str, ...]:
    """Return the scopes of a name such as `while/body/transpose(jvp(maps))/psum`, without JAX's transformations.

    An operation of a backward pass has the scopes of the operation that it is the backward pass of. Where XLA has made
    several operations one (`a/(b/psum:c/psum)`), all scopes are there.
    """
    return tuple(filter(None, (re.sub(r"^(?:[\w<>]*\()*|\)*$", "", scope) for scope in re.split("[/:]", name))))


def in_backward_pass(name: str) -> bool:
    """Return whether an operation with a name such as that of `split_scopes` belongs to a backward pass."""
    return "transpose(" in name


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a program."""

    kind: str
    """Name of the collective in HLO."""
    axes: tuple[str, ...] | None
    """Mesh axes that it runs over; None if no mesh was given or its groups follow no axes."""
    devices: int
    """Size of a group; for a permute the number of devices that send."""
    sent: float
    """Bytes that each device sends in one run; for a permute the average over the mesh."""
    times: int | None
    """Number of runs; None inside a loop of unknown length."""
    scopes: tuple[str, ...] = ()
    """The names (of `jax.named_scope`, loops and functions) that it stands in, the innermost last."""
    hidden: bool = False
    """Whether other work runs between its start and its end."""

    @property
    def total(self) -> float | None:
        """Bytes sent by a device over a run of the program; `None` where the number of times is unknown."""
        return None if self.times is None else self.sent * self.times

    @property
    def least(self) -> float:
        """Bytes sent by a device over a run of the program, at least: a loop of unknown length counts once."""
        return self.sent if self.times is None else self.sent * self.times

    def named(self, names: Container[str]) -> str | None:
        """Return the innermost scope that is one of `names`; None if there is none."""
        return next((scope for scope in reversed(self.scopes) if scope in names), None)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program. Its costs are those of one run, without those of the programs that it runs."""

    kind: str
    """The primitive of a jaxpr, or the opcode of HLO."""
    reads: tuple[int | None, ...]
    """Numbers of the values that it reads; None for a constant."""
    writes: tuple[int, ...]
    """Numbers of the values that it writes."""
    scopes: tuple[str, ...] = ()
    """The names that it stands in, the innermost last, without JAX's transformations."""
    is_backward: bool = False
    """Whether it belongs to a backward pass."""
    bodies: tuple["Program", ...] = ()
    """Programs that it runs: the body of a loop, the branches of a conditional."""
    trips: int | None = 1
    """How often it runs its bodies; None for a loop of unknown length."""
    consts: int = 0
    """How many of the values that a loop reads are the same in each iteration; they come first."""
    carry: int = 0
    """How many values a loop hands from iteration to iteration: they come behind the constants among the values that it
    reads, and first among those that it writes."""
    flops: float = 0.0
    """Floating-point operations of a matrix product; those in kernels (Mosaic, Triton, cuDNN) are not known."""
    cycles: float = 0.0
    """Cycles as a TPU's compiler estimates them, those of a fusion's own program included; 0 where it says none."""
    moved: float = 0.0
    """Bytes read from the device's main memory and written there; 0 in a jaxpr, whose results may never be written."""
    transfer: Transfer | None = None
    """What it sends."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in the order in which they run, over numbered values."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    """Bytes of each value in the memory of the device."""
    host_sizes: tuple[int, ...]
    """Bytes of each value in the memory of the device's host."""
    inputs: tuple[int, ...]
    """Numbers of the values that the program is given."""
    results: tuple[int | None, ...]
    """Numbers of the values that it returns; None for a constant."""
