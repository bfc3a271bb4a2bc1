"""The folder of a run that belongs to one recipe, and the learning rates of a continued run."""

import dataclasses
from collections.abc import Container
from pathlib import Path

import jax
import numpy as np

from .. import training
from .._files import dataclass_differences, read_utf8
from ..training import SchedulePhase
from ._named_recipes import from_json, read_recipe, user_classes, user_file
from ._recipe import CHANGEABLE, Recipe


ALL_FIELDS = frozenset(field.name for field in dataclasses.fields(Recipe))
# A run that holds a converted model, and has not taken a step, may change these fields.
ALL_BUT_THE_MODEL = ALL_FIELDS - {"model", "published"}


class RunDirectory(training.RunFolder):
    """A `training.RunFolder` whose recipe is a `Recipe`; its errors begin with `--run-dir`."""

    def __init__(self, path: str | Path):
        training.RunFolder.__init__(self, path, call=f"--run-dir {path}")

    def claim(self, name: str, recipe: Recipe) -> None:
        """Check that the folder may hold this run, create it if it is missing, and lock it.

        Raises a `ValueError` as `acquire` does, and also for a folder of another recipe, and for a run whose learning
        rate would jump.
        """
        if self.recipe.exists():
            self.identify()
            self._check_same(name, recipe)
            self._check_latest(recipe)
            schedule_phases(recipe, self.checkpointer())
        self.acquire()

    def begin(self, name: str, recipe: Recipe) -> None:
        """Write the recipe, after all checks; from now on, the folder is the folder of a run."""
        file = user_file(name)
        self.write_recipe(name, recipe, None if file is None else read_utf8(file))

    def _check_same(self, name: str, recipe: Recipe) -> None:
        self._check_source(name)
        old_name, old = read_recipe(self.recipe, _class_of_model(recipe))
        changed = _differences(old, recipe, self._changeable_fields())
        if changed:
            raise ValueError(
                f"--run-dir {self.path}: the folder holds a run of recipe {old_name!r}, and this command's recipe "
                f"{name!r} differs in"
                + "".join(f"\n  {line}" for line in changed)
                + "\nGive the same values to continue that run, or another --run-dir to begin a new run."
            )

    def _check_latest(self, recipe: Recipe) -> None:
        """Raise a `ValueError` if the latest checkpoint was saved by another run or trained by another recipe."""
        checkpointer = self.checkpointer()
        if not (step := checkpointer.latest_step):  # There is no checkpoint, or a converted model, which has no recipe.
            return
        saved = checkpointer.metadata().get("recipe", {}).get("recipe")
        if saved is None:
            return
        old = from_json(saved, {**user_classes(self.source), **_class_of_model(recipe)})
        if changed := _differences(old, recipe, CHANGEABLE):
            raise ValueError(
                f"{self.checkpoints / str(step)}: this checkpoint was trained by another recipe than the run in "
                f"{self.path}; the recipes differ in"
                + "".join(f"\n  {line}" for line in changed)
                + "\nMove the checkpoint back to its own run, or begin a new run with its weights (--from-run DIR)."
            )

    def _check_source(self, name: str) -> None:
        """Raise a `ValueError` if the user's file of the recipe has changed since the run began."""
        file, copy = user_file(name), self.source
        if file is not None and copy.exists() and read_utf8(file) != read_utf8(copy):
            raise ValueError(
                f"--run-dir {self.path} --recipe {name}: {file} has changed since the run began, and the run goes on "
                f"only with its own copy of the file; give --recipe {copy} and the function's name, or another "
                "--run-dir."
            )

    def _changeable_fields(self) -> frozenset[str]:
        """Return the fields of the folder's recipe that a command may change; there are fewer after a checkpoint."""
        steps = self.checkpointer().steps
        if steps:
            return ALL_BUT_THE_MODEL if steps == [0] else CHANGEABLE
        # Once files of a published model are copied, the run cannot change to another published model.
        return ALL_FIELDS - {"published"} if self.published.exists() else ALL_FIELDS

    def began_from(self, published: Path) -> bool:
        """Return whether the folder holds a run that began from the folder `published` and has a checkpoint."""
        if not self.recipe.exists() or not (self.published / "config.json").exists():
            return False
        return self.read()[1].published == published and bool(self.checkpointer().steps)

    def copied_tokenizer(self, recipe: Recipe) -> Path | None:
        """Return the run's copy of the recipe's --text.tokenizer.

        The result is None if the run has no checkpoint, or if its recipe names another file.
        """
        if not (self.recipe.exists() and self.tokenizer.exists() and self.checkpointer().steps):
            return None
        _, saved = read_recipe(self.recipe, _class_of_model(recipe))
        return self.tokenizer if saved.text.tokenizer == recipe.text.tokenizer else None

    def read(self) -> tuple[str, Recipe]:
        """Return the name and the recipe of the folder's run, without claiming it.

        Raises a `ValueError` if the folder has no run.
        """
        if not self.recipe.exists():
            near = sorted(str(path.parent) for path in self.path.parent.glob("*/recipe.json"))
            hint = f"; runs beside it: {', '.join(near)}" if near else "; train one with scripts/pretrain.py"
            raise ValueError(f"--run-dir {self.path}: there is no run (no recipe.json){hint}.")
        return read_recipe(self.recipe)


