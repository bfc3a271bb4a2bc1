"""The short help, which fits on a screen: the flags that most runs use."""

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from support.flags import fields_of


# Under each heading, flags with what they take; a command shows those that it has.
GROUPS = {
    "model": "--recipe, --model FOLDER, --from-run FOLDER, --model.embed, --model.layers, --model.heads, --lora.rank",
    "text": "--data PATH, --text.mix PATH=WEIGHT, --text.tokenizer FILE, --seq",
    "training": "--steps, --batch, --microbatches, --optimizer.name, --optimizer.learning-rate, --precision.compute, "
    "--seed",
    "the run": "--run-dir FOLDER, --checkpoint-every, --validate-every, --sample-every, --prompt",
    "devices": "--mesh.fsdp, --mesh.tensor, --mesh.pipe, --zero, --simulate N",
}
RARE = frozenset(("--trust-recipe",))  # only --help-all lists them; the error that needs one names it
WIDTH, INDENT = 80, 36


def short_help(script: str, command: Any, recipes: str, left_out: Sequence[str] = ()) -> str:
    """The help's text: the command's purpose, groups of flags with their default values, and the command's own flags.

    A flag's words are the first clause of its field's documentation.
    """
    purpose = (inspect.getdoc(type(command)) or "").partition("\n")[0]
    lines = [f"usage: {script} [--flag value ...]", textwrap.fill(purpose, WIDTH)]
    fields = {flag: (value, kind, name) for flag, value, kind, name in fields_of(command)}
    known = {*re.findall(r"--[a-z.-]+", " ".join(GROUPS.values()))} | RARE
    own = [flag for flag, (_, kind, _) in fields.items() if kind is type(command) and flag not in known]
    for heading, chosen in {**GROUPS, "this command": ", ".join(own)}.items():
        there = [(flag, of) for one in chosen.split(", ") for flag, _, of in [one.partition(" ")] if flag in fields]
        if there and heading not in left_out:
            lines += [f"{heading}:", *(_line(flag, of, *fields[flag]) for flag, of in there)]
    named = f"{recipes}, presets (llama-3-8b), large runs (llama-3-8b-h100-8), FILE.py:NAME"
    more = f"Recipes: {named}. --help-all lists every flag and recipe."
    return "\n".join([*lines, textwrap.fill(more, WIDTH)])


def _line(flag: str, of: str, value: Any, kind: type, name: str) -> str:
    """A flag's line with its default value or, if it has none, with what it takes: `of`, or the name's last word."""
    if value in (None, ()):
        taken = of or flag.rpartition("-")[2].upper()
    else:
        taken = "" if isinstance(value, bool) else str(value)
    words = re.split(r"[;:.](?: |$)| \(", documentation(kind).get(name, ""))[0]
    return textwrap.fill(f"  {f'{flag} {taken}':<{INDENT - 3}} {words}", WIDTH, subsequent_indent=" " * INDENT)


def documentation(kind: type) -> dict[str, str]:
    """What is written below each field of a dataclass, those that it inherits included."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):  # all but `object`
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        for field, words in pairwise(defined.body if isinstance(defined, ast.ClassDef) else []):
            if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr):
                found[ast.unparse(field.target)] = ast.literal_eval(words.value)
    return found
