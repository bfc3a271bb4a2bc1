"""The learning rates of a run that is continued with another number of steps, decided before anything is written.

If the next step's rate stays what it was going to be (a constant rate, a plateau), the run goes on as if the new
number of steps had been asked for from the beginning. If the rate would jump, the user chooses how to go on
(`--prolong`), and checkpoints keep the choice. The rates of the steps already taken never change.
"""

import jax
import numpy as np
from recipes import Recipe

from eqformer import training
from eqformer.training import SchedulePhase


def phases_of(recipe: Recipe, checkpointer: training.Checkpointer) -> tuple[list[SchedulePhase], str]:
    """The phases of a run that goes on by a recipe, and a line on how its rates changed ("" where they did not).

    Raises a `ValueError` where the rate would jump and the recipe does not say how to go on.
    """
    start, steps, chosen = checkpointer.latest_step, recipe.steps, recipe.optimizer
    if not start:
        return chosen.phases(steps), ""
    so_far = [SchedulePhase(**phase) for phase in checkpointer.metadata()["rates"]]
    if steps in (so_far[-1].steps, start) or steps < start:
        return so_far, ""
    options = {"peak": chosen.learning_rate, "start": start, "steps": steps, "warmup": chosen.warmup}
    ahead = lambda phases: _ahead(chosen.make_rates(phases), start, steps)
    on = training.continue_phases(chosen.rates, so_far, **options)
    call = f"--steps {steps}: the run was trained as one of {so_far[-1].steps} steps, and the learning rate was "
    call += f"{_rate(chosen.make_rates(so_far), start - 1)} at step {start}"
    if on.smooth(start):
        return on.longer, f"{call}; it will be {ahead(on.longer)}"
    if recipe.prolong in on.ways:
        way = on.ways[recipe.prolong]
        return way, f"{call}; by --prolong {recipe.prolong} it will be {ahead(way)}"
    why = "it would jump" if recipe.prolong == "refuse" else f"--prolong {recipe.prolong} is not possible here"
    listed = "".join(f"\n  --prolong {how}: {ahead(phases)}" for how, phases in on.ways.items())
    kept = [step for step in checkpointer.steps if step >= so_far[-1].start and on.smooth(step)]
    other = f"\nThe checkpoint of step {kept[-1]} goes on without a jump: move later ones away." if kept else ""
    raise ValueError(f"{call}; {why}. Choose how to go on, and it will be{listed}{other}")


def _ahead(rates: training.Rates, start: int, steps: int) -> str:
    """The rates to come, as text: the next, the highest if it is neither the next nor the last, and the last."""
    highest = start + int(np.argmax(jax.jit(jax.vmap(rates))(np.arange(start, steps))))
    return ", ".join(f"{_rate(rates, step)} at step {step + 1}" for step in sorted({start, highest, steps - 1}))


def _rate(rates: training.Rates, step: int) -> str:
    return f"{float(rates(step)):.3g}"
