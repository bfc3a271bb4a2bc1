"""Kinds of values in configurations: types, with ranges for numbers, by which fields of configs are annotated."""

import dataclasses
import math
import types
import typing
from typing import Annotated, Any


LARGEST_WHOLE, LARGEST = 2**31 - 1, 3.4028234663852886e38  # of int32 and of float32


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number; both belong to the range, the lower one only unless `exclusive`."""

    least: int | float
    most: int | float
    exclusive: bool = False
    counts: str = ""
    """The things that the number counts, where that matters: `"entries"` of a dim of weights, or `"layers"`."""

    def __contains__(self, value: int | float) -> bool:
        return (self.least < value if self.exclusive else self.least <= value) and value <= self.most


Size = Annotated[int, Range(1, LARGEST_WHOLE, counts="entries")]
"""Entries of a dim of some weight: channels, heads, ids, experts."""
OptionalSize = Annotated[int, Range(0, LARGEST_WHOLE, counts="entries")]
"""The same of a part of the model that may be missing, which 0 says."""
Length = Annotated[int, Range(1, LARGEST_WHOLE)]
"""A number of tokens."""
Index = Annotated[int, Range(0, LARGEST_WHOLE)]
"""The number of a layer or of an id, counted from 0."""
LayerCount = Annotated[int, Range(1, 4096, counts="layers")]
"""Layers of a model."""
Number = Annotated[float, Range(-LARGEST, LARGEST)]
"""Any finite number."""
Positive = Annotated[float, Range(0.0, LARGEST, exclusive=True)]
"""A finite number above 0."""
NotNegative = Annotated[float, Range(0.0, LARGEST)]
"""A finite number of at least 0."""
Fraction = Annotated[float, Range(0.0, 1.0, exclusive=True)]
"""A part of a whole, without 0."""
Rate = Annotated[float, Range(0.0, 1.0)]
"""A probability."""


def ranges_in(kind: Any) -> list[Range]:
    """Return the ranges of the numbers of a kind, also within options and tuples."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return [args[1]]
    return [bounds for part in args for bounds in ranges_in(part)]


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind. A whole number fits where a float is meant; True is no number."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is Annotated:
        return fits(value, args[0]) and value in args[1]
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in args)
    if origin is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if origin is tuple:
        args = args[:1] * len(value) if isinstance(value, tuple) and args[1:] == (...,) else args
        return isinstance(value, tuple) and len(value) == len(args) and all(map(fits, value, args))
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def converted(value: Any, kind: Any) -> Any:
    """Return a value that fits its kind, with floats where whole numbers stand for them."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return converted(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return converted(value, next(option for option in args if fits(value, option)))
    if origin is list:
        return [converted(item, args[0]) for item in value]
    if origin is tuple:
        args = args[:1] * len(value) if args[1:] == (...,) else args
        return tuple(map(converted, value, args))
    return float(value) if kind is float else value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object"}
_NAMES |= {type(None): "null"}


def described_kind(kind: Any, value: Any) -> str:
    """Return what a value must be, in words, of which `value` breaks the rule: "a whole number of at least 1"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _described_range(args[0], args[1], value)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(described_kind(option, value) for option in args)
    if origin is list or (origin is tuple and args[1:] == (...,)):
        wrong = [item for item in value if not fits(item, args[0])] if isinstance(value, list | tuple) else []
        return f"a list, each of it {described_kind(args[0], wrong[0] if wrong else value)}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(described_kind(item, value) for item in args)}"
    return _NAMES.get(kind, str(kind))


def _described_range(kind: type, bounds: Range, value: Any) -> str:
    is_number = fits(value, kind)
    name = "a finite number" if is_number and not _is_finite(value) else _NAMES[kind]
    if is_number and value > bounds.most and _is_finite(value):
        return f"{name} of at most {bounds.most:.9g}" if kind is float else f"{name} of at most {bounds.most}"
    if bounds.least <= -LARGEST:
        return name
    upper = f" and at most {bounds.most:g}" if kind is float and bounds.most < LARGEST else ""
    return f"{name} {'above' if bounds.exclusive else 'of at least'} {bounds.least:g}{upper}"


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def shown(value: Any) -> str:
    """Return a value as an error shows it: in full unless it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits.
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= 400 else f"{text[:400]}..."
