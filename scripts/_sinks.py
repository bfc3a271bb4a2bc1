"""Where a run's rows of metrics go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from typing import Any

from _processes import first
from _recipe_file import to_json
from _run_directory import RunDirectory
from recipes import Recipe

from eqformer import training


Write = Callable[[dict[str, Any]], None]


@contextmanager
def open_sinks(recipe: Recipe, directory: RunDirectory, start: int) -> Iterator[Write]:
    """One function that has the first process write a row to every sink; all processes call it, and fail with it.

    Rows of steps after `start`, which will be run again, are dropped.
    """
    with ExitStack() as stack:
        sinks = first(lambda: _open(stack, recipe, directory, start)) or []
        yield lambda row: first(lambda: _write(sinks, row))


def _open(stack: ExitStack, recipe: Recipe, directory: RunDirectory, start: int) -> list[training.Sink]:
    sinks: list[training.Sink] = []

    def add(sink: training.Sink) -> None:
        stack.callback(sink.close)
        sinks.append(sink)

    add(training.JsonLines(directory.metrics, from_step=start + 1))
    path, chosen = directory.path, recipe.sinks
    if chosen.tensorboard:
        add(training.TensorBoard(path / "tensorboard"))
    if chosen.wandb is not None:
        add(training.WeightsAndBiases(chosen.wandb, folder=path, name=path.name, recipe=to_json(recipe)))
    return sinks


def _write(sinks: list[training.Sink], row: dict[str, Any]) -> None:
    for sink in sinks:
        sink.write(row)
