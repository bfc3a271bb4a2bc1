"""Runs that begin with the weights of another run: `--from-run DIR`."""

import dataclasses

from recipes import Recipe

from eqformer import nn, training
from support.run_directory import RunDirectory
from support.setup import adapted, shapes_of


def check_fork(recipe: Recipe, shapes: nn.Transformer, directory: RunDirectory) -> None:
    """Raise a `ValueError` if the recipe cannot begin from the run that it names; `shapes` are its model's."""
    if recipe.from_run is None:
        if recipe.from_step is not None or recipe.from_optimizer:
            raise ValueError(
                "--from-step, --from-optimizer: they choose what is taken of --from-run DIR; give that too."
            )
        return
    given = f"--from-run {recipe.from_run}"
    if directory.checkpointer().latest_step is not None:
        return  # it has begun, and goes on by itself
    if recipe.from_run.absolute() == directory.path.absolute():
        raise ValueError(f"{given} --run-dir {directory.path}: a run begins from another; give it a folder of its own.")
    source = RunDirectory(recipe.from_run)
    _, old = source.read()
    checkpointer = training.Checkpointer(source.checkpoints)  # of whichever run: weights alone are taken
    if not checkpointer.steps or (recipe.from_step or checkpointer.steps[0]) not in checkpointer.steps:
        there = ", ".join(map(str, checkpointer.steps)) or "none"
        raise ValueError(f"{given} --from-step {recipe.from_step}: the run has checkpoints of these steps: {there}.")
    if recipe.from_optimizer:
        fields = {
            "--optimizer.name": (old.optimizer.name, recipe.optimizer.name),
            "--lora.rank": (old.lora.rank, recipe.lora.rank),
            "--precision.parameters": (old.precision.parameters, recipe.precision.parameters),
        }
        if changed := [f"{flag} {new} (there {its})" for flag, (its, new) in fields.items() if its != new]:
            raise ValueError(
                f"{given} --from-optimizer: its memory is of another kind; leave out {', '.join(changed)}."
            )
    try:
        checkpointer.check({"model": shapes_of(_as_saved(recipe, old))}, recipe.from_step, partial=True)
    except training.CheckpointError as error:
        raise ValueError(f"{given}: the recipe's model has other arrays than the run's: {error}") from error


def forked(recipe: Recipe, states: training.PlannedState) -> training.TrainState:
    """The state before the first step, with the weights of the run that the recipe names, or also its optimizer's."""
    assert recipe.from_run is not None
    source = RunDirectory(recipe.from_run)
    _, old = source.read()
    checkpointer = training.Checkpointer(source.checkpoints)
    if recipe.from_optimizer:
        return states.restore(checkpointer, recipe.from_step, reset_counters=True)[0]
    shapes = shapes_of(_as_saved(recipe, old))
    model = training.restore_model(checkpointer, shapes, states.plan, step=recipe.from_step)
    model = model if old.lora == recipe.lora else adapted(recipe, nn.merge_lora(model))
    return states.init_from(recipe.precision.apply(model))


def _as_saved(recipe: Recipe, old: Recipe) -> Recipe:
    """The recipe with what the old one says of its arrays' kinds: low-rank changes and dtype."""
    return dataclasses.replace(recipe, lora=old.lora, precision=old.precision)
