"""From the command line to a recipe: flags change the fields of the recipe that `--recipe` names."""

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro
from recipes import Recipe, RECIPES

from eqformer import models


Command = TypeVar("Command")


def parse(kind: type[Command], arguments: Sequence[str]) -> Command:
    """The command, a dataclass with fields `recipe` (a name) and `run` (the recipe), that the flags make."""
    name = "default"
    for flag, value in zip([*arguments, ""], [*arguments[1:], "", ""]):
        name = value if flag == "--recipe" else flag.removeprefix("--recipe=") if "--recipe=" in flag else name
    make: Any = kind
    description = "\n".join(f"  {known}: {recipe.__doc__}" for known, recipe in RECIPES.items())
    return tyro.cli(
        make,
        default=make(name, recipe_of(name)),
        args=arguments,
        config=(tyro.conf.AvoidSubcommands,),
        description=f"{inspect.getdoc(kind)}\n\nRecipes (or any preset of eqformer.models):\n{description}",
    )


def recipe_of(name: str) -> Recipe:
    """The recipe of that name, or the default one with the preset of that name for a model."""
    if name in RECIPES:
        return RECIPES[name]()
    if name in models.presets():
        return Recipe(model=models.preset(name))
    raise ValueError(
        f"--recipe {name}: there is no such recipe; the recipes are {', '.join(RECIPES)}, and a preset of "
        "eqformer.models by its name is the default recipe with that model."
    )
