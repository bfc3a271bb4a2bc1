"""Train a language model: `python scripts/pretrain.py`. Each field of a recipe is a flag; `--help-all` lists them."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv)

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import tyro
from jax.errors import JaxRuntimeError
from recipes import Recipe
from support.chats import show_example
from support.check import check
from support.command import entry
from support.from_run import check_from_run
from support.processes import connect, Machine, run_devices
from support.published import check_published
from support.recipe_file import short_name
from support.run_directory import RunDirectory
from support.screen import Screen
from support.setup import candidate_flags, check_plan, make_plan, make_training_setup, setting_flags
from support.trainer import Trainer

from eqformer import dataclass_to_json, planning
from eqformer.parallel import check_alike, is_first_process


@dataclasses.dataclass(frozen=True)
class Command:
    """Train a transformer on text; run the same command again to continue a run that was stopped."""

    recipe: str
    """The recipe to start from; see below; other flags change its fields."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()
    run_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/<recipe>)")] = None
    """The folder of the run; everything is written there, except for tokens, which runs share (docs/data.md)."""
    show_example: bool = False
    """Print the first conversation of chat data with the learned tokens marked, and end."""
    trust_recipe: bool = False
    """Run the code of a recipe of one's own that lies in a run's folder, where a class of the recipe needs it."""


def train(command: Command) -> None:
    """Train as the command says; everything is checked before anything is written."""
    recipe, machine = command.run, command.machine
    connect(machine)
    check_alike(
        {"--recipe": command.recipe} | {f"--{flag}": value for flag, value in dataclass_to_json(recipe).items()}
    )
    shapes = check(recipe)
    folder = command.run_dir or Path("runs") / short_name(command.recipe)
    check_published(recipe, RunDirectory(folder))
    check_from_run(recipe, shapes, RunDirectory(folder))
    if command.show_example:
        show_example(recipe, RunDirectory(folder), Screen(silent=not is_first_process()))
        return
    plan = make_plan(recipe, run_devices(machine))
    check_plan(recipe, plan, shapes)
    with RunDirectory(folder) as directory:
        trainer = Trainer(command.recipe, recipe, shapes, plan, directory, Screen(silent=not is_first_process()))
        try:
            trainer.run()
        except JaxRuntimeError as error:
            setup, format_plan = make_training_setup(recipe, shapes), functools.partial(candidate_flags, recipe)
            message = planning.out_of_memory_report(
                error, setup, format_plan=format_plan, format_settings=setting_flags
            )
            if message is None:
                raise
            raise ValueError(message) from error


main = entry(Command, train)

if __name__ == "__main__":
    main(sys.argv[1:])
