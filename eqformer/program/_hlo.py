"""The text of a compiled program (HLO), as computations of instructions."""

import enum
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


FURTHER_ROUNDS = "further rounds of choices"
"""Named scope of loops that only an uneven load of experts enters, such as rounds of an exchange behind the first: the
costs of a program leave them out."""


class Instruction(NamedTuple):
    """A line of a program: its name, the type of its result, the operation, its operands' names, and the rest."""

    name: str
    result: str
    operation: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""
    """What stands in the brackets: of a constant its value, of a parameter its number."""
    is_root: bool = False


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, and the name of the one that is run."""
    program: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            current = start.group(2)
            program[current] = []
            entry = current if start.group(1) else entry
        elif found := re.match(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$", line):
            root, name, result, operation, rest = found.groups()
            inside, attributes = _split_operands(rest)
            operands = tuple(re.findall(r"%([\w.-]+)", inside))
            program[current].append(Instruction(name, result, operation, operands, attributes, inside, bool(root)))
    if not entry:
        raise ValueError("list_transfers: the text has no ENTRY; give the text of a compiled program (HLO).")
    return program, entry


def _split_operands(rest: str) -> tuple[str, str]:
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:place], rest[place + 1 :]
    return "", rest


def trips_of(line: Instruction, program: dict[str, list[Instruction]], beside: dict[str, Instruction]) -> int | None:
    """How often a loop runs, as the compiler says or as its condition compares a counter with a constant; or None.

    `beside` are the instructions of the computation that the loop stands in, by name: from them the counter's first
    value is known. A counter goes up by one, as those of JAX's loops do. Rounds that only uneven loads need are none.
    """
    if FURTHER_ROUNDS in scopes_of(line.attributes):
        return 0
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.attributes):
        return int(known.group(1))
    found = re.search(r"condition=%?([\w.-]+)", line.attributes)
    condition = {one.name: one for one in program.get(found.group(1), [])} if found else {}
    root = next((one for one in condition.values() if one.is_root), None)
    if root is None or root.operation != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, bound = (condition.get(name) for name in root.operands)
    last = None if bound is None else _constant(bound, condition)
    number = re.search(r"index=(\d+)", counter.attributes) if counter else None
    carried = beside.get(line.operands[0]) if line.operands else None
    if last is None or number is None or carried is None or carried.operation != "tuple":
        return None
    first = beside.get(carried.operands[int(number.group(1))])
    start = None if first is None else _constant(first, beside)
    return None if start is None else max(0, last - start)


def _constant(line: Instruction, beside: dict[str, Instruction]) -> int | None:
    """The value of a whole number, through copies."""
    while line.operation in ("copy", "bitcast", "copy-done", "copy-start") and line.operands[0] in beside:
        line = beside[line.operands[0]]
    return int(line.literal) if line.operation == "constant" and re.fullmatch(r"-?\d+", line.literal) else None


class Waits(enum.Enum):
    """What a computation of a TPU's program has to do with a collective that it runs beside other work."""

    STARTS = "AsyncCollectiveStart"
    ENDS = "AsyncCollectiveDone"
    WORKS = "async_collective_fusion"


def waits(name: str, lines: Iterable[Instruction]) -> Waits | None:
    """Whether a computation starts a collective, waits for it, or computes beside it; the collective stands in each."""
    if name.startswith(Waits.WORKS.value):
        return Waits.WORKS
    for line in lines:
        if line.operation == "custom-call":
            for one in (Waits.STARTS, Waits.ENDS):
                if f'custom_call_target="{one.value}"' in line.attributes:
                    return one
    return None


_KERNEL = re.compile(r'custom_call_target="[^"]*(__cu|tpu_custom_call|triton|mosaic)')
_PASSED = {"get-tuple-element", "bitcast", "tuple", "copy", "copy-start", "copy-done"}


def hidden_starts(lines: Sequence[Instruction], program: dict[str, list[Instruction]]) -> set[str]:
    """Names of the instructions that begin a collective and are waited for only after products or a kernel, in order.

    Elementwise work beside it is none that would hide it: the first gather of a layer often has only casts of the next.
    """
    kinds = {line.name: next((k for n in called(line) if (k := waits(n, program.get(n, [])))), None) for line in lines}
    found = set()
    for place, line in enumerate(lines):
        if kinds[line.name] is not Waits.STARTS and not line.operation.endswith("-start"):
            continue
        handed, worked = {line.name}, False
        for after in lines[place + 1 :]:
            is_handed = not handed.isdisjoint(after.operands)
            if is_handed and (kinds[after.name] is Waits.ENDS or after.operation.endswith("-done")):
                found |= {line.name} if worked else set()
                break
            if is_handed and (kinds[after.name] is Waits.WORKS or after.operation in _PASSED):
                handed.add(after.name)
            worked = worked or (kinds[after.name] not in (Waits.STARTS, Waits.ENDS) and _multiplies(after, program))
    return found


