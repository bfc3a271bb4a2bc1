"""Learning-rate schedules, by name, with the checks that a schedule itself does not make."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


Schedule = Callable[[int | Int[Array, ""]], Float[Array, ""]]


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """`peak` at every step, after a linear warmup of `warmup` steps."""
    _check("constant", peak=peak, warmup=warmup)
    return _as_float32(_after_warmup(optax.schedules.constant_schedule(peak), peak, warmup))


def warmup_cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.1) -> Schedule:
    """Linear warmup to `peak`, then half a cosine down to `final * peak` at step `steps` (arXiv 1608.03983)."""
    _check("warmup_cosine", peak=peak, steps=steps, warmup=warmup, final=final)
    cosine = optax.schedules.cosine_decay_schedule(peak, steps - warmup, alpha=final)
    return _as_float32(_after_warmup(cosine, peak, warmup))


def warmup_stable_decay(
    peak: float, *, steps: int, warmup: int = 0, decay: int | None = None, final: float = 0.0
) -> Schedule:
    """Linear warmup to `peak`, a plateau, then a line down to `final * peak` over the last `decay` steps.

    A run may be prolonged from any checkpoint of its plateau (arXiv 2404.06395). `decay=None` is a fifth of the steps.
    """
    decay = max(1, min(steps // 5, steps - warmup)) if decay is None else decay
    _check("warmup_stable_decay", peak=peak, steps=steps, warmup=warmup, final=final, decay=decay)
    fall = optax.schedules.linear_schedule(peak, final * peak, decay, transition_begin=steps - warmup - decay)
    return _as_float32(_after_warmup(fall, peak, warmup))


SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"constant": constant, "warmup-cosine": warmup_cosine, "warmup-stable-decay": warmup_stable_decay}
)


def schedule(
    name: str,
    *,
    peak: float,
    steps: int,
    warmup: int = 0,
    decay: int | None = None,
    final: float | None = None,
) -> Schedule:
    """The schedule of a name in `SCHEDULES`: step -> learning rate, float32, traceable.

    Warmup rises by equal increments from `peak / (warmup + 1)` at step 0 to `peak` at step `warmup`, so that no step
    is spent at a rate of zero. Arguments that the named schedule does not have are refused.
    """
    options = {"decay": decay, "final": final}
    given = {option: value for option, value in options.items() if value is not None}
    readable = {"constant": (), "warmup-cosine": ("final",), "warmup-stable-decay": ("decay", "final")}
    if name not in SCHEDULES:
        raise ValueError(f"schedule({name!r}): the schedules are {', '.join(SCHEDULES)}; pass one of these.")
    for option, value in given.items():
        if option not in readable[name]:
            raise ValueError(f"schedule({name!r}, {option}={value}): {name} has no `{option}`; leave it out.")
    if name == "constant":
        _check(name, steps=steps, warmup=warmup)
        return constant(peak, warmup=warmup)
    return SCHEDULES[name](peak, steps=steps, warmup=warmup, **given)


def switched(first: Schedule, after: Schedule, *, at: int) -> Schedule:
    """`first` before step `at` and `after` from it on, each of the same count of steps."""
    if at < 1:
        raise ValueError(f"switched(at={at}): nothing comes before that step; pass at least 1, or `after` alone.")

    def rate(step: int | Int[Array, ""]) -> Float[Array, ""]:
        return jnp.where(jnp.asarray(step) < at, first(step), after(step))

    return rate


def _after_warmup(after: optax.Schedule, peak: float, warmup: int) -> optax.Schedule:
    if warmup == 0:
        return after
    rise = optax.schedules.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.schedules.join_schedules([rise, after], [warmup])


def _as_float32(of_step: optax.Schedule) -> Schedule:
    def rate(step: int | Int[Array, ""]) -> Float[Array, ""]:
        # Optax mixes integers and floats where promotion is strict, so the step goes in as the float it becomes.
        return jnp.asarray(of_step(jnp.asarray(step, jnp.float32)), jnp.float32)

    return rate


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
