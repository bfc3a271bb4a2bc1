"""Estimate of the peak memory of a traced program, from the lifetimes of its values.

The estimate follows rules that all compilers share. A compiler may order, fuse and place operations differently:
docs/accelerators-planning.md compares the estimate with compiled steps.
"""

import functools
from collections.abc import Callable, Collection
from typing import NamedTuple

from ._ir import Operation, Program


# Causes: the purposes for which values are in memory.
GATHERED, GRADIENTS, KEPT, WORK = "gathered parameters", "gradients", "kept for the backward pass", "worked on"
IN_FLIGHT = "sent beside a layer's work"


class PeakMemory(NamedTuple):
    """Bytes that a program holds at its peak, without its inputs."""

    size: int
    """Total bytes."""
    by_cause: dict[str, int]
    """The total, divided by the causes of the memory, such as `gradients`."""


def estimate_peak(program: Program) -> PeakMemory:
    """Estimate the bytes that a traced program holds at its peak, without its inputs.

    A value lives from the operation that writes it to the last operation that reads it. All compilers share these
    rules:

    - Elementwise results that only elementwise operations and reductions read are never written. An exception is the
      result of a convolution (a sum of overlapping slices of one array) that several operations read.
    - If an operation can work in place, its result replaces an operand of the same size that is not read any more.
    - A product that is only added to an array is added in place.
    - A loop's carry stays in place, and a branch's results are written to the results of the conditional.
    - While an iteration of a loop runs, the parameters of the next iteration are gathered, and a gradient is scattered.
    """
    size, parts = _walk(program)
    by_cause: dict[str, int] = {}
    for cause, part in parts:
        by_cause[cause] = by_cause.get(cause, 0) + part
    return PeakMemory(size, by_cause)


def count_host_bytes(program: Program) -> int:
    """Return the bytes that a program's loops write to the memory of the device's host, for later operations."""
    loops = [operation for operation in program.operations if operation.kind == "scan"]
    stored = sum(program.host_sizes[value] for loop in loops for value in loop.writes)
    bodies = [body for operation in program.operations for body in operation.bodies]
    return stored + max(map(count_host_bytes, bodies), default=0)


Parts = list[tuple[str, int]]  # Causes, and the bytes of a part of the memory.


def _walk(program: Program, loop: Operation | None = None, placed: Collection[int] = ()) -> tuple[int, Parts]:
    """Return the bytes that a program allocates at its peak, and the causes of these bytes.

    If the program is the body of a loop, `loop` is this loop. `placed` are the indices of a branch's results that are
    allocated before the branch runs.
    """
    lifetimes = _Lifetimes(program)
    unwritten = {*lifetimes.views, *lifetimes.fused, *_added_in_place(lifetimes), *_results_in_place(lifetimes, placed)}
    unwritten |= set() if loop is None else _carried_in_place(lifetimes, loop)
    alive: dict[int, int] = {}
    peak, parts = 0, []
    for index, operation in enumerate(program.operations):
        operands = map(lifetimes.root, operation.reads)
        # Operands that no later operation reads, so that a result may be written over them.
        free = {operand for operand in operands if operand in alive and lifetimes.last_use(operand) == index}
        new, made_in_branch = [], []
        for result, value in enumerate(operation.writes):
            if value in unwritten:
                continue
            if (operand := _find_overwritten(lifetimes, operation, result, free)) is not None:
                free.discard(operand)
                del alive[operand]
            elif operation.kind == "cond":  # The branch allocates this result itself, perhaps after its own peak.
                made_in_branch.append(value)
                continue
            new.append(value)
        inside = _walk_bodies(operation, [n for n, value in enumerate(operation.writes) if value not in made_in_branch])
        # Results that branches allocate do not exist yet while the bodies run. Afterwards, the bodies take no memory.
        for values, (inner_size, inner_parts) in ((new, inside), (made_in_branch, (0, []))):
            alive |= {value: program.sizes[value] for value in values if value not in alive}
            size = sum(alive.values()) + inner_size
            if size > peak:
                peak = size
                parts = [(_cause_of(lifetimes, value), size) for value, size in alive.items()] + inner_parts
        alive = {value: size for value, size in alive.items() if lifetimes.last_use(value) > index}
    return peak, parts


def _walk_bodies(operation: Operation, placed: Collection[int]) -> tuple[int, Parts]:
    """Return the bytes that the bodies of an operation allocate at their peak, and the causes of these bytes."""
    if operation.kind == "scan":
        size, parts = _walk(operation.bodies[0], operation)
        in_flight = _count_in_flight(operation)
        return size + in_flight, [*parts, (IN_FLIGHT, in_flight)]
    if operation.kind == "while":
        return _walk(operation.bodies[0], operation)
    if operation.kind == "cond":
        return max((_walk(body, placed=placed) for body in operation.bodies), key=lambda peak: peak[0])
    return 0, []


