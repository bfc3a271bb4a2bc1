"""How XLA's compiler for GPUs runs a traced step beside what it sends: what is there for longer, and what earlier."""

import math
from collections.abc import Callable
from typing import Any

from ..program import carry_of, Line, Lines
from ._traced_uses import is_view, Uses, VIEWS, WRITTEN


_SCATTERS = ("psum_scatter", "reduce_scatter")
_KERNELS = ("custom_vmap_call", "mpmd_map", "pallas_call")
_GRADIENTS = ("dot_general", "reduce_sum", *_KERNELS)
_PRODUCTS = {"dot_general": 1, "scan": 2}


def born_early(uses: Uses, merged: set[int]) -> tuple[set[int], dict[int, list[int]]]:
    """What gradients of layers are added to is made with the first zeros of all; zeros of one shape are made at once.

    Not those of what is scattered along another dim than its first, which lie in another order.
    """
    first, early, shapes = None, [], set()
    for place, line in enumerate(uses.lines):
        value = line.writes[0] if line.writes else -1
        if line.name == "broadcast_in_dim" and value not in (uses.fused | merged):
            shape, source = uses.program.avals[value].shape, line.reads[0]
            # A loss's zeros are of one number that there is once hidden states are.
            if first is None and (source is None or uses.program.avals[source].shape == ()):
                first = place
            if source is None:
                early.extend([value] if shape in shapes and not _scattered_within(uses, value) else ())
                shapes.add(shape)
        elif line.name == "scan" and first is not None and "transpose" in line.scopes:
            early.extend(line.writes[carry_of(line)[1] :])
    return set(early), {} if first is None else {first: early}


def _scattered_within(uses: Uses, zeros: int) -> bool:
    """Whether what is added to zeros is scattered along another dim than its first."""
    sums = (uses.root(value) for place in uses.readers.get(zeros, []) for value in uses.lines[place].writes)
    then = (uses.lines[place] for value in sums for place in uses.readers.get(value, []))
    return any(line.name in _SCATTERS and line.params["scatter_dimension"] for line in then)


def gradients_last(program: Lines) -> list[Line]:
    """A loop's lines with the products and sums that are scattered over devices behind all others, each before its
    scatter: a norm's scale, whose gradient is a sum over tokens, has arrays of all of them wait."""
    made = {value: place for place, line in enumerate(program.lines) for value in line.writes}
    turns: dict[int, int] = {}  # of a line that is late, the place of the scatter with which it goes
    for place, line in enumerate(program.lines):
        before: int | None = place if line.name in _SCATTERS else None
        while before is not None and before not in turns:
            turns[before], source = place, program.lines[before].reads[0]
            is_sum = program.lines[before].name in _GRADIENTS and not is_view(program, program.lines[before])
            before = None if is_sum or source is None else made.get(source)
            if before is not None and program.lines[before].name not in (*VIEWS, *_GRADIENTS, "convert_element_type"):
                before = None
    of_late: dict[int | None, int] = {}
    for place, line in enumerate(program.lines):
        found = [of_late[value] for value in line.reads if value in of_late]
        if place in turns or found:
            turns.setdefault(place, max(found, default=place))
            of_late.update(dict.fromkeys(line.writes, turns[place]))
    return [program.lines[place] for place in sorted(range(len(program.lines)), key=lambda n: (turns.get(n, -1), n))]


def beside_loops(program: Lines) -> list[int]:
    """At each line the bytes that loops send at their ends, where other lines run beside that.

    The first turn of a loop gathers parameters from the loop before it on, and what the last turn scatters is sent
    until the loop behind it has ended.
    """
    found = [0] * len(program.lines)
    loops = [(place, line) for place, line in enumerate(program.lines) if line.name == "scan"]
    for number, (place, line) in enumerate(loops):
        body = Lines(line.params["jaxpr"].jaxpr)
        gathered = sum(body.size(one.writes[0]) for one in body.lines if _gathers_parameters(one))
        sums = [one.reads[0] for one in body.lines if one.name in _SCATTERS]
        scattered = max((body.size(value) for value in sums if value is not None), default=0)
        start = loops[number - 1][0] if number else 0
        end = loops[number + 1][0] if number + 1 < len(loops) else place
        for beside in range(start, place):
            found[beside] += gathered
        for beside in range(place + 1, end + 1):
            found[beside] += scattered
    return found


