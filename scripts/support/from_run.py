"""Start a run with the weights of another run: `--from-run DIR`."""

import dataclasses

from recipes import Recipe

from eqformer import nn, training
from support.run_directory import RunDirectory
from support.setup import add_lora, model_shapes


def check_from_run(recipe: Recipe, shapes: nn.Transformer, directory: RunDirectory) -> None:
    """Raise a `ValueError` if the recipe cannot start from the run that it names; `shapes` are its model's."""
    if recipe.from_run is None:
        if recipe.from_step is not None or recipe.from_optimizer:
            raise ValueError(
                "--from-step, --from-optimizer: they choose what is taken of --from-run DIR; give that too."
            )
        return
    flag = f"--from-run {recipe.from_run}"
    if directory.checkpointer().latest_step is not None:
        return  # The run has begun, and continues by itself.
    if recipe.from_run.absolute() == directory.path.absolute():
        raise ValueError(f"{flag} --run-dir {directory.path}: a run begins from another; give it a folder of its own.")
    source = RunDirectory(recipe.from_run)
    _, old = source.read()
    checkpointer = training.Checkpointer(source.checkpoints)  # Of any run, since only weights are taken.
    if not checkpointer.steps or (recipe.from_step or checkpointer.steps[0]) not in checkpointer.steps:
        steps = ", ".join(map(str, checkpointer.steps)) or "none"
        raise ValueError(f"{flag} --from-step {recipe.from_step}: the run has checkpoints of these steps: {steps}.")
    if recipe.from_optimizer:
        fields = {
            "--optimizer.name": (old.optimizer.name, recipe.optimizer.name),
            "--lora.rank": (old.lora.rank, recipe.lora.rank),
            "--precision.parameters": (old.precision.parameters, recipe.precision.parameters),
        }
        if changed := [f"{name} {new} (there {saved})" for name, (saved, new) in fields.items() if saved != new]:
            raise ValueError(
                f"{flag} --from-optimizer: the run's optimizer state has a different structure; leave out "
                f"{', '.join(changed)}."
            )
    try:
        checkpointer.check({"model": model_shapes(_with_saved_dtypes(recipe, old))}, recipe.from_step, partial=True)
    except training.CheckpointError as error:
        raise ValueError(f"{flag}: the recipe's model has other arrays than the run's: {error}") from error


def init_from_run(recipe: Recipe, states: training.PlannedState) -> training.TrainState:
    """Return the state before the first step, with the weights of the run that the recipe names.

    With `--from-optimizer` the optimizer's state is that run's too.
    """
    assert recipe.from_run is not None
    source = RunDirectory(recipe.from_run)
    _, old = source.read()
    checkpointer = training.Checkpointer(source.checkpoints)
    if recipe.from_optimizer:
        return states.restore(checkpointer, recipe.from_step, reset_counters=True)[0]
    shapes = model_shapes(_with_saved_dtypes(recipe, old))
    model = training.restore_model(checkpointer, shapes, states.plan, step=recipe.from_step)
    model = model if old.lora == recipe.lora else add_lora(recipe, nn.merge_lora(model))
    return states.init_from(recipe.precision.apply(model))


def _with_saved_dtypes(recipe: Recipe, old: Recipe) -> Recipe:
    """Return the recipe with the LoRA and the dtypes of the old one's arrays."""
    return dataclasses.replace(recipe, lora=old.lora, precision=old.precision)
