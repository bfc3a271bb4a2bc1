"""The largest buffers of a compiled program at its peak, read from its HLO text in the order of execution."""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from . import _hlo_text as hlo_text


Value = PyTree  # The index of a buffer, or a list of values for a tuple.


class Buffer(NamedTuple):
    """A buffer of a program."""

    type: str
    """Dtype and shape, such as `f32[8,4]`."""
    size: int
    """Bytes of the buffer."""
    scopes: tuple[str, ...]
    """Scopes of the instruction that writes the buffer."""


class _Peak(NamedTuple):
    """Bytes of a computation's buffers at its peak, and the indices of the buffers that exist then."""

    size: int
    buffers: list[int]


def largest_buffers(text: str) -> tuple[int, list[Buffer]]:
    """Return the bytes of all temporary buffers at the peak, and these buffers, the largest first.

    The program's arguments and results do not count (results are taken to be written over donated arguments), nor do
    buffers outside of the device's main memory. A value is written over an existing buffer in four cases: the
    instruction states that an output aliases an operand; the instruction writes into a part of an operand; a loop's
    body returns its next carry; a fused loop is the last reader of an operand of the result's size. The compiler may
    reuse more buffers, or leave gaps between buffers, so only the compiler's own figure is exact.
    """
    computations, entry = hlo_text.parse_hlo(text)
    first, (result, _) = _walk(computations, entry, set())
    # Both walks give a buffer the same index. The second walk does not count the program's result, which is written
    # over a donated argument, nor the buffers that share the memory of the result.
    uncounted, size = set(jax.tree.leaves(result)), 0
    while len(uncounted) > size:
        size = len(uncounted)
        uncounted |= {buffer for group in first.shared if not uncounted.isdisjoint(group) for buffer in group}
    walk, (_, peak) = _walk(computations, entry, uncounted)
    return peak.size, sorted((walk.buffers[index] for index in peak.buffers), key=lambda buffer: -buffer.size)


def _walk(computations: hlo_text.Computations, entry: str, uncounted: set[int]) -> tuple["_Walk", tuple[Value, _Peak]]:
    """Walk through a program; return the walk, the program's result and its peak."""
    walk = _Walk(computations, uncounted)
    arguments = [walk.new_value(line.result, line, is_uncounted=True) for line in walk.parameters(entry)]
    return walk, walk.run(entry, arguments)


