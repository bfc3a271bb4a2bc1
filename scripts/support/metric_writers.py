"""The writers of a run's metrics: a file always, TensorBoard and Weights & Biases if the recipe asks for them."""

import secrets
from collections.abc import Callable

from recipes import Recipe

from eqformer import read_utf8, training, write_atomic
from support.recipe_file import to_json
from support.run_directory import RunDirectory


def open_metrics(recipe: Recipe, directory: RunDirectory, start: int) -> training.MetricWriters:
    """Opens the run's writers; rows of steps after `start`, which will be run again, are dropped."""
    path, wandb = directory.path, recipe.metrics.wandb
    makers: list[Callable[[], training.MetricWriter]] = []
    makers.append(lambda: training.JsonLines(directory.metrics, from_step=start + 1))
    if recipe.metrics.tensorboard:
        makers.append(lambda: training.TensorBoard(path / "tensorboard", from_step=start + 1))
    if wandb is not None:
        named = lambda: {"folder": path, "name": path.name, "identifier": _identifier(directory, start)}
        makers.append(lambda: training.WeightsAndBiases(wandb, **named(), recipe=to_json(recipe)))
    return training.MetricWriters(*makers)


def _identifier(directory: RunDirectory, start: int) -> str:
    """The run's identifier at Weights & Biases, kept in its folder; a run that starts from step 0 gets a new one."""
    if not start or not directory.identifier.exists():
        write_atomic(directory.identifier, secrets.token_hex(8))
    return read_utf8(directory.identifier)
