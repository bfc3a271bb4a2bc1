"""Types of config fields, with ranges for numbers: classes of configs annotate their fields by them."""

import dataclasses
import math
import types
import typing
from typing import Annotated, Any


LARGEST_INT, LARGEST_FLOAT = 2**31 - 1, 3.4028234663852886e38  # of int32 and of float32


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


Size = Annotated[int, Range(1, LARGEST_INT, counts="entries")]
"""Entries of a dim of some weight: channels, heads, ids, experts."""
OptionalSize = Annotated[int, Range(0, LARGEST_INT, counts="entries")]
"""A size of a part of the model that may be missing, which 0 states."""
Length = Annotated[int, Range(1, LARGEST_INT)]
"""A number of tokens."""
Index = Annotated[int, Range(0, LARGEST_INT)]
"""The number of a layer or of an id, counted from 0."""
LayerCount = Annotated[int, Range(1, 4096, counts="layers")]
"""Layers of a model."""
Number = Annotated[float, Range(-LARGEST_FLOAT, LARGEST_FLOAT)]
"""Any finite number."""
Positive = Annotated[float, Range(0.0, LARGEST_FLOAT, exclusive=True)]
"""A finite number above 0."""
NotNegative = Annotated[float, Range(0.0, LARGEST_FLOAT)]
"""A finite number of at least 0."""
Fraction = Annotated[float, Range(0.0, 1.0, exclusive=True)]
"""A part of all, above 0."""
Rate = Annotated[float, Range(0.0, 1.0)]
"""A probability."""


def ranges_in(field_type: Any) -> list[Range]:
    """Return the ranges of the numbers of a type, also within unions and tuples."""
    args = typing.get_args(field_type)
    if typing.get_origin(field_type) is Annotated:
        return [args[1]]
    return [bounds for part in args for bounds in ranges_in(part)]


def fits(value: Any, field_type: Any) -> bool:
    """Return whether a value is of a type. A whole number fits where a float is meant; True is no number."""
    origin, args = typing.get_origin(field_type), typing.get_args(field_type)
    if field_type is Any:
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
    if field_type in (int, float):
        return isinstance(value, int if field_type is int else int | float) and not isinstance(value, bool)
    return not isinstance(field_type, type) or isinstance(value, field_type)


def convert(value: Any, field_type: Any) -> Any:
    """Return a value that fits its type, with floats in the place of whole numbers where the type asks for floats."""
    origin, args = typing.get_origin(field_type), typing.get_args(field_type)
    if origin is Annotated:
        return convert(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return convert(value, next(option for option in args if fits(value, option)))
    if origin is list:
        return [convert(item, args[0]) for item in value]
    if origin is tuple:
        args = args[:1] * len(value) if args[1:] == (...,) else args
        return tuple(map(convert, value, args))
    return float(value) if field_type is float else value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object"}
_NAMES |= {type(None): "null"}


def describe_type(field_type: Any, value: Any) -> str:
    """Return in words the rule of a type that `value` breaks: "a whole number of at least 1"."""
    origin, args = typing.get_origin(field_type), typing.get_args(field_type)
    if origin is Annotated:
        return _describe_range(args[0], args[1], value)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(option, value) for option in args)
    if origin is list or (origin is tuple and args[1:] == (...,)):
        wrong = [item for item in value if not fits(item, args[0])] if isinstance(value, list | tuple) else []
        return f"a list, each of it {describe_type(args[0], wrong[0] if wrong else value)}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(describe_type(item, value) for item in args)}"
    return _NAMES.get(field_type, str(field_type))


def _describe_range(number_type: type, bounds: Range, value: Any) -> str:
    is_number = fits(value, number_type)
    name = "a finite number" if is_number and not _is_finite(value) else _NAMES[number_type]
    if is_number and value > bounds.most and _is_finite(value):
        most = f"{bounds.most:.9g}" if number_type is float else f"{bounds.most}"
        return f"{name} of at most {most}"
    if bounds.least <= -LARGEST_FLOAT:
        return name
    upper = f" and at most {bounds.most:g}" if number_type is float and bounds.most < LARGEST_FLOAT else ""
    return f"{name} {'above' if bounds.exclusive else 'of at least'} {bounds.least:g}{upper}"


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def format_value(value: Any) -> str:
    """Return a value as an error shows it: in full unless it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits.
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= 400 else f"{text[:400]}..."
