"""Jinja sandbox for untrusted chat templates, which enforces the limits of `_template_limits.py` on a rendering.

This file imports `jinja2`, which is optional, so other files import this one inside functions.
"""

import contextlib
import datetime
import functools
import json
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import EscapeFormatter, Markup

from . import _template_limits as template_limits


class Piece(NamedTuple):
    """Piece of a rendered conversation, and the index of the message whose loop iteration wrote the piece, or None."""

    text: str
    message: int | None


RenderPieces = Callable[[Mapping[str, object]], list[Piece]]


class LoopTracker:
    """Record of a rendering's loops; `message` is the index of the message of the current iteration, or None."""

    def __init__(self, messages: Sequence[object]):
        self._indices = {id(message): index for index, message in enumerate(messages)}
        self._outer: list[int | None] = []
        self.message: int | None = None

    def begin(self) -> None:
        """Enter a loop over the messages, or over parts of the current message."""
        self._outer.append(self.message)

    def visit(self, item: object) -> None:
        """Begin an iteration; an item that is not a message of the conversation belongs to the current message."""
        self.message = self._indices.get(id(item), self.message)

    def end(self) -> None:
        """Leave the loop, and return to the message of the outer loop."""
        self.message = self._outer.pop()


class CountedIterator(Iterator[object]):
    """Iterator that counts every item as a step. Iterators over iterators may nest 64 levels deep."""

    def __init__(self, items: Iterator[object], budget: template_limits.Budget, depth: int):
        if depth > 64:
            raise template_limits.TemplateLimit("it nests filters over iterators more than 64 levels deep")
        self.items, self.budget, self.depth = items, budget, depth

    def __next__(self) -> object:
        self.budget.step()
        return next(self.items)


