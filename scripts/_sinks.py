"""Where a run's rows of metrics go."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from typing import Any

from _processes import first
from _recipe_file import to_json
from _run_directory import RunDirectory
from _whole import write_whole
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
        add(training.TensorBoard(path / "tensorboard", from_step=start + 1))
    if chosen.wandb is not None:
        identifier, told = _identifier(directory, start), to_json(recipe)
        add(training.WeightsAndBiases(chosen.wandb, folder=path, name=path.name, identifier=identifier, recipe=told))
    return sinks


def _identifier(directory: RunDirectory, start: int) -> str:
    """What tells the run apart for good: kept in its folder, and new where it begins anew."""
    if not start or not directory.identifier.exists():
        write_whole(directory.identifier, secrets.token_hex(8))
    return directory.identifier.read_text(encoding="utf-8")


def _write(sinks: list[training.Sink], row: dict[str, Any]) -> None:
    for sink in sinks:
        sink.write(row)
