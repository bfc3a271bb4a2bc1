"""From the command line to a recipe: flags change the fields of the recipe that `--recipe` names."""

import dataclasses
import inspect
import math
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
from recipes import LARGE, Recipe, RECIPES

from eqformer import models, nn
from support.flags import check_names, flags_of, given, naming_flags, with_hyphens
from support.help import short_help
from support.own_recipe import file_of, own_recipe, short_name
from support.published import recipe_of_folder, tokenizer_of
from support.recipe_file import source_beside, trust_recipe
from support.run_directory import RunDirectory
from support.screen import one_message


Command = TypeVar("Command")


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _words(info: Any) -> Any:
    """A choice of words or of what no command line can spell (a schedule's table), as one of words."""
    kinds = typing.get_args(info.type)
    words = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is Literal]
    if not words or not any(map(dataclasses.is_dataclass, kinds)):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(words[0]) + "}",
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
        choices=words[0],
    )


def entry(
    kind: type[Command], act: Callable[[Command], None], left_out: Sequence[str] = ()
) -> Callable[[Sequence[str]], None]:
    """A script's `main`, which acts as its flags say; bad input ends it with one message and exit code 2."""

    def main(arguments: Sequence[str]) -> None:
        with one_message():
            if "--trust-recipe" in given(with_hyphens(arguments)):
                for word in (*arguments, *(argument.partition("=")[2] for argument in arguments), "runs/default"):
                    trust_recipe(RunDirectory(Path(word)).recipe)
            has_recipe = "recipe" in typing.get_type_hints(kind)
            command = parse(kind, arguments, left_out) if has_recipe else read(kind, arguments)
            with naming_flags(command):
                act(command)

    return main


def read(kind: type[Command], arguments: Sequence[str]) -> Command:
    """The command that the flags make; it is a dataclass, and `--help` shows every field."""
    arguments = with_hyphens(arguments)
    check_names(arguments, flags_of(kind))
    return tyro.cli(kind, args=["--help" if argument == "--help-all" else argument for argument in arguments])


def parse(kind: type[Command], arguments: Sequence[str], left_out: Sequence[str] = ()) -> Command:
    """The command that the flags make, a dataclass with the fields `recipe` (a name) and `run` (the recipe).

    `--help` shows the most used flags and the command's own, except for the groups `left_out`; `--help-all` shows all.
    """
    arguments = with_hyphens(arguments)
    default = _default(kind, arguments)
    check_names(arguments, flags_of(default))
    if {"-h", "--help"} & {*arguments}:
        print(short_help(os.path.relpath(sys.argv[0]), default, ", ".join(RECIPES), left_out))
        raise SystemExit(0)
    known = "\n".join(f"  {name}: {' '.join((recipe.__doc__ or '').split())}" for name, recipe in RECIPES.items())
    command: Any = tyro.cli(
        kind,
        default=default,
        args=["--help" if argument == "--help-all" else argument for argument in arguments],
        config=(tyro.conf.AvoidSubcommands,),
        registry=_REGISTRY,
        description=f"{inspect.getdoc(kind)}\n\nRecipes (or any preset of eqformer.models):\n{known}\n\n"
        f"Of published models on many accelerators: {', '.join(LARGE)}.",
    )
    run = command.run
    if run.from_run is not None:
        run = dataclasses.replace(run, from_run=run.from_run.absolute())
    if run.published is not None:  # absolute, as in `recipe_of_folder`, so that the run resumes from any directory
        run = dataclasses.replace(run, published=run.published.absolute())
    elif run.text.tokenizer is not None:
        run = _with_vocabulary(run, "--model.vocab" in given(arguments))
    return dataclasses.replace(command, run=run)


def _default(kind: Any, arguments: Sequence[str]) -> Any:
    """The command with the recipe that the arguments name; raises where the parser's own error would name no flag."""
    word = {flag: words[0] for flag, words in given(arguments).items() if words}.get
    for flag in ("--precision.parameters", "--precision.compute"):
        if (dtype := word(flag)) is not None:
            nn.float_dtype(dtype, f"{flag} {dtype}")
    if (products := word("--precision.products")) not in (None, "compute", "fp8"):
        raise ValueError(f"--precision.products {products}: give compute, for those of its dtype, or fp8.")
    name, folder = word("--recipe"), word("--model")
    if (source := word("--from-run")) is not None and name is None and folder is None:
        return kind(*_of_run(RunDirectory(Path(source))))
    called = name or ("default" if folder is None else Path(folder).absolute().name)
    run = RunDirectory(Path(word("--run-dir") or Path("runs") / short_name(called)))
    return kind(called, recipe_of(name or "default", None if folder is None else Path(folder), run))


def _of_run(run: RunDirectory) -> tuple[str, Recipe]:
    """The name and the recipe of a run, for another that starts from it."""
    name, recipe = run.read()
    if file_of(name) is not None:  # the run's copy, since the file may have changed
        name = f"{source_beside(run.recipe)}:{name.rpartition(':')[2]}"
    return name, dataclasses.replace(recipe, from_run=None, from_step=None, from_optimizer=False, prolong="refuse")


def _with_vocabulary(recipe: Recipe, is_given: bool) -> Recipe:
    """The recipe with its tokenizer's vocabulary, rounded up, as the model's, unless --model.vocab `is_given`."""
    text = recipe.text
    if text.round_vocab < 1:
        raise ValueError(f"--text.round-vocab {text.round_vocab}: it counts ids, so give at least 1.")
    if is_given:
        return recipe
    with naming_flags(recipe):
        vocab = math.ceil(tokenizer_of(recipe).vocab / text.round_vocab) * text.round_vocab
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab=vocab))


def recipe_of(name: str, folder: Path | None = None, run: RunDirectory | None = None) -> Recipe:
    """The recipe of that name; or, for a preset's name, one of AdamW and 800 steps with that model.

    `FILE.py:NAME` is a function in a file of one's own. With the `folder` of a published model (or, where it is gone,
    the copy in the `run` that began from it), the recipe trains that model. A recipe other than `default` then keeps
    its fields, except for the model and, unless it was written for a published model, the optimizer, whose learning
    rate would be too high for trained weights.
    """
    if folder is not None:
        made = recipe_of_folder(folder, run)
        own = made if name == "default" else recipe_of(name)
        optimizer = made.optimizer if own.published is None else own.optimizer
        return dataclasses.replace(own, model=made.model, published=made.published, optimizer=optimizer)
    if name in RECIPES:
        return RECIPES[name]()
    if name in LARGE:
        return LARGE[name][1]
    if file_of(name) is not None:
        return own_recipe(name)
    if name in models.presets():
        return Recipe(model=models.preset(name))
    raise ValueError(
        f"--recipe {name}: there is no such recipe; the recipes are {', '.join(RECIPES)}, a preset of "
        "eqformer.models by its name is one: AdamW and 800 steps with that model; of one's own, give FILE.py:NAME. At "
        f"the scale of many machines: {', '.join(LARGE)}."
    )
