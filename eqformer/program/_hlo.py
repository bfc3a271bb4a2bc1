"""Reader of compiled programs (HLO) as `Program`s, with each operation's flops, memory traffic and transfer."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jaxtyping import Int

from . import _hlo_text as hlo_text
from ._ir import COLLECTIVES, count_ragged_bytes, Operation, Program, sent_share, Transfer


AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Neighbors = Mapping[str, hlo_text.Instruction]  # the instructions of a computation by name


def read_hlo(compiled: jax.stages.Compiled | str, *, mesh: AnyMesh | None = None) -> Program:
    """Read a compiled program (`jax.jit(f).lower(...).compile()`, or its text), which runs on each device.

    With the `mesh` that the program was compiled for, transfers have the mesh axes that they run over. Raises a
    `ValueError` if the compiler cannot write the program's text, as for some programs for TPUs.
    """
    text = compiled if isinstance(compiled, str) else text_of(compiled)
    computations, entry = hlo_text.parse_hlo(text)
    counts = re.search(r"num_partitions=(\d+)", text), re.search(r"replica_count=(\d+)", text)
    devices = math.prod(int(match.group(1)) for match in counts if match)
    if mesh is not None and mesh.size != devices:
        raise ValueError(
            f"read_hlo(mesh={dict(mesh.shape)}): the mesh has {mesh.size} devices, but the program was "
            f"compiled for {devices}; pass the mesh that the program runs on."
        )
    return _HloReader(computations, devices, mesh).read(entry)


def text_of(compiled: jax.stages.Compiled) -> str:
    """Return the text of a compiled program; raise a `ValueError` if the compiler cannot write the text."""
    try:
        return compiled.as_text() or ""
    except Exception as error:  # jaxlib's own kind of error, which JAX does not name
        raise ValueError(
            "read_hlo: the compiler cannot write the text of this program, so its costs cannot be counted: "
            f"{str(error).splitlines()[0][:200]}"
        ) from error


class _HloReader:
    """Reader of the computations of a program. Each computation is read once."""

    def __init__(self, computations: hlo_text.Computations, devices: int, mesh: AnyMesh | None):
        self._computations, self._devices, self._mesh = computations, devices, mesh
        self._traffic = _Traffic(computations)
        self.read = functools.cache(self._read)

    def _read(self, name: str) -> Program:
        """Read the computation with this name; its values are the results of its instructions, in order."""
        lines = self._computations.get(name, [])
        neighbors = {line.name: line for line in lines}
        indices = {line.name: index for index, line in enumerate(lines)}
        hidden = hlo_text.find_hidden_starts(lines, self._computations)
        operations = [
            self._operation(line, tuple(indices.get(name) for name in line.operands), index, neighbors, hidden)
            for index, line in enumerate(lines)
        ]
        sizes = tuple(hlo_text.main_memory_size(line.result) for line in lines)
        inputs = [indices[line.name] for line in lines if line.opcode == "parameter"]
        roots = [indices[line.name] for line in lines if line.is_root]
        return Program(tuple(operations), sizes, (0,) * len(lines), tuple(inputs), tuple(roots))

    def _operation(
        self,
        line: hlo_text.Instruction,
        reads: tuple[int | None, ...],
        write: int,
        neighbors: Neighbors,
        hidden: set[str],
    ) -> Operation:
        kind = line.opcode.removesuffix("-start")
        transfer, bodies = None, ()
        if kind in COLLECTIVES:  # The computation that a collective calls only combines two numbers: it is left out.
            transfer = self._transfer(kind, line, neighbors, is_hidden=line.name in hidden)
        else:
            bodies = tuple(
                self._body(name, line, is_hidden=line.name in hidden) for name in hlo_text.called_computations(line)
            )
        return Operation(
            line.opcode,
            reads,
            (write,),
            hlo_text.scopes_of(line.attributes),
            hlo_text.is_backward_pass(line.attributes),
            bodies,
            hlo_text.count_trips(line, self._computations, neighbors) if line.opcode == "while" else 1,
            flops=_count_flops(line, neighbors),
            cycles=_read_cycles(line),
            moved=self._traffic.count(line, neighbors),
            transfer=transfer,
        )

    def _body(self, name: str, line: hlo_text.Instruction, is_hidden: bool) -> Program:
        """Read a computation that an instruction runs, with the transfers adjusted to the kind of the instruction."""
        if hlo_text.async_role(name, self._computations.get(name, [])) in (
            hlo_text.AsyncRole.OVERLAPS,
            hlo_text.AsyncRole.ENDS,
        ):
            return _map_transfers(self.read(name), lambda _: None)  # the collective was started elsewhere
        program = self.read(name)
        # Compilers for TPUs fuse an all-reduce with the slice that each device keeps, which is a reduce-scatter.
        if "AllReduceScatterFusion" in line.attributes:
            program = _map_transfers(program, _as_reduce_scatter)
        return _map_transfers(program, _hide) if is_hidden else program

    def _transfer(
        self, kind: str, line: hlo_text.Instruction, neighbors: Neighbors, is_hidden: bool
    ) -> Transfer | None:
        """Return the transfer of a collective; None if the collective sends nothing."""
        sizes = [hlo_text.size_of(neighbors[name].result) for name in line.operands]
        size = count_ragged_bytes(*sizes) if kind == "ragged-all-to-all" else sum(sizes)
        scopes = _collective_scopes(line, neighbors)
        if kind == "collective-permute":
            listed = re.search(r"source_target_pairs=\{(.*?)\}\}", line.attributes)
            matches = re.findall(r"(\d+),(\d+)", listed.group(1)) if listed else []
            pairs = np.array([(int(a), int(b)) for a, b in matches if a != b]).reshape(-1, 2)
            axes, sent = _axes_of(pairs, self._mesh, is_permute=True), size * len(pairs) / self._devices
            return Transfer(kind, axes, len(pairs), sent, 1, scopes, is_hidden) if sent else None
        groups = hlo_text.groups_of(line.attributes, self._devices)
        members = groups.shape[1]
        sent = float(size * sent_share(kind, members))
        return Transfer(kind, _axes_of(groups, self._mesh), members, sent, 1, scopes, is_hidden) if sent else None


def _map_transfers(program: Program, change: Callable[[Transfer], Transfer | None]) -> Program:
    """Return a program with `change` applied to each transfer, also in the bodies of operations."""
    operations = tuple(
        dataclasses.replace(
            operation,
            transfer=None if operation.transfer is None else change(operation.transfer),
            bodies=tuple(_map_transfers(body, change) for body in operation.bodies),
        )
        for operation in program.operations
    )
    return dataclasses.replace(program, operations=operations)


def _hide(transfer: Transfer) -> Transfer:
    return dataclasses.replace(transfer, hidden=True)


def _as_reduce_scatter(transfer: Transfer) -> Transfer:
    """Return an all-reduce as a reduce-scatter, which sends half as many bytes; return other transfers unchanged."""
    is_sum = transfer.kind == "all-reduce"
    return dataclasses.replace(transfer, kind="reduce-scatter", sent=transfer.sent / 2) if is_sum else transfer


def _collective_scopes(line: hlo_text.Instruction, neighbors: Neighbors) -> tuple[str, ...]:
    """Return the scopes of a collective.

    XLA for GPUs drops the scopes of a ragged all-to-all; the array that it writes over has the same scopes.
    """
    scopes = hlo_text.scopes_of(line.attributes)
    if scopes or not line.opcode.startswith("ragged-all-to-all"):
        return scopes
    output = hlo_text.source_of(neighbors[line.operands[1]], {"get-tuple-element", "copy", "bitcast"}, neighbors)
    return hlo_text.scopes_of(output.attributes)


def _axes_of(
    groups: Int[np.ndarray, "groups devices"], mesh: AnyMesh | None, is_permute: bool = False
) -> tuple[str, ...] | None:
    """Return the mesh axes along which a group's devices differ; None if a group lacks a device along these axes."""
    if mesh is None:
        return None
    positions = np.stack(np.unravel_index(groups, mesh.axis_sizes), axis=-1)
    differs = (positions != positions[:, :1]).any(axis=(0, 1))
    names = tuple(name for name, is_split in zip(mesh.axis_names, differs) if is_split)
    size = math.prod(length for length, is_split in zip(mesh.axis_sizes, differs) if is_split)
    return names if is_permute or size == groups.shape[1] else None


