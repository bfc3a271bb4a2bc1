"""The bytes that a compiled program sends, read off its text."""

import dataclasses
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Int

from ._hlo import (
    called,
    FURTHER_ROUNDS,
    groups_of,
    hidden_starts,
    Instruction,
    parse,
    scopes_in,
    scopes_of,
    size_of,
    trips_of,
    Waits,
    waits,
)
from ._jaxpr import Line, Lines, needed, per_device


AnyMesh = Mesh | AbstractMesh
# Bytes sent by each of n devices for each byte of its operands (rings; Patarasuk and Yuan 2009).
SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a compiled program."""

    kind: str
    """Which collective it is."""
    axes: tuple[str, ...] | None
    """The mesh axes it runs over; None where no mesh was given or its groups follow no axis."""
    devices: int
    """The size of a group; of a permute, how many devices of the mesh send."""
    sent: float
    """The bytes each device sends each time, a permute's averaged over the mesh."""
    times: int | None
    """How often it runs; None inside a loop whose length the compiler does not know."""
    scopes: tuple[str, ...] = ()
    """The names (of `jax.named_scope`, loops and functions) that it stands in, the innermost last."""
    hidden: bool = False
    """Whether it is begun, and waited for only after other work."""

    @property
    def total(self) -> float | None:
        """Bytes sent by a device over a run of the program; `None` where the number of times is unknown."""
        return None if self.times is None else self.sent * self.times

    def named(self, names: Container[str]) -> str | None:
        """The innermost of the scopes that is one of some names; None where none is."""
        return next((scope for scope in reversed(self.scopes) if scope in names), None)


def list_transfers(compiled: jax.stages.Compiled | str, *, mesh: AnyMesh | None = None) -> tuple[Transfer, ...]:
    """What each device sends in one run of a compiled program (`jax.jit(f).lower(...).compile()`, or its HLO text).

    All-reduce `2(n-1)/n S`; all-gather `(n-1)/n S` of its result; reduce-scatter and all-to-all `(n-1)/n S` of their
    operands, of a ragged one as an even load fills them; permute `S`, times the share of devices that send. Calls are
    followed and loops multiplied out; of a conditional, the branch that sends most is counted, and of an exchange of
    experts' tokens the first round. With the `mesh` the program was compiled for, axes are named. The bytes are those
    of the program: XLA's CPU backend, for one, adds up 16-bit numbers as float32. Raises a `ValueError` where the
    program's text cannot be had, as of some TPU programs.
    """
    text = compiled if isinstance(compiled, str) else text_of(compiled)
    program, entry = parse(text)
    count = re.search(r"num_partitions=(\d+)", text), re.search(r"replica_count=(\d+)", text)
    everyone = math.prod(int(match.group(1)) for match in count if match)
    if mesh is not None and mesh.size != everyone:
        raise ValueError(
            f"list_transfers(mesh={dict(mesh.shape)}): the mesh has {mesh.size} devices, but the program was "
            f"compiled for {everyone}; pass the mesh it runs on."
        )
    known: dict[str, tuple[Transfer, ...]] = {}

    def sent_by(name: str) -> tuple[Transfer, ...]:
        if name not in known:
            lines = program.get(name, [])
            beside, begun = {line.name: line for line in lines}, hidden_starts(lines, program)
            known[name] = tuple(transfer for line in lines for transfer in of_line(line, beside, begun))
        return known[name]

    def of_line(line: Instruction, beside: dict[str, Instruction], begun: set[str]) -> Iterator[Transfer]:
        kind = line.operation.removesuffix("-start")
        if kind in SENT:
            sizes = [size_of(beside[name].result) for name in line.operands]
            given = ragged_bytes(*sizes) if kind == "ragged-all-to-all" else sum(sizes)
            transfer = _transfer(kind, line, given, everyone, mesh)
            if transfer.sent:
                yield dataclasses.replace(transfer, scopes=_scopes(line, beside), hidden=line.name in begun)
            return
        parts = [sent_by(name) for name in called(line) if waits(name, program.get(name, [])) not in _AGAIN]
        if line.operation == "conditional":
            parts = [max(parts, key=_most)]
        times = trips_of(line, program, beside) if line.operation == "while" else 1
        for transfer in (_as_fused(transfer, line) for part in parts for transfer in part):
            product = None if transfer.times is None or times is None else transfer.times * times
            yield dataclasses.replace(transfer, times=product, hidden=transfer.hidden or line.name in begun)

    return tuple(transfer for transfer in sent_by(entry) if transfer.times != 0)


def list_traced_transfers(jaxpr: Any, sizes: Mapping[str, int]) -> tuple[Transfer, ...]:
    """Return the collectives that each device of a mesh with axes of such `sizes` runs in a traced program.

    Conventions are those of `list_transfers`: loops are multiplied out (None for a loop of unknown length), of a
    conditional the branch that sends most counts, and of an exchange of experts' tokens the first round. A pipeline
    counts all ticks, in some of which a device is idle. What the partitioner adds outside `shard_map` is not traced.
    """
    programs = (Lines(needed(program)) for program in per_device(jaxpr))
    return tuple(transfer for program in programs for transfer in _traced_transfers(program, sizes))


