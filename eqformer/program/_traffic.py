"""What a compiled program reads from a device's main memory and writes there, from its text."""

import re
from collections.abc import Iterator

from ._hlo import called, Instruction, parse, size_of, trips_of


def moved_bytes(text: str) -> float:
    """Bytes that the operations of a program read and write in the device's main memory, loops multiplied out.

    Each operation reads its operands once and writes its result; a fusion is one operation. Of an array of which an
    operation reads a slice, or in which it updates one, the slice counts, and of a kernel in Pallas what it says, if it
    says something (`pl.CostEstimate`). What lies in a TPU's vector memory does not, nor what other kernels read twice.
    Of a conditional the branch with the most is counted, and a loop of unknown length once.
    """
    program, entry = parse(text)
    return _Moved(program).of(entry)


class _Moved:
    def __init__(self, program: dict[str, list[Instruction]]):
        self.program = program
        self.known: dict[str, float] = {}

    def of(self, name: str) -> float:
        """Bytes moved by a computation."""
        if name not in self.known:
            beside = {line.name: line for line in self.program.get(name, [])}
            self.known[name] = sum(self._line(line, beside) for line in beside.values())
        return self.known[name]

    def _line(self, line: Instruction, beside: dict[str, Instruction]) -> float:
        operation = line.operation
        if operation in _NAMING or operation.endswith(("-done", "-update")) or _ALLOCATES in line.attributes:
            return 0.0
        if operation in _RUNS:
            parts = [self.of(name) for name in called(line) if name in self.program]
            if operation == "conditional":
                return max(parts, default=0.0)
            times = trips_of(line, self.program, beside) if operation == "while" else 1
            return sum(parts) * (1 if times is None else times)
        if operation in ("fusion", "fusion-start"):
            return self._fusion(line, beside)
        if operation == "custom-call" and (said := re.search(r'"bytes_accessed":"(\d+)"', line.attributes)):
            near = sum(
                size_of(one) - _held(one) for one in (*(beside[name].result for name in line.operands), line.result)
            )
            return max(0.0, float(said.group(1)) - near)
        given = [_held(beside[name].result) if name in beside else 0 for name in line.operands]
        if operation in _SLICES:  # the result, read and written
            return 2.0 * _held(line.result)
        if operation in _UPDATES:
            return 2.0 * given[_UPDATES[operation]]
        if operation == "slice-start":
            whole, part = _parts(line.result)[:2]
            return float(_held(part) + (size_of(part) if _held(whole) else 0))
        if operation in _COPIED:  # a tuple with its operand
            parts = _parts(line.result)
            return float(sum(given) + _held(parts[_COPIED[operation]]))
        written = _parts(line.result)[0] if operation == "custom-call" and "__cublas$" in line.attributes else None
        return float(sum(given) + _held(written or line.result))  # without cuBLAS's workspace

    def _fusion(self, line: Instruction, beside: dict[str, Instruction]) -> float:
        inside = self.program.get(next(iter(called(line)), ""), [])
        names = {one.name: one for one in inside}
        numbers = {int(one.literal): one.name for one in inside if one.operation == "parameter"}
        read = 0.0
        for number, name in enumerate(line.operands):
            size = _held(beside[name].result) if name in beside else 0
            if size:
                read += min(size, sum(self._uses(numbers[number], inside)))
        return read + self._written(line, names)

    def _uses(self, name: str, inside: list[Instruction], *, is_made: bool = False) -> Iterator[float]:
        """Bytes that a fusion's operations read of one of its values; of one that it makes nothing is in its place."""
        for line in inside:
            for place, operand in enumerate(line.operands):
                if operand != name:
                    continue
                if line.operation in ("bitcast", "reshape"):
                    yield from self._uses(line.name, inside, is_made=is_made)
                elif line.operation in _EACH and place == 0 and not line.is_root and line.result[0] != "(":
                    # Of a sum of which a slice is taken, what the slice is a sum of.
                    share = size_of(_result(name, inside)) / size_of(line.result)
                    yield from (share * size for size in self._uses(line.name, inside, is_made=True))
                elif line.operation in _SLICES and place == 0:
                    yield size_of(line.result)
                elif line.operation in _UPDATES and place == 0:
                    yield float("inf") if is_made else 0.0  # updated in its place
                elif line.operation == "fusion":
                    within = self.program.get(next(iter(called(line)), ""), [])
                    parameter = next(o.name for o in within if o.operation == "parameter" and int(o.literal) == place)
                    is_view = "output_to_operand_aliasing" in line.attributes and not line.is_root
                    if not is_view:  # which a compiler for TPUs makes of an array that is laid out in other tiles
                        yield from self._uses(parameter, within, is_made=is_made)
                    if is_view or _names(within, parameter):
                        yield from self._uses(line.name, inside, is_made=is_made)
                elif line.operation not in ("tuple", "get-tuple-element"):
                    yield float("inf")

    def _written(self, line: Instruction, names: dict[str, Instruction]) -> float:
        """Bytes that a fusion writes: of updates in place, the updates."""
        root = next((one for one in names.values() if one.is_root), None)
        if root is None:
            return float(_held(line.result))
        results = _parts(line.result)
        if line.operation == "fusion-start":  # its operands, results, and a number that its end waits for
            results = results[len(line.operands) : -1]
        ends = [names[name] for name in root.operands] if root.operation == "tuple" else [root]
        if len(ends) != len(results):
            return float(_held(line.result))
        total = 0.0
        for end, result in zip(ends, results):
            while end.operation in ("bitcast", "copy") and end.operands:
                end = names[end.operands[0]]
            whole = _held(result)
            if end.operation in _UPDATES:
                whole = min(whole, size_of(names[end.operands[_UPDATES[end.operation]]].result))
            total += whole
        return total


def _result(name: str, lines: list[Instruction]) -> str:
    """The type of a value."""
    return next(line.result for line in lines if line.name == name)


def _names(lines: list[Instruction], name: str) -> bool:
    """Whether the result of a fusion is one of its values by another name."""
    for line in lines:
        if name in line.operands and line.operation == "bitcast":
            return line.is_root or _names(lines, line.name)
    return False


_NAMING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "optimization-barrier"}
_NAMING |= {"add-dependency", "partition-id", "replica-id"}
_ALLOCATES = 'custom_call_target="AllocateBuffer"'  # memory that nobody has written
_RUNS = {"while", "call", "conditional", "async-start"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_EACH = {"convert", "reduce"}  # what a fusion computes for those elements of the result that it needs
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the update
_COPIED = {"copy-start": 0, "all-gather-start": 1, "collective-permute-start": 1}  # which part is the result


def _held(result: str) -> int:
    """The bytes of a type in main memory; a TPU's other memories are marked as `S(1)` and the like."""
    return sum(size_of(part) for part in _parts(result) if not re.search(r"S\([1-9]", part))


def _parts(result: str) -> list[str]:
    """The arrays of a type."""
    return re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", result)
