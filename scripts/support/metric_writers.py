"""The writers of a run's metrics: a file always, TensorBoard and Weights & Biases if the recipe asks for them."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from typing import Any

from recipes import Recipe

from eqformer import training
from eqformer.parallel import on_first_process
from support.recipe_file import to_json
from support.run_directory import RunDirectory
from support.whole import write_whole


Write = Callable[[dict[str, Any]], None]


@contextmanager
def open_metrics(recipe: Recipe, directory: RunDirectory, start: int) -> Iterator[Write]:
    """Opens the run's writers and gives a function that writes a row to each of them.

    Every process calls the function; the first one writes, and if it fails, all processes raise its error. Rows of
    steps after `start`, which will be run again, are dropped.
    """
    with ExitStack() as stack:
        writers = on_first_process(lambda: _open(stack, recipe, directory, start)) or []
        yield lambda row: on_first_process(lambda: _write(writers, row))


def _open(stack: ExitStack, recipe: Recipe, directory: RunDirectory, start: int) -> list[training.MetricWriter]:
    writers: list[training.MetricWriter] = []

    def add(writer: training.MetricWriter) -> None:
        stack.callback(writer.close)
        writers.append(writer)

    add(training.JsonLines(directory.metrics, from_step=start + 1))
    path, chosen = directory.path, recipe.metrics
    if chosen.tensorboard:
        add(training.TensorBoard(path / "tensorboard", from_step=start + 1))
    if chosen.wandb is not None:
        identifier, saved = _identifier(directory, start), to_json(recipe)
        add(training.WeightsAndBiases(chosen.wandb, folder=path, name=path.name, identifier=identifier, recipe=saved))
    return writers


def _identifier(directory: RunDirectory, start: int) -> str:
    """The run's identifier at Weights & Biases, kept in its folder; a run that starts from step 0 gets a new one."""
    if not start or not directory.identifier.exists():
        write_whole(directory.identifier, secrets.token_hex(8))
    return directory.identifier.read_text(encoding="utf-8")


def _write(writers: list[training.MetricWriter], row: dict[str, Any]) -> None:
    for writer in writers:
        writer.write(row)
