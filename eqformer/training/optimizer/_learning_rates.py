"""Learning rates: functions of the step, made by name, with their arguments checked.

They are called rates, and never schedules: that word is a pipeline's. Their numbers are arrays, which a compiled step
takes as arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


Rates = Callable[[int | Int[Array, ""]], Float[Array, ""]]  # step -> learning rate


def constant(peak: float, *, warmup: int = 0) -> Rates:
    """`peak` at every step, after a linear warmup of `warmup` steps."""
    _check("constant", peak=peak, warmup=warmup)
    return _Warmup(peak, warmup, _level)


def warmup_cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.1) -> Rates:
    """Linear warmup to `peak`, then half a cosine down to `final * peak` at step `steps` (arXiv 1608.03983)."""
    _check("warmup_cosine", peak=peak, steps=steps, warmup=warmup, final=final)
    return _Warmup(peak, warmup, _Cosine(warmup, steps - warmup, final))


def warmup_stable_decay(
    peak: float, *, steps: int, warmup: int = 0, decay: int | None = None, final: float = 0.0
) -> Rates:
    """Linear warmup to `peak`, a plateau, then a line down to `final * peak` over the last `decay` steps.

    A run may be prolonged from any checkpoint of its plateau (arXiv 2404.06395). `decay=None` is a fifth of the steps.
    """
    decay = max(1, min(steps // 5, steps - warmup)) if decay is None else decay
    _check("warmup_stable_decay", peak=peak, steps=steps, warmup=warmup, final=final, decay=decay)
    return _Warmup(peak, warmup, _Fall(steps - decay, decay or np.inf, final))


RATES: Mapping[str, Callable[..., Rates]] = MappingProxyType(
    {"constant": constant, "warmup-cosine": warmup_cosine, "warmup-stable-decay": warmup_stable_decay}
)


def rates(
    name: str,
    *,
    peak: float,
    steps: int,
    warmup: int = 0,
    decay: int | None = None,
    final: float | None = None,
) -> Rates:
    """The learning rate as a function of the step, by a name in `RATES`: float32, and traceable.

    Warmup rises linearly from `peak / (warmup + 1)` at step 0 to `peak` at step `warmup`, so that no step has a rate of
    zero. Raises a `ValueError` for an unknown name and for an option that the named rates do not have.

    Args:
        name: A name in `RATES`.
        peak: The largest rate.
        steps: The steps of the run.
        warmup: The steps before the peak.
        decay: The steps of the descent at the end, of rates that have one; None: a fifth of the run.
        final: The share of the peak that is left at the end, of rates that have a descent; None: their default.
    """
    options = {"decay": decay, "final": final}
    given = {option: value for option, value in options.items() if value is not None}
    readable = {"constant": (), "warmup-cosine": ("final",), "warmup-stable-decay": ("decay", "final")}
    if name not in RATES:
        raise ValueError(f"rates({name!r}): the names are {', '.join(RATES)}; pass one of these.")
    for option, value in given.items():
        if option not in readable[name]:
            raise ValueError(f"rates({name!r}, {option}={value}): {name} has no `{option}`; leave it out.")
    if name == "constant":
        _check(name, steps=steps, warmup=warmup)
        return constant(peak, warmup=warmup)
    return RATES[name](peak, steps=steps, warmup=warmup, **given)


def switch_rates(first: Rates, after: Rates, *, at: int) -> Rates:
    """`first(step)` for steps before `at`, `after(step)` from it on."""
    if at < 1:
        raise ValueError(f"switch_rates(at={at}): nothing comes before that step; pass at least 1, or `after` alone.")
    return _Switched(first, after, at)


def later(rates: Rates, by: int) -> Rates:
    """Rates that begin at step `by`: `rates(step - by)`."""
    return _Later(rates, by)


Number = Float[np.ndarray, ""]


def _number(value: float | int) -> np.ndarray:
    return np.asarray(value, np.float32)


class _Warmup(eqx.Module):
    """A linear warmup to `peak`, then the share of it that `after(step)` leaves, a function of the run's step."""

    peak: Number = eqx.field(converter=_number)
    warmup: Number = eqx.field(converter=_number)
    after: Callable[[Float[Array, ""]], Float[Array, ""]]

    def __call__(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        at = jnp.asarray(step, jnp.float32)
        return jnp.where(at < self.warmup, (at + 1) / (self.warmup + 1), self.after(at)) * self.peak


def _level(step: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.ones_like(step)


class _Cosine(eqx.Module):
    start: Number = eqx.field(converter=_number)
    steps: Number = eqx.field(converter=_number)
    final: Number = eqx.field(converter=_number)

    def __call__(self, step: Float[Array, ""]) -> Float[Array, ""]:
        share = jnp.minimum((step - self.start) / self.steps, 1)
        return (1 + jnp.cos(jnp.pi * share)) / 2 * (1 - self.final) + self.final


class _Fall(eqx.Module):
    start: Number = eqx.field(converter=_number)
    steps: Number = eqx.field(converter=_number)
    final: Number = eqx.field(converter=_number)

    def __call__(self, step: Float[Array, ""]) -> Float[Array, ""]:
        return 1 - jnp.clip((step - self.start) / self.steps, 0, 1) * (1 - self.final)


class _Switched(eqx.Module):
    first: Rates
    after: Rates
    at: Number = eqx.field(converter=_number)

    def __call__(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        return jnp.where(jnp.asarray(step, jnp.float32) < self.at, self.first(step), self.after(step))


class _Later(eqx.Module):
    rates: Rates
    by: Int[np.ndarray, ""] = eqx.field(converter=lambda steps: np.asarray(steps, np.int32))

    def __call__(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        return self.rates(jnp.asarray(step) - self.by)


def _check(
    name: str, *, peak: float = 1.0, steps: int | None = None, warmup: int = 0, decay: int = 0, final: float = 0.0
) -> None:
    if not (peak > 0 and peak < float("inf")):
        raise ValueError(f"{name}(peak={peak}): a learning rate is positive and finite; pass for example peak=1e-3.")
    if steps is not None and steps < 1:
        raise ValueError(f"{name}(steps={steps}): a run has at least one step.")
    if warmup < 0 or decay < 0:
        raise ValueError(f"{name}(warmup={warmup}, decay={decay}): both count steps and are at least 0.")
    if steps is not None and warmup >= steps:
        raise ValueError(
            f"{name}(warmup={warmup}, steps={steps}): warmup must be shorter than the run; lower warmup or raise steps."
        )
    if steps is not None and warmup + decay > steps:
        raise ValueError(
            f"{name}(warmup={warmup}, decay={decay}, steps={steps}): warmup and decay must fit in the run, but "
            f"{warmup} + {decay} > {steps}; shorten one of them."
        )
    if not 0 <= final <= 1:
        raise ValueError(f"{name}(final={final}): the last rate is a share of the peak, from 0 to 1.")


WAYS: tuple[Literal["hold", "rewarm", "reshape"], ...] = ("hold", "rewarm", "reshape")
LONGEST_WARMUP = 50  # steps; the most that `default_warmup` takes


@dataclasses.dataclass(frozen=True)
class SchedulePhase:
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


def phase_rates(name: str, phases: Sequence[SchedulePhase], *, peak: float) -> Rates:
    """The learning rate of each step of a run in phases, by a name in `RATES`; raises as `rates` does."""
    made: Rates | None = None
    for phase in phases:
        own = _own_rates(name, phase, peak, made)
        made = own if made is None else switch_rates(made, own, at=phase.start)
    assert made is not None, "a run has a phase"
    return made


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How a run in phases may go on after `start` steps to `steps` steps.

    `longer` are the phases of a run that was asked for `steps` steps from the beginning, and `smooth(step)` says
    whether the rate of a step is the same in the run so far. `ways` are the phases by each name in `WAYS` for which
    there are rates: a warmup may not be as long as what is left.
    """

    longer: list[SchedulePhase]
    ways: dict[str, list[SchedulePhase]]
    smooth: Callable[[int], bool]


def continue_phases(
    name: str, so_far: Sequence[SchedulePhase], *, peak: float, start: int, steps: int, warmup: int | None = None
) -> Continuation:
    """How a run in phases may go on to another number of steps.

    Args:
        name: The name of its rates in `RATES`.
        so_far: Its phases.
        peak: The largest rate.
        start: The steps that it has taken.
        steps: Those that it is to have.
        warmup: The steps before the peak of a `rewarm`; None: `default_warmup` of the steps that are left.
    """
    rewarm = default_warmup(steps - start) if warmup is None else warmup
    warmups = {"hold": so_far[0].warmup, "rewarm": rewarm, "reshape": so_far[0].warmup}
    ways = {how: [*so_far, SchedulePhase(start, steps, warmups[how], how)] for how in WAYS}
    longer = [*so_far[:-1], dataclasses.replace(so_far[-1], steps=steps)]
    before, after = phase_rates(name, so_far, peak=peak), _possible(name, longer, peak)

    def smooth(step: int) -> bool:
        return after is not None and math.isclose(float(before(step)), float(after(step)), rel_tol=1e-5)

    possible = {how: its for how, its in ways.items() if _possible(name, its, peak) is not None}
    return Continuation(longer, possible, smooth)


def _possible(name: str, phases: Sequence[SchedulePhase], peak: float) -> Rates | None:
    with suppress(ValueError):
        return phase_rates(name, phases, peak=peak)
    return None


def _own_rates(name: str, phase: SchedulePhase, peak: float, before: Rates | None) -> Rates:
    """The learning rate of each step of one phase, as a function of the run's step."""
    if phase.how == "hold":
        assert before is not None, "a rate is held after others"
        return constant(float(before(phase.start - 1)))
    shift = phase.start if phase.how == "rewarm" else 0
    own = rates(name, peak=peak, steps=phase.steps - shift, warmup=phase.warmup)
    return later(own, shift) if shift else own
