"""Write text with a trained model: `python scripts/sample.py --run-dir runs/default --prompt "def "`."""

import sys

import _environment


_environment.prepare()

import dataclasses
from pathlib import Path

import jax
import tyro
from _run_directory import RunDirectory
from _screen import fail
from _setup import latest_model, tokenizer_of

from eqformer import data, generation, training


@dataclasses.dataclass(frozen=True)
class Command:
    """Write on from a prompt with the latest checkpoint of a run."""

    run_dir: Path = Path("runs/default")
    """The folder of the run."""
    prompt: str = "def "
    """What the text begins with."""
    tokens: int = 300
    """How many tokens to write; fewer if the model ends the text."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Draw from tokens at least this share as likely as the likeliest."""
    repetition_penalty: float | None = None
    """Above 1: make tokens that are already in the text less likely."""
    seed: int = 0
    """The same seed writes the same text."""


def write(command: Command) -> None:
    """Stream the text to standard output."""
    directory = RunDirectory(command.run_dir)
    _, recipe = directory.open()
    tokenizer = tokenizer_of(recipe)
    model = latest_model(directory, recipe)
    prompt = tokenizer.encode(command.prompt).tolist() or [tokenizer.end_of_text]
    ids = generation.stream(
        model,
        prompt,
        max_new_tokens=command.tokens,
        transforms=generation.sampling(
            temperature=command.temperature,
            top_k=command.top_k,
            top_p=command.top_p,
            min_p=command.min_p,
            repetition_penalty=command.repetition_penalty,
        ),
        end_of_text=tokenizer.end_of_text,
        key=jax.random.key(command.seed),
    )
    text = data.TextStream(tokenizer)
    sys.stdout.write(command.prompt)
    for number in ids:
        sys.stdout.write(text.push(number))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")


def main(arguments: list[str]) -> None:
    """Run the command; bad input ends it with one message and exit code 2."""
    try:
        write(tyro.cli(Command, args=arguments))
    except (ValueError, OSError, training.CheckpointError) as error:
        fail(error)


if __name__ == "__main__":
    main(sys.argv[1:])
