"""Dataclasses as JSON, each with the name of its class, for the files of a run; reading runs no code."""

import dataclasses
import functools
import math
import typing
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any


_FLOAT = "__float__"  # The key that transformers writes for numbers that JSON does not have.


class UnknownKindError(ValueError):
    """A value in a file is of a class that is not known; `kind` is its name."""

    def __init__(self, kind: object, known: Iterable[str], source: str):
        super().__init__(f"{source}: kind {kind!r} is unknown; it must be one of {sorted(known)}.")
        self.kind = kind


def dataclass_to_json(value: Any) -> Any:
    """Return a value as JSON; a dataclass keeps its class's name as `kind`."""
    match value:
        case tuple():
            return [dataclass_to_json(part) for part in value]
        case float() if math.isinf(value):
            return {_FLOAT: "Infinity" if value > 0 else "-Infinity"}
        case Path():
            return str(value)
        case type():
            return value
        case _ if dataclasses.is_dataclass(value):
            fields = {field.name: dataclass_to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"kind": type(value).__name__, **fields}
        case _:
            return value


def dataclass_from_json(value: Any, classes: Mapping[str, type], source: str) -> Any:
    """Return the value that `dataclass_to_json` wrote.

    `classes` are those that may come, by name, and `source` is the name of the file, for errors. Raises an
    `UnknownKindError` for another class, and a `ValueError` for a field that its class does not have, or that has a
    value of another type.
    """
    match value:
        case list():
            return tuple(dataclass_from_json(part, classes, source) for part in value)
        case dict() if value.get(_FLOAT) in ("Infinity", "-Infinity"):
            return float(value[_FLOAT])
        case dict():
            return _make_dataclass(value, classes, source)
        case _:
            return value


def _make_dataclass(value: Mapping[str, Any], classes: Mapping[str, type], source: str) -> Any:
    """Return the dataclass that an object in JSON describes."""
    fields = {name: dataclass_from_json(part, classes, source) for name, part in value.items() if name != "kind"}
    kind: Any = classes.get(value.get("kind", ""))
    if kind is None:
        raise UnknownKindError(value.get("kind"), classes, source)
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(
            f"{source}: {kind.__name__} has no fields {unknown}; it was written by another version of eqformer, with "
            "which the run can go on."
        )
    for name in fields:
        if "Path" in str(known[name].type) and isinstance(fields[name], str):
            fields[name] = Path(fields[name])
    _check_types(kind, fields, source)
    return kind(**fields)


def dataclass_differences(old: Any, new: Any, *, ignored: Container[str] = ()) -> list[str]:
    """Return the values that differ between two dataclasses, as `field.part: old -> new`, except of ignored fields."""
    pairs = [(field.name, getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(old)]
    return [
        line
        for name, old_value, new_value in pairs
        if name not in ignored
        for line in _compare(name, dataclass_to_json(old_value), dataclass_to_json(new_value))
    ]


def _compare(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        return [line for part in old for line in _compare(f"{name}.{part}", old[part], new[part])]
    return [] if old == new else [f"{name}: {old!r} -> {new!r}"]


def _check_types(kind: Any, fields: Mapping[str, Any], source: str) -> None:
    """Raise a `ValueError` for a field that holds a value of another type than its annotation says."""
    for name, value in fields.items():
        if (hint := violated_annotation(kind, name, value)) is not None:
            raise ValueError(
                f"{source}: {kind.__name__}.{name} must be of {hint}, but is {value!r:.100}; write the file "
                "anew by the command that began the run."
            )


_type_hints = functools.cache(typing.get_type_hints)


def violated_annotation(kind: Any, name: str, value: Any) -> Any:
    """Return the annotation of a dataclass's field if the value is of another type; None if the value may be there."""
    from beartype import BeartypeConf  # Imported here, since the package imports this file at once.
    from beartype.door import is_bearable

    try:
        hint = _type_hints(kind)[name]
    except NameError:  # A class of the user's file, whose annotations type checkers alone can read.
        return None
    numbers = BeartypeConf(is_pep484_tower=True)  # An integer is a float too, as in annotations.
    return None if is_bearable(value, hint, conf=numbers) else hint