class _Walk:
    """A walk through a program in the order of execution, which gives each buffer an index and finds the peak.

    A buffer lives from the instruction that makes it to the last instruction that reads it.
    """

    def __init__(self, computations: hlo_text.Computations, uncounted: set[int]):
        """`uncounted` are the indices of buffers that do not count because they are written over other buffers."""
        self.computations, self.uncounted = computations, uncounted
        self.buffers: list[Buffer] = []
        # Groups of buffers that share memory: the results of a conditional's branches; a copy and its source, if the
        # copy is the last reader of the source.
        self.shared: list[tuple[int, ...]] = []

    def parameters(self, name: str) -> list[hlo_text.Instruction]:
        """Return the parameters of the computation with this name, in order."""
        lines = [line for line in self.computations[name] if line.opcode == "parameter"]
        return sorted(lines, key=lambda line: int(line.literal))

    def new_value(self, result: str, line: hlo_text.Instruction, is_uncounted: bool = False) -> Value:
        """Return new buffers for a type, nested like the type's tuples; with `is_uncounted` they count 0 bytes."""
        return jax.tree.map(lambda type: self._new_buffer(type, line, is_uncounted), _nest_types(result))

    def _new_buffer(self, type: str, line: hlo_text.Instruction, is_uncounted: bool) -> int:
        is_uncounted |= len(self.buffers) in self.uncounted
        size = 0 if is_uncounted else hlo_text.main_memory_size(type)
        self.buffers.append(Buffer(type.partition("{")[0], size, hlo_text.scopes_of(line.attributes)))
        return len(self.buffers) - 1

    def run(self, name: str, arguments: list[Value], is_loop: bool = False) -> tuple[Value, _Peak]:
        """Return the result of the computation with this name, and the peak of the buffers that it makes.

        `is_loop` marks a loop's body, which takes the carry and returns the next carry. The next carry is written over
        the carry, except where an instruction reads the carry after the next carry is made.
        """
        lines, values = self.computations[name], {}
        for line, value in zip(self.parameters(name), arguments):
            values[line.name] = value
        first_new = len(self.buffers)
        inner: list[_Peak] = []
        for line in lines:
            peak = _Peak(0, [])
            if line.opcode != "parameter":
                values[line.name], peak = self._run_line(line, values)
            inner.append(peak)
        births, last_reads = self._lifetimes(lines, values)
        for index, line in enumerate(lines):
            if line.opcode == "copy" and not line.has_tuple_result:
                source = values[line.operands[0]]
                is_last = last_reads[source] == index and source >= first_new
                self.shared += [(values[line.name], source)] if is_last else []
        result = values[next(line.name for line in lines if line.is_root)]
        carries, next_carries = jax.tree.leaves(arguments), jax.tree.leaves(result)
        in_place: set[int] = set()
        if is_loop and len(carries) == len(next_carries):
            pairs = zip(carries, next_carries)
            in_place = {next_carry for carry, next_carry in pairs if last_reads.get(carry, -1) <= births[next_carry]}
        last_reads |= dict.fromkeys(next_carries, len(lines))
        counted = [x for x in births if x >= first_new and x not in in_place and self.buffers[x].size]
        return result, self._find_peak(counted, births, last_reads, inner)

    def _lifetimes(
        self, lines: Sequence[hlo_text.Instruction], values: dict[str, Value]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return the indices of the instructions that make each buffer and that read it last."""
        births: dict[int, int] = {}
        last_reads: dict[int, int] = {}
        for index, line in enumerate(lines):
            for buffer in jax.tree.leaves(values[line.name]):
                births.setdefault(buffer, index)
                last_reads.setdefault(buffer, index)
            if line.opcode not in _NAMING:
                for operand in line.operands:
                    last_reads |= dict.fromkeys(jax.tree.leaves(values.get(operand)), index)
        # A fused loop writes its result over an operand of the same size that no later instruction reads.
        for index, line in enumerate(lines):
            if "kind=kLoop" not in line.attributes or line.has_tuple_result:
                continue
            if births[new := values[line.name]] == index:
                for buffer in jax.tree.leaves([values.get(name) for name in line.operands]):
                    if last_reads[buffer] == index and self.buffers[buffer].size == self.buffers[new].size:
                        last_reads[buffer] = index - 1
                        break
        return births, last_reads

    def _find_peak(
        self, new: Collection[int], births: dict[int, int], last_reads: dict[int, int], inner: Sequence[_Peak]
    ) -> _Peak:
        """Return the peak of a computation's new buffers and the buffers of the computations that it calls."""
        changes = [0] * (len(inner) + 2)
        for buffer in new:
            changes[births[buffer]] += self.buffers[buffer].size
            changes[max(births[buffer], last_reads[buffer]) + 1] -= self.buffers[buffer].size
        alive, max_alive, peak_index = 0, -1, 0
        for index, peak in enumerate(inner):
            alive += changes[index]
            if alive + peak.size > max_alive:
                max_alive, peak_index = alive + peak.size, index
        at_peak = [buffer for buffer in new if births[buffer] <= peak_index <= last_reads[buffer]]
        return _Peak(max(max_alive, 0), at_peak + inner[peak_index].buffers)

    def _run_line(self, line: hlo_text.Instruction, values: dict[str, Value]) -> tuple[Value, _Peak]:
        """Return the value of an instruction, and the peak of the computations that it calls."""
        operands = [values.get(name, []) for name in line.operands]
        if line.opcode in ("while", "call", "conditional", "async-start"):
            return self._run_called(line, operands)
        return self._value_of(line, operands), _Peak(0, [])

    def _run_called(self, line: hlo_text.Instruction, operands: list[Value]) -> tuple[Value, _Peak]:
        """Return the value of an instruction that runs other computations, and the peak of these computations."""
        names = [name for name in hlo_text.called_computations(line) if name in self.computations]
        if line.opcode == "while":
            body = re.search(r"body=%?([\w.-]+)", line.attributes)
            assert body is not None
            return operands[0], self.run(body.group(1), [operands[0]], is_loop=True)[1]
        no_peak = _Peak(0, [])
        if line.opcode == "conditional":
            branches = [self.run(name, [operand]) for name, operand in zip(names, operands[1:])]
            self.shared += zip(*(jax.tree.leaves(result) for result, _ in branches))
            return max(branches, key=lambda run: run[1].size, default=(self.new_value(line.result, line), no_peak))
        result, peak = self.run(names[0], operands) if names else (self.new_value(line.result, line), no_peak)
        return ([result, *operands] if line.opcode == "async-start" else result), peak

    def _value_of(self, line: hlo_text.Instruction, operands: list[Value]) -> Value:
        """Return the value of an instruction that runs no other computation."""
        opcode = line.opcode
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            match = re.search(r"index=(\d+)", line.attributes)
            assert match is not None
            elements = operands[0]
            if isinstance(elements, list) and elements:
                return elements[int(match.group(1))]
            return self.new_value(line.result, line)
        if opcode in ("bitcast", "optimization-barrier", "after-all", "add-dependency"):
            return operands[0] if operands else []
        if opcode == "constant":
            return self.new_value(line.result, line, is_uncounted=True)
        if opcode.endswith("-start"):
            return self._start_value(line, operands)
        if opcode.endswith("-done"):
            started = operands[0]
            return started[0] if isinstance(started, list) and opcode != "all-reduce-done" else started
        return self._written_value(line, operands)

    def _start_value(self, line: hlo_text.Instruction, operands: list[Value]) -> Value:
        """Return the value of the start of an asynchronous operation: its result, then its operands and other buffers.

        The value of the start of an all-reduce is the result alone.
        """
        new = self.new_value(line.result, line)
        if not line.has_tuple_result or line.opcode == "all-reduce-start":
            return new
        result, source = (0, 1) if line.opcode == "copy-start" else (1, 0)
        if line.opcode.startswith("ragged-all-to-all"):  # writes into its second operand
            new[result] = operands[1]
        new[source] = operands[0] if len(operands) == 1 else operands
        return [new[result], *new[:result], *new[result + 1 :]]

    def _written_value(self, line: hlo_text.Instruction, operands: list[Value]) -> Value:
        """Return the value that an instruction writes: new buffers, or an operand that it writes over."""
        new = self.new_value(line.result, line)
        # `output_to_operand_aliasing={{1}: (0, {})}` writes output 1 over operand 0; `{{}: (0, {})}` is for a single
        # output.
        for output, operand in re.findall(r"\{(\d*)\}: \((\d+), \{\}", line.attributes):
            if output and line.has_tuple_result:
                new[int(output)] = operands[int(operand)]
            elif not output:
                new = operands[int(operand)]
        if line.opcode == "dynamic-update-slice":
            return operands[0]
        if line.opcode == "ragged-all-to-all":
            return operands[1]
        if line.opcode == "fusion" and "output_to_operand_aliasing" not in line.attributes:
            return self._fusion_value(line, operands, new)
        return new

    def _fusion_value(self, line: hlo_text.Instruction, operands: list[Value], new: Value) -> Value:
        """Return the value of a fusion; an output that updates a slice of an operand is that operand's buffer."""
        body = hlo_text.fusion_body(line, self.computations)
        outputs = hlo_text.fusion_outputs(body)
        values: list[Value] = list(new) if line.has_tuple_result else [new]
        if len(outputs) != len(values):
            return new
        for index, output in enumerate(outputs):
            if output.opcode == "dynamic-update-slice":
                target = hlo_text.source_of(body[output.operands[0]], {"bitcast"}, body)
                if target.opcode == "parameter":
                    values[index] = operands[int(target.literal)]
        return values if line.has_tuple_result else values[0]


# Opcodes that only give a value another name, and read no buffer.
_NAMING = ("tuple", "get-tuple-element", "bitcast", "optimization-barrier", "parameter")


def _nest_types(result: str) -> str | list:
    """Split the text of a type, `(f32[2], (s32[], u32[]))`, into nested lists of types."""
    result = re.sub(r"/\*.*?\*/", "", result).strip()
    if not result.startswith("("):
        return result
    parts, depth, start = [], 0, 1
    for index, character in enumerate(result):
        depth += character in "([{"
        depth -= character in ")]}"
        if (character == "," and depth == 1) or (depth == 0 and index == len(result) - 1):
            parts.append(result[start:index])
            start = index + 1
    return [_nest_types(part) for part in parts if part.strip()]
