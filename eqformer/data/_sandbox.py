"""A sandbox for chat templates of strangers: bounded steps, sizes of values, memory and processor time.

This file imports `jinja2`, which is optional, so others import it inside of functions.
"""

import datetime
import functools
import itertools
import json
import re
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import EscapeFormatter, Markup


MAX_SOURCE = 1 << 16  # characters of a template; the longest published ones have about 30,000
MAX_STEPS = 1 << 20  # loop iterations, calls and operations, and 1,024 characters or elements that they make
MAX_SIZE = 1 << 22  # characters and elements of a value or of the output
MAX_SECONDS = 1.0  # of this thread's processor time, so that a busy machine refuses nothing more
_MADE = 64  # how many values of the largest size may be made in all, which bounds the memory
_LARGER = 4  # how many times the conversation's size is added to the largest size
_MAX_BITS = 1 << 14  # of an integer
_MAX_PRODUCT = 10**8  # comparisons of one operation that takes the product of two sizes
_MAX_SMALL = 1 << 14  # characters for a filter whose time is not linear
_MAX_INDENT = 64
_MAX_FORMAT = 256  # characters of a date's format
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


class Counted(Iterator[Any]):
    """An iterator whose items are counted as steps. Iterators over iterators may nest 64 levels deep."""

    def __init__(self, items: Iterator[Any], budget: Budget, depth: int):
        if depth > 64:
            raise TemplateLimit("it nests filters over iterators more than 64 levels deep")
        self.items, self.budget, self.depth = items, budget, depth

    def __next__(self) -> Any:
        self.budget.step()
        return next(self.items)


