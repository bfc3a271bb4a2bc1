"""Costs of a program, as sums over its operations: matrix products, cycles, memory traffic, communication and time.

The body of a loop counts once per iteration, or once if the number of iterations is unknown. A conditional counts as
its most expensive branch. `CompiledCosts` holds all costs of a compiled program as plain data that can be written to a
file. `time_account` divides the measured time of a program, from a trace, by kind of work and by module.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

import jax

from .._files import JsonObject
from ._buffers import Buffer, largest_buffers
from ._hlo import read_hlo, text_of
from ._hlo_text import called_computations, Computations, Instruction, is_backward_pass, module_of, parse_hlo, scopes_of
from ._ir import CONDITIONALS, Program, Transfer


MAX_BUFFERS = 10  # buffers that `CompiledCosts` lists
_CONTROL_FLOW = {"scan", "while", "call", "async-start", *CONDITIONALS}


def count_flops(program: Program) -> float:
    """Return the floating-point operations of all matrix products; a multiplication and an addition are two.

    Products in kernels (Mosaic, Triton) and in libraries other than cuBLAS, such as cuDNN, are not counted.
    """
    return _sum_costs(program, "flops", fusion_bodies="all")


def count_cycles(program: Program) -> int:
    """Return the cycles that a TPU's compiler estimates; 0 if it gives no estimate."""
    # A fusion's cycles include the cycles of its body, so the body counts only if the compiler gives the fusion no
    # cycles.
    return round(_sum_costs(program, "cycles", fusion_bodies="without own cost"))


def count_moved_bytes(program: Program) -> float:
    """Return the bytes that a compiled program reads and writes in the device's main memory.

    Each operation reads its operands once and writes its result; a fusion is one operation. Bytes in a TPU's vector
    memory do not count, nor bytes that a kernel reads twice.
    """
    return _sum_costs(program, "moved", fusion_bodies="none")


def _sum_costs(
    program: Program,
    field: Literal["flops", "cycles", "moved"],
    *,
    fusion_bodies: Literal["all", "without own cost", "none"],
) -> float:
    """Sum one field of a program's operations; `fusion_bodies` says for which fusions the body counts, too."""
    total = 0.0
    for operation in program.operations:
        cost = attrgetter(field)(operation)
        total += cost
        enters = fusion_bodies == "all" or (fusion_bodies == "without own cost" and not cost)
        if operation.kind in _CONTROL_FLOW or enters:
            costs = [_sum_costs(body, field, fusion_bodies=fusion_bodies) for body in operation.bodies]
            inner = max(costs, default=0.0) if operation.kind in CONDITIONALS else sum(costs)
            total += (1 if operation.trips is None else operation.trips) * inner
    return total


def list_transfers(program: Program) -> tuple[Transfer, ...]:
    """Return the collectives of one run of a program, with the bytes that each device sends.

    Over `n` devices an all-reduce of `S` bytes sends `2(n-1)/n S`, an all-gather `(n-1)/n` of its result, a
    reduce-scatter and an all-to-all `(n-1)/n` of their operands (a ragged all-to-all is counted with an even load), and
    a permute `S` times the share of devices that send. A loop's collectives count once per iteration. A conditional
    counts as the branch that sends most, and an exchange of experts' tokens as its first round. Sizes are read from the
    program: XLA's CPU backend, for example, sums 16-bit numbers as float32. A traced program lacks the collectives that
    the partitioner adds, and counts all ticks of a pipeline, although a device is idle in some of them.
    """
    return tuple(transfer for transfer in _multiply_out(program) if transfer.times != 0)


def _multiply_out(program: Program) -> Iterator[Transfer]:
    """Yield all transfers of a program, also in loops and conditionals, with the number of times that each runs."""
    for operation in program.operations:
        if operation.transfer is not None:
            yield operation.transfer
        parts = [tuple(_multiply_out(body)) for body in operation.bodies]
        if operation.kind in CONDITIONALS:
            parts = [max(parts, key=_total_bytes, default=())]
        for transfer in (transfer for part in parts for transfer in part):
            times, trips = transfer.times, operation.trips
            yield dataclasses.replace(transfer, times=None if times is None or trips is None else times * trips)


def _total_bytes(transfers: Iterable[Transfer]) -> float:
    """Return the bytes of all transfers; infinity if a transfer is in a loop of unknown length."""
    return float(sum(math.inf if transfer.total is None else transfer.total for transfer in transfers))


