"""Whether what a configuration says is of the kind that the config's field has."""

import types
import typing
from collections.abc import Iterable
from typing import Any

from ._attributes import Entry
from ._config import PublishedConfig


def read_entries(entries: Iterable[Entry], published: PublishedConfig, config: type) -> dict[str, Any]:
    """The fields that a table's entries read; refuse a value that is not of the kind of its field in `config`."""
    kinds, found = typing.get_type_hints(config), dict[str, Any]()
    for entry in entries:
        before = published.taken
        its = entry.read(published)
        for name, value in its.items():
            if name in kinds and not fits(value, kinds[name]):
                said = published.names_of(value, before) or name
                published.refuse(f"{said}={value!r}: it must be {_called(kinds[name])}.")
            found[name] = _as(value, kinds.get(name))
    return found


def fits(value: Any, kind: Any) -> bool:
    """Whether a value may stand in a field of this annotation; a number may be whole, and True is none."""
    args = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(fits(value, one) for one in args)
    if typing.get_origin(kind) is tuple:
        args = args[:1] * len(value) if isinstance(value, tuple) and args[1:] == (...,) else args
        return isinstance(value, tuple) and len(value) == len(args) and all(map(fits, value, args))
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _as(value: Any, kind: Any) -> Any:
    """The same, where a fraction may be said as a whole number."""
    return float(value) if isinstance(value, int) and kind in (float, float | None) else value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _called(kind: Any) -> str:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return " or ".join(_NAMES.get(one, str(one)) for one in kinds)