def _multiplies(line: Instruction, program: dict[str, list[Instruction]]) -> bool:
    """Whether an instruction is, or runs, a product of matrices or a kernel."""
    if line.operation in ("convolution", "dot"):
        return True
    if line.operation == "custom-call" and _KERNEL.search(line.attributes):
        return True
    return any(_multiplies(one, program) for name in called(line) for one in program.get(name, []))


def called(line: Instruction) -> list[str]:
    """The computations that an instruction runs; the end of an asynchronous one names them again."""
    if line.operation.endswith(("-done", "-update")):
        return []
    keys = "calls|to_apply|body|condition|true_computation|false_computation"
    names = re.findall(rf"\b(?:{keys})=%?([\w.-]+)", line.attributes)
    for several in re.findall(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}", line.attributes):
        names += re.findall(r"[\w.-]+", several)
    return names


def size_of(result: str) -> int:
    """The size of a type such as `f32[8,4]{1,0}`, or of all that a tuple of them holds."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", result):
        width = re.search(r"\d+", dtype)
        bits = int(width.group()) if width else 8 * (dtype == "pred")
        total += -(-bits * math.prod(int(dim) for dim in dims.split(",") if dim) // 8)
    return total


def scopes_of(attributes: str) -> tuple[str, ...]:
    """The scopes of `op_name="jit(step)/while/body/transpose(jvp(maps))/psum"`, and the operation: `step`, ..., `psum`.

    Those of a backward pass are those of what it is the backward pass of. Of several operations that XLA has made one
    (`a/(b/psum:c/psum)`) all scopes are there.
    """
    found = re.search(r'op_name="([^"]*)"', attributes)
    return scopes_in(found.group(1)) if found else ()


def scopes_in(name: str) -> tuple[str, ...]:
    """Return the scopes of a name such as `while/body/transpose(jvp(maps))/psum`, without JAX's transformations."""
    return tuple(filter(None, (re.sub(r"^(?:[\w<>]*\()*|\)*$", "", scope) for scope in re.split("[/:]", name))))


def module_of(scopes: tuple[str, ...]) -> str:
    """The path of the module that an operation stands in, of its scopes without what loops and JAX add; or nothing."""
    added = lambda scope: scope in _NOT_MODULES or scope.startswith("branch_") or "->" in scope
    return ".".join(scope for scope in scopes if not added(scope))


def groups_of(attributes: str, everyone: int) -> Int[np.ndarray, "groups devices"]:
    """The devices that take part together, a row a group.

    In any of XLA's spellings: `{{0,1},{2,3}}`, `[2,2]<=[2,2]T(1,0)`, `mesh['a'=2,'b'=2] {'b'}` (with an order of
    the devices or in their own), or all for `{}`.
    """
    if listed := re.search(r"replica_groups=\{\{(.*?)\}\}", attributes):
        return np.array([[int(i) for i in group.split(",")] for group in listed.group(1).split("},{")])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims, order = ([int(i) for i in part.split(",")] if part else None for part in iota.groups())
        assert shape and dims
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices.transpose(order) if order else devices).reshape(shape)
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if named := re.search(rf"replica_groups=mesh\[([^\]]*)\]{order} \{{([^}}]*)\}}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        over = re.findall(r"'(\w+)'", named.group(4))
        devices = np.arange(math.prod(sizes.values()))
        if named.group(2):
            shape, moved = ([int(i) for i in part.split(",")] if part else None for part in named.groups()[1:3])
            devices = devices.reshape(shape).transpose(moved).reshape(-1)
        names = list(sizes)
        last = [names.index(name) for name in names if name not in over] + [names.index(name) for name in over]
        grid = devices.reshape(list(sizes.values())).transpose(last)
        return grid.reshape(-1, math.prod(sizes[name] for name in over))
    if re.search(r"replica_groups=\{\}", attributes) or "replica_groups" not in attributes:
        return np.arange(everyone)[None]
    raise ValueError(f"list_transfers: unknown form of groups in {attributes[:200]!r}.")


_NOT_MODULES = {"jit", "run", "step", "shard_map", "while", "body", "cond", "closed_call", "checkpoint"}
_NOT_MODULES |= {"rematted_computation"}
