"""Where the time of a program goes: a trace of its operations, told by kind of work and by module."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ._hlo import called, Instruction, module_of, parse, scopes_of


KINDS = ("products", "elementwise", "reductions", "copies", "fills", "messages", "loops", "nothing")
_LOOPS = {"while", "conditional", "call"}
_MESSAGES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-", "ragged-all-to-all"
_PRODUCTS = {"dot", "convolution", "custom-call"}
_SOURCES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_FILLS = _SOURCES | {"broadcast", "iota"}
_COPIES = _FILLS | set("copy transpose reshape slice dynamic-slice dynamic-update-slice concatenate pad".split())
_COPIES |= set("convert compare select and or not add clamp gather".split())  # which choose places, and round


class Span(NamedTuple):
    """A stretch of a thread in which an operation ran, in seconds from any start."""

    thread: str
    name: str
    start: float
    end: float


class Work(NamedTuple):
    """Seconds that a program spent on one kind of work in one module."""

    kind: str
    """One of `KINDS`: `nothing` is when no thread had an operation, `loops` what loops take themselves, and `messages`
    when there was nothing but collectives, in which a device waits for the others."""
    module: str
    """Its path; empty for what is in none."""
    is_backward: bool
    seconds: float


def time_account(text: str, spans: Iterable[Span]) -> tuple[Work, ...]:
    """The seconds from the first operation's start to the last one's end, by what ran, the longest first.

    `text` is that of the compiled program (HLO), whose operations the spans are called by; others are left out. At each
    instant the threads that work share it, so that all adds up to the time that passed. An operation inside of another
    on the same thread (of a loop's body) counts for itself; a loop or a message counts only where nothing else works.
    """
    lines = _lines(text)
    spans = [span for span in spans if span.name in lines and span.end > span.start]
    # Ends come before starts, and of two spans that start together the longer one is outside.
    points = [(span.start, 1, -span.end, number) for number, span in enumerate(spans)]
    points = sorted(points + [(span.end, 0, 0.0, number) for number, span in enumerate(spans)])
    inside: dict[str, list[int]] = defaultdict(list)
    found: dict[tuple[str, str, bool], float] = defaultdict(float)
    before = points[0][0] if points else 0.0
    for now, is_start, _, number in points:
        if now > before:
            tops = [lines[spans[own[-1]].name] for own in inside.values() if own]
            working = [top for top in tops if top[0] not in ("messages", "loops")]
            working = working or [top for top in tops if top[0] == "messages"] or tops or [("nothing", "", False)]
            for each in working:
                found[each] += (now - before) / len(working)
        before, own = now, inside[spans[number].thread]
        own.append(number) if is_start else own.remove(number)
    longest = sorted(found.items(), key=lambda each: -each[1])
    return tuple(Work(*key, seconds) for key, seconds in longest)


def _lines(text: str) -> dict[str, tuple[str, str, bool]]:
    """Of each operation its kind, its module and whether it is of a backward pass."""
    program, _ = parse(text)
    found = {}
    for lines in program.values():
        for line in lines:
            name = re.search(r'op_name="([^"]*)"', line.attributes)
            scopes = scopes_of(line.attributes)[:-1]  # the last is the operation's own
            found[line.name] = _kind(line, program), module_of(scopes), "transpose(" in (name[1] if name else "")
    return found


def _kind(line: Instruction, program: dict[str, list[Instruction]]) -> str:
    if line.operation in _LOOPS:
        return "loops"
    if line.operation.startswith(_MESSAGES):
        return "messages"
    operations = {line.operation}
    if line.operation == "fusion":
        operations = {each.operation for name in called(line) for each in program[name]}
    if operations & _PRODUCTS:
        return "products"
    if operations & {"reduce", "reduce-window"}:
        return "reductions"
    return "fills" if operations <= _FILLS else "copies" if operations <= _COPIES else "elementwise"
