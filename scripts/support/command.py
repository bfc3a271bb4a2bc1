"""From the command line to a recipe: flags change the fields of the recipe that `--recipe` names."""

import ast
import dataclasses
import functools
import inspect
import math
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from eqformer import nn, training
from eqformer.recipes import (
    fields_of,
    find_recipe,
    flags_of,
    LARGE,
    name_flags_in_errors,
    published_recipe,
    Recipe,
    RECIPES,
    RunDirectory,
    Screen,
    short_name,
    Text,
    texts,
    trust_recipe,
    user_file,
)
from support.ending import one_message
from support.flags import check_names, parse_words


Command = TypeVar("Command")


def _parse_literals(info: Any) -> Any:
    """Parse a union of literals and of values that no command line can spell (a schedule's table) as a literal."""
    kinds = typing.get_args(info.type)
    words = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is Literal]
    if not words or not any(map(dataclasses.is_dataclass, kinds)):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(words[0]) + "}",
        instance_from_str=lambda arguments: arguments[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
        choices=words[0],
    )


# Flags of a recipe whose name or metavar differs from the parser's default.
_FLAGS = {
    Recipe: {
        "published": tyro.conf.arg(name="model", metavar="FOLDER"),
        "from_run": tyro.conf.arg(metavar="FOLDER"),
        "profile": tyro.conf.arg(metavar="FIRST:LAST"),
        "evaluate_text": tyro.conf.arg(metavar="FILE ..."),
        "evaluate_tasks": tyro.conf.arg(metavar="NAME ..."),
        "plan": tyro.conf.arg(name=""),
    },
    training.Optimization: {"paths": tyro.conf.arg(metavar="PATTERN=NAME ...")},
    Text: {"mix": tyro.conf.arg(metavar="SOURCE=WEIGHT ...")},
}


def _split_recipe(info: Any, flags: Collection[str] | None) -> Any:
    """Parse a recipe, its text and its optimizer as flags with the names in `_FLAGS`.

    A field keeps the recipe's value if the command line has none of the field's flags. If `flags` is None, every field
    is parsed.
    """
    if info.type not in _FLAGS:
        return None
    fields = []
    for name, kind in typing.get_type_hints(info.type).items():
        flag: Any = _FLAGS[info.type].get(name)
        flag_name = name.replace("_", "-") if flag is None or flag.name is None else flag.name
        if info.type is Recipe and flags is not None and flag_name and not _has_flag(flag_name, flags):
            continue
        kind = Path | None if kind == Path | str | None else kind  # Each word is a path.
        field_type: Any = kind if flag is None else typing.Annotated[kind, flag]
        default = getattr(info.default, name)
        # A part of a recipe is a group of flags. The docstring of the part's class is the group's help.
        is_part = dataclasses.is_dataclass(getattr(info.type, name, None))
        text = None if is_part else functools.partial(_find_help, info.type, name)  # Read only if help is shown.
        fields.append(tyro.constructors.StructFieldSpec(name, field_type, default, text))
    return tyro.constructors.StructConstructorSpec(functools.partial(dataclasses.replace, info.default), tuple(fields))


def _has_flag(name: str, flags: Collection[str]) -> bool:
    """Return whether a flag sets the field of this name, or a field of the group of this name."""
    return any(flag in (f"--{name}", f"--no-{name}") or flag.startswith(f"--{name}.") for flag in flags)


def _parser_rules(arguments: Sequence[str], default: Any) -> tyro.constructors.ConstructorRegistry:
    """Return the rules of the parser of a command line, for the fields that its flags set.

    Making all flags of a recipe takes 35 ms, so this is done only for help and for a message about an unknown flag.
    """
    words, values = parse_words(arguments), flags_of(default)
    # A flag `--group.no-name` is the negative form of the flag `--group.name`.
    positive = {flag: re.sub(r"no-(?=[^.]*$)", "", flag) for flag in words}
    is_known = all(flag in values or isinstance(values.get(positive[flag]), bool) for flag in words)
    rules = tyro.constructors.ConstructorRegistry()
    rules.primitive_rule(_parse_literals)
    rules.struct_rule(functools.partial(_split_recipe, flags=words if is_known else None))
    return rules


def _find_help(kind: type, name: str) -> str | None:
    """Return the help text of a field; None if the field has none."""
    return documentation(kind).get(name)


def entry(
    kind: type[Command], run: Callable[[Command], None], hidden: Sequence[str] = ()
) -> Callable[[Sequence[str]], None]:
    """Return a script's `main`, which parses flags and runs the command.

    Bad input ends the script with one message and exit code 2.
    """

    def main(arguments: Sequence[str]) -> None:
        with one_message():
            if "--trust-recipe" in parse_words(arguments):
                # Every word, and every value after "=", may be the folder of a run.
                values = (argument.partition("=")[2] for argument in arguments)
                for word in (*arguments, *values, "runs/default"):
                    trust_recipe(RunDirectory(Path(word)).recipe, Screen(errors=True).note)
            has_recipe = "recipe" in typing.get_type_hints(kind)
            command = parse(kind, arguments, hidden) if has_recipe else read(kind, arguments)
            with name_flags_in_errors(command):
                run(command)

    return main


