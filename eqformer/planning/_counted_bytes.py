"""What a compiled program sends, by the causes of the formulas."""

from collections.abc import Iterable

from .. import parallel
from ..parallel import COLLECTIVES, PIPE, STATE, TENSOR
from ._communication import Transfer
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


def _share_of_ticks(plan: parallel.Plan, cause: str) -> float:
    if cause != PIPE:
        return plan.microbatches * plan.timetable().chunks / ticks(plan)
    if plan.spreads_edges:
        return 1.0
    used = parallel.count_link_ticks(plan.timetable())
    return sum(used.values()) / (len(used) * ticks(plan))