# Floating-point operations of matrix products, and a compiler's estimate of cycles.


def _read_cycles(line: hlo_text.Instruction) -> float:
    """Return the cycles that a TPU's compiler estimates; 0 if the instruction states none."""
    match = re.search(r'"estimated_cycles":"(\d+)"', line.attributes)
    cycles = float(match.group(1)) if match else 0.0
    return cycles if cycles < _UNKNOWN_CYCLES else 0.0


_UNKNOWN_CYCLES = 2.0**50  # A TPU's compiler states a larger number for kernels that it cannot estimate.


def _count_flops(line: hlo_text.Instruction, neighbors: Neighbors) -> float:
    """Return the floating-point operations of a matrix product; 0 for any other instruction."""
    if not all(name in neighbors for name in line.operands[:2]):
        return 0.0
    if line.opcode == "dot" or (line.opcode == "custom-call" and "__cublas$" in line.attributes):
        return _count_dot_flops(line, neighbors)
    if line.opcode == "convolution":
        return _count_convolution_flops(line, *(_dims_of(neighbors[name].result) for name in line.operands[:2]))
    return 0.0


def _count_dot_flops(line: hlo_text.Instruction, neighbors: Neighbors) -> float:
    dims = _dims_of(neighbors[line.operands[0]].result)
    match = re.search(r'lhs_contracting_dims"?[=:][\[{]([^\]}]*)', line.attributes)
    contracted = math.prod(dims[int(dim)] for dim in re.findall(r"\d+", match.group(1))) if match else 1
    return 2.0 * math.prod(_dims_of(line.result)) * contracted


