"""What a compiled program sends, by the causes of the formulas."""

import collections
from collections.abc import Container, Iterable

from .. import parallel
from ..nn import format_table
from ..parallel import COLLECTIVES, PIPE, STATE, TENSOR
from ..program import bytes_sent, Transfer
from ._sent_bytes import by_cause, Sent, ticks


def counted_bytes(plan: parallel.Plan, transfers: Iterable[Transfer]) -> dict[str, float]:
    """What a program's collectives send, by the causes of `sent_bytes`, found by the collectives' names.

    Without a name are what the partitioner adds, parameters after the optimizer's step (state), and few sums that JAX
    adds to a backward pass. All that goes over `tensor` alone counts as its: XLA makes one sum, by one of their names,
    of gradients and of what the loss reduces there.
    In a pipeline each counts in the ticks in which it is done: entries are branches, and idle ones send nothing.
    """

    def sent(transfer: Transfer) -> Sent:
        name, times = transfer.named(COLLECTIVES), transfer.times or 0
        cause = TENSOR if transfer.axes == (TENSOR,) else STATE if name is None else COLLECTIVES[name]
        is_in_ticks = plan.is_pipelined and times and times % ticks(plan) == 0
        share = _share_of_ticks(plan, cause) if is_in_ticks else 1.0
        return Sent(cause, name or transfer.kind, share * times * transfer.sent)

    return by_cause(map(sent, transfers))


def name_transfers(transfers: Iterable[Transfer]) -> tuple[Sent, ...]:
    """Return the bytes that a device sends by the collectives' names; those in loops of unknown length count once."""
    sizes: dict[tuple[str, str], float] = {}
    for transfer in transfers:
        name = transfer.named(COLLECTIVES)
        key = STATE if name is None else COLLECTIVES[name], name or transfer.kind
        sizes[key] = sizes.get(key, 0.0) + transfer.sent * (1 if transfer.times is None else transfer.times)
    return tuple(Sent(cause, what, size) for (cause, what), size in sizes.items() if size)


def _share_of_ticks(plan: parallel.Plan, cause: str) -> float:
    if cause != PIPE:
        return plan.microbatches * plan.timetable().chunks / ticks(plan)
    if plan.spreads_edges:
        return 1.0
    used = parallel.count_link_ticks(plan.timetable())
    return sum(used.values()) / (len(used) * ticks(plan))


def communication_table(transfers: Iterable[Transfer], *, names: Container[str] = ()) -> str:
    """Lines of text: what is sent by kind, axes, and which of some names, largest first, and the sum.

    `+?` stands behind what more is sent in loops of unknown length.
    """
    groups: dict[tuple[str, str, str, str], list[Transfer]] = collections.defaultdict(list)
    for each in transfers:
        over = f"{each.devices} devices" if each.axes is None else " x ".join(each.axes)
        groups[each.kind, over, each.named(names) or "", "beside other work" if each.hidden else ""].append(each)
    groups = dict(sorted(groups.items(), key=lambda its: -_known(its[1])[1]))
    groups["all", "", "", ""] = [each for group in groups.values() for each in group]
    rows: list[tuple[str, ...]] = [("operation", "over", "times", "bytes sent a device", "name", "")]
    for (kind, over, name, hidden), group in groups.items():
        (times, sent), more = _known(group), "+?" if any(each.times is None for each in group) else ""
        rows.append((kind, over, f"{times}{more}", f"{sent:,.0f}{more}", name, hidden))
    return format_table(rows)


def _known(transfers: Iterable[Transfer]) -> tuple[int, float]:
    """How often they run, and the bytes that are sent, of those of which that is known."""
    known = [each for each in transfers if each.times is not None]
    return sum(each.times or 0 for each in known), bytes_sent(known)
