"""Limits on what one rendering of a chat template may ask for: steps, sizes of values, memory and processor time.

This file imports `jinja2`, which is optional, so others import it inside of functions.
"""

import itertools
import re
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from typing import Any

from jinja2 import Environment
from jinja2.filters import make_attrgetter


MAX_SOURCE = 1 << 16  # characters of a template; the longest published ones have about 30,000
MAX_STEPS = 1 << 20  # loop iterations, calls and operations, and 1,024 characters or elements that they make
MAX_SIZE = 1 << 22  # characters and elements of a value or of the output
MAX_SECONDS = 1.0  # of this thread's processor time, so that a busy machine refuses nothing more
_MADE = 64  # how many values of the largest size may be made in all, which bounds the memory
_LARGER = 4  # how many times the conversation's size is added to the largest size
_MAX_BITS = 1 << 14  # of an integer
_MAX_PRODUCT = 10**8  # comparisons of one operation that takes the product of two sizes
MAX_SMALL = 1 << 14  # characters for a filter whose time is not linear
_MAX_INDENT = 64
MAX_FORMAT = 256  # characters of a date's format
_COUNTED_IN = 1024  # characters or elements for a step
_CHECKED_EVERY = 16  # steps after which the time is looked at


class TemplateLimit(Exception):
    """A template asked for more than a limit allows."""


class Budget:
    """What is left for one rendering, given the conversation and the template's other variables."""

    def __init__(self, variables: Mapping[str, Any]):
        self._sizes: dict[int, int] = {}  # of the variables' containers, which live as long as the rendering
        self.largest = 1 << 62
        size = self._size(variables, self._sizes)
        self.largest = MAX_SIZE + _LARGER * size
        self._steps, self._made, self._next_look = MAX_STEPS + size, _MADE * self.largest, 0
        self._next_look = self._steps - _CHECKED_EVERY
        self._seconds = MAX_SECONDS * (1 + size / MAX_SIZE)
        self._start = time.thread_time()

    def step(self, size: int = 0) -> None:
        """Count one step, and one more for every 1,024 of the size that it makes or reads."""
        self._steps -= 1 + size // _COUNTED_IN
        if self._steps <= self._next_look:
            if self._steps < 0:
                raise TemplateLimit(f"it takes more than {MAX_STEPS:,} steps")
            if time.thread_time() - self._start > self._seconds:
                raise TemplateLimit(f"it takes more than {self._seconds:.3g} s")
            self._next_look = self._steps - _CHECKED_EVERY

    def allow(self, size: int) -> None:
        """Raise where a value of this size must not be made."""
        if size > self.largest:
            raise TemplateLimit(f"it makes a value of more than {self.largest:,} characters or elements")

    def make(self, size: int) -> None:
        """Count a step that makes a value of this size."""
        self.allow(size)
        self.step(size)
        self._made -= size
        if self._made < 0:
            raise TemplateLimit(f"it makes values of more than {_MADE * self.largest:,} characters or elements in all")

    def size(self, value: object) -> int:
        """Characters and elements of a value, those of a part as often as it stands in it."""
        return self._size(value, {})

    def _size(self, value: object, seen: dict[int, int]) -> int:
        if isinstance(value, str):
            return len(value) if value.isascii() else 4 * len(value)
        if isinstance(value, bytes):
            return len(value)
        parts: Iterable[object]
        if isinstance(value, Mapping):
            parts = itertools.chain(value.keys(), value.values())
        elif isinstance(value, list | tuple | Set | ValuesView):
            parts = list(value)  # which keeps the pairs of `dict.items` alive while their addresses are compared
        else:
            return 1
        place = id(value)
        if place in self._sizes:
            return self._sizes[place]
        if place in seen:
            return seen[place]
        seen[place] = self.largest + 1  # of a value that holds itself
        total = 1
        for part in parts:
            if isinstance(part, int | float | None):
                total += 1
            elif isinstance(part, str):
                total += 1 + (len(part) if part.isascii() else 4 * len(part))
            else:
                total += 1 + self._size(part, seen)
            if total > self.largest:
                self.allow(total)
        seen[place] = total
        return total


def check_bits(bits: int) -> None:
    """Raise for an integer of more bits than are allowed."""
    if bits > _MAX_BITS:
        raise TemplateLimit(f"it makes an integer of more than {_MAX_BITS:,} bits")


def _check_product(first: int, second: int) -> None:
    if first * second > _MAX_PRODUCT:
        raise TemplateLimit(f"it compares {first:,} with {second:,} characters, one by one")


def largest_number(text: str | bytes) -> int:
    """The largest number that stands in a text, as a width or a precision does."""
    numbers = re.findall(rb"\d+", text) if isinstance(text, bytes) else re.findall(r"\d+", text)
    return max((10 ** min(len(number) - 1, 20) for number in numbers if len(number) > 4), default=0)


