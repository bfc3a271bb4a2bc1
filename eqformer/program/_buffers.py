"""The buffers of a compiled program at the moment when they are most, from its text, which is in the order of a run."""

import re
from typing import Any, NamedTuple

from ._hlo import called, Instruction, parse, scopes_of, size_of


Value = Any  # a buffer's number, or a list of values for a tuple


class Buffer(NamedTuple):
    """A buffer of a program: its type, its bytes, and the scopes of what writes it."""

    type: str
    size: int
    scopes: tuple[str, ...]


def largest_buffers(text: str) -> tuple[int, list[Buffer]]:
    """Bytes of all temporary buffers when they are most, and these buffers, the largest first.

    Arguments, results in the place of donated arguments, and what is not in the device's main memory are left out. Of
    two values the second takes the first's place where the program says so, in an update of a slice, and in a loop. The
    compiler may find more such places, or leave gaps: its own figure is the true one.
    """
    program, entry = parse(text)
    first, (result, *_) = _walked(program, entry, set())
    # Numbers are the same each time. What the program gives back is in the place of a donated argument.
    free, size = set(_flat(result)), 0
    while len(free) > size:
        size = len(free)
        free |= {one for same in first.alike if not free.isdisjoint(same) for one in same}
    walk, (_, peak, there) = _walked(program, entry, free)
    return peak, sorted((walk.buffers[one] for one in there), key=lambda buffer: -buffer.size)


def _walked(program: dict[str, list[Instruction]], entry: str, free: set[int]) -> tuple[Any, tuple]:
    walk = _Walk(program, free)
    arguments = [walk.fresh(line.result, line, is_free=True) for line in walk.parameters(entry)]
    return walk, walk.run(entry, arguments)


