"""Bytes that a device sends, counted in traced and compiled programs, by the causes of `sent_bytes`."""

from collections.abc import Iterable

from .. import parallel
from ..parallel import COLLECTIVES, PIPE, STATE, TENSOR
from ..program import Transfer
from ._sent_bytes import count_ticks, merge_sent, Sent, sum_by_cause


def counted_bytes(plan: parallel.Plan, transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return the bytes that a compiled program's collectives send, by the causes of `sent_bytes`.

    The name of a collective gives its cause. Collectives without a name count as state: collectives of the partitioner,
    gathers of parameters after the optimizer's step, and a few sums that JAX adds to a backward pass. All bytes over
    the axis `tensor` alone count for `tensor`, because XLA merges gradients and sums of the loss into one all-reduce,
    which keeps only one of their names. A pipeline's loop runs its collectives in branches of a conditional, so that a
    collective counts only in the ticks that take its branch.
    """

    def to_sent(transfer: Transfer) -> Sent:
        name, times = transfer.named(COLLECTIVES), transfer.times or 0
        cause = TENSOR if transfer.axes == (TENSOR,) else _cause_of(name)
        # A collective in the pipeline's loop is counted in every tick, so its `times` is a multiple of the ticks.
        is_in_loop = plan.is_pipelined and times and times % count_ticks(plan) == 0
        share = _share_of_ticks(plan, cause) if is_in_loop else 1.0
        return Sent(cause, name or transfer.kind, share * times * transfer.sent)

    return sum_by_cause(map(to_sent, transfers))


def name_transfers(transfers: Iterable[Transfer]) -> tuple[Sent, ...]:
    """Return the bytes that a device sends by the names of collectives; loops of unknown length count once."""

    def to_sent(transfer: Transfer) -> Sent:
        name = transfer.named(COLLECTIVES)
        return Sent(_cause_of(name), name or transfer.kind, transfer.min_total)

    return tuple(merge_sent(map(to_sent, transfers)))


def _cause_of(name: str | None) -> str:
    """Return the cause of a collective by its name."""
    return STATE if name is None else COLLECTIVES[name]


def _share_of_ticks(plan: parallel.Plan, cause: str) -> float:
    """Return the share of a pipeline's ticks in which a device sends something for a cause."""
    if cause != PIPE:
        return plan.microbatches * plan.timetable().chunks / count_ticks(plan)
    if plan.spreads_edges:
        return 1.0
    link_ticks = parallel.count_link_ticks(plan.timetable())
    return sum(link_ticks.values()) / (len(link_ticks) * count_ticks(plan))
