"""From the command line to a recipe: flags change the fields of the recipe that `--recipe` names."""

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from _published import recipe_of_folder
from recipes import Recipe, RECIPES

from eqformer import models, nn


Command = TypeVar("Command")


def parse(kind: type[Command], arguments: Sequence[str]) -> Command:
    """The command, a dataclass with fields `recipe` (a name) and `run` (the recipe), that the flags make."""
    for flag in ("--precision.parameters", "--precision.compute"):  # before the parser calls them something else
        if (dtype := _value(flag, arguments)) is not None:
            nn.float_dtype(dtype, f"{flag} {dtype}")
    name, folder = _value("--recipe", arguments), _value("--model", arguments)
    recipe = recipe_of(name or "default", None if folder is None else Path(folder))
    name = name or ("default" if folder is None else Path(folder).absolute().name)
    make: Any = kind
    description = "\n".join(f"  {known}: {recipe.__doc__}" for known, recipe in RECIPES.items())
    command: Any = tyro.cli(
        make,
        default=make(name, recipe),
        args=arguments,
        config=(tyro.conf.AvoidSubcommands,),
        description=f"{inspect.getdoc(kind)}\n\nRecipes (or any preset of eqformer.models):\n{description}",
    )
    if command.run.published is None:
        return command
    # As `recipe_of_folder` has it, and so that the run goes on from any working directory.
    return dataclasses.replace(
        command, run=dataclasses.replace(command.run, published=command.run.published.absolute())
    )


def _value(flag: str, arguments: Sequence[str]) -> str | None:
    """The flag's last value on the command line."""
    found = None
    for one, following in zip(arguments, [*arguments[1:], ""]):
        found = following if one == flag else one.removeprefix(f"{flag}=") if one.startswith(f"{flag}=") else found
    return found


def recipe_of(name: str, folder: Path | None = None) -> Recipe:
    """The recipe of that name, or the default one with the preset of that name for a model.

    With the folder of a published model the recipe is made for that, and one of a name other than `default` keeps all
    of its own but the model.
    """
    if folder is not None:
        made = recipe_of_folder(folder)
        own = made if name == "default" else recipe_of(name)
        return dataclasses.replace(own, model=made.model, published=made.published)
    if name in RECIPES:
        return RECIPES[name]()
    if name in models.presets():
        return Recipe(model=models.preset(name))
    raise ValueError(
        f"--recipe {name}: there is no such recipe; the recipes are {', '.join(RECIPES)}, and a preset of "
        "eqformer.models by its name is the default recipe with that model."
    )
