"""The learning rates of a run that is continued with another number of steps, decided before anything is written.

If the next step's rate stays what it was going to be (a constant rate, a plateau), the run goes on as if the new
number of steps had been asked for from the beginning. If the rate would jump, the user chooses how to go on
(`--prolong`), and checkpoints keep the choice. The rates of the steps already taken never change.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import jax
import jax.numpy as jnp
from recipes import Optimization, Recipe

from eqformer import training


LONGEST_WARMUP = 50  # steps; the most that the default warmup takes
_WAYS = ("hold", "rewarm", "reshape")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The steps of a run from `start` on, and how their learning rates are made.

    `reshape`: the rates of a run of `steps` steps, as if that had been the number from the beginning. `rewarm`: those
    of a new run of the steps that are left, with its own warmup. `hold`: the last rate.
    """

    start: int
    steps: int
    warmup: int
    how: Literal["reshape", "rewarm", "hold"] = "reshape"


def whole_run(recipe: Recipe) -> list[Stretch]:
    """The one stretch of a run that begins with this recipe."""
    return [Stretch(0, recipe.steps, _warmup(recipe.optimizer, recipe.steps))]


def rates_of(chosen: Optimization, stretches: Sequence[Stretch]) -> training.Rates:
    """The learning rate of each step; raises a `ValueError` that names the flags where no rates can be made."""
    made: training.Rates | None = None
    for stretch in stretches:
        own = _rates_of(chosen, stretch, made)
        made = own if made is None else training.switched(made, own, at=stretch.start)
    assert made is not None
    return made


def stretches_of(recipe: Recipe, checkpointer: training.Checkpointer) -> tuple[list[Stretch], str]:
    """The stretches of a run that goes on by a recipe, and a line on how its rates changed ("" where they did not).

    Raises a `ValueError` where the rate would jump and the recipe does not say how to go on.
    """
    start = checkpointer.latest_step
    if not start:
        return whole_run(recipe), ""
    so_far = [Stretch(**stretch) for stretch in checkpointer.metadata()["rates"]]
    if recipe.steps in (so_far[-1].steps, start) or recipe.steps < start:
        return so_far, ""
    longer = [*so_far[:-1], dataclasses.replace(so_far[-1], steps=recipe.steps)]
    before, after = rates_of(recipe.optimizer, so_far), _possible_rates(recipe.optimizer, longer)
    ahead = lambda rates: _ahead(rates, start, recipe.steps)
    call = f"--steps {recipe.steps}: the run was trained as one of {so_far[-1].steps} steps, and the learning rate was "
    call += f"{_rate(before, start - 1)} at step {start}"
    if after is not None and _is_same(before, after, start):
        return longer, f"{call}; it will be {ahead(after)}"
    ways = {how: [*so_far, _stretch(how, start, so_far[0], recipe)] for how in _WAYS}
    made = {how: rates for how in _WAYS if (rates := _possible_rates(recipe.optimizer, ways[how])) is not None}
    if recipe.prolong in made:
        return ways[recipe.prolong], f"{call}; by --prolong {recipe.prolong} it will be {ahead(made[recipe.prolong])}"
    why = "it would jump" if recipe.prolong == "refuse" else f"--prolong {recipe.prolong} is not possible here"
    listed = "".join(f"\n  --prolong {how}: {ahead(rates)}" for how, rates in made.items())
    smooth = [step for step in checkpointer.steps if step >= so_far[-1].start and _is_same(before, after, step)]
    other = f"\nThe checkpoint of step {smooth[-1]} goes on without a jump: move later ones away." if smooth else ""
    raise ValueError(f"{call}; {why}. Choose how to go on, and it will be{listed}{other}")


def to_metadata(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    """The stretches as a checkpoint keeps them."""
    return [dataclasses.asdict(stretch) for stretch in stretches]


def _stretch(how: Literal["reshape", "rewarm", "hold"], start: int, first: Stretch, recipe: Recipe) -> Stretch:
    warmup = _warmup(recipe.optimizer, recipe.steps - start) if how == "rewarm" else first.warmup
    return Stretch(start, recipe.steps, warmup, how)


def _warmup(chosen: Optimization, steps: int) -> int:
    return min(LONGEST_WARMUP, max(1, steps // 10), steps - 1) if chosen.warmup is None else chosen.warmup


def _possible_rates(chosen: Optimization, stretches: Sequence[Stretch]) -> training.Rates | None:
    """The learning rate of each step; None where there is none, as where a warmup is as long as the run."""
    with suppress(ValueError):
        return rates_of(chosen, stretches)
    return None


def _rates_of(chosen: Optimization, stretch: Stretch, before: training.Rates | None) -> training.Rates:
    """The learning rate of each step of one stretch, as a function of the run's step."""
    if stretch.how == "hold":
        assert before is not None
        return training.constant(float(before(stretch.start - 1)))
    shift = stretch.start if stretch.how == "rewarm" else 0
    steps = stretch.steps - shift
    try:
        own = training.rates(chosen.rates, peak=chosen.learning_rate, steps=steps, warmup=stretch.warmup)
    except ValueError as error:
        flags = f"--optimizer.learning-rate {chosen.learning_rate} --optimizer.warmup {stretch.warmup} --steps {steps}"
        raise ValueError(f"{flags}: {error}") from error
    return (lambda step: own(step - shift)) if shift else own


def _is_same(one: Callable, other: Callable | None, step: int) -> bool:
    return other is not None and math.isclose(float(one(step)), float(other(step)), rel_tol=1e-5)


def _ahead(rates: training.Rates, start: int, steps: int) -> str:
    """The rates to come, as text: the next, the highest if it is neither the next nor the last, and the last."""
    highest = start + int(jnp.argmax(jax.vmap(rates)(jnp.arange(start, steps))))
    return ", ".join(f"{_rate(rates, step)} at step {step + 1}" for step in sorted({start, highest, steps - 1}))


def _rate(rates: training.Rates, step: int) -> str:
    return f"{float(rates(step)):.3g}"
