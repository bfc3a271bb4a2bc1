"""Limits of one rendering of a chat template: steps, sizes of values, memory and processor time.

This file imports `jinja2`, which is optional, so other files import this one inside functions.
"""

import dataclasses
import itertools
import re
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from typing import Any

from jinja2 import Environment
from jinja2.filters import make_attrgetter


MAX_SOURCE = 1 << 16  # characters of a template; the longest published ones have about 30,000
MAX_STEPS = 1 << 20  # loop iterations, calls, operations, and each 1,024 characters or elements that they create
MAX_SIZE = 1 << 22  # characters and elements of a value, and of the output
MAX_SECONDS = 1.0  # processor time of this thread, which does not depend on how busy the machine is
_TOTAL_FACTOR = 64  # All values together may be this many times as large as the largest value, which bounds the memory.
_CONVERSATION_FACTOR = 4  # The maximum size of a value grows by this multiple of the conversation's size.
_MAX_BITS = 1 << 14  # bits of an integer
_MAX_COMPARISONS = 10**8  # comparisons in one operation that compares all parts of two values with each other
MAX_SMALL = 1 << 14  # characters of the input of a filter whose time grows faster than its input
_MAX_INDENT = 64  # characters of a level of indented JSON
MAX_FORMAT = 256  # characters of a date's format
_SIZE_PER_STEP = 1024  # characters or elements that count as one step
_STEPS_PER_CLOCK_READ = 16


class TemplateLimit(Exception):
    """Error of a template that exceeds a limit."""


class Budget:
    """The steps, sizes and time that one rendering may still use.

    The limits grow with the size of `variables`: the conversation and the template's other variables.
    """

    def __init__(self, variables: Mapping[str, object]):
        # Sizes of the variables' containers by `id`; the containers live as long as the rendering.
        self._sizes: dict[int, int] = {}
        self.largest = 1 << 62  # no limit while the variables are measured
        size = self._size(variables, self._sizes)
        self.largest = MAX_SIZE + _CONVERSATION_FACTOR * size
        self._steps, self._total_left = MAX_STEPS + size, _TOTAL_FACTOR * self.largest
        self._next_clock_read = self._steps - _STEPS_PER_CLOCK_READ
        self._seconds = MAX_SECONDS * (1 + size / MAX_SIZE)
        self._start = time.thread_time()

    def step(self, size: int = 0) -> None:
        """Count one step, and one more step for every 1,024 characters or elements of the size."""
        self._steps -= 1 + size // _SIZE_PER_STEP
        if self._steps <= self._next_clock_read:
            if self._steps < 0:
                raise TemplateLimit(f"it takes more than {MAX_STEPS:,} steps")
            if time.thread_time() - self._start > self._seconds:
                raise TemplateLimit(f"it takes more than {self._seconds:.3g} s")
            self._next_clock_read = self._steps - _STEPS_PER_CLOCK_READ

    def allow(self, size: int) -> None:
        """Raise a `TemplateLimit` for a value of this size if it is too large."""
        if size > self.largest:
            raise TemplateLimit(f"it makes a value of more than {self.largest:,} characters or elements")

    def make(self, size: int) -> None:
        """Count a step that creates a value of this size."""
        self.allow(size)
        self.step(size)
        self._total_left -= size
        if self._total_left < 0:
            raise TemplateLimit(
                f"it makes values of more than {_TOTAL_FACTOR * self.largest:,} characters or elements in all"
            )

    def size(self, value: object) -> int:
        """Return the characters and elements of a value; a part that occurs several times counts each time."""
        return self._size(value, {})

    def _size(self, value: object, sizes: dict[int, int]) -> int:
        parts: Iterable[object]
        match value:
            case str() | bytes():
                return text_size(value)
            case Mapping():
                parts = itertools.chain(value.keys(), value.values())
            case list() | tuple() | Set() | ValuesView():
                # The list keeps the pairs of `dict.items` alive while their addresses are compared.
                parts = list(value)
            case _:
                return 1
        address = id(value)
        if address in self._sizes:
            return self._sizes[address]
        if address in sizes:
            return sizes[address]
        # A value that contains itself counts as too large.
        sizes[address] = self.largest + 1
        total = 1
        for part in parts:
            match part:
                case int() | float() | None:
                    total += 1
                case str():
                    total += 1 + text_size(part)
                case _:
                    total += 1 + self._size(part, sizes)
            if total > self.largest:
                self.allow(total)
        sizes[address] = total
        return total


def text_size(text: str | bytes) -> int:
    """Return an upper bound of the bytes of a text in memory."""
    return len(text) if text.isascii() or isinstance(text, bytes) else 4 * len(text)


def check_bits(bits: int) -> None:
    """Raise a `TemplateLimit` for an integer of more bits than are allowed."""
    if bits > _MAX_BITS:
        raise TemplateLimit(f"it makes an integer of more than {_MAX_BITS:,} bits")


def _check_product(first: int, second: int) -> None:
    """Raise a `TemplateLimit` for two sizes whose product, a number of comparisons, is too large."""
    if first * second > _MAX_COMPARISONS:
        raise TemplateLimit(f"it compares {first:,} with {second:,} characters, one by one")


def largest_number(text: str) -> int:
    """Return the largest number in a text, such as a width, rounded down to a power of ten; 0 below 10,000."""
    numbers = re.findall(r"\d+", text)
    return max((10 ** min(len(number) - 1, 20) for number in numbers if len(number) > 4), default=0)