class _Walk:
    """Runs through computations in order; a buffer is alive from the line that makes it to the last that reads it."""

    def __init__(self, program: dict[str, list[Instruction]], free: set[int]):
        self.program, self.free = program, free
        self.buffers: list[Buffer] = []
        # Buffers that share a place: what a conditional's branches give for a result, and a last copy and its source.
        self.alike: list[tuple[int, ...]] = []

    def parameters(self, name: str) -> list[Instruction]:
        """The parameters of a computation, in order."""
        found = [line for line in self.program[name] if line.operation == "parameter"]
        return sorted(found, key=lambda line: int(line.literal))

    def fresh(self, result: str, line: Instruction, is_free: bool = False) -> Value:
        """New buffers of a type; `is_free` ones have no size."""
        return self._made(_nested(result), line, is_free)

    def _made(self, kind: Any, line: Instruction, is_free: bool) -> Value:
        if isinstance(kind, list):
            return [self._made(each, line, is_free) for each in kind]
        is_free |= len(self.buffers) in self.free or re.search(r"S\([1-9]", kind) is not None
        size = 0 if is_free else size_of(kind)
        self.buffers.append(Buffer(kind.partition("{")[0], size, scopes_of(line.attributes)))
        return len(self.buffers) - 1

    def run(self, name: str, given: list[Value], is_loop: bool = False) -> tuple[Value, int, list[int]]:
        """A computation's result, and the bytes and buffers that it makes of its own when they are most.

        The result of a loop's body takes the place of what it was given, wherever that is no longer read.
        """
        lines, values = self.program[name], {}
        for line, value in zip(self.parameters(name), given):
            values[line.name] = value
        outside = len(self.buffers)
        inner: list[tuple[int, list[int]]] = []
        for line in lines:
            most, there = 0, []
            if line.operation != "parameter":
                values[line.name], most, there = self._line(line, values)
            inner.append((most, there))
        born, last = self._lives(lines, values)
        for place, line in enumerate(lines):
            if line.operation == "copy" and isinstance(given_one := values[line.operands[0]], int):
                self.alike += [(values[line.name], given_one)] * (last[given_one] == place and given_one >= outside)
        result = values[next(line.name for line in lines if line.is_root)]
        before, after = _flat(given), _flat(result)
        taken = set()
        if is_loop and len(before) == len(after):
            taken = {new for old, new in zip(before, after) if last.get(old, -1) <= born[new]}
        last |= dict.fromkeys(after, len(lines))
        own = [one for one in born if one >= outside and one not in taken and self.buffers[one].size]
        return result, *self._most(own, born, last, inner)

    def _lives(self, lines: list[Instruction], values: dict[str, Value]) -> tuple[dict[int, int], dict[int, int]]:
        """The places of the lines that make each buffer and that read it last."""
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, line in enumerate(lines):
            for one in _flat(values[line.name]):
                born.setdefault(one, place)
                last.setdefault(one, place)
            if line.operation not in _NAMING:
                for operand in line.operands:
                    last |= dict.fromkeys(_flat(values.get(operand, [])), place)
        for place, line in enumerate(lines):  # a result in the place of an operand of which nothing else reads any more
            if "kind=kLoop" in line.attributes and isinstance(made := values[line.name], int) and born[made] == place:
                for one in _flat([values.get(name, []) for name in line.operands]):
                    if last[one] == place and self.buffers[one].size == self.buffers[made].size:
                        last[one] = place - 1
                        break
        return born, last

    def _most(self, own: list[int], born: dict[int, int], last: dict[int, int], inner: list) -> tuple[int, list[int]]:
        """The most bytes of a computation's own buffers and those of what it calls, and these buffers."""
        changes = [0] * (len(inner) + 2)
        for one in own:
            changes[born[one]] += self.buffers[one].size
            changes[max(born[one], last[one]) + 1] -= self.buffers[one].size
        alive, most, when = 0, -1, 0
        for place, (more, _) in enumerate(inner):
            alive += changes[place]
            if alive + more > most:
                most, when = alive + more, place
        return max(most, 0), [one for one in own if born[one] <= when <= last[one]] + inner[when][1]

    def _line(self, line: Instruction, values: dict[str, Value]) -> tuple[Value, int, list[int]]:
        """The value of a line, and the bytes and buffers that what it calls makes of its own when they are most."""
        operands = [values.get(name, []) for name in line.operands]
        if line.operation in ("while", "call", "conditional", "async-start"):
            return self._called(line, operands)
        return self._plain(line, operands), 0, []

    def _called(self, line: Instruction, operands: list[Value]) -> tuple[Value, int, list[int]]:
        names = [name for name in called(line) if name in self.program]
        if line.operation == "while":
            body = re.search(r"body=%?([\w.-]+)", line.attributes)
            assert body is not None
            return operands[0], *self.run(body.group(1), [operands[0]], is_loop=True)[1:]
        if line.operation == "conditional":
            runs = [self.run(name, [given]) for name, given in zip(names, operands[1:])]
            self.alike += zip(*(_flat(result) for result, *_ in runs))
            return max(runs, key=lambda each: each[1], default=(self.fresh(line.result, line), 0, []))
        result, most, there = self.run(names[0], operands) if names else (self.fresh(line.result, line), 0, [])
        return ([operands, result] if line.operation == "async-start" else result), most, there

    def _plain(self, line: Instruction, operands: list[Value]) -> Value:
        operation = line.operation
        if operation == "tuple":
            return operands
        if operation == "get-tuple-element":
            number = re.search(r"index=(\d+)", line.attributes)
            assert number is not None
            whole = operands[0]
            return whole[int(number.group(1))] if isinstance(whole, list) and whole else self.fresh(line.result, line)
        if operation in ("bitcast", "optimization-barrier", "after-all", "add-dependency"):
            return operands[0] if operands else []
        if operation == "constant":
            return self.fresh(line.result, line, is_free=True)
        if operation.endswith("-start"):
            made = self.fresh(line.result, line)
            if not isinstance(made, list) or operation == "all-reduce-start":
                return made
            result, given = (0, 1) if operation == "copy-start" else (1, 0)
            if operation.startswith("ragged-all-to-all"):  # into the array that it is given for this
                made[result] = operands[1]
            made[given] = operands[0] if len(operands) == 1 else operands
            return [made[result], *made[:result], *made[result + 1 :]]
        if operation.endswith("-done"):
            whole = operands[0]
            return whole[0] if isinstance(whole, list) and operation != "all-reduce-done" else whole
        return self._written(line, operands)

    def _written(self, line: Instruction, operands: list[Value]) -> Value:
        """What a line writes: new buffers, or an operand's where it says so or updates a slice of it."""
        made = self.fresh(line.result, line)
        for where, number in re.findall(r"\{(\d*)\}: \((\d+), \{\}", line.attributes):
            if where and isinstance(made, list):
                made[int(where)] = operands[int(number)]
            elif not where:
                made = operands[int(number)]
        if line.operation == "dynamic-update-slice":
            return operands[0]
        if line.operation == "ragged-all-to-all":
            return operands[1]
        if line.operation == "fusion" and "output_to_operand_aliasing" not in line.attributes:
            return self._updated(line, operands, made)
        return made

    def _updated(self, line: Instruction, operands: list[Value], made: Value) -> Value:
        """A fusion that ends in updates of slices writes them in place."""
        inside = {one.name: one for name in called(line)[:1] for one in self.program.get(name, [])}
        root = next((one for one in inside.values() if one.is_root), None)
        if root is None or (root.operation == "tuple") != isinstance(made, list):
            return made
        ends = [inside[name] for name in root.operands] if root.operation == "tuple" else [root]
        values = []
        for end, own in zip(ends, made if isinstance(made, list) else [made]):
            while end.operation in ("bitcast", "copy") and end.operands:
                end = inside[end.operands[0]]
            target = inside[end.operands[0]] if end.operation == "dynamic-update-slice" else None
            while target is not None and target.operation == "bitcast":
                target = inside[target.operands[0]]
            is_given = target is not None and target.operation == "parameter"
            values.append(operands[int(target.literal)] if target is not None and is_given else own)
        return values if isinstance(made, list) else values[0]


_NAMING = ("tuple", "get-tuple-element", "bitcast", "optimization-barrier", "parameter")  # these read no buffer


def _flat(value: Value) -> list[int]:
    return [one for each in value for one in _flat(each)] if isinstance(value, list) else [value]


def _nested(result: str) -> Any:
    """A type as text, `(f32[2], (s32[], u32[]))`, as nested lists of types."""
    result = re.sub(r"/\*.*?\*/", "", result).strip()
    if not result.startswith("("):
        return result
    parts, depth, start = [], 0, 1
    for place, letter in enumerate(result):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if (letter == "," and depth == 1) or (depth == 0 and place == len(result) - 1):
            parts.append(result[start:place])
            start = place + 1
    return [_nested(part) for part in parts if part.strip()]