def _count_convolution_flops(line: hlo_text.Instruction, inputs: list[int], kernel: list[int]) -> float:
    """Return the flops of a convolution; programs for TPUs write every matrix product as a convolution.

    The batch dims of the matrices are spatial dims of the convolution, and most taps of the kernel fall into the
    padding. Only taps that fall inside the input count.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    assert labels is not None
    input_labels, kernel_labels, result_labels = labels.groups()
    result, window = _dims_of(line.result), _window_of(line.attributes)
    flops = 2.0 * result[result_labels.index("b")] * result[result_labels.index("f")] * kernel[kernel_labels.index("i")]
    for dim, label in enumerate(sorted(label for label in result_labels if label.isdigit())):  # The spatial dims.
        length, taps = inputs[input_labels.index(label)], kernel[kernel_labels.index(label)]
        outputs = result[result_labels.index(label)]
        padding = int(window["pad"][dim].partition("_")[0]) if "pad" in window else 0
        stride, input_dilation, kernel_dilation = (
            int(window[key][dim]) if key in window else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        position = np.arange(outputs)[:, None] * stride - padding + np.arange(taps) * kernel_dilation
        is_inside = (position >= 0) & (position <= (length - 1) * input_dilation) & (position % input_dilation == 0)
        flops *= int(is_inside.sum())
    return flops


def _window_of(attributes: str) -> dict[str, list[str]]:
    """Return the properties of a convolution's window, such as `pad` and `stride`, as one text per spatial dim."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in match.group(1).split()) if match else {}
    return {name: value.split("x") for name, value in parts.items()}


def _dims_of(result: str) -> list[int]:
    """Return the sizes of the first array in a type."""
    match = re.search(r"\[([\d,]*)\]", result)
    return [int(size) for size in match.group(1).split(",") if size] if match else []


# Memory traffic.


