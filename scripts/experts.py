"""Color each token of a text by the expert that it takes first: `python scripts/experts.py --run-dir runs/moe`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(gradients=False)

import dataclasses
from pathlib import Path

from support.command import entry

from eqformer import data, read_utf8
from eqformer.recipes import RunDirectory
from eqformer.text import load_run_model, load_run_tokenizer


EXAMPLE = '''def load(path, encoding="utf-8"):
    """Read a file and return its lines without their ends."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]
'''


@dataclasses.dataclass(frozen=True)
class Command:
    """Write a page and a picture of a text, each token in the color of the expert that it takes first."""

    run_dir: Path = Path("runs/moe")
    """The folder of a run with a mixture of experts; experts.html and experts.png are written into it."""
    text: str | None = None
    """The text; by default a few lines of Python."""
    file: Path | None = None
    """A file with the text; only its first --tokens are read."""
    tokens: int = 2048
    """Maximum number of tokens that are read."""
    trust_recipe: bool = False
    """Run the Python file recipe.py of a run's folder if the recipe needs a class that this file defines."""


def write(command: Command) -> None:
    """Write both files."""
    directory = RunDirectory(command.run_dir)
    directory.read()  # Reading the recipe first raises errors that name flags.
    if command.text is not None and command.file is not None:
        raise ValueError(f"--text ... --file {command.file}: only one text is colored; leave one of the two out.")
    if command.tokens < 1:
        raise ValueError(f"--tokens {command.tokens}: give at least 1.")
    text = read_utf8(command.file) if command.file is not None else command.text
    text = EXAMPLE if text is None else text
    tokenizer = load_run_tokenizer(directory.path)
    ids = tokenizer.encode(text)[: command.tokens].tolist()
    if not ids:
        raise ValueError("the text is empty: there is nothing to color; give a text by --text or --file.")
    directory.color_by_experts(load_run_model(directory.path), ids, data.TextStream(tokenizer).pieces(ids))
    sys.stdout.write(f"look at {directory.experts_page}, {directory.experts}\n")


main = entry(Command, write)

if __name__ == "__main__":
    main(sys.argv[1:])
