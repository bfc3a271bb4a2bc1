"""Parser of the text of a compiled program (HLO), and queries about its instructions."""

import enum
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from ._ir import FURTHER_ROUNDS, in_backward_pass, split_scopes


class Instruction(NamedTuple):
    """One instruction of a computation: `name = result opcode(operands), attributes`."""

    name: str
    result: str
    """The type of the result."""
    opcode: str
    operands: tuple[str, ...]
    """Names of the instructions whose results are read."""
    attributes: str
    """The text after the closing bracket of the operands."""
    literal: str = ""
    """The text in the brackets: the value of a constant, the index of a parameter."""
    is_root: bool = False
    """Whether the instruction's result is the computation's result."""

    @property
    def has_tuple_result(self) -> bool:
        """Whether the result is a tuple, `(f32[2], s32[])`."""
        return self.result.startswith("(")


Computations = Mapping[str, Sequence[Instruction]]


def parse_hlo(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of each computation by its name, and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            current = start.group(2)
            computations[current] = []
            entry = current if start.group(1) else entry
        elif match := re.match(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$", line):
            root, name, result, opcode, tail = match.groups()
            brackets, attributes = _split_operands(tail)
            operands = tuple(re.findall(r"%([\w.-]+)", brackets))
            computations[current].append(Instruction(name, result, opcode, operands, attributes, brackets, bool(root)))
    if not entry:
        raise ValueError("read_hlo: the text has no ENTRY; give the text of a compiled program (HLO).")
    return computations, entry


def _split_operands(tail: str) -> tuple[str, str]:
    """Split the text after an opening bracket into the text inside the brackets and the text after them."""
    depth = 1
    for index, character in enumerate(tail):
        depth += (character == "(") - (character == ")")
        if not depth:
            return tail[:index], tail[index + 1 :]
    return "", tail


# Control flow.


def called_computations(instruction: Instruction) -> list[str]:
    """Return the names of the computations that an instruction runs.

    The end of an asynchronous instruction also names the computations of its start, but does not run them.
    """
    if instruction.opcode.endswith(("-done", "-update")):
        return []
    keys = "calls|to_apply|body|condition|true_computation|false_computation"
    names = re.findall(rf"\b(?:{keys})=%?([\w.-]+)", instruction.attributes)
    for listed in re.findall(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}", instruction.attributes):
        names += re.findall(r"[\w.-]+", listed)
    return names


def count_trips(loop: Instruction, computations: Computations, neighbors: Mapping[str, Instruction]) -> int | None:
    """Return the number of iterations of a `while`; None if it is unknown.

    The compiler may state the number. Otherwise the number is read from a condition that compares a counter with a
    constant; the counter is assumed to go up by one, as in JAX's loops. `neighbors` are the instructions of the
    computation that contains the loop, by name: the counter's first value is one of them. Loops under the scope
    `FURTHER_ROUNDS` count 0 iterations.
    """
    if FURTHER_ROUNDS in scopes_of(loop.attributes):
        return 0
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known.group(1))
    match = re.search(r"condition=%?([\w.-]+)", loop.attributes)
    condition = {line.name: line for line in computations.get(match.group(1), [])} if match else {}
    root = next((line for line in condition.values() if line.is_root), None)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, bound = (condition.get(name) for name in root.operands)
    stop = None if bound is None else _integer_constant(bound, condition)
    index = re.search(r"index=(\d+)", counter.attributes) if counter else None
    carry = neighbors.get(loop.operands[0]) if loop.operands else None
    if stop is None or index is None or carry is None or carry.opcode != "tuple":
        return None
    first = neighbors.get(carry.operands[int(index.group(1))])
    start = None if first is None else _integer_constant(first, neighbors)
    return None if start is None else max(0, stop - start)


def _integer_constant(line: Instruction, neighbors: Mapping[str, Instruction]) -> int | None:
    """Return the value of an integer constant, or of a copy of a constant; None for any other instruction."""
    line = source_of(line, {"copy", "bitcast", "copy-done", "copy-start"}, neighbors)
    return int(line.literal) if line.opcode == "constant" and re.fullmatch(r"-?\d+", line.literal) else None


# Copies, views and fusions.


def source_of(line: Instruction, opcodes: Container[str], neighbors: Mapping[str, Instruction]) -> Instruction:
    """Replace an instruction by its first operand as long as the opcode is one of `opcodes`; return the last one."""
    while line.opcode in opcodes and line.operands and line.operands[0] in neighbors:
        line = neighbors[line.operands[0]]
    return line


def fusion_body(fusion: Instruction, computations: Computations) -> dict[str, Instruction]:
    """Return the instructions of the computation that a fusion runs, by name."""
    return {line.name: line for name in called_computations(fusion)[:1] for line in computations.get(name, ())}


def fusion_outputs(body: Mapping[str, Instruction]) -> list[Instruction]:
    """Return the instructions that compute the results of a fusion, before copies and views of these results."""
    root = next((line for line in body.values() if line.is_root), None)
    if root is None:
        return []
    outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return [source_of(output, {"bitcast", "copy"}, body) for output in outputs]


# Collectives that run while other work runs.


class AsyncRole(enum.Enum):
    """Role of a computation in an asynchronous collective of a TPU program."""

    STARTS = "AsyncCollectiveStart"
    ENDS = "AsyncCollectiveDone"
    OVERLAPS = "async_collective_fusion"


def async_role(name: str, lines: Iterable[Instruction]) -> AsyncRole | None:
    """Return whether a computation starts a collective, waits for its end, or works meanwhile; None for others.

    Computations of all three roles contain the collective.
    """
    if name.startswith(AsyncRole.OVERLAPS.value):
        return AsyncRole.OVERLAPS
    for line in lines:
        if line.opcode == "custom-call":
            for role in (AsyncRole.STARTS, AsyncRole.ENDS):
                if f'custom_call_target="{role.value}"' in line.attributes:
                    return role
    return None


_KERNEL = re.compile(r'custom_call_target="[^"]*(__cu|tpu_custom_call|triton|mosaic)')
_FORWARDING = {"get-tuple-element", "bitcast", "tuple", "copy", "copy-start", "copy-done"}


def find_hidden_starts(lines: Sequence[Instruction], computations: Computations) -> set[str]:
    """Return the names of instructions that start a collective which overlaps with a product or a kernel.

    Elementwise work does not count, since it takes too little time to hide a collective. For example, often only casts
    of parameters run during the first gather of a layer.
    """
    roles = {line.name: _called_role(line, computations) for line in lines}
    hidden = set()
    for index, start in enumerate(lines):
        if roles[start.name] is not AsyncRole.STARTS and not start.opcode.endswith("-start"):
            continue
        handles, has_work = {start.name}, False
        for line in lines[index + 1 :]:
            is_handle = not handles.isdisjoint(line.operands)
            if is_handle and (roles[line.name] is AsyncRole.ENDS or line.opcode.endswith("-done")):
                hidden |= {start.name} if has_work else set()
                break
            if is_handle and (roles[line.name] is AsyncRole.OVERLAPS or line.opcode in _FORWARDING):
                handles.add(line.name)
            is_end = roles[line.name] in (AsyncRole.STARTS, AsyncRole.ENDS)
            has_work = has_work or (not is_end and _multiplies(line, computations))
    return hidden


def _called_role(line: Instruction, computations: Computations) -> AsyncRole | None:
    """Return the first `async_role` among the computations that an instruction runs; None if they have no role."""
    roles = (async_role(name, computations.get(name, [])) for name in called_computations(line))
    return next((role for role in roles if role is not None), None)


def _multiplies(line: Instruction, computations: Computations) -> bool:
    """Return whether an instruction is, or runs, a matrix product or a kernel."""
    if line.opcode in ("convolution", "dot"):
        return True
    if line.opcode == "custom-call" and _KERNEL.search(line.attributes):
        return True
    return any(
        _multiplies(inner, computations) for name in called_computations(line) for inner in computations.get(name, [])
    )


# Types, scopes and groups of devices.


def size_of(result: str) -> int:
    """Return the bytes of a type such as `f32[8,4]{1,0}`, or of all arrays of a tuple."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", result):
        width = re.search(r"\d+", dtype)
        bits = int(width.group()) if width else 8 * (dtype == "pred")
        total += -(-bits * math.prod(int(dim) for dim in dims.split(",") if dim) // 8)
    return total


def split_arrays(result: str) -> list[str]:
    """Return the type of each array in a type, which may be a tuple."""
    return re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", result)


def main_memory_size(result: str) -> int:
    """Return the bytes of a type in main memory; `S(1)` and the like mark arrays in a TPU's other memories."""
    return sum(size_of(array) for array in split_arrays(result) if not re.search(r"S\([1-9]", array))


def scopes_of(attributes: str) -> tuple[str, ...]:
    """Return the scopes of an instruction's `op_name="jit(step)/while/body/transpose(jvp(maps))/psum"`."""
    return split_scopes(_op_name(attributes))


def is_backward_pass(attributes: str) -> bool:
    """Return whether an instruction belongs to a backward pass."""
    return in_backward_pass(_op_name(attributes))


def _op_name(attributes: str) -> str:
    match = re.search(r'op_name="([^"]*)"', attributes)
    return match.group(1) if match else ""


def module_of(scopes: tuple[str, ...]) -> str:
    """Return the path of the module that an operation belongs to: its scopes except for loops and JAX's own."""
    is_module = lambda scope: not (scope in _NOT_MODULES or scope.startswith("branch_") or "->" in scope)
    return ".".join(filter(is_module, scopes))


def groups_of(attributes: str, devices: int) -> Int[np.ndarray, "groups devices"]:
    """Return the groups of devices that a collective runs over, one row per group.

    XLA writes the groups in one of four forms: `{{0,1},{2,3}}`; `[2,2]<=[2,2]T(1,0)`; `mesh['a'=2,'b'=2] {'b'}`, with
    or without an order of the devices; or `{}` for one group of all devices.
    """
    if listed := re.search(r"replica_groups=\{\{(.*?)\}\}", attributes):
        return np.array([[int(i) for i in group.split(",")] for group in listed.group(1).split("},{")])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims, order = ([int(i) for i in part.split(",")] if part else None for part in iota.groups())
        assert shape and dims
        devices_by_dim = np.arange(math.prod(dims)).reshape(dims)
        return (devices_by_dim.transpose(order) if order else devices_by_dim).reshape(shape)
    device_ids = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if named := re.search(rf"replica_groups=mesh\[([^\]]*)\]{device_ids} \{{([^}}]*)\}}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        axes = re.findall(r"'(\w+)'", named.group(4))
        mesh_devices = np.arange(math.prod(sizes.values()))
        if named.group(2):
            shape, dims = ([int(i) for i in part.split(",")] if part else None for part in named.groups()[1:3])
            mesh_devices = mesh_devices.reshape(shape).transpose(dims).reshape(-1)
        names = list(sizes)
        axes_last = [names.index(name) for name in names if name not in axes] + [names.index(name) for name in axes]
        grid = mesh_devices.reshape(list(sizes.values())).transpose(axes_last)
        return grid.reshape(-1, math.prod(sizes[name] for name in axes))
    if re.search(r"replica_groups=\{\}", attributes) or "replica_groups" not in attributes:
        return np.arange(devices)[None]
    raise ValueError(
        "read_hlo: replica_groups must have one of the forms of jaxlib 0.10, such as {{0,1},{2,3}} or [2,2]<=[4]; "
        f"this form is unknown: {attributes[:200]!r}. Install a jaxlib that eqformer is tested with."
    )


_NOT_MODULES = {"jit", "run", "step", "shard_map", "while", "body", "cond", "closed_call", "checkpoint"}
_NOT_MODULES |= {"rematted_computation"}
