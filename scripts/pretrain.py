"""Train a language model: `python scripts/pretrain.py`. Each field of a recipe is a flag; `--help-all` lists them."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv)

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text
from support.command import entry
from support.processes import connect, Machine, run_devices

from eqformer.models import SpeedrunConfig
from eqformer.parallel import is_first_process
from eqformer.recipes import (
    describe_speedrun,
    needs_code,
    Recipe,
    report,
    RunDirectory,
    Screen,
    setup,
    short_name,
    texts,
    train,
)


@dataclasses.dataclass(frozen=True)
class Command:
    """Train a transformer on text; run the same command again to continue a run that was stopped."""

    recipe: str
    """The recipe to start from; see below; other flags change its fields."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()
    depth: int | None = None
    """The depth of the recipe speedrun; it decides the width, heads, batch, learning rates and steps."""
    run_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/<recipe>)")] = None
    """The folder of the run; everything is written there, except for tokens, which runs share (docs/data.md)."""
    show_example: bool = False
    """Print the first conversation of chat data with the learned tokens marked, and end."""
    trust_recipe: bool = False
    """Run the Python file recipe.py of a run's folder if the recipe needs a class that this file defines."""


def run_command(command: Command) -> None:
    """Train as the command says; everything is checked before anything is written."""
    recipe, folder = command.run, command.run_dir or Path("runs") / short_name(command.recipe)
    connect(command.machine)
    if command.show_example:
        setup.check_run(recipe, RunDirectory(folder))
        show_example(recipe, RunDirectory(folder))
        return
    screen = Screen(silent=not is_first_process())
    if isinstance(recipe.model, SpeedrunConfig):
        screen.note(f"speedrun   {describe_speedrun(recipe)}")
    run = train(recipe, folder, name=command.recipe, devices=run_devices(command.machine), screen=screen)
    if run.start < run.step == recipe.steps and recipe.writes_text:
        sample = f"--run-dir {folder} --prompt {json.dumps(recipe.prompt)} --tokens 300 --temperature 0.8 --seed 0"
        sample += " --trust-recipe" if needs_code(recipe) else ""
        screen.note(f"sample     python scripts/sample.py {sample}")


def show_example(recipe: Recipe, directory: RunDirectory) -> None:
    """Print the first conversation of the recipe's data; the learned tokens are in colour, or in brackets."""
    if recipe.has_text_rows:
        raise ValueError(f"--show-example --loss {recipe.loss}: this loss learns no tokens; leave --show-example out.")
    if recipe.data is None and not recipe.text.mix:
        raise ValueError(
            "--show-example: conversations are read from a file or folder; give --data CHATS.jsonl, and the --model "
            "that has the chat template, even if --run-dir names a run."
        )
    tokenizer = texts.recipe_tokenizer(recipe, directory)
    encoder = texts.chat_encoder(recipe, tokenizer, directory)
    if encoder is None:
        raise ValueError("--show-example: the data is plain text, and all of it is learned; leave --show-example out.")
    with report.print_warnings():
        document = next(iter(texts.open_chats(recipe, texts.chat_paths(recipe)[0])))
    shown = Text()
    console = Console(highlight=False, soft_wrap=True, quiet=not is_first_process())
    has_colors = console.color_system is not None and console.is_terminal
    spans = encoder.mark_learned(document)
    for span in spans:
        piece = f"[[{span.text}]]" if span.is_learned and not has_colors else span.text
        shown.append(piece, style="bold green" if span.is_learned else "dim")
    total = sum(span.tokens for span in spans)
    learned = sum(span.tokens for span in spans if span.is_learned)
    mark = "in colour" if has_colors else "in [[brackets]]"
    console.print(f"{document.name}: {total} tokens, of which {learned} are learned ({mark})", markup=False)
    console.print(shown)


main = entry(Command, run_command)

if __name__ == "__main__":
    main(sys.argv[1:])