def formatted_size(text: str | bytes, values: Any, budget: Budget) -> int:
    """At most so many characters has `text % values`."""
    widths = values if isinstance(values, tuple) else (values,)
    width = max((abs(each) for each in widths if isinstance(each, int)), default=0) if _star(text) else 0
    marks = text.count(b"%") if isinstance(text, bytes) else text.count("%")
    return len(text) + marks * (budget.size(values) + 10 * largest_number(text) + width)


def _star(text: str | bytes) -> bool:
    return b"*" in text if isinstance(text, bytes) else "*" in text


def _whole(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


# Bounds of methods of text and of integers: each is given the arguments of a call, and returns those to call it with.
def _bound_width(budget: Budget, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    widths = [_whole(value) for value in (*args, *kwargs.values())]
    budget.allow(max(widths, default=0) * (1 + (owner.count("\t") if isinstance(owner, str) else 0)))
    return args


def _bound_replaced(budget: Budget, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    if len(args) > 1 and all(isinstance(value, type(owner) | str) for value in args[:2]):
        budget.allow(len(owner) + len(args[1]) * owner.count(args[0]))
    return args


def _bound_joined(budget: Budget, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    items = list(args[0]) if args else []
    budget.allow(budget.size(items) + len(owner) * len(items))
    return [items, *args[1:]] if args else args


def _bound_translated(budget: Budget, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    budget.allow(len(owner) * max((budget.size(value) for value in args), default=0))
    return args


def _bound_compared(budget: Budget, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    parts = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, str | bytes)]
    _check_product(len(owner), max(parts, default=0))
    return args


_Bound = Callable[[Budget, Any, Sequence[Any], Mapping[str, Any]], Sequence[Any]]
METHODS: Mapping[str, _Bound] = types.MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"), _bound_width),
        **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"), _bound_compared),
        "replace": _bound_replaced,
        "join": _bound_joined,
        "translate": _bound_translated,
        "striptags": lambda budget, owner, args, kwargs: (_check_product(len(owner), len(owner)), args)[1],
    }
)


# Bounds of filters, in the same way; the value comes first.
def _bound_numbers(budget: Budget, environment: Environment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    budget.allow(max(map(_whole, (*args, *kwargs.values())), default=0))
    return value, *args


def _bound_round(budget: Budget, environment: Environment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    if max(map(_whole, (*args, *kwargs.values())), default=0) > 1000:
        raise TemplateLimit("it rounds to more than 1,000 digits")
    return value, *args


def _bound_indent(budget: Budget, environment: Environment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    width = (args or [kwargs.get("width", 4)])[0]
    lines = len(str(value).splitlines()) + 1
    budget.allow(lines * (len(width) if isinstance(width, str) else _whole(width)))
    return value, *args


def _bound_json(budget: Budget, environment: Environment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    options = [*args, *kwargs.values()]
    widths = [len(its) if isinstance(its, str) else _whole(its) for its in options if not isinstance(its, list | tuple)]
    if max(widths, default=0) > _MAX_INDENT or budget.size(options) > 4 * _MAX_INDENT:
        raise TemplateLimit(f"it indents JSON by more than {_MAX_INDENT} characters")
    indented = any(not isinstance(its, bool) and width for its, width in zip(options, widths))
    budget.allow(budget.size(value) * (1 + max(widths, default=0) * _depth(value) if indented else 1))
    return value, *args


def _bound_join(
    budget: Budget, environment: Environment, value: Any, d: Any = "", attribute: int | str | None = None
) -> Sequence[Any]:
    items = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    budget.allow(budget.size(items) + budget.size(d) * len(items))
    return items, d


def _bound_replace(budget: Budget, environment: Environment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    old, new = (str(its) for its in (*args, kwargs.get("old", ""), kwargs.get("new", ""))[:2])
    budget.allow(len(text := str(value)) + len(new) * text.count(old))
    return value, *args


def _bound_format(budget: Budget, environment: Environment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    budget.allow(formatted_size(str(value), kwargs or args, budget))
    return value, *args


def _bound_sum(budget: Budget, environment: Environment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    items = list(value)
    if any(isinstance(its, list | tuple) for its in (*args, *kwargs.values())):
        _check_product(len(items), budget.size(items))
    return items, *args


FILTERS: Mapping[str, Callable[..., Sequence[Any]]] = types.MappingProxyType(
    {
        **dict.fromkeys(("center", "batch", "slice", "truncate"), _bound_numbers),
        "round": _bound_round,
        "indent": _bound_indent,
        "tojson": _bound_json,
        "join": _bound_join,
        "replace": _bound_replace,
        "format": _bound_format,
        "sum": _bound_sum,
    }
)
NOT_LINEAR = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))


def _depth(value: Any) -> int:
    """How deep containers nest; a value that was counted before holds none twice on a path."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, Mapping | list | tuple)]:
        level = [part for each in level for part in (each.values() if isinstance(each, Mapping) else each)]
        depth += 1
    return depth