class _Traffic:
    """Count of the bytes that instructions read and write in main memory.

    Each instruction reads its operands once and writes its result; a fusion is one instruction. If an instruction reads
    or updates a slice of an array, only the slice counts. If a Pallas kernel states the bytes that it accesses
    (`pl.CostEstimate`), these bytes count instead. A TPU's vector memory does not count.
    """

    def __init__(self, computations: hlo_text.Computations):
        self._computations = computations

    def count(self, line: hlo_text.Instruction, neighbors: Neighbors) -> float:
        """Return the bytes that an instruction reads and writes; `neighbors` contains its operands."""
        opcode = line.opcode
        if opcode in _FREE or opcode in _RUNS or opcode.endswith(("-done", "-update")):
            return 0.0
        if _ALLOCATES in line.attributes:
            return 0.0
        if opcode in ("fusion", "fusion-start"):
            return self._count_fusion(line, neighbors)
        if opcode == "custom-call" and (estimate := re.search(r'"bytes_accessed":"(\d+)"', line.attributes)):
            types = (*(neighbors[name].result for name in line.operands if name in neighbors), line.result)
            in_vector_memory = sum(hlo_text.size_of(result) - hlo_text.main_memory_size(result) for result in types)
            return max(0.0, float(estimate.group(1)) - in_vector_memory)
        sizes = [
            hlo_text.main_memory_size(neighbors[name].result) if name in neighbors else 0 for name in line.operands
        ]
        if opcode in _SLICES:  # reads as many bytes as it writes
            return 2.0 * hlo_text.main_memory_size(line.result)
        if opcode in _UPDATES:
            return 2.0 * sizes[_UPDATES[opcode]]
        if opcode == "slice-start":
            source, piece = hlo_text.split_arrays(line.result)[:2]
            return float(
                hlo_text.main_memory_size(piece) + (hlo_text.size_of(piece) if hlo_text.main_memory_size(source) else 0)
            )
        if opcode in _COPIES:  # the result is a tuple with the operand
            return float(sum(sizes) + hlo_text.main_memory_size(hlo_text.split_arrays(line.result)[_COPIES[opcode]]))
        is_cublas = opcode == "custom-call" and "__cublas$" in line.attributes
        output = hlo_text.split_arrays(line.result)[0] if is_cublas else line.result  # without cuBLAS's workspace
        return float(sum(sizes) + hlo_text.main_memory_size(output))

    def _count_fusion(self, line: hlo_text.Instruction, neighbors: Neighbors) -> float:
        """Return the bytes that a fusion reads from its operands and writes to its results."""
        body = hlo_text.fusion_body(line, self._computations)
        parameters = _parameters(body)
        bytes_read = 0.0
        for index, name in enumerate(line.operands):
            size = hlo_text.main_memory_size(neighbors[name].result) if name in neighbors else 0
            if size and index in parameters:
                bytes_read += min(size, sum(self._reads(parameters[index], body)))
            else:
                bytes_read += size
        return bytes_read + _count_written(line, body)

    def _reads(self, name: str, body: Neighbors, *, is_computed: bool = False) -> Iterator[float]:
        """Yield the bytes that each instruction of a fusion reads of the value `name`; infinity if it reads all of it.

        `is_computed` tells that the fusion computes the value, rather than reads it from memory.
        """
        for line in body.values():
            for index, operand in enumerate(line.operands):
                if operand == name:
                    yield from self._operand_reads(line, index, body, is_computed)

    def _operand_reads(
        self, line: hlo_text.Instruction, index: int, body: Neighbors, is_computed: bool
    ) -> Iterator[float]:
        """Yield the bytes that an instruction of a fusion, and the readers of its result, read of operand `index`.

        An in-place update reads nothing of the old value, unless the fusion computes that value.
        """
        if line.opcode in _VIEWS:
            yield from self._reads(line.name, body, is_computed=is_computed)
        elif line.opcode in _ELEMENTWISE and index == 0 and not line.is_root and line.result[0] != "(":
            # If the readers use only a slice of the result, the fusion reads only the operand's part for this slice.
            ratio = hlo_text.size_of(body[line.operands[0]].result) / hlo_text.size_of(line.result)
            yield from (ratio * size for size in self._reads(line.name, body, is_computed=True))
        elif line.opcode in _SLICES and index == 0:
            yield hlo_text.size_of(line.result)
        elif line.opcode in _UPDATES and index == 0:
            yield float("inf") if is_computed else 0.0
        elif line.opcode == "fusion":
            yield from self._inner_fusion_reads(line, index, body, is_computed)
        elif line.opcode not in ("tuple", "get-tuple-element"):
            yield float("inf")

    def _inner_fusion_reads(
        self, line: hlo_text.Instruction, index: int, body: Neighbors, is_computed: bool
    ) -> Iterator[float]:
        """Yield the bytes of an operand that a nested fusion reads.

        If the fusion returns a view of the operand, these are the bytes that the readers of the view read.
        """
        inner = hlo_text.fusion_body(line, self._computations)
        parameter = _parameters(inner)[index]
        # Compilers for TPUs express a change of tiling that moves no data as a fusion whose output aliases its operand.
        is_view = "output_to_operand_aliasing" in line.attributes and not line.is_root
        if not is_view:
            yield from self._reads(parameter, inner, is_computed=is_computed)
        if is_view or _returns_view(inner, parameter):
            yield from self._reads(line.name, body, is_computed=is_computed)


def _parameters(body: Neighbors) -> dict[int, str]:
    """Return the name of each parameter of a computation by the parameter's index."""
    return {int(line.literal): line.name for line in body.values() if line.opcode == "parameter"}


def _returns_view(body: Neighbors, name: str) -> bool:
    """Return whether the result of a fusion is only a view (`bitcast`) of the value `name`."""
    for line in body.values():
        if name in line.operands and line.opcode == "bitcast":
            return line.is_root or _returns_view(body, line.name)
    return False


def _count_written(line: hlo_text.Instruction, body: Neighbors) -> float:
    """Return the bytes that a fusion writes; an in-place update writes only the update."""
    results, outputs = hlo_text.split_arrays(line.result), hlo_text.fusion_outputs(body)
    if line.opcode == "fusion-start":  # Its type lists operands, results, and a number that `fusion-done` waits for.
        results = results[len(line.operands) : -1]
    if len(outputs) != len(results):
        return float(hlo_text.main_memory_size(line.result))
    total = 0.0
    for output, result in zip(outputs, results):
        size = hlo_text.main_memory_size(result)
        if output.opcode in _UPDATES:
            size = min(size, hlo_text.size_of(body[output.operands[_UPDATES[output.opcode]]].result))
        total += size
    return total


_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "optimization-barrier"}
_FREE |= {"add-dependency", "partition-id", "replica-id"}
_RUNS = {"while", "call", "conditional", "async-start"}  # The instructions of their computations count instead.
_ALLOCATES = 'custom_call_target="AllocateBuffer"'  # This call only allocates memory.
_VIEWS = {"bitcast", "reshape"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_ELEMENTWISE = {"convert", "reduce"}  # A fusion computes these only for the elements of the result that it needs.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> index of the operand that is the update
_COPIES = {"copy-start": 0, "all-gather-start": 1, "collective-permute-start": 1}  # -> index in the tuple