class BoundedNamespace(Namespace):
    """Jinja's `namespace`, printed as `<Namespace>` without its values, since a namespace may contain itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class BoundedFormatter(SandboxedFormatter):
    """`str.format` with bounded widths and precisions."""

    def __init__(self, environment: "BoundedEnvironment", **options: Any):
        super().__init__(environment, **options)
        self._budget = environment.budget

    def format_field(self, value: object, format_spec: str) -> str:
        self._budget.allow(template_limits.largest_number(format_spec))
        text = super().format_field(value, format_spec)
        self._budget.make(len(text))
        return text


class BoundedEscapeFormatter(BoundedFormatter, EscapeFormatter):
    """`str.format` with bounded widths and precisions, for text that is marked as safe."""


class CountingCodeGenerator(CodeGenerator):
    """Code generator that counts every loop iteration and the size of every value that an expression creates."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        # `environment.count()` returns True, so it can be part of the loop's test, where it also counts rejected items.
        count = nodes.EnvironmentAttribute("count()")
        if node.test is not None:
            node.test = nodes.And(count, node.test)
        node.body = [nodes.ExprStmt(count), *node.body]
        if isinstance(node.target, nodes.Name):
            begin = nodes.ExprStmt(nodes.Name(node.target.name, "load"))
            begin.begins_iteration = True  # type: ignore[attr-defined]  # jinja2 allows no node classes of our own.
            node.body = [begin, *node.body]
        self.writeline("environment.begin_loop()")
        super().visit_For(node, frame)
        self.writeline("environment.end_loop()")

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if getattr(node, "begins_iteration", False):
            self.newline(node)
            self.write("environment.begin_iteration(")
            self.visit(node.node, frame)
            self.write(")")
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        with self._checked():
            super().visit_Compare(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        with self._checked():
            super().visit_List(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        with self._checked():
            super().visit_Dict(node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            with self._checked():
                super().visit_Tuple(node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            with self._checked():
                super().visit_Getitem(node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile:
            join = "(markup_join if context.eval_ctx.volatile else str_join)"
        else:
            join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        self.write(f"environment.concatenate({join}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Put the expression that the block writes inside a call of `BoundedEnvironment.check_value`."""
        self.write("environment.check_value(")
        yield
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. A template runs only in the function that `compile_template` returns."""

    code_generator_class = CountingCodeGenerator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, now: Callable[[], datetime.datetime] | None):
        extensions = ["jinja2.ext.loopcontrols", GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._finalize_value)
        self._thread_state = threading.local()
        # jinja2 calls `concat` for blocks, macros and the output.
        self.concat = self._join_output  # type: ignore[assignment]
        self.globals |= {"namespace": BoundedNamespace, "raise_exception": _raise_exception}
        if now is not None:
            self.globals["strftime_now"] = lambda format: now().strftime(format[: template_limits.MAX_FORMAT])
        del self.globals["lipsum"]
        self.filters["tojson"] = to_json
        self.filters = {name: self._bound_filter(name, call) for name, call in self.filters.items()}
        self.tests = {name: self._count_test(call) for name, call in self.tests.items()}

    @property
    def budget(self) -> template_limits.Budget:
        """The budget of this thread's rendering; raises a `TemplateLimit` if no rendering runs."""
        budget = getattr(self._thread_state, "budget", None)
        if budget is None:
            # When jinja2 compiles a template, it also tries to compute constant expressions. After this error, it
            # leaves the expression to the rendering.
            raise template_limits.TemplateLimit("a template is evaluated when it is rendered, and not before")
        return budget

    def compile_template(self, source: str) -> "RenderPieces":
        """Return the function that renders a template; raises an error of jinja2 if the template cannot be parsed."""
        if len(source) > template_limits.MAX_SOURCE:
            raise template_limits.TemplateLimit(
                f"it has {len(source):,} characters, and the limit is {template_limits.MAX_SOURCE:,}"
            )
        template = self.from_string(source)

        def render(variables: Mapping[str, object]) -> list[Piece]:
            messages = variables.get("messages")
            budget = template_limits.Budget(variables)
            loops = LoopTracker(messages if isinstance(messages, Sequence) else ())
            self._thread_state.budget, self._thread_state.loops = budget, loops
            try:
                pieces = template.root_render_func(template.new_context(dict(variables)))
                # The generator runs up to its next piece, so `loops.message` is the message of this piece.
                return [Piece(text, loops.message) for text in self._check_output(pieces)]
            finally:
                self._thread_state.budget = self._thread_state.loops = None

        return render

    def begin_loop(self) -> None:
        """Note that a loop of the template begins."""
        self._thread_state.loops.begin()

    def begin_iteration(self, item: object) -> None:
        """Note that an iteration of a loop begins with this item."""
        self._thread_state.loops.visit(item)

    def end_loop(self) -> None:
        """Note that a loop of the template has ended."""
        self._thread_state.loops.end()

    def count(self) -> bool:
        """Count an iteration of a loop; return True, so that the call can be part of a condition."""
        self.budget.step()
        return True

    def check_value(self, value: object, depth: int = 1) -> object:
        """Count a value and return it; an iterator becomes a `CountedIterator` at this depth of nesting."""
        budget = self.budget
        match value:
            case str():
                budget.make(template_limits.text_size(value))
            case bool() | float() | None:
                budget.step()
            case int():
                template_limits.check_bits(value.bit_length())
                budget.step()
            case Iterator() if not isinstance(value, LoopContext):
                return CountedIterator(value, budget, depth)
            case _:
                budget.make(budget.size(value))
        return value

    def concatenate(self, join: Callable[[Sequence[object]], str], parts: Sequence[object]) -> str:
        """Join the parts of `a ~ b` into one text."""
        self.budget.make(sum(self.budget.size(part) for part in parts))
        return join(parts)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Return the result of an operator; raise a `TemplateLimit` instead of computing a result that is too large."""
        budget = self.budget
        match operator, left, right:
            case "**", int(), int():
                template_limits.check_bits(left.bit_length() * max(right, 0))
            case "*", int(), int():
                template_limits.check_bits(left.bit_length() + right.bit_length())
            case ("*", int(times), value) | ("*", value, int(times)):
                budget.allow(max(times, 0) * budget.size(value))
            case "%", str() | bytes(), _:
                budget.allow(template_limits.max_formatted_size(left, right, budget))
        return self.check_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: object, **kwargs: object) -> object:
        """Return the result of a call in a template.

        The parameters have names with underscores, as in jinja2, because a template's call may use plain names as
        keywords.
        """
        budget = __self.budget
        budget.step()
        owner = getattr(__obj, "__self__", None)
        is_method = isinstance(__obj, types.BuiltinMethodType | types.MethodType)
        if is_method and isinstance(owner, str | bytes | int) and __obj.__name__ in template_limits.METHODS:
            method = template_limits.TemplateCall(budget, __self, owner, args, kwargs)
            template_limits.METHODS[__obj.__name__](method)
            args = tuple(method.args)
        return __self.check_value(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Return a safe `str.format` or `str.format_map`, with this sandbox's limits; None for other values."""
        is_method = isinstance(value, types.MethodType | types.BuiltinMethodType)
        if not is_method or value.__name__ not in ("format", "format_map") or not isinstance(value.__self__, str):
            return None
        text, takes_mapping = value.__self__, value.__name__ == "format_map"
        is_safe = isinstance(text, Markup)
        formatter = BoundedEscapeFormatter(self, escape=text.escape) if is_safe else BoundedFormatter(self)

        def format(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                (kwargs,), args = args, ()
            return type(text)(formatter.vformat(text, args, kwargs))

        return format

    def _finalize_value(self, value: object) -> object:
        """Convert a value of the output to text, and count the text."""
        if isinstance(value, str) or getattr(self._thread_state, "budget", None) is None:
            return value
        text = str(value)
        self.budget.make(len(text))
        return text

    def _join_output(self, pieces: Iterable[str]) -> str:
        """Join pieces of the output into one text."""
        return "".join(self._check_output(pieces))

    def _check_output(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield pieces of the output; the size is checked before each piece, because the output may be endless."""
        budget, size = self.budget, 0
        for piece in pieces:
            size += len(piece)
            budget.allow(size)
            yield piece
        budget.make(size)

    def _bound_filter(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return a filter that checks its arguments by `FILTERS` and counts its result."""
        # jinja2 passes the context or the environment before the value to filters with this attribute.
        first = 1 if hasattr(call, "jinja_pass_arg") else 0

        @functools.wraps(call)
        def bounded(*args: object, **kwargs: object) -> object:
            self.budget.step()
            checked = template_limits.TemplateCall(self.budget, self, args[first], args[first + 1 :], kwargs)
            if name in template_limits.NOT_LINEAR and self.budget.size(checked.value) > template_limits.MAX_SMALL:
                raise template_limits.TemplateLimit(
                    f"its filter {name} takes at most {template_limits.MAX_SMALL:,} characters or elements"
                )
            if (check := template_limits.FILTERS.get(name)) is not None:
                check(checked)
            depth = 1 + checked.value.depth if isinstance(checked.value, CountedIterator) else 1
            result = call(*args[:first], checked.value, *checked.args, **checked.kwargs)
            return self.check_value(result, depth)

        return bounded

    def _count_test(self, call: Callable[..., bool]) -> Callable[..., bool]:
        """Return a test that counts each call as a step."""

        @functools.wraps(call)
        def counted(*args: object, **kwargs: object) -> bool:
            self.budget.step()
            return call(*args, **kwargs)

        return counted


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks text to train on; a rendering writes only the content of the tag."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise ValueError(str(message)[: template_limits.MAX_SMALL])


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as the filter `tojson` of transformers writes it, which escapes no letters by default."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
