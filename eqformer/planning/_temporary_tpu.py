"""How XLA's compiler for TPUs casts what a traced step sends, and lays its gradients out for the update."""

from typing import Any

from ..program import carry_of, Line, Lines
from ._traced_uses import Uses, VIEWS, WRITTEN


_UNFUSED = WRITTEN - {"dot_general"}
_TILE = 32  # bytes of a column of a tile: eight rows of float32


def tpu_uses(program: Lines) -> tuple[Uses, dict[int, int], dict[int, int]]:
    """Who reads what; the casts that are not made, and what they are of; and the bytes of products that are only cast.

    Products compute the elementwise results that they read, each for itself, so that those are not written; and what is
    only cast is written as it is cast to.
    """
    uses = Uses(program, None, _UNFUSED)
    back, cast = _cast_back(uses), dict[int, int]()
    for line in program.lines:
        product = uses.maker(line.reads[0]) if line.name == "convert_element_type" else None
        if product is not None and product.name == "dot_general":
            made = product.writes[0]
            cast |= {line.writes[0]: made} if made not in uses.results and len(uses.readers[made]) == 1 else {}
    # What is filled up with zeros, to be cut, is not: a slice reads what is within.
    filled = {
        line.writes[0]: line.reads[0] for line in program.lines if line.name == "pad" and line.reads[0] is not None
    }
    views = back | cast | filled
    return Uses(program, views, _UNFUSED), back, {one: program.size(value) for value, one in cast.items()}


def cast_before_sent(uses: Uses, carried: tuple[int, int] | None) -> dict[int, int]:
    """Bytes of what is gathered and then only cast, which a TPU's compiler does in the other order, and of the casts.

    A cast of what a loop is given is done before the loop.
    """
    found: dict[int, int] = {}
    given = uses.program.given[: carried[0]] if carried else []
    for value in [*given, *(line.writes[0] for line in uses.lines if line.name == "all_gather")]:
        places = uses.readers.get(value, [])
        widths = [_cast_width(uses.lines[place], value, uses) for place in places]
        if places and all(widths) and max(widths) < uses.program.avals[value].dtype.itemsize:
            found[value] = max(widths) * uses.program.avals[value].size
            casts = (uses.lines[place] for place in places)
            found |= {line.writes[0]: 0 for line in casts if line.name == "convert_element_type"}
    return found


def before_loops(uses: Uses) -> list[int]:
    """At each line the bytes of what is made of parameters for more than one loop, forward and backward.

    What loops go through turn by turn and cast to fewer bytes is cast before the first of them, all of it, and is there
    until the last. Loops of one turn are taken away, and what they gather, which is the same, is there between them.
    """
    found = [0] * len(uses.lines)
    shared: dict[int, list[tuple[int, int]]] = {}  # of an array, the places of its loops, and the bytes
    for place, line in enumerate(uses.lines):
        if line.name != "scan":
            continue
        over, is_turn = sum(carry_of(line)), line.params["length"] == 1
        inner = Uses(Lines(line.params["jaxpr"].jaxpr))
        for value, given in zip(map(uses.root, line.reads[over:]), inner.program.given[over:]):
            casts = [inner.lines[reader] for reader in inner.readers.get(given, [])]
            if value != -1 and casts and _all_casts(casts):
                cast = casts[0].writes[0]
                gathers = (inner.lines[reader] for reader in inner.readers.get(cast, []))
                gathered = sum(inner.program.size(one.writes[0]) for one in gathers if one.name == "all_gather")
                size = uses.program.avals[value].size * inner.program.avals[cast].dtype.itemsize
                shared.setdefault(value, []).append((place, gathered if is_turn else size))
    for value, loops in shared.items():
        (first, size), last = loops[0], loops[-1][0]
        is_turn = uses.lines[first].params["length"] == 1
        if is_turn or size < uses.program.size(value):
            for place in range(first + is_turn, last + 1 - is_turn):
                found[place] += size
    return found


def _cast_width(line: Line, value: int, uses: Uses) -> int:
    """The bytes of a number as which a line reads a value, where it casts it or hands it to a loop that does; or 0."""
    if line.name == "convert_element_type":
        return uses.program.avals[line.writes[0]].dtype.itemsize
    if line.name == "gather":  # a lookup, whose vectors are cast
        casts = [uses.lines[place] for place in uses.readers.get(line.writes[0], [])]
        return max((_cast_width(one, line.writes[0], uses) for one in casts), default=0) if _all_casts(casts) else 0
    if line.name != "scan":
        return 0
    number = next(n for n, one in enumerate(line.reads) if uses.root(one) == value)
    inner = Lines(line.params["jaxpr"].jaxpr)
    casts = [one for one in inner.lines if inner.given[number] in one.reads]
    if number >= carry_of(line)[0] or not _all_casts(casts):
        return 0
    return max((inner.avals[one.writes[0]].dtype.itemsize for one in casts), default=0)


def _cast_back(uses: Uses) -> dict[int, int]:
    """Casts to more bytes, and what they are of, that are cast back wherever they are read: they are not made."""
    found: dict[int, int] = {}
    for line in uses.lines:
        if line.name == "convert_element_type" and (source := line.reads[0]) is not None:
            value, width = line.writes[0], uses.program.avals[source].dtype.itemsize
            places = uses.readers.get(value, [])
            is_back = all(_cast_width(uses.lines[place], value, uses) == width for place in places)
            if places and is_back and width < uses.program.avals[value].dtype.itemsize:
                found[value] = source
    return found


def _all_casts(lines: list[Line]) -> bool:
    return all(line.name == "convert_element_type" for line in lines)


def relaid_bytes(jaxpr: Any, moments: int) -> int:
    """Bytes that an update's new moments take beside all gradients, where these are made in parts.

    Arrays lie in tiles of eight rows of float32. Parts of another number of rows are laid out anew to be one array:
    not the gradient itself, but what each moment adds of it, all before the update, and in the place of the gradient
    but for the last of such arrays.
    """
    program = Lines(jaxpr)
    uses, sizes = Uses(program), [0]
    for result in program.results:
        line = None if result not in uses.made else uses.lines[uses.made[result]]
        while line is not None and line.name in (*VIEWS, "psum_invariant"):
            given = line.reads[0]
            if given is None:
                break
            before, after = program.avals[given], program.avals[line.writes[0]]
            is_joined = line.name == "reshape" and before.ndim == after.ndim + 1 > 2
            if is_joined and before.shape[-2] * before.dtype.itemsize % _TILE:
                sizes.append(program.size(given))
            line = uses.lines[uses.made[given]] if given in uses.made else None
    return max(moments - 1, 0) * sum(sizes) + (max(sizes) if moments else 0)