def _differences(old: Recipe, new: Recipe, changeable: Container[str]) -> list[str]:
    """Return a line for each field in which two recipes differ, without fields that a command may change.

    Settings that the optimizer does not have are not compared, because recipes of earlier versions may have them.
    """
    old, new = (dataclasses.replace(recipe, optimizer=recipe.optimizer.without_unused()) for recipe in (old, new))
    return dataclass_differences(old, new, ignored=changeable)


def _class_of_model(recipe: Recipe) -> dict[str, type]:
    """Return the class of a recipe's model by the class's name; the class may be a user's own."""
    return {type(recipe.model).__name__: type(recipe.model)}


def schedule_phases(recipe: Recipe, checkpointer: training.Checkpointer) -> tuple[list[SchedulePhase], str]:
    """Return the phases of a new or continued run, and a line about changed learning rates ("" if they stay).

    Learning rates change if a run continues to another number of steps. Raises a `ValueError` if the rate would jump
    and the recipe does not say how to continue.
    """
    start, steps, config = checkpointer.latest_step, recipe.steps, recipe.optimizer
    if not start:
        return config.phases(steps), ""
    old_phases = [SchedulePhase(**phase) for phase in checkpointer.metadata()["rates"]]
    if steps in (old_phases[-1].steps, start) or steps < start:
        return old_phases, ""

    def describe(phases: list[SchedulePhase]) -> str:
        return _describe_rates(config.make_rates(phases), start, steps)

    continuation = training.continue_phases(
        config.rates,
        old_phases,
        peak=config.learning_rate,
        start=start,
        steps=steps,
        warmup=config.warmup,
        decay_share=config.decay_share,
    )
    call = f"--steps {steps}: the run was planned for {old_phases[-1].steps} steps, and the learning rate was "
    call += f"{_format_rate(config.make_rates(old_phases), start - 1)} at step {start}"
    if continuation.is_smooth(start):
        return continuation.extended, f"{call}; it will be {describe(continuation.extended)}"
    if recipe.prolong in continuation.options:
        phases = continuation.options[recipe.prolong]
        return phases, f"{call}; by --prolong {recipe.prolong} it will be {describe(phases)}"
    reason = "it would jump" if recipe.prolong == "refuse" else f"--prolong {recipe.prolong} is not possible here"
    listed = "".join(f"\n  --prolong {way}: {describe(phases)}" for way, phases in continuation.options.items())
    smooth = [step for step in checkpointer.steps if step >= old_phases[-1].start and continuation.is_smooth(step)]
    hint = (
        f"\nFrom the checkpoint of step {smooth[-1]} the run goes on without a jump: move later checkpoints away."
        if smooth
        else ""
    )
    raise ValueError(f"{call}; {reason}. Choose how the learning rate goes on:{listed}{hint}")


def _describe_rates(rates: training.Rates, start: int, steps: int) -> str:
    """Return a text with the next, the highest and the last learning rate from step `start` on."""
    highest = start + int(np.argmax(jax.jit(jax.vmap(rates))(np.arange(start, steps))))
    shown = sorted({start, highest, steps - 1})
    return ", ".join(f"{_format_rate(rates, step)} at step {step + 1}" for step in shown)


def _format_rate(rates: training.Rates, step: int) -> str:
    return f"{float(rates(step)):.3g}"
