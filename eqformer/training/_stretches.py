"""Learning rates of a run that is given another number of steps on its way."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from ._rates import constant, later, Rates, rates, switched


WAYS: tuple[Literal["hold", "rewarm", "reshape"], ...] = ("hold", "rewarm", "reshape")
LONGEST_WARMUP = 50  # steps; the most that `default_warmup` takes


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The steps of a run from `start` on, and how their learning rates are made.

    `reshape`: the rates of a run of `steps` steps, as if that had been the number from the beginning. `rewarm`: those
    of a new run of the steps that are left, with its own warmup (arXiv 2403.08763). `hold`: the last rate.
    """

    start: int
    steps: int
    warmup: int
    how: Literal["reshape", "rewarm", "hold"] = "reshape"


def default_warmup(steps: int) -> int:
    """A tenth of the steps: at least 1, if a step is left for the peak, and at most 50."""
    return min(LONGEST_WARMUP, max(1, steps // 10), steps - 1)


def stretched_rates(name: str, stretches: Sequence[Stretch], *, peak: float) -> Rates:
    """The learning rate of each step of a run in stretches, by a name in `RATES`; raises as `rates` does."""
    made: Rates | None = None
    for stretch in stretches:
        own = _own_rates(name, stretch, peak, made)
        made = own if made is None else switched(made, own, at=stretch.start)
    assert made is not None, "a run has a stretch"
    return made


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How a run in stretches may go on after `start` steps to `steps` steps.

    `longer` are the stretches of a run that was asked for `steps` steps from the beginning, and `smooth(step)` says
    whether the rate of a step is the same in the run so far. `ways` are the stretches by each name in `WAYS` for which
    there are rates: a warmup may not be as long as what is left.
    """

    longer: list[Stretch]
    ways: dict[str, list[Stretch]]
    smooth: Callable[[int], bool]


def continuation(
    name: str, so_far: Sequence[Stretch], *, peak: float, start: int, steps: int, warmup: int | None = None
) -> Continuation:
    """How a run in stretches may go on to another number of steps.

    Args:
        name: The name of its rates in `RATES`.
        so_far: Its stretches.
        peak: The largest rate.
        start: The steps that it has taken.
        steps: Those that it is to have.
        warmup: The steps before the peak of a `rewarm`; None: `default_warmup` of the steps that are left.
    """
    rewarm = default_warmup(steps - start) if warmup is None else warmup
    warmups = {"hold": so_far[0].warmup, "rewarm": rewarm, "reshape": so_far[0].warmup}
    ways = {how: [*so_far, Stretch(start, steps, warmups[how], how)] for how in WAYS}
    longer = [*so_far[:-1], dataclasses.replace(so_far[-1], steps=steps)]
    before, after = stretched_rates(name, so_far, peak=peak), _possible(name, longer, peak)

    def smooth(step: int) -> bool:
        return after is not None and math.isclose(float(before(step)), float(after(step)), rel_tol=1e-5)

    possible = {how: its for how, its in ways.items() if _possible(name, its, peak) is not None}
    return Continuation(longer, possible, smooth)


def _possible(name: str, stretches: Sequence[Stretch], peak: float) -> Rates | None:
    with suppress(ValueError):
        return stretched_rates(name, stretches, peak=peak)
    return None


def _own_rates(name: str, stretch: Stretch, peak: float, before: Rates | None) -> Rates:
    """The learning rate of each step of one stretch, as a function of the run's step."""
    if stretch.how == "hold":
        assert before is not None, "a rate is held after others"
        return constant(float(before(stretch.start - 1)))
    shift = stretch.start if stretch.how == "rewarm" else 0
    own = rates(name, peak=peak, steps=stretch.steps - shift, warmup=stretch.warmup)
    return later(own, shift) if shift else own