def _traced_transfers(program: Lines, sizes: Mapping[str, int]) -> Iterator[Transfer]:
    for line in program.lines:
        if line.name in _TRACED_KINDS:
            yield from _traced_transfer(line, program, sizes)
        elif line.name == "scan":
            for transfer in _traced_transfers(Lines(line.params["jaxpr"].jaxpr), sizes):
                length = line.params["length"]
                yield dataclasses.replace(transfer, times=None if transfer.times is None else transfer.times * length)
        elif line.name == "while" and FURTHER_ROUNDS not in line.scopes:
            for transfer in _traced_transfers(Lines(line.params["body_jaxpr"].jaxpr), sizes):
                yield dataclasses.replace(transfer, times=None)
        elif line.name == "cond":
            branches = [tuple(_traced_transfers(Lines(branch.jaxpr), sizes)) for branch in line.params["branches"]]
            yield from max(branches, key=lambda branch: sum(each.sent * (each.times or 1) for each in branch))


def _traced_transfer(line: Line, program: Lines, sizes: Mapping[str, int]) -> Iterator[Transfer]:
    kind = _TRACED_KINDS[line.name]
    operands = [program.size(value) for value in line.reads if value is not None]
    size = ragged_bytes(*operands) if kind == "ragged-all-to-all" else sum(operands)
    names: Any = line.params.get("axes", line.params.get("axis_name"))
    axes = (names,) if isinstance(names, str) else tuple(names)
    groups, devices = line.params.get("axis_index_groups"), math.prod(sizes[axis] for axis in axes)
    if kind == "collective-permute":
        senders = len(line.params["perm"])
        transfer = Transfer(kind, axes, senders, size * senders / devices, 1, scopes_in(line.scopes))
    else:
        members = len(groups[0]) if groups else devices
        transfer = Transfer(kind, axes, members, float(SENT[kind](members) * size), 1, scopes_in(line.scopes))
    if transfer.sent:
        yield transfer


_TRACED_KINDS = {
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


def text_of(compiled: jax.stages.Compiled) -> str:
    """The text of a compiled program (HLO); raises a `ValueError` where its compiler cannot write it."""
    try:
        return compiled.as_text() or ""
    except Exception as error:  # jaxlib's own kind of error, which JAX does not name
        raise ValueError(
            "list_transfers: the text of this program cannot be had, so that its collectives cannot be counted: "
            f"{str(error).splitlines()[0][:200]}"
        ) from error


def ragged_bytes(given: int, made: int, *_: int) -> int:
    """Bytes of the rows of a ragged all-to-all with an even load: one of its arrays may have more room than that."""
    return min(given, made)


def bytes_sent(transfers: Iterable[Transfer], *, axes: tuple[str, ...] | None = None) -> float:
    """Bytes that each device sends in all; with `axes`, over exactly those mesh axes.

    Raises a `ValueError` where a loop's length is unknown.
    """
    chosen = [transfer for transfer in transfers if axes is None or set(transfer.axes or ()) == set(axes)]
    unknown = [transfer.kind for transfer in chosen if transfer.times is None]
    if unknown:
        raise ValueError(
            f"bytes_sent: {', '.join(unknown)} stand in a loop of unknown length; give the loop a fixed length, or "
            f"leave them out."
        )
    return float(sum(transfer.sent * (transfer.times or 0) for transfer in chosen))


_AGAIN = (Waits.WORKS, Waits.ENDS)  # a collective stands there once more, but was begun elsewhere


def _scopes(line: Instruction, beside: dict[str, Instruction]) -> tuple[str, ...]:
    """The scopes of a collective; where GPUs' compiler drops those of a ragged all-to-all, of what it writes over."""
    found = scopes_of(line.attributes)
    if found or not line.operation.startswith("ragged-all-to-all"):
        return found
    written = beside[line.operands[1]]
    while written.operation in ("get-tuple-element", "copy", "bitcast"):
        written = beside[written.operands[0]]
    return scopes_of(written.attributes)


def _as_fused(transfer: Transfer, line: Instruction) -> Transfer:
    """An all-reduce of which each device keeps a slice is one reduce-scatter, where a TPU has an emitter of both."""
    if transfer.kind != "all-reduce" or "AllReduceScatterFusion" not in line.attributes:
        return transfer
    return dataclasses.replace(transfer, kind="reduce-scatter", sent=transfer.sent / 2)


def _most(transfers: tuple[Transfer, ...]) -> float:
    return float(sum(math.inf if transfer.total is None else transfer.total for transfer in transfers))


def _transfer(kind: str, line: Instruction, size: int, everyone: int, mesh: AnyMesh | None) -> Transfer:
    if kind == "collective-permute":
        listed = re.search(r"source_target_pairs=\{(.*?)\}\}", line.attributes)
        found = re.findall(r"(\d+),(\d+)", listed.group(1)) if listed else []
        pairs = np.array([(int(a), int(b)) for a, b in found if a != b]).reshape(-1, 2)
        return Transfer(kind, _axes(pairs, mesh, is_permute=True), len(pairs), size * len(pairs) / everyone, 1)
    groups = groups_of(line.attributes, everyone)
    devices = groups.shape[1]
    return Transfer(kind, _axes(groups, mesh), devices, float(size * SENT[kind](devices)), 1)


def _axes(
    groups: Int[np.ndarray, "groups devices"], mesh: AnyMesh | None, is_permute: bool = False
) -> tuple[str, ...] | None:
    """The mesh axes along which the devices of a group differ, if together they make up the group."""
    if mesh is None:
        return None
    places = np.stack(np.unravel_index(groups, mesh.axis_sizes), axis=-1)
    along = (places != places[:, :1]).any(axis=(0, 1))
    names = tuple(name for name, differs in zip(mesh.axis_names, along) if differs)
    size = math.prod(length for length, differs in zip(mesh.axis_sizes, along) if differs)
    return names if is_permute or size == groups.shape[1] else None