def _count_in_flight(loop: Operation) -> int:
    """Return the bytes of arrays that a loop sends and receives while an iteration runs.

    These are the parameters of the next iteration, which are being gathered, and the largest gradient of the previous
    iteration, which is still being scattered.
    """
    body, from_slices = loop.bodies[0], set(loop.bodies[0].inputs[loop.consts + loop.carry :])
    gathered = scattered = 0
    for operation in body.operations:
        operand = operation.reads[0] if operation.reads else None
        if operand in from_slices and (operation.kind in VIEWS or operation.kind == "convert_element_type"):
            from_slices.update(operation.writes)
        elif operand in from_slices and operation.kind in ("all_gather", "all_gather_invariant"):
            gathered += body.sizes[operation.writes[0]]
        elif operand is not None and operation.kind in ("psum_scatter", "reduce_scatter"):
            scattered = max(scattered, body.sizes[operand])
    return gathered + scattered if loop.trips is not None and loop.trips > 1 else 0


# Operations whose result takes no memory of its own: compilers remove them, or only change the operand's shape.
VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "pcast", "pvary", "copy", "stop_gradient", "name"}
VIEWS |= {"optimization_barrier", "sharding_constraint"}
SUMS = {"reduce_sum", "reduce_max", "reduce_min", "argmax", "reduce_and", "reduce_or"}
# Operations that are not fused and may write over an operand; elementwise operations may, too (`_find_overwritten`).
IN_PLACE = {"scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "psum", "psum_invariant", "while", "cond"}
# Operations that change an operand, so that it must be in memory even if it is a constant.
UPDATES = {"scan", "while", "scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "ragged_all_to_all"}
# Operations that compilers do not fuse with their readers. Their results are in memory, and so are their operands,
# except for the operands of `SUMS`.
UNFUSED = SUMS | IN_PLACE | UPDATES | {"dot_general", "cond", "shard_map", "gather", "sort", "cumsum", "cumlogsumexp"}
UNFUSED |= {"cummax", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "pallas_call", "concatenate", "pad"}
UNFUSED |= {"all_gather", "all_gather_invariant", "psum_scatter", "reduce_scatter", "all_to_all", "ppermute", "top_k"}
UNFUSED |= {"random_bits", "threefry2x32", "custom_vjp_call", "custom_vmap_call", "mpmd_map", "device_put"}


class _Lifetimes:
    """The writer, the readers and the last use of each value of a program, and the values that are never in memory."""

    def __init__(self, program: Program):
        self.program, self.operations = program, program.operations
        self.writers = {value: index for index, operation in enumerate(self.operations) for value in operation.writes}
        self.views: dict[int, int] = {}  # view -> the value that it is a view of
        for operation in self.operations:
            if self._is_view(operation):
                for operand, value in zip(operation.reads, operation.writes):
                    if operand is not None and program.sizes[operand] == program.sizes[value]:
                        self.views[value] = operand
        self.readers: dict[int, list[int]] = {}
        for index, operation in enumerate(self.operations):
            if not (operation.writes and operation.writes[0] in self.views):
                for operand in operation.reads:
                    if operand is not None:
                        self.readers.setdefault(self.root(operand), []).append(index)
        self.results = {self.root(value) for value in program.results if value is not None}
        self._slices = functools.cache(self._find_slices)
        self.fused = {value for value in self.writers if self._is_fused(value)}
        self.last_use: Callable[[int], int] = functools.cache(self._find_last_use)

    def root(self, value: int | None) -> int:
        """Return the value that `value` is a view of, or `value` itself if it is no view; -1 for a constant."""
        while value in self.views:
            value = self.views[value]
        return -1 if value is None else value

    def writer(self, value: int | None) -> Operation | None:
        """Return the operation that makes a value; None for an input of the program."""
        index = self.writers.get(self.root(value))
        return None if index is None else self.operations[index]

    def _is_view(self, operation: Operation) -> bool:
        """Return whether an operation is one of `VIEWS`, or a sum over dims of size 1, which only changes the shape."""
        summed = operation.reads[0] if operation.kind == "reduce_sum" else None
        sizes = self.program.sizes
        return operation.kind in VIEWS or (summed is not None and sizes[summed] == sizes[operation.writes[0]])

    def _is_fused(self, value: int) -> bool:
        """Return whether a value is computed inside the operations that read it, and never written."""
        operation = self.operations[self.writers[value]]
        if value in self.views or value in self.results or operation.kind in UNFUSED or self._is_convolution(value):
            return False
        kinds = {self.operations[index].kind for index in self.readers.get(value, [])}
        if operation.kind in ("broadcast_in_dim", "iota"):
            return kinds.isdisjoint(UPDATES)
        if operation.kind == "convert_element_type":  # A gather casts only the rows that it reads.
            kinds -= {"gather"}
        return kinds.isdisjoint(UNFUSED - SUMS)

    def _is_convolution(self, value: int) -> bool:
        """Return whether a sum with several readers reads an array more than once, as a convolution does.

        Compilers write such a sum, since reading it takes less time than computing it for each reader.
        """
        if self.operations[self.writers[value]].kind != "add" or len(set(self.readers.get(value, []))) < 2:
            return False
        bytes_read: dict[int, int] = {}
        for source, piece in self._slices(value):
            bytes_read[source] = bytes_read.get(source, 0) + self.program.sizes[piece]
        return any(size > self.program.sizes[source] for source, size in bytes_read.items())

    def _find_slices(self, value: int) -> frozenset[tuple[int, int]]:
        """Return the slices that an elementwise value is computed from, as pairs of the sliced array and the slice."""
        operation, slices = self.operations[self.writers[value]], set[tuple[int, int]]()
        if operation.kind in UNFUSED:
            return frozenset()
        for operand in map(self.root, operation.reads):
            if operation.kind == "slice":
                slices.add((operand, value))
            elif operand in self.writers and not self._is_convolution(operand):
                slices |= self._slices(operand)
        return frozenset(slices)

    def _find_last_use(self, value: int) -> int:
        """Return the index of the last operation that reads a value, or a fused value computed from it."""
        if value in self.results:
            return len(self.operations)
        last = self.writers.get(value, -1)
        for index in self.readers.get(value, []):
            results = map(self.root, self.operations[index].writes)
            last = max(last, index, *(self.last_use(result) for result in results if result in self.fused))
        return last


def _find_overwritten(lifetimes: _Lifetimes, operation: Operation, result: int, free: Collection[int]) -> int | None:
    """Return the operand over which an operation writes its result of index `result`; None if there is no such operand.

    `free` are the operands that no later operation reads; only these may be written over.
    """
    if operation.kind == "scan":
        operand = lifetimes.root(operation.reads[operation.consts + result]) if result < operation.carry else -1
        return operand if operand in free else None
    if operation.kind == "ragged_all_to_all":  # The second operand is the array to write to.
        operand = lifetimes.root(operation.reads[1])
        return operand if operand in free else None
    if operation.kind in UNFUSED - IN_PLACE:
        return None
    sizes = lifetimes.program.sizes
    return next((value for value in free if sizes[value] == sizes[operation.writes[result]]), None)


def _results_in_place(lifetimes: _Lifetimes, placed: Collection[int]) -> set[int]:
    """Return the results of a branch that are allocated before it runs, and the values that they are written over."""
    values: set[int] = set()
    for value in {lifetimes.root(lifetimes.program.results[index]) for index in placed}:
        while value in lifetimes.writers and value not in values:
            values.add(value)
            index = lifetimes.writers[value]
            operation = lifetimes.operations[index]
            operands = (operand for operand in map(lifetimes.root, operation.reads) if operand in lifetimes.writers)
            free = {operand for operand in operands if lifetimes.last_use(operand) == index} - values
            operand = _find_overwritten(lifetimes, operation, operation.writes.index(value), free)
            value = -1 if operand is None else operand
    return values


def _carried_in_place(lifetimes: _Lifetimes, loop: Operation) -> set[int]:
    """Return a loop's next carries that are written over carries which no later operation reads."""
    program, values = lifetimes.program, set()
    for old, result in zip(program.inputs[loop.consts : loop.consts + loop.carry], program.results):
        new = lifetimes.root(result)
        if new in lifetimes.writers and lifetimes.last_use(old) <= lifetimes.writers[new]:
            values.add(new)
    return values


def _added_in_place(lifetimes: _Lifetimes) -> set[int]:
    """Return the values that are never allocated because an addition accumulates them in its other term.

    There are two kinds. The first is a product that only the addition reads, if nothing else reads the other term. The
    second is a scatter into zeros that only the addition reads; the zeros are not allocated either.
    """
    values = set()
    for value, index in lifetimes.writers.items():
        operation, readers = lifetimes.operations[index], lifetimes.readers.get(value, [])
        is_added = len(readers) == 1 and lifetimes.operations[readers[0]].kind in ("add", "add_any")
        if not is_added or value in lifetimes.results:
            continue
        if operation.kind == "dot_general":
            addends = map(lifetimes.root, lifetimes.operations[readers[0]].reads)
            terms = [addend for addend in addends if addend not in (value, -1)]
            if terms and len(lifetimes.readers.get(terms[0], [])) == 1:
                values.add(value)
        elif operation.kind in ("scatter-add", "scatter_add"):
            target = lifetimes.writer(operation.reads[0])
            if target is not None and target.kind == "broadcast_in_dim":
                values |= {value, lifetimes.root(operation.reads[0])}
    return values


def _cause_of(lifetimes: _Lifetimes, value: int) -> str:
    """Guess the cause of a value's memory from the operation that makes the value.

    A loop's carry of more than 1 MiB is taken for summed gradients, and so is a `broadcast_in_dim`, which makes the
    zeros that gradients are added to.
    """
    operation = lifetimes.operations[lifetimes.writers[value]]
    is_cast = operation.kind == "convert_element_type"
    source = lifetimes.writer(operation.reads[0]) if is_cast else operation
    if (source or operation).kind.startswith("all_gather"):
        return GATHERED
    is_carry = operation.kind == "scan" and value in operation.writes[: operation.carry]
    is_large_carry = is_carry and lifetimes.program.sizes[value] > 2**20
    if operation.is_backward or operation.kind == "broadcast_in_dim" or is_large_carry:
        return GRADIENTS
    return KEPT if operation.kind == "scan" else WORK
