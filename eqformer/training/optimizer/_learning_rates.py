"""Learning-rate schedules: functions of the step, made by name, and the schedules of runs in several phases.

This package calls learning-rate schedules "rates", because a "schedule" is the order of passes in a pipeline. The
numbers in rates are arrays, which a compiled step takes as arguments.
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


DECAY_SHARE = 0.2
"""The default share of the steps over which the rates of `warmup-stable-decay` fall."""
Rates = Callable[[int | Int[Array, ""]], Float[Array, ""]]  # step -> learning rate


def constant(peak: float, *, warmup: int = 0) -> Rates:
    """Return the rate `peak` for every step, after a linear warmup of `warmup` steps."""
    _check("constant", peak=peak, warmup=warmup)
    return _Warmup(peak, warmup, _ones)


def warmup_cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.1) -> Rates:
    """Return a linear warmup to `peak`, then half a cosine to `final * peak` at step `steps` (arXiv 1608.03983)."""
    _check("warmup_cosine", peak=peak, steps=steps, warmup=warmup, final=final)
    return _Warmup(peak, warmup, _Cosine(warmup, steps - warmup, final))


def warmup_stable_decay(
    peak: float, *, steps: int, warmup: int = 0, decay: int | None = None, final: float = 0.0
) -> Rates:
    """Return a linear warmup to `peak`, a plateau, then a line down to `final * peak` over the last `decay` steps.

    With `decay=None`, the rate falls over the last fifth of the steps. A run may be extended from any checkpoint of its
    plateau (arXiv 2404.06395).
    """
    decay = _descent_steps(DECAY_SHARE, steps, warmup) if decay is None else decay
    _check("warmup_stable_decay", peak=peak, steps=steps, warmup=warmup, final=final, decay=decay)
    return _Warmup(peak, warmup, _LinearDecay(steps - decay, decay or np.inf, final))


def _descent_steps(share: float, steps: int, warmup: int) -> int:
    """Return the number of steps over which the rate falls: a share of the run, at most all steps after the warmup."""
    return max(1, min(int(share * steps), steps - warmup))


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
    """Return the learning rate as a function of the step, in float32; jit may trace the function.

    The warmup rises linearly from `peak / (warmup + 1)` at step 0 to `peak` at step `warmup`, so that no step has a
    rate of zero. Raises a `ValueError` for an unknown name and for an option that the named rates do not have.

    Args:
        name: A name in `RATES`.
        peak: The largest rate.
        steps: The number of steps of the run.
        warmup: The number of steps before the peak.
        decay: For "warmup-stable-decay", the number of last steps over which the rate falls; None: a fifth of the run.
        final: The last rate as a share of the peak, for rates that fall; None: the default of the named rates.
    """
    options = {"decay": decay, "final": final}
    given_options = {option: value for option, value in options.items() if value is not None}
    known_options = {"constant": (), "warmup-cosine": ("final",), "warmup-stable-decay": ("decay", "final")}
    if name not in RATES:
        raise ValueError(f"rates({name!r}): the names are {', '.join(RATES)}; pass one of these.")
    for option, value in given_options.items():
        if option not in known_options[name]:
            raise ValueError(f"rates({name!r}, {option}={value}): {name} has no `{option}`; leave it out.")
    if name == "constant":
        _check(name, steps=steps, warmup=warmup)
        return constant(peak, warmup=warmup)
    return RATES[name](peak, steps=steps, warmup=warmup, **given_options)


def switch_rates(first: Rates, after: Rates, *, at: int) -> Rates:
    """Return `first(step)` for steps before `at`, and `after(step)` from step `at` on."""
    if at < 1:
        raise ValueError(f"switch_rates(at={at}): no step comes before step 0; pass at least 1, or use only `after`.")
    return _Switch(first, after, at)


def shift_rates(rates: Rates, by: int) -> Rates:
    """Return rates that begin at step `by`: `rates(step - by)`."""
    return _Shift(rates, by)


Number = Float[np.ndarray, ""]


def _to_float32(value: float | int) -> np.ndarray:
    return np.asarray(value, np.float32)


def _to_int32(value: int) -> np.ndarray:
    return np.asarray(value, np.int32)


class _Warmup(eqx.Module):
    """A linear warmup to `peak`, then `peak * share(step)`."""

    peak: Number = eqx.field(converter=_to_float32)
    warmup: Number = eqx.field(converter=_to_float32)
    share: Callable[[Float[Array, ""]], Float[Array, ""]]

    def __call__(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        return jnp.where(step < self.warmup, (step + 1) / (self.warmup + 1), self.share(step)) * self.peak


def _ones(step: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.ones_like(step)


class _Cosine(eqx.Module):
    """Half a cosine from 1 at step `start` to `final`, `steps` steps later."""

    start: Number = eqx.field(converter=_to_float32)
    steps: Number = eqx.field(converter=_to_float32)
    final: Number = eqx.field(converter=_to_float32)

    def __call__(self, step: Float[Array, ""]) -> Float[Array, ""]:
        progress = jnp.minimum((step - self.start) / self.steps, 1)
        return (1 + jnp.cos(jnp.pi * progress)) / 2 * (1 - self.final) + self.final


class _LinearDecay(eqx.Module):
    """1 until step `start`, then a line to `final`, `steps` steps later."""

    start: Number = eqx.field(converter=_to_float32)
    steps: Number = eqx.field(converter=_to_float32)
    final: Number = eqx.field(converter=_to_float32)

    def __call__(self, step: Float[Array, ""]) -> Float[Array, ""]:
        return 1 - jnp.clip((step - self.start) / self.steps, 0, 1) * (1 - self.final)


class _Switch(eqx.Module):
    """The rates of `switch_rates`."""

    first: Rates
    second: Rates
    at: Number = eqx.field(converter=_to_float32)

    def __call__(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        return jnp.where(jnp.asarray(step, jnp.float32) < self.at, self.first(step), self.second(step))


class _Shift(eqx.Module):
    """The rates of `shift_rates`."""

    rates: Rates
    by: Int[np.ndarray, ""] = eqx.field(converter=_to_int32)

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
        raise ValueError(f"{name}(warmup={warmup}, decay={decay}): numbers of steps must be at least 0.")
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


# A run has several phases if its number of steps changes during the run.

TRANSITIONS: tuple[Literal["hold", "rewarm", "reshape"], ...] = ("hold", "rewarm", "reshape")
MAX_DEFAULT_WARMUP = 50  # steps


@dataclasses.dataclass(frozen=True)
class SchedulePhase:
    """The steps of a run from `start` on, and the learning rates of these steps.

    `how` chooses the rates:

    - `"reshape"`: the rates of a run that has `steps` steps from its beginning.
    - `"rewarm"`: the rates of a new run of the remaining steps, with its own warmup (arXiv 2403.08763).
    - `"hold"`: the last rate of the previous phase.
    """

    start: int
    """The number of steps before this phase."""
    steps: int
    """The number of steps of the run at the end of this phase."""
    warmup: int
    """The number of steps of linear warmup."""
    how: Literal["reshape", "rewarm", "hold"] = "reshape"
    """How the rates continue after the previous phases."""


def default_warmup(steps: int) -> int:
    """Return the default warmup: a tenth of the steps, at most 50, and at least 1 if the run has two steps or more."""
    return min(MAX_DEFAULT_WARMUP, max(1, steps // 10), steps - 1)


def phase_rates(name: str, phases: Sequence[SchedulePhase], *, peak: float, decay_share: float = DECAY_SHARE) -> Rates:
    """Return the learning rate of each step of a run in phases, by a name in `RATES`; raises as `rates` does.

    `decay_share` is the share of the steps, at the end, over which the rates of `warmup-stable-decay` fall.
    """
    if not 0 < decay_share <= 1:
        raise ValueError(f"phase_rates(decay_share={decay_share}): the share must be above 0 and at most 1.")
    joined: Rates | None = None
    for phase in phases:
        new_rates = _make_phase_rates(name, phase, peak, decay_share, joined)
        joined = new_rates if joined is None else switch_rates(joined, new_rates, at=phase.start)
    assert joined is not None, "a run has at least one phase"
    return joined


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The ways in which a run may continue after `start` steps to another number of steps."""

    extended: list[SchedulePhase]
    """The phases of the run so far, in which the last phase has the new number of steps."""
    options: dict[str, list[SchedulePhase]]
    """The phases for each possible transition. A transition whose warmup needs too many steps is left out."""
    is_smooth: Callable[[int], bool]
    """A function of a step: whether the step has the same rate in the run so far and in the extended run."""


