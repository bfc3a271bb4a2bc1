"""What a device sends in a traced program, by its collectives' names."""

import math
from collections.abc import Mapping
from typing import Any

from ..parallel import COLLECTIVES, FURTHER_ROUNDS, STATE
from ._communication import ragged_bytes, SENT
from ._sent_bytes import Sent
from ._traced import Line, Lines, needed, per_device


def traced_sent(jaxpr: Any, sizes: Mapping[str, int]) -> list[Sent]:
    """The bytes that each device of a mesh with axes of such `sizes` sends in a traced program.

    Loops are multiplied out, those of unknown length count once; of a conditional, the branch that sends most; of an
    exchange of experts' tokens the first round; of a pipeline all ticks, in some of which a device is idle.
    """
    found: dict[tuple[str, str], float] = {}
    for each in per_device(jaxpr):
        _count(Lines(needed(each)), sizes, 1, found)
    return [Sent(cause, what, size) for (cause, what), size in found.items() if size]


def _count(program: Lines, sizes: Mapping[str, int], times: int, found: dict[tuple[str, str], float]) -> None:
    for line in program.lines:
        if line.name in _KINDS:
            name = next((scope for scope in reversed(line.scopes.split("/")) if scope in COLLECTIVES), line.name)
            key = COLLECTIVES.get(name, STATE), name
            given = [program.size(value) for value in line.reads if value is not None]
            read = ragged_bytes(*given) if line.name == "ragged_all_to_all" else sum(given)
            found[key] = found.get(key, 0.0) + times * _share(line, sizes) * read
        elif line.name == "scan":
            _count(Lines(line.params["jaxpr"].jaxpr), sizes, times * line.params["length"], found)
        elif line.name == "while" and FURTHER_ROUNDS not in line.scopes:
            _count(Lines(line.params["body_jaxpr"].jaxpr), sizes, times, found)
        elif line.name == "cond":
            runs: list[dict[tuple[str, str], float]] = [{} for _ in line.params["branches"]]
            for branch, own in zip(line.params["branches"], runs):
                _count(Lines(branch.jaxpr), sizes, times, own)
            for key, size in max(runs, key=lambda own: sum(own.values())).items():
                found[key] = found.get(key, 0.0) + size


def _share(line: Line, sizes: Mapping[str, int]) -> float:
    """The bytes that a collective sends for each byte that it is given."""
    axes: Any = line.params.get("axes", line.params.get("axis_name"))
    groups = line.params.get("axis_index_groups")
    devices = math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
    if line.name == "ppermute":
        return len(line.params["perm"]) / devices
    return float(SENT[_KINDS[line.name]](len(groups[0]) if groups else devices))


_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "psum_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}
