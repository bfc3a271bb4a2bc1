"""From the command line to a recipe: flags change the fields of the recipe that `--recipe` names."""

import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import tyro
from _flags import check_names, flags_of, naming_flags, with_hyphens
from _help import short_help
from _published import recipe_of_folder, tokenizer_of
from _run_directory import RunDirectory
from recipes import Recipe, RECIPES

from eqformer import models, nn


Command = TypeVar("Command")


def read(kind: type[Command], arguments: Sequence[str]) -> Command:
    """The command, a dataclass of which `--help` shows every flag, that the flags make."""
    arguments = with_hyphens(arguments)
    check_names(arguments, flags_of(kind))
    return tyro.cli(kind, args=["--help" if argument == "--help-all" else argument for argument in arguments])


def parse(
    kind: type[Command],
    arguments: Sequence[str],
    own: Mapping[str, str] = MappingProxyType({}),
    left_out: Sequence[str] = (),
) -> Command:
    """The command, a dataclass with fields `recipe` (a name) and `run` (the recipe), that the flags make.

    `--help` shows the flags that most runs are made of and the command's `own`, with words for each, but for the
    groups `left_out`; `--help-all` all.
    """
    arguments = with_hyphens(arguments)
    default = _default(kind, arguments)
    check_names(arguments, flags_of(default))
    about = inspect.getdoc(kind) or ""
    if {"-h", "--help"} & {*arguments}:
        script = os.path.relpath(sys.argv[0])
        print(short_help(script, about.partition("\n")[0], flags_of(default), own, ", ".join(RECIPES), left_out))
        raise SystemExit(0)
    known = "\n".join(f"  {name}: {recipe.__doc__}" for name, recipe in RECIPES.items())
    command: Any = tyro.cli(
        kind,
        default=default,
        args=["--help" if argument == "--help-all" else argument for argument in arguments],
        config=(tyro.conf.AvoidSubcommands,),
        description=f"{about}\n\nRecipes (or any preset of eqformer.models):\n{known}",
    )
    run = command.run
    if run.published is not None:  # as `recipe_of_folder` has it, and so that it goes on from any working directory
        run = dataclasses.replace(run, published=run.published.absolute())
    elif run.text.tokenizer is not None:
        run = _with_vocabulary(run, _value("--model.vocab", arguments) is not None)
    return dataclasses.replace(command, run=run)


def _default(kind: Any, arguments: Sequence[str]) -> Any:
    """The command with the recipe that the arguments name; raises for what the parser would not name by its flag."""
    for flag in ("--precision.parameters", "--precision.compute"):
        if (dtype := _value(flag, arguments)) is not None:
            nn.float_dtype(dtype, f"{flag} {dtype}")
    name, folder = _value("--recipe", arguments), _value("--model", arguments)
    called = name or ("default" if folder is None else Path(folder).absolute().name)
    run = RunDirectory(Path(_value("--run-dir", arguments) or Path("runs") / called))
    return kind(called, recipe_of(name or "default", None if folder is None else Path(folder), run))


def _with_vocabulary(recipe: Recipe, is_given: bool) -> Recipe:
    """The recipe whose model has the vocabulary of its tokenizer, rounded up, or the one that `is_given`."""
    text = recipe.text
    if text.round_vocab < 1:
        raise ValueError(f"--text.round-vocab {text.round_vocab}: it counts ids, so give at least 1.")
    if is_given:
        return recipe
    with naming_flags(recipe):
        vocab = math.ceil(tokenizer_of(recipe).vocab / text.round_vocab) * text.round_vocab
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab=vocab))


def _value(flag: str, arguments: Sequence[str]) -> str | None:
    """The flag's last value on the command line."""
    found = None
    for one, following in zip(arguments, [*arguments[1:], ""]):
        found = following if one == flag else one.removeprefix(f"{flag}=") if one.startswith(f"{flag}=") else found
    return found


def recipe_of(name: str, folder: Path | None = None, run: RunDirectory | None = None) -> Recipe:
    """The recipe of that name, or AdamW and 800 steps with the preset of that name for a model.

    With the folder of a published model, or the `run` that began from it, the recipe is made for that. One of a name
    other than `default` keeps all of its own but the model and, where it was not written for a published model, the
    optimizer, whose rate would be one for weights that know nothing yet.
    """
    if folder is not None:
        made = recipe_of_folder(folder, run)
        own = made if name == "default" else recipe_of(name)
        optimizer = made.optimizer if own.published is None else own.optimizer
        return dataclasses.replace(own, model=made.model, published=made.published, optimizer=optimizer)
    if name in RECIPES:
        return RECIPES[name]()
    if name in models.presets():
        return Recipe(model=models.preset(name))
    raise ValueError(
        f"--recipe {name}: there is no such recipe; the recipes are {', '.join(RECIPES)}, and a preset of "
        "eqformer.models by its name is one: AdamW and 800 steps with that model."
    )
