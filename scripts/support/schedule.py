"""Choose the learning rates of a run that is continued with another number of steps, before anything is written.

If the next step's rate stays what it was going to be (a constant rate, a plateau), the run goes on as if the new
number of steps had been asked for from the beginning. If the rate would jump, the user chooses how to go on
(`--prolong`), and checkpoints keep the choice. The rates of the steps already taken never change.
"""

import jax
import numpy as np
from recipes import Recipe

from eqformer import training
from eqformer.training import SchedulePhase


def schedule_phases(recipe: Recipe, checkpointer: training.Checkpointer) -> tuple[list[SchedulePhase], str]:
    """Return the phases of a continued run, and a line on how its learning rates changed ("" if they did not).

    Raises a `ValueError` where the rate would jump and the recipe does not say how to go on.
    """
    start, steps, config = checkpointer.latest_step, recipe.steps, recipe.optimizer
    if not start:
        return config.phases(steps), ""
    old_phases = [SchedulePhase(**phase) for phase in checkpointer.metadata()["rates"]]
    if steps in (old_phases[-1].steps, start) or steps < start:
        return old_phases, ""

    def describe(phases: list[SchedulePhase]) -> str:
        return _describe_rates(config.make_rates(phases), start, steps)

    options = {"peak": config.learning_rate, "start": start, "steps": steps, "warmup": config.warmup}
    continuation = training.continue_phases(config.rates, old_phases, **options)
    call = f"--steps {steps}: the run was trained as one of {old_phases[-1].steps} steps, and the learning rate was "
    call += f"{_format_rate(config.make_rates(old_phases), start - 1)} at step {start}"
    if continuation.is_smooth(start):
        return continuation.extended, f"{call}; it will be {describe(continuation.extended)}"
    if recipe.prolong in continuation.options:
        phases = continuation.options[recipe.prolong]
        return phases, f"{call}; by --prolong {recipe.prolong} it will be {describe(phases)}"
    reason = "it would jump" if recipe.prolong == "refuse" else f"--prolong {recipe.prolong} is not possible here"
    listed = "".join(f"\n  --prolong {way}: {describe(phases)}" for way, phases in continuation.options.items())
    smooth = [step for step in checkpointer.steps if step >= old_phases[-1].start and continuation.is_smooth(step)]
    hint = f"\nThe checkpoint of step {smooth[-1]} goes on without a jump: move later ones away." if smooth else ""
    raise ValueError(f"{call}; {reason}. Choose how to go on, and it will be{listed}{hint}")


def _describe_rates(rates: training.Rates, start: int, steps: int) -> str:
    """Return the rates to come as text: the next, the highest if it is neither the next nor the last, and the last."""
    highest = start + int(np.argmax(jax.jit(jax.vmap(rates))(np.arange(start, steps))))
    shown = sorted({start, highest, steps - 1})
    return ", ".join(f"{_format_rate(rates, step)} at step {step + 1}" for step in shown)


def _format_rate(rates: training.Rates, step: int) -> str:
    return f"{float(rates(step)):.3g}"
