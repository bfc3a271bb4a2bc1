"""Recipes as JSON: written into every run directory, read back to resume and to sample."""

import dataclasses
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from beartype import BeartypeConf
from beartype.door import is_bearable
from recipes import Recipe

from eqformer import models, nn, read_json, read_utf8, write_atomic
from support.own_recipe import classes_of, file_of, loaded
from support.screen import Screen


_KINDS = {
    kind.__name__: kind
    for kind in (
        Recipe,
        *(type(field.default) for field in dataclasses.fields(Recipe) if dataclasses.is_dataclass(field.default)),
        *(family.config for family in models.FAMILIES.values()),
        *nn.RotaryScaling.__subclasses__(),
    )
}

_FORMER_NAMES = {"Choices": "ParallelConfig"}
"""Classes by the names that older run folders have for them."""
_NUMBERS = BeartypeConf(is_pep484_tower=True)  # an integer is a float too, as in annotations
_FLOAT = "__float__"  # as transformers writes what JSON has no number for


class UnknownKindError(ValueError):
    """A value of a recipe is of a class that is not known; `kind` is its name."""

    def __init__(self, kind: object, known: Iterable[str]):
        super().__init__(f"recipe.json: kind {kind!r} is unknown; it must be one of {sorted(known)}.")
        self.kind = kind


def to_json(value: Any) -> Any:
    """A value of a recipe as JSON; a dataclass keeps its class's name as `kind`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    if isinstance(value, float) and math.isinf(value):
        return {_FLOAT: "Infinity" if value > 0 else "-Infinity"}
    return str(value) if isinstance(value, Path) else value


def from_json(value: Any, own: Mapping[str, type] = MappingProxyType({})) -> Any:
    """The value that `to_json` wrote; raises a `ValueError` for a kind or a field that this version does not know.

    `own` are classes of the recipe's own file, by name.
    """
    if isinstance(value, list):
        return tuple(from_json(part, own) for part in value)
    if not isinstance(value, dict):
        return value
    if value.get(_FLOAT) in ("Infinity", "-Infinity"):
        return float(value[_FLOAT])
    fields = {name: from_json(part, own) for name, part in value.items() if name != "kind"}
    kinds: Mapping[str, Any] = {**_KINDS, **own}
    name = value.get("kind", "")
    kind = kinds.get(name, kinds.get(_FORMER_NAMES.get(name, "")))
    if kind is None:
        raise UnknownKindError(value.get("kind"), kinds)
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(
            f"recipe.json: {kind.__name__} has no fields {unknown}; it was written by another version of "
            "eqformer, with which the run can go on."
        )
    for name in fields:
        if "Path" in str(known[name].type) and isinstance(fields[name], str):
            fields[name] = Path(fields[name])
    _check_kinds(kind, fields)
    return kind(**fields)


def _check_kinds(kind: Any, fields: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a field that holds a value of another type than its annotation says."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a class of the user's own file, whose annotations type checkers alone can read
        return
    for name, value in fields.items():
        if not is_bearable(value, hints[name], conf=_NUMBERS):
            raise ValueError(
                f"recipe.json: {kind.__name__}.{name} must be of {hints[name]}, but is {value!r:.100}; write the file "
                "anew by the command that began the run."
            )


def read_recipe(path: Path) -> tuple[str, Recipe]:
    """Return the name and the recipe in a `recipe.json`, which is data: no code of the folder is run.

    Raises a `ValueError` for a recipe whose classes are defined by the code beside it, unless this process has run that
    code: by `--recipe FILE.py:NAME` with the same text, or by `trust_recipe`.
    """
    try:
        return _read_recipe(path)
    except UnknownKindError as error:
        if not (source := source_beside(path)).exists():
            raise
        raise ValueError(
            f"{path}: the class {error.kind} of this recipe is defined by the code in {source}, and code from a run's "
            f"folder is run only if you say so: read the file and, if you trust it, name the folder {path.parent} and "
            "add --trust-recipe."
        ) from error


def _read_recipe(path: Path) -> tuple[str, Recipe]:
    content = read_json(path)
    with _naming_recipe(path):
        recipe = from_json(content["recipe"], classes_of(source_beside(path)))
        if not isinstance(content["name"], str):
            raise TypeError(f"name is {content['name']!r:.100}")
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe is {recipe!r:.100}")
        return content["name"], recipe


def trust_recipe(path: Path) -> None:
    """Run the code beside a `recipe.json`, after a line that says so, if the recipe's classes are defined by it."""
    source = source_beside(path)
    if not path.is_file() or not source.is_file():
        return
    try:
        _read_recipe(path)
    except UnknownKindError:
        Screen(errors=True).note(f"running the code in {source}, as --trust-recipe says")
        loaded(source)


def needs_code(recipe: Recipe) -> bool:
    """Whether a recipe has values of classes that only code of one's own defines."""
    try:
        from_json(to_json(recipe))
    except UnknownKindError:
        return True
    return False


@contextmanager
def _naming_recipe(path: Path) -> Iterator[None]:
    """Raise a `ValueError` that names the file for content that no run wrote."""
    try:
        yield
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: this is not a recipe that a run wrote ({type(error).__name__}: {error}).") from error


def source_beside(path: Path) -> Path:
    """The copy of a recipe's own file that is kept beside its `recipe.json`."""
    return path.with_suffix(".py")


def run_identifier(path: Path) -> str | None:
    """The random identifier of the run in a `recipe.json`; None if there is no file, or an older version wrote it."""
    if not path.exists():
        return None
    run = read_json(path).get("run")
    if not isinstance(run, str | None):
        raise ValueError(f"{path}: this is not a recipe that a run wrote (run is {run!r:.100}).")
    return run


def write_recipe(path: Path, name: str, recipe: Recipe, run: str) -> None:
    """Write a `recipe.json` with the run's identifier, and before it a copy of the recipe's own file, if it has one."""
    if (file := file_of(name)) is not None:
        write_atomic(source_beside(path), read_utf8(file))
    content = {"name": name, "run": run, "recipe": to_json(recipe)}
    write_atomic(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def differences(old: Recipe, new: Recipe, changeable: frozenset[str]) -> list[str]:
    """What differs between two recipes outside the changeable fields, as `field: old -> new`."""
    return [
        line
        for field in dataclasses.fields(Recipe)
        if field.name not in changeable
        for line in _compare(field.name, to_json(getattr(old, field.name)), to_json(getattr(new, field.name)))
    ]


def _compare(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        return [line for part in old for line in _compare(f"{name}.{part}", old[part], new[part])]
    return [] if old == new else [f"{name}: {old!r} -> {new!r}"]