class BoundedNamespace(Namespace):
    """Variables that outlive a loop; they are not shown as text, since a namespace may hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class BoundedFormatter(SandboxedFormatter):
    """`str.format` with bounded widths."""

    def __init__(self, environment: "BoundedEnvironment", **options: Any):
        super().__init__(environment, **options)
        self._budget = environment.budget

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._budget.allow(_largest_number(format_spec))
        text = super().format_field(value, format_spec)
        self._budget.make(len(text))
        return text


class BoundedEscapeFormatter(BoundedFormatter, EscapeFormatter):
    """The same for text that is marked as safe."""


class BoundedCode(CodeGenerator):
    """Code of a template in which every loop counts its iterations, and every constructor what it makes."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        # `environment.count()` is true. In the test it counts the items that the body does not see.
        count = nodes.EnvironmentAttribute("count()")
        if node.test is not None:
            node.test = nodes.And(count, node.test)
        node.body = [nodes.ExprStmt(count), *node.body]
        super().visit_For(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._checked(lambda: super(BoundedCode, self).visit_Compare(node, frame))

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._checked(lambda: super(BoundedCode, self).visit_List(node, frame))

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._checked(lambda: super(BoundedCode, self).visit_Dict(node, frame))

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._checked(lambda: super(BoundedCode, self).visit_Tuple(node, frame))
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._checked(lambda: super(BoundedCode, self).visit_Getitem(node, frame))
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        join = "(markup_join if context.eval_ctx.volatile else str_join)" if frame.eval_ctx.volatile else "str_join"
        join = "markup_join" if frame.eval_ctx.autoescape and not frame.eval_ctx.volatile else join
        self.write(f"environment.concatenate({join}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _checked(self, write: Callable[[], None]) -> None:
        self.write("environment.checked(")
        write()
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits; a template is rendered by `render`, and evaluates nothing elsewhere."""

    code_generator_class = BoundedCode
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, now: Callable[[], datetime.datetime] | None):
        extensions = ["jinja2.ext.loopcontrols", Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._shown)
        self._of_thread = threading.local()
        self.concat = self._joined  # type: ignore[assignment]  # jinja2 calls it for blocks, macros and the output
        self.globals |= {"namespace": BoundedNamespace, "raise_exception": _refuse}
        if now is not None:
            self.globals["strftime_now"] = lambda format: now().strftime(format[:_MAX_FORMAT])
        del self.globals["lipsum"]
        self.filters["tojson"] = to_json
        self.filters = {name: self._bounded_filter(name, call) for name, call in self.filters.items()}
        self.tests = {name: self._counted_test(call) for name, call in self.tests.items()}

    @property
    def budget(self) -> Budget:
        """The budget of the rendering that runs in this thread; raises an error where none does."""
        budget = getattr(self._of_thread, "budget", None)
        if budget is None:  # jinja2 computes constants when it compiles, and leaves them to the rendering if that fails
            raise TemplateLimit("a template is evaluated when it is rendered, and not before")
        return budget

    def parsed(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """The function that renders a template; raises an error of jinja2 for one that cannot be parsed."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it has {len(source):,} characters, and at most {MAX_SOURCE:,} are read")
        template = self.from_string(source)

        def render(variables: Mapping[str, Any]) -> str:
            self._of_thread.budget = Budget(variables)
            try:
                return template.render(variables)
            finally:
                self._of_thread.budget = None

        return render

    def count(self) -> bool:
        """Count a loop's iteration; always true, so that it may stand in a condition."""
        self.budget.step()
        return True

    def checked(self, value: Any, depth: int = 1) -> Any:
        """The same value once it is counted; an iterator becomes one whose items are counted."""
        budget = self.budget
        if isinstance(value, str):
            budget.make(len(value) if value.isascii() else 4 * len(value))
        elif isinstance(value, bool | float | None):
            budget.step()
        elif isinstance(value, int):
            _check_bits(value.bit_length())
            budget.step()
        elif isinstance(value, Iterator) and not isinstance(value, LoopContext):
            return Counted(value, budget, depth)
        else:
            budget.make(budget.size(value))
        return value

    def concatenate(self, join: Callable[[Sequence[Any]], str], parts: Sequence[Any]) -> str:
        """The parts of `a ~ b` as one text."""
        self.budget.make(sum(self.budget.size(part) for part in parts))
        return join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator."""
        budget = self.budget
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and right > 0:
                _check_bits(left.bit_length() * right)
            elif operator == "*":
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            times, value = (left, right) if isinstance(left, int) else (right, left)
            budget.allow(max(times, 0) * budget.size(value))
        elif operator == "%" and isinstance(left, str | bytes):
            budget.allow(_formatted_size(left, right, budget))
        return self.checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a call in a template; the names are jinja2's, since others may be keywords of the call."""
        budget = __self.budget
        budget.step()
        owner = getattr(__obj, "__self__", None)
        is_method = isinstance(__obj, types.BuiltinMethodType | types.MethodType)
        if is_method and isinstance(owner, str | bytes | int) and __obj.__name__ in _METHODS:
            args = tuple(_METHODS[__obj.__name__](budget, owner, args, kwargs))
        return __self.checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map` with this sandbox's attributes and widths; None for other values."""
        is_method = isinstance(value, types.MethodType | types.BuiltinMethodType)
        text = value.__self__ if is_method and value.__name__ in ("format", "format_map") else None
        if not isinstance(text, str):
            return None
        marked = isinstance(text, Markup)
        formatter = BoundedEscapeFormatter(self, escape=text.escape) if marked else BoundedFormatter(self)

        def format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return type(text)(formatter.vformat(text, args, kwargs))

        return format

    def _shown(self, value: Any) -> Any:
        """A value of the output as text."""
        if isinstance(value, str) or getattr(self._of_thread, "budget", None) is None:
            return value
        text = str(value)
        self.budget.make(len(text))
        return text

    def _joined(self, pieces: Iterable[str]) -> str:
        budget, size, held = self.budget, 0, []
        for piece in pieces:
            size += len(piece)
            budget.allow(size)
            held.append(piece)
        budget.make(size)
        return "".join(held)

    def _bounded_filter(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        place = 1 if hasattr(call, "jinja_pass_arg") else 0  # of the value, behind the context or the environment

        @functools.wraps(call)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            budget.step()
            if name in _NOT_LINEAR and budget.size(args[place]) > _MAX_SMALL:
                raise TemplateLimit(f"its filter {name} takes at most {_MAX_SMALL:,} characters or elements")
            if (bound := _FILTERS.get(name)) is not None:
                args = (*args[:place], *bound(self, *args[place:], **kwargs))
                kwargs = {} if name == "join" else kwargs
            depth = 1 + getattr(args[place], "depth", 0) if isinstance(args[place], Counted) else 1
            return self.checked(call(*args, **kwargs), depth)

        return bounded

    def _counted_test(self, call: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> bool:
            self.budget.step()
            return call(*args, **kwargs)

        return counted


class Generation(Extension):
    """The tag `{% generation %}`, which marks text to train on: here it renders its content and nothing else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: str) -> None:
    raise ValueError(str(message)[:_MAX_SMALL])


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the filter `tojson` of transformers writes it, which escapes no letters by default."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimit(f"it makes an integer of more than {_MAX_BITS:,} bits")


def _check_product(first: int, second: int) -> None:
    if first * second > _MAX_PRODUCT:
        raise TemplateLimit(f"it compares {first:,} with {second:,} characters, one by one")


def _largest_number(text: str | bytes) -> int:
    """The largest number that stands in a text, as a width or a precision does."""
    numbers = re.findall(rb"\d+", text) if isinstance(text, bytes) else re.findall(r"\d+", text)
    return max((10 ** min(len(number) - 1, 20) for number in numbers if len(number) > 4), default=0)


def _formatted_size(text: str | bytes, values: Any, budget: Budget) -> int:
    """At most so many characters has `text % values`."""
    widths = values if isinstance(values, tuple) else (values,)
    width = max((abs(each) for each in widths if isinstance(each, int)), default=0) if _star(text) else 0
    marks = text.count(b"%") if isinstance(text, bytes) else text.count("%")
    return len(text) + marks * (budget.size(values) + 10 * _largest_number(text) + width)


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
_METHODS: Mapping[str, _Bound] = types.MappingProxyType(
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
def _bound_numbers(environment: BoundedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    environment.budget.allow(max(map(_whole, (*args, *kwargs.values())), default=0))
    return value, *args


def _bound_round(environment: BoundedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    if max(map(_whole, (*args, *kwargs.values())), default=0) > 1000:
        raise TemplateLimit("it rounds to more than 1,000 digits")
    return value, *args


def _bound_indent(environment: BoundedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    width = (args or [kwargs.get("width", 4)])[0]
    lines = len(str(value).splitlines()) + 1
    environment.budget.allow(lines * (len(width) if isinstance(width, str) else _whole(width)))
    return value, *args


def _bound_json(environment: BoundedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    budget, options = environment.budget, [*args, *kwargs.values()]
    widths = [len(its) if isinstance(its, str) else _whole(its) for its in options if not isinstance(its, list | tuple)]
    if max(widths, default=0) > _MAX_INDENT or budget.size(options) > 4 * _MAX_INDENT:
        raise TemplateLimit(f"it indents JSON by more than {_MAX_INDENT} characters")
    indented = any(not isinstance(its, bool) and width for its, width in zip(options, widths))
    budget.allow(budget.size(value) * (1 + max(widths, default=0) * _depth(value) if indented else 1))
    return value, *args


def _bound_join(
    environment: BoundedEnvironment, value: Any, d: Any = "", attribute: int | str | None = None
) -> Sequence[Any]:
    items = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    environment.budget.allow(environment.budget.size(items) + environment.budget.size(d) * len(items))
    return items, d


def _bound_replace(environment: BoundedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    old, new = (str(its) for its in (*args, kwargs.get("old", ""), kwargs.get("new", ""))[:2])
    environment.budget.allow(len(text := str(value)) + len(new) * text.count(old))
    return value, *args


def _bound_format(environment: BoundedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    environment.budget.allow(_formatted_size(str(value), kwargs or args, environment.budget))
    return value, *args


def _bound_sum(environment: BoundedEnvironment, value: Any, *args: Any, **kwargs: Any) -> Sequence[Any]:
    items = list(value)
    if any(isinstance(its, list | tuple) for its in (*args, *kwargs.values())):
        _check_product(len(items), environment.budget.size(items))
    return items, *args


_FILTERS: Mapping[str, Callable[..., Sequence[Any]]] = types.MappingProxyType(
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
_NOT_LINEAR = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))


def _depth(value: Any) -> int:
    """How deep containers nest; a value that was counted before holds none twice on a path."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, Mapping | list | tuple)]:
        level = [part for each in level for part in (each.values() if isinstance(each, Mapping) else each)]
        depth += 1
    return depth
