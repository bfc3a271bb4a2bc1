"""The text of a compiled program (HLO), as computations of instructions."""

import math
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Instruction(NamedTuple):
    """A line of a program: its name, the type of its result, the operation, its operands' names, and the rest."""

    name: str
    result: str
    operation: str
    operands: tuple[str, ...]
    attributes: str


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, and the name of the one that is run."""
    program: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            current = start.group(2)
            program[current] = []
            entry = current if start.group(1) else entry
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$", line):
            name, result, operation, rest = found.groups()
            operands, attributes = _split_operands(rest)
            program[current].append(Instruction(name, result, operation, operands, attributes))
    if not entry:
        raise ValueError("communication: the text has no ENTRY; give the text of a compiled program (HLO).")
    return program, entry


def _split_operands(rest: str) -> tuple[tuple[str, ...], str]:
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return tuple(re.findall(r"%([\w.-]+)", rest[:place])), rest[place + 1 :]
    return (), rest


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
    scopes = re.split("[/:]", found.group(1)) if found else []
    return tuple(filter(None, (re.sub(r"^(?:[\w<>]*\()*|\)*$", "", scope) for scope in scopes)))


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
    raise ValueError(f"communication: unknown form of groups in {attributes[:200]!r}.")
