"""The bytes that a program sends."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from ._ir import CONDITIONALS, Program, Transfer


def list_transfers(program: Program) -> tuple[Transfer, ...]:
    """Return what each device sends in one run of a program.

    All-reduce `2(n-1)/n S`; all-gather `(n-1)/n S` of its result; reduce-scatter and all-to-all `(n-1)/n S` of their
    operands, of a ragged one as an even load fills them; permute `S`, times the share of devices that send. Loops are
    multiplied out; of a conditional, the branch that sends most is counted, and of an exchange of experts' tokens the
    first round. The bytes are those of the program: XLA's CPU backend, for one, adds up 16-bit numbers as float32. A
    traced program does not have what the partitioner adds, and its pipelines count all ticks, in some of which a device
    is idle.
    """
    return tuple(transfer for transfer in _transfers(program) if transfer.times != 0)


def _transfers(program: Program) -> Iterator[Transfer]:
    for operation in program.operations:
        if operation.transfer is not None:
            yield operation.transfer
        parts = [tuple(_transfers(body)) for body in operation.bodies]
        if operation.kind in CONDITIONALS:
            parts = [max(parts, key=_total_bytes, default=())]
        for transfer in (transfer for part in parts for transfer in part):
            times, trips = transfer.times, operation.trips
            yield dataclasses.replace(transfer, times=None if times is None or trips is None else times * trips)


def _total_bytes(transfers: Iterable[Transfer]) -> float:
    return float(sum(math.inf if transfer.total is None else transfer.total for transfer in transfers))


def bytes_sent(transfers: Iterable[Transfer], *, axes: tuple[str, ...] | None = None) -> float:
    """Return the bytes that each device sends in all; with `axes`, over exactly those mesh axes.

    Raises a `ValueError` where a loop's length is unknown.
    """
    chosen = [transfer for transfer in transfers if axes is None or set(transfer.axes or ()) == set(axes)]
    unknown = [transfer.kind for transfer in chosen if transfer.times is None]
    if unknown:
        raise ValueError(
            f"bytes_sent: {', '.join(unknown)} stand in a loop of unknown length; give the loop a fixed length, or "
            f"leave them out."
        )
    return float(sum(transfer.total or 0 for transfer in chosen))