def bytes_sent(transfers: Iterable[Transfer], *, axes: tuple[str, ...] | None = None) -> float:
    """Return the bytes that each device sends in all; with `axes`, only bytes sent over exactly these mesh axes.

    Raises a `ValueError` if one of these transfers is in a loop of unknown length.
    """
    chosen = [transfer for transfer in transfers if axes is None or set(transfer.axes or ()) == set(axes)]
    unknown = [transfer.kind for transfer in chosen if transfer.times is None]
    if unknown:
        raise ValueError(
            f"bytes_sent(transfers): the length of every loop must be known, but these collectives are in a loop of "
            f"unknown length: {', '.join(unknown)}; give the loop a fixed length, or leave these transfers out."
        )
    return float(sum(transfer.total or 0 for transfer in chosen))


@dataclasses.dataclass(frozen=True)
class CompiledCosts:
    """Memory, operations and communication of a compiled program.

    `argument`, `temporary`, `peak` and `on_host` are the compiler's figures. All other fields, except for `platform`,
    are read from the program's text.
    """

    argument: int
    """Bytes of the program's arguments on a device."""
    temporary: int
    """Bytes of temporary buffers on a device."""
    peak: int
    """Bytes at the peak; the sum of `argument` and `temporary` if the compiler reports no peak."""
    buffers: tuple[Buffer, ...] = ()
    """The largest temporary buffers that exist at the peak, by `largest_buffers`."""
    operations: float = 0.0
    """Floating-point operations of matrix products, by `count_flops`."""
    moved: float = 0.0
    """Bytes read from main memory and written there, by `count_moved_bytes`."""
    cycles: int = 0
    """Cycles by the estimate of a TPU's compiler (`count_cycles`); 0 if there is none."""
    transfers: tuple[Transfer, ...] = ()
    """The program's collectives, by `list_transfers`."""
    unread: str = ""
    """Reason why the program's text, and the figures read from it, are not available; else empty."""
    on_host: int = 0
    """Bytes of arguments and temporaries in the memory of the device's host, in addition to those on the device."""
    platform: str = ""
    """JAX's name of the platform that the program was compiled for; empty if the program has no arguments."""

    @property
    def held(self) -> int:
        """Bytes that a device must have to run the program.

        On TPUs, these are the bytes at the peak: the compiler places every array and refuses a program whose peak
        exceeds the memory, and the compiler's figure of temporaries includes space that is unused at the peak. On other
        platforms, these are the bytes of the arguments and of the temporaries, which are allocated as one block.
        """
        return self.peak if self.platform == "tpu" else self.argument + self.temporary

    def fits(self, memory: int) -> bool:
        """Return whether a device with `memory` bytes can run the program.

        A program for TPUs always fits, because the compiler for TPUs refuses a program that does not.
        """
        return self.platform == "tpu" or self.held <= memory

    @property
    def sent(self) -> float:
        """Bytes that a device sends; a loop of unknown length counts as one iteration."""
        return float(sum(transfer.min_total for transfer in self.transfers))

    @property
    def hidden(self) -> float:
        """Bytes that a device sends while other work runs."""
        return float(sum(transfer.min_total for transfer in self.transfers if transfer.hidden))

    def as_dict(self) -> JsonObject:
        """Return all figures as plain data."""
        return dataclasses.asdict(self) | {"buffers": [buffer._asdict() for buffer in self.buffers]}

    @classmethod
    def from_dict(cls, data: JsonObject) -> "CompiledCosts":
        """Return the costs whose `as_dict` is `data`, which may have been written as JSON and read again."""
        buffers = tuple(Buffer(**row | {"scopes": tuple(row["scopes"])}) for row in data["buffers"])
        transfers = []
        for row in data["transfers"]:
            axes = None if row["axes"] is None else tuple(row["axes"])
            transfers.append(Transfer(**row | {"axes": axes, "scopes": tuple(row["scopes"])}))
        return cls(**data | {"buffers": buffers, "moved": data["moved"], "transfers": tuple(transfers)})