def continue_phases(
    name: str,
    so_far: Sequence[SchedulePhase],
    *,
    peak: float,
    start: int,
    steps: int,
    warmup: int | None = None,
    decay_share: float = DECAY_SHARE,
) -> Continuation:
    """Return the ways in which a run may continue to another number of steps.

    Args:
        name: The name of the run's rates in `RATES`.
        so_far: The phases of the run so far.
        peak: The largest rate.
        start: The number of steps that the run has taken.
        steps: The new number of steps.
        warmup: The number of warmup steps of a `rewarm`; None: `default_warmup` of the remaining steps.
        decay_share: As in `phase_rates`.
    """
    rewarm = default_warmup(steps - start) if warmup is None else warmup
    warmups = {"hold": so_far[0].warmup, "rewarm": rewarm, "reshape": so_far[0].warmup}
    options = {how: [*so_far, SchedulePhase(start, steps, warmups[how], how)] for how in TRANSITIONS}
    extended = [*so_far[:-1], dataclasses.replace(so_far[-1], steps=steps)]
    old_rates = phase_rates(name, so_far, peak=peak, decay_share=decay_share)
    new_rates = _rates_or_none(name, extended, peak, decay_share)

    def is_smooth(step: int) -> bool:
        return new_rates is not None and math.isclose(float(old_rates(step)), float(new_rates(step)), rel_tol=1e-5)

    possible = {
        how: phases for how, phases in options.items() if _rates_or_none(name, phases, peak, decay_share) is not None
    }
    return Continuation(extended, possible, is_smooth)


def _rates_or_none(name: str, phases: Sequence[SchedulePhase], peak: float, decay_share: float) -> Rates | None:
    """Return the rates of phases; None if the phases are impossible."""
    with suppress(ValueError):
        return phase_rates(name, phases, peak=peak, decay_share=decay_share)
    return None


def _make_phase_rates(name: str, phase: SchedulePhase, peak: float, decay_share: float, earlier: Rates | None) -> Rates:
    """Return the learning rates of one phase, as a function of the run's step; `hold` reads the earlier rates."""
    if phase.how == "hold":
        assert earlier is not None, "the first phase of a run cannot hold an earlier rate"
        return constant(float(earlier(phase.start - 1)))
    shift = phase.start if phase.how == "rewarm" else 0
    steps = phase.steps - shift
    decay = _descent_steps(decay_share, steps, phase.warmup) if name == "warmup-stable-decay" else None
    new_rates = rates(name, peak=peak, steps=steps, warmup=phase.warmup, decay=decay)
    return shift_rates(new_rates, shift) if shift else new_rates