def kept_twice(program: Lines) -> list[int]:
    """At each line the bytes that the last turns of loops before it keep, and that are not yet beside other turns'.

    Of a loop that gathers parameters a turn ahead the last turn runs behind it, and what it keeps is written into the
    loop's arrays when they are read: products and the like as they are, elementwise results as they are computed.
    """
    found = [0] * len(program.lines)
    for place, line in enumerate(program.lines):
        if line.name != "scan" or line.params["length"] == 1:
            continue
        body = Uses(Lines(line.params["jaxpr"].jaxpr))
        if any(map(_gathers_parameters, body.lines)):
            carried, arrays = carry_of(line)[1], set(line.writes[carry_of(line)[1] :])
            makers = ((value, body.maker(value)) for value in set(map(body.root, body.program.results[carried:])))
            kept = sum(body.program.size(value) for value, maker in makers if maker and maker.name in WRITTEN)
            readers = (n for n in range(place + 1, len(program.lines)) if arrays & set(program.lines[n].reads))
            for beside in range(place + 1, next(readers, place)):
                found[beside] = kept
    return found


def _gathers_parameters(line: Line) -> bool:
    return line.name == "all_gather" and "parameters" in line.scopes


def last_in_flight(uses: Uses, is_loop: bool) -> Callable[[int], int]:
    """Until when each value is there: a sum that is scattered beside the next two products, and what a loop gathers.

    Sums that kernels give, all at once, are cast and scattered one after another, two at a time. A loop has products
    enough. In the place of what was gathered and read is what the next turn reads.
    """
    products = [place for place, line in enumerate(uses.lines) for _ in range(_PRODUCTS.get(line.name, 0))]
    scatters = [place for place, line in enumerate(uses.lines) if line.name in _SCATTERS]
    later: dict[int, int] = {}
    for place, line in enumerate(uses.lines):
        if line.name in _SCATTERS:
            second = [product for product in products if product > place][1:2]
            following = [scatter for scatter in scatters if scatter > place][:1]
            end = following if _is_of_kernels(uses, line.reads[0]) else second
            later[uses.root(line.reads[0])] = (end or [len(uses.lines) - 1])[0]
        elif _gathers_parameters(line) and is_loop:
            later[line.writes[0]] = len(uses.lines) - 1
    return lambda value: max(uses.last(value), later.get(value, -1))


def _is_of_kernels(uses: Uses, value: int | None) -> bool:
    """Whether a sum is what a kernel gives, with a cast."""
    maker = uses.maker(value)
    while maker is not None and maker.name in (*VIEWS, "convert_element_type"):
        maker = uses.maker(maker.reads[0])
    return maker is not None and maker.name in _KERNELS


def copied_bytes(jaxpr: Any) -> int:
    """Bytes of a loop's arrays that are gathered along another dim than their first."""
    copied: dict[int, int] = {}

    def visit(jaxpr: Any, given: list[tuple[int, int] | None]) -> None:
        program = Lines(jaxpr)
        source = dict(zip(program.given, given))
        for line in program.lines:
            of = [None if one is None else source.get(one) for one in line.reads]
            if line.name in VIEWS or line.name == "convert_element_type":
                source[line.writes[0]] = of[0]
            elif line.name == "all_gather":
                shape = program.avals[line.writes[0]].shape  # of the first dims what is gathered has as many
                dim = line.params["all_gather_dimension"]
                if of[0] is not None and of[0][1] and math.prod(shape[:dim]) > 1:
                    copied[of[0][0]] = of[0][1]
            elif line.name == "scan":
                over = sum(carry_of(line))
                sizes = [0 if one is None else program.size(one) for one in line.reads[over:]]
                sized = [its and (its[0], size) for its, size in zip(of[over:], sizes)]
                visit(line.params["jaxpr"].jaxpr, [*of[:over], *sized])
            elif line.name == "cond":
                for branch in line.params["branches"]:
                    visit(branch.jaxpr, of[1:])

    visit(jaxpr, [(number, 0) for number in range(len(jaxpr.invars))])
    return sum(copied.values())
