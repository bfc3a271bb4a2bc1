"""The short help, which fits on a screen: the flags that most runs use."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any


# Under each heading, flags with their descriptions; a command shows those that it has.
GROUPS = {
    "model": {
        "--recipe NAME": "{recipes}, a preset's name, or FILE.py:NAME",
        "--model FOLDER": "a published model to train on (a folder)",
        "--from-run FOLDER": "a run whose weights this one starts from",
        "--model.embed": "channels",
        "--model.layers": "layers",
        "--model.heads": "attention heads",
        "--lora.rank": "train low-rank changes alone; 0 trains all",
    },
    "text": {
        "--data PATH": "a file or folder; Python's own library",
        "--text.mix PATH=WEIGHT": "several, or datasets: hub:NAME=WEIGHT",
        "--text.tokenizer FILE": "a tokenizer.json; bytes without one",
        "--seq": "tokens in a row",
    },
    "training": {
        "--steps": "optimizer steps",
        "--batch": "rows a step",
        "--microbatches": "pieces a step is computed in",
        "--optimizer.name": "adamw, muon or sgd",
        "--optimizer.learning-rate": "the highest learning rate",
        "--precision.compute": "float32, or bfloat16 for mixed precision",
        "--seed": "decides weights, order, samples",
    },
    "the run": {
        "--run-dir FOLDER": "where all is written, and goes on from",
        "--checkpoint-every": "steps between checkpoints",
        "--validate-every": "steps between validations",
        "--sample-every": "steps between samples; 0 for none",
        "--prompt": "what samples begin with",
    },
    "devices": {
        "--mesh.fsdp": "split rows and state (--zero) over so many",
        "--mesh.tensor": "split heads and features over so many",
        "--mesh.pipe": "split layers over so many",
        "--zero": "1 optimizer state, 2 gradients, 3 all",
        "--simulate N": "have the CPU act as so many devices",
    },
}
WIDTH, INDENT = 80, 36


def short_help(
    script: str,
    purpose: str,
    flags: Mapping[str, Any],
    own: Mapping[str, str],
    recipes: str,
    left_out: Sequence[str] = (),
) -> str:
    """The help's text: the script's purpose, the groups of flags with their default values, and the script's own."""
    lines = [f"usage: {script} [--flag value ...]", textwrap.fill(purpose, WIDTH)]
    for heading, chosen in {**GROUPS, "this command": own}.items():
        there = [(*named.partition(" ")[::2], words) for named, words in chosen.items() if named.split()[0] in flags]
        if there and heading not in left_out:
            lines.append(f"{heading}:")
            lines += (_line(flag, flags[flag], of, words.format(recipes=recipes)) for flag, of, words in there)
    lines.append("--help-all lists every flag.")
    return "\n".join(lines)


def _line(flag: str, value: Any, of: str, words: str) -> str:
    """A flag's line with its default value or, if it has none, with the kind of value it takes (`of`)."""
    known = of if value in (None, ()) or isinstance(value, bool) else str(value)
    head = f"  {f'{flag} {known}':<{INDENT - 3}} "
    return textwrap.fill(words, WIDTH, initial_indent=head, subsequent_indent=" " * INDENT)