def max_formatted_size(text: str | bytes, values: object, budget: Budget) -> int:
    """Return an upper bound of the characters of `text % values`."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    widths = values if isinstance(values, tuple) else (values,)
    width = max(map(_absolute_int, widths), default=0) if "*" in text else 0
    return len(text) + text.count("%") * (budget.size(values) + 10 * largest_number(text) + width)


def _absolute_int(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def _count_characters(width: object) -> int:
    """Return the characters of an indentation, which is a text or a number of spaces."""
    return len(width) if isinstance(width, str) else _absolute_int(width)


@dataclasses.dataclass
class TemplateCall:
    """Call of a method or a filter in a template; a check may replace the value and the arguments by lists."""

    budget: Budget
    environment: Environment
    value: Any
    """The object that has the method, or the value that is filtered."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> list[Any]:
        """The positional arguments, then the values of the keyword arguments."""
        return [*self.args, *self.kwargs.values()]


# Checks of methods of texts and integers.


def _check_width(call: TemplateCall) -> None:
    """Allow the width of the result; `expandtabs` writes this width for each tab."""
    width = max(map(_absolute_int, call.arguments), default=0)
    tabs = call.value.count("\t") if isinstance(call.value, str) else 0
    call.budget.allow(width * (1 + tabs))


def _check_method_replace(call: TemplateCall) -> None:
    text, args = call.value, call.args
    if len(args) > 1 and all(isinstance(value, type(text) | str) for value in args[:2]):
        call.budget.allow(len(text) + len(args[1]) * text.count(args[0]))


def _check_method_join(call: TemplateCall) -> None:
    items = list(call.args[0]) if call.args else []
    call.budget.allow(call.budget.size(items) + len(call.value) * len(items))
    call.args = [items, *call.args[1:]] if call.args else call.args


def _check_translate(call: TemplateCall) -> None:
    call.budget.allow(len(call.value) * max(map(call.budget.size, call.args), default=0))


def _check_comparisons(call: TemplateCall) -> None:
    lengths = [len(value) for value in call.arguments if isinstance(value, str | bytes)]
    _check_product(len(call.value), max(lengths, default=0))


def _check_striptags(call: TemplateCall) -> None:
    _check_product(len(call.value), len(call.value))


_Checks = Mapping[str, Callable[[TemplateCall], None]]
METHODS: _Checks = types.MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"), _check_width),
        **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"), _check_comparisons),
        "replace": _check_method_replace,
        "join": _check_method_join,
        "translate": _check_translate,
        "striptags": _check_striptags,
    }
)


# Checks of filters.


def _check_numbers(call: TemplateCall) -> None:
    call.budget.allow(max(map(_absolute_int, call.arguments), default=0))


def _check_round(call: TemplateCall) -> None:
    if max(map(_absolute_int, call.arguments), default=0) > 1000:
        raise TemplateLimit("it rounds to more than 1,000 digits")


def _check_indent(call: TemplateCall) -> None:
    width = call.args[0] if call.args else call.kwargs.get("width", 4)
    lines = len(str(call.value).splitlines()) + 1
    call.budget.allow(lines * _count_characters(width))


def _check_json(call: TemplateCall) -> None:
    """Allow the size of the JSON, in which the indentation of a line grows with the depth of nesting."""
    options = call.arguments
    widths = [_count_characters(option) for option in options if not isinstance(option, list | tuple)]
    if max(widths, default=0) > _MAX_INDENT or call.budget.size(options) > 4 * _MAX_INDENT:
        raise TemplateLimit(f"it indents JSON by more than {_MAX_INDENT} characters")
    # True counts as the width 1 above, but is an option such as `sort_keys`, not an indentation.
    is_indented = any(not isinstance(option, bool) and width for option, width in zip(options, widths))
    deepest = max(widths, default=0) * _nesting_depth(call.value) if is_indented else 0
    call.budget.allow(call.budget.size(call.value) * (1 + deepest))


def _check_filter_join(call: TemplateCall) -> None:
    separator, attribute = _join_arguments(*call.args, **call.kwargs)
    items = list(call.value if attribute is None else map(make_attrgetter(call.environment, attribute), call.value))
    call.budget.allow(call.budget.size(items) + call.budget.size(separator) * len(items))
    call.value, call.args, call.kwargs = items, (separator,), {}


def _join_arguments(d: object = "", attribute: int | str | None = None) -> tuple[object, int | str | None]:
    """Return the arguments of the filter `join`, with jinja2's names and defaults."""
    return d, attribute


def _check_filter_replace(call: TemplateCall) -> None:
    arguments = (*call.args, call.kwargs.get("old", ""), call.kwargs.get("new", ""))
    text, old, new = str(call.value), str(arguments[0]), str(arguments[1])
    call.budget.allow(len(text) + len(new) * text.count(old))


def _check_format(call: TemplateCall) -> None:
    call.budget.allow(max_formatted_size(str(call.value), call.kwargs or tuple(call.args), call.budget))


def _check_sum(call: TemplateCall) -> None:
    call.value = list(call.value)
    if any(isinstance(argument, list | tuple) for argument in call.arguments):
        _check_product(len(call.value), call.budget.size(call.value))


FILTERS: _Checks = types.MappingProxyType(
    {
        **dict.fromkeys(("center", "batch", "slice", "truncate"), _check_numbers),
        "round": _check_round,
        "indent": _check_indent,
        "tojson": _check_json,
        "join": _check_filter_join,
        "replace": _check_filter_replace,
        "format": _check_format,
        "sum": _check_sum,
    }
)
# Filters whose time grows faster than the size of their input.
NOT_LINEAR = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))


def _nesting_depth(value: object) -> int:
    """Return how deep containers nest in a value; no container of the value may contain itself."""
    level, depth = [value], 0
    while level := [container for container in level if isinstance(container, Mapping | list | tuple)]:
        level = [
            part
            for container in level
            for part in (container.values() if isinstance(container, Mapping) else container)
        ]
        depth += 1
    return depth
