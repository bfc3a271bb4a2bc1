"""The time of a program by kind of work and by module, from a trace of its operations."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ._hlo_text import called_computations, Computations, Instruction, is_backward_pass, module_of, parse_hlo, scopes_of


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
    """Return the seconds from the first operation's start to the last one's end, by kind and module, longest first.

    `text` is the text of the compiled program (HLO); spans that are not named for one of its operations are left out.
    Threads that are busy at the same time share that time equally, so the seconds add up to the time that passed. If an
    operation runs inside another on the same thread, as in a loop's body, only the inner one counts. A collective
    counts only while no other kind of work runs, and a loop only while nothing else runs.
    """
    work_of = _classify_operations(text)
    spans = [span for span in spans if span.name in work_of and span.end > span.start]
    # At the same time, ends come before starts, and the longer of two spans that start together is the outer one.
    points = [(span.start, 1, -span.end, number) for number, span in enumerate(spans)]
    points = sorted(points + [(span.end, 0, 0.0, number) for number, span in enumerate(spans)])
    open_spans: dict[str, list[int]] = defaultdict(list)  # of each thread, the innermost last
    seconds: dict[tuple[str, str, bool], float] = defaultdict(float)
    previous = points[0][0] if points else 0.0
    for now, is_start, _, number in points:
        if now > previous:
            innermost = [work_of[spans[stack[-1]].name] for stack in open_spans.values() if stack]
            working = [work for work in innermost if work[0] not in ("messages", "loops")]
            working = working or [work for work in innermost if work[0] == "messages"]
            working = working or innermost or [("nothing", "", False)]
            for work in working:
                seconds[work] += (now - previous) / len(working)
        previous, stack = now, open_spans[spans[number].thread]
        stack.append(number) if is_start else stack.remove(number)
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