def read(kind: type[Command], arguments: Sequence[str]) -> Command:
    """Return the command, a dataclass, with the values of the flags; `--help` shows every field."""
    check_names(arguments, flags_of(kind))
    return tyro.cli(kind, args=_help_for_help_all(arguments))


def parse(kind: type[Command], arguments: Sequence[str], hidden: Sequence[str] = ()) -> Command:
    """Return the command with the values of the flags: a dataclass with `recipe` (a name) and `run` (the recipe).

    `--help` shows the most used flags and the command's own flags, except for the `hidden` groups and flags.
    `--help-all` shows all flags.
    """
    default = _default_command(kind, arguments)
    default = dataclasses.replace(default, run=_with_named_optimizer(default.run, parse_words(arguments)))
    check_names(arguments, flags_of(default))
    if {"-h", "--help"} & {*arguments}:
        print(short_help(os.path.relpath(sys.argv[0]), default, hidden))
        raise SystemExit(0)
    recipes = "\n".join(f"  {name}: {' '.join((recipe.__doc__ or '').split())}" for name, recipe in RECIPES.items())
    command: Any = tyro.cli(
        kind,
        default=default,
        args=_help_for_help_all(arguments),
        config=(tyro.conf.AvoidSubcommands,),
        registry=_parser_rules(arguments, default),
        description=f"{inspect.getdoc(kind)}\n\nRecipes (or any preset of eqformer.models):\n{recipes}\n\n"
        f"Recipes of published models on many accelerators: {', '.join(LARGE)}.",
    )
    recipe = texts.complete_recipe(command.run)
    has_vocab_flag = "--model.vocab" in parse_words(arguments)
    if recipe.published is None and recipe.text.tokenizer is not None:
        recipe = _with_vocabulary(recipe, _run_directory(arguments, command.recipe), has_vocab_flag)
    return dataclasses.replace(command, run=recipe)


def _with_named_optimizer(recipe: Recipe, words: Mapping[str, Sequence[str]]) -> Recipe:
    """Return the recipe with the optimizer that flags name, without the recipe's settings that this optimizer lacks.

    A recipe with an `update_size`, for example, can be run with `--optimizer.name adamw`, which has no such setting.
    The flag `--optimizer.update-size` together with `--optimizer.name adamw` is an error.
    """
    if not words.get("--optimizer.name"):
        return recipe
    paths = tuple(words.get("--optimizer.paths", recipe.optimizer.paths))
    optimizer: Any = dataclasses.replace(recipe.optimizer, name=words["--optimizer.name"][0], paths=paths)
    return dataclasses.replace(recipe, optimizer=optimizer.without_unused())


def _help_for_help_all(arguments: Sequence[str]) -> list[str]:
    return ["--help" if argument == "--help-all" else argument for argument in arguments]


def _default_command(kind: Any, arguments: Sequence[str]) -> Any:
    """Return the command with the recipe that the arguments name.

    Raises a `ValueError` for some bad values, because the parser's own error would not name the flag.
    """
    word = _first_words(arguments).get
    for flag in ("--precision.parameters", "--precision.compute"):
        if (dtype := word(flag)) is not None:
            nn.float_dtype(dtype, f"{flag} {dtype}")
    if (products := word("--precision.products")) not in (None, "compute", "fp8"):
        raise ValueError(f"--precision.products {products}: give compute, for products in the compute dtype, or fp8.")
    name, folder = word("--recipe"), word("--model")
    if (source := word("--from-run")) is not None and name is None and folder is None:
        return kind(*_recipe_of_run(RunDirectory(Path(source))))
    if (depth := word("--depth")) is not None:
        return _command_of_depth(kind, name or "default", depth, folder)
    if folder is None:
        return kind(name or "default", find_recipe(name or "default"))
    shown_name = name or Path(folder).absolute().name
    return kind(shown_name, _recipe_of_model(name or "default", Path(folder), _run_directory(arguments, shown_name)))


def _command_of_depth(kind: Any, name: str, depth: str, folder: str | None) -> Any:
    """Return the command with the recipe of a depth."""
    if not re.fullmatch(r"-?\d+", depth):
        raise ValueError(f"--depth {depth}: give a number of layers, such as --depth 4.")
    if folder is not None:
        raise ValueError(
            f"--depth {depth} --model {folder}: a published model has its own depth; leave one of the two flags out."
        )
    recipe = find_recipe(name, int(depth))
    return kind(name, recipe)


def _first_words(arguments: Sequence[str]) -> dict[str, str]:
    """Return the first word of each flag that has one."""
    return {flag: words[0] for flag, words in parse_words(arguments).items() if words}


def _run_directory(arguments: Sequence[str], name: str) -> RunDirectory:
    """Return the folder of the run that the arguments name; by default the folder for a recipe with this name."""
    return RunDirectory(_first_words(arguments).get("--run-dir") or Path("runs") / short_name(name))