def read_compiled(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
) -> CompiledCosts:
    """Return the costs of a compiled program.

    With the `mesh` that the program was compiled for, each transfer has the mesh axes that it runs over.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    argument, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    argument_on_host = memory.host_argument_size_in_bytes
    # The compiler's peak includes arrays in the host's memory. The compiler does not state how many of the host's
    # temporaries exist at the peak, so only the host's arguments are subtracted.
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
        buffers=tuple(largest_buffers(text)[1][:MAX_BUFFERS]),
        operations=count_flops(program),
        moved=count_moved_bytes(program),
        cycles=count_cycles(program),
        transfers=list_transfers(program),
    )


def _platform(compiled: jax.stages.Compiled) -> str:
    """Return the platform that a program was compiled for; empty if the program has no arguments to read it from."""
    shardings = jax.tree.leaves(compiled.input_shardings)
    return next((device.platform for sharding in shardings for device in sharding.device_set), "")


KINDS = ("products", "elementwise", "reductions", "copies", "fills", "messages", "loops", "nothing")
_LOOPS = {"while", "conditional", "call"}
_MESSAGES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-", "ragged-all-to-all"
_PRODUCTS = {"dot", "convolution", "custom-call"}
_SOURCES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_FILLS = _SOURCES | {"broadcast", "iota"}
_COPIES = _FILLS | set("copy transpose reshape slice dynamic-slice dynamic-update-slice concatenate pad".split())
_COPIES |= set("convert compare select and or not add clamp gather".split())  # index arithmetic, casts, choices


class Span(NamedTuple):
    """An interval in which an operation ran on a thread, in seconds from an arbitrary origin."""

    thread: str
    name: str
    start: float
    end: float


class Work(NamedTuple):
    """Seconds that a program spent on one kind of work in one module."""

    kind: str
    """One of `KINDS`. `nothing`: no operation ran. `loops`: a loop ran, but no operation of its body. `messages`: only
    collectives ran, so the device waited for others."""
    module: str
    """Path of the module; empty for operations outside of modules."""
    is_backward: bool
    seconds: float


def time_account(text: str, spans: Iterable[Span]) -> tuple[Work, ...]:
    """Return the seconds from the first operation's start to the last operation's end, by kind and module.

    Entries are sorted, the longest first. `text` is the text of the compiled program (HLO); spans that are not named
    for one of its operations are left out. Threads that are busy at the same time share that time equally, so the
    seconds add up to the time that passed. If an operation runs inside another on the same thread, as in a loop's body,
    only the inner operation counts. A collective counts only while no other kind of work runs, and a loop only while
    nothing else runs.
    """
    work_of = _classify_operations(text)
    spans = [span for span in spans if span.name in work_of and span.end > span.start]
    # At the same time, ends come before starts, and the longer of two spans that start together is the outer one.
    points = [(span.start, 1, -span.end, index) for index, span in enumerate(spans)]
    points = sorted(points + [(span.end, 0, 0.0, index) for index, span in enumerate(spans)])
    open_spans: dict[str, list[int]] = defaultdict(list)  # of each thread, the innermost last
    seconds: dict[tuple[str, str, bool], float] = defaultdict(float)
    previous = points[0][0] if points else 0.0
    for now, is_start, _, index in points:
        if now > previous:
            innermost = [work_of[spans[stack[-1]].name] for stack in open_spans.values() if stack]
            working = [work for work in innermost if work[0] not in ("messages", "loops")]
            working = working or [work for work in innermost if work[0] == "messages"]
            working = working or innermost or [("nothing", "", False)]
            for work in working:
                seconds[work] += (now - previous) / len(working)
        previous, stack = now, open_spans[spans[index].thread]
        stack.append(index) if is_start else stack.remove(index)
    return tuple(Work(*work, duration) for work, duration in sorted(seconds.items(), key=lambda item: -item[1]))


def _classify_operations(text: str) -> dict[str, tuple[str, str, bool]]:
    """Return the kind and the module of each operation, and whether it belongs to a backward pass."""
    computations, _ = parse_hlo(text)
    work_of = {}
    for lines in computations.values():
        for line in lines:
            scopes = scopes_of(line.attributes)[:-1]  # The last scope is the operation's name.
            work_of[line.name] = _kind_of(line, computations), module_of(scopes), is_backward_pass(line.attributes)
    return work_of


def _kind_of(line: Instruction, computations: Computations) -> str:
    if line.opcode in _LOOPS:
        return "loops"
    if line.opcode.startswith(_MESSAGES):
        return "messages"
    opcodes = {line.opcode}
    if line.opcode == "fusion":
        opcodes = {inner.opcode for name in called_computations(line) for inner in computations[name]}
    if opcodes & _PRODUCTS:
        return "products"
    if opcodes & {"reduce", "reduce-window"}:
        return "reductions"
    return "fills" if opcodes <= _FILLS else "copies" if opcodes <= _COPIES else "elementwise"