def _recipe_of_run(run: RunDirectory) -> tuple[str, Recipe]:
    """Return the name and the recipe of a run, for another run that starts from this run."""
    name, recipe = run.read()
    if user_file(name) is not None:  # The user's file may have changed, so the name refers to the run's copy.
        name = f"{run.source}:{name.rpartition(':')[2]}"
    return name, dataclasses.replace(recipe, from_run=None, from_step=None, from_optimizer=False, prolong="refuse")


def _with_vocabulary(recipe: Recipe, run: RunDirectory, has_vocab_flag: bool) -> Recipe:
    """Return the recipe whose model has the tokenizer's vocabulary, rounded up, unless --model.vocab is given.

    The tokenizer is the copy in the folder of the run, if the run has one.
    """
    text = recipe.text
    if text.round_vocab < 1:
        raise ValueError(f"--text.round-vocab {text.round_vocab}: give a number of ids, at least 1.")
    if has_vocab_flag:
        return recipe
    with name_flags_in_errors(recipe):
        vocab = math.ceil(texts.recipe_tokenizer(recipe, run).vocab / text.round_vocab) * text.round_vocab
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab=vocab))


def _recipe_of_model(name: str, folder: Path, run: RunDirectory) -> Recipe:
    """Return the recipe of a name, changed to train the published model in a folder.

    A recipe other than `default` keeps its fields, except for the model and the optimizer, whose learning rate would be
    too high for trained weights. A recipe that was written for a published model keeps its optimizer too.
    """
    recipe = published_recipe(folder, run)
    if name == "default":
        return recipe
    named = find_recipe(name)
    optimizer = recipe.optimizer if named.published is None else named.optimizer
    return dataclasses.replace(named, model=recipe.model, published=recipe.published, optimizer=optimizer)


# Flags of the short help by heading, with metavars; a command shows only the flags that it has.
GROUPS = {
    "model": "--recipe, --depth, --model FOLDER, --from-run FOLDER, --model.embed, --model.layers, --model.heads, "
    "--lora.rank",
    "text": "--data PATH, --loss-on, --show-example, --text.mix SOURCE=WEIGHT, --text.tokenizer FILE, --seq",
    "training": "--steps, --batch, --microbatches, --optimizer.name, --optimizer.learning-rate, --precision.compute, "
    "--seed",
    "rewards": "--reward FILE.py:NAME, --held-out FILE, --policy-loss, --group, --tokens, --temperature, --kl-weight, "
    "--clip-low, --clip-high, --updates, --scale-rewards, --mask-equal-groups, --mask-truncated, --resample",
    "the run": "--run-dir FOLDER, --checkpoint-every, --validate-every, --evaluate-every, --sample-every, --prompt",
    "devices": "--mesh.fsdp, --mesh.tensor, --mesh.pipe, --zero, --simulate N",
}
RARE = frozenset(("--trust-recipe",))  # Only --help-all lists this flag; an error names it if it is needed.
WIDTH, INDENT = 80, 36


def short_help(script: str, command: Any, hidden: Sequence[str] = ()) -> str:
    """Return the help that fits on a screen: the command's purpose, the most used flags by group, and its own flags.

    The help of a flag is the first clause of its field's documentation.
    """
    purpose = (inspect.getdoc(type(command)) or "").partition("\n")[0]
    lines = [f"usage: {script} [--flag value ...]", textwrap.fill(purpose, WIDTH)]
    fields = {flag: (value, kind, name) for flag, value, kind, name in fields_of(command)}
    listed = {*re.findall(r"--[a-z.-]+", " ".join(GROUPS.values()))} | RARE
    own_flags = [flag for flag, (_, kind, _) in fields.items() if kind is type(command) and flag not in listed]
    for heading, group in {**GROUPS, "this command": ", ".join(own_flags)}.items():
        entries = [entry.partition(" ") for entry in group.split(", ")]
        shown = [(flag, metavar) for flag, _, metavar in entries if flag in fields and flag not in hidden]
        if shown and heading not in hidden:
            lines += [f"{heading}:", *(_help_line(flag, metavar, *fields[flag]) for flag, metavar in shown)]
    names = f"{', '.join(RECIPES)}, presets (llama-3-8b), large runs (llama-3-8b-h100-8), FILE.py:NAME"
    return "\n".join([*lines, textwrap.fill(f"Recipes: {names}. --help-all lists every flag and recipe.", WIDTH)])


def _help_line(flag: str, metavar: str, value: Any, kind: type, name: str) -> str:
    """Return a flag's line with its default value; without a default, with its metavar or its name's last word."""
    if value in (None, ()):
        shown_value = metavar or flag.rpartition("-")[2].upper()
    else:
        shown_value = "" if isinstance(value, bool) else str(value)
    words = re.split(r"[;:.](?: |$)| \(", documentation(kind).get(name, ""))[0]
    line = f"  {f'{flag} {shown_value}':<{INDENT - 3}} {words}"
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * INDENT)


@functools.cache
def documentation(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, inherited fields included."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):  # all but `object`
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, text in pairwise(definition.body if isinstance(definition, ast.ClassDef) else []):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return texts
