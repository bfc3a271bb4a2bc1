"""Every public call with more than five arguments describes each argument where the reference shows the description.

Functions, methods and `__init__` have a section `Args:`. A class that is built from its fields has a docstring under
each field, in the class itself or in the base class that defines the field.
"""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator

import equinox as eqx
import pytest
from test_rooms import listed_names, PACKAGE, ROOMS


MOST = 5
ARGS = re.compile(r"^Args:\n((?:[ ]+.*\n?|\n)+)", re.MULTILINE)


def described_in(docstring: str | None) -> set[str]:
    """Return the arguments that a docstring describes in a line `name: description`."""
    section = ARGS.search(inspect.cleandoc(docstring or ""))
    return set(re.findall(r"^ {4}\*{0,2}(\w+): \S", section[1], re.MULTILINE)) if section else set()


@functools.cache
def body_of(cls: type) -> list[ast.stmt]:
    """Return the statements of a class; to find its source, `inspect` parses the whole file."""
    node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(node, ast.ClassDef)
    return node.body


def bodies(cls: type) -> Iterator[list[ast.stmt]]:
    """Return the statements of a class, and of its base classes in the package."""
    return (body_of(base) for base in cls.__mro__ if base.__module__.startswith(("eqformer", __name__)))


def described_fields(cls: type) -> set[str]:
    """Return the fields of a class that have a docstring under them."""
    return {
        field.target.id
        for body in bodies(cls)
        for field, below in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def has_init(cls: type) -> bool:
    return any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for body in bodies(cls) for part in body)


def left_out(call: Callable, described: set[str]) -> list[str]:
    """Return the arguments that are not described, of a call with more than `MOST` arguments."""
    names = [name for name in inspect.signature(call).parameters if name not in ("self", "cls")]
    return [name for name in names if name not in described] if len(names) > MOST else []


def complaints(name: str, thing: object) -> dict[str, list[str]]:
    """Return the undescribed arguments of a public function or class and of its public methods, by name."""
    found = {}
    if inspect.isfunction(thing):
        found[name] = left_out(thing, described_in(thing.__doc__))
    elif inspect.isclass(thing) and typing.is_typeddict(thing):  # keyword arguments, each with a docstring under it
        fields = [part.target for part in next(bodies(thing)) if isinstance(part, ast.AnnAssign)]
        found[name] = sorted({ast.unparse(field) for field in fields} - described_fields(thing))
    elif inspect.isclass(thing) and not issubclass(thing, BaseException):
        described = described_in(inspect.getdoc(thing.__init__)) if has_init(thing) else described_fields(thing)
        found[name] = left_out(thing, described)
        for method, call in vars(thing).items():
            if inspect.isfunction(call := inspect.unwrap(getattr(call, "__func__", call))) and (
                method == "__call__" or not method.startswith("_")
            ):
                docs = (inspect.getdoc(getattr(one, method, None)) for one in thing.__mro__)
                found[f"{name}.{method}"] = left_out(call, set().union(*map(described_in, docs)))
    return {name: names for name, names in found.items() if names}


def public(room: str) -> Iterator[tuple[str, object]]:
    """Yield every public name of a room with its value, and the public names of modules that the room exports."""
    module = importlib.import_module(f"eqformer.{room}")
    for name in listed_names((PACKAGE / room / "__init__.py").read_text()):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield from (
                (f"{name}.{one}", value)
                for one, value in vars(thing).items()
                if not one.startswith("_") and getattr(value, "__module__", "") == thing.__name__
            )
        else:
            yield name, thing


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_calls_with_many_arguments_describe_each(room):
    found = {name: names for one in public(room) for name, names in complaints(*one).items()}
    assert found == {}


def sums(a, b, c, d, e, f):
    """The sum of six.

    Args:
        a: The first,
            b: which goes on.
        c: The third.
    """


class Fields(eqx.Module):
    a: int
    """The first."""
    b: int
    c: int
    d: int
    e: int
    f: int

    def few(self, a, b):
        """Few arguments need no lines."""


class Options(typing.TypedDict, total=False):
    a: int
    """The first."""
    b: int


def test_what_is_left_out_is_found():
    assert complaints("Options", Options) == {"Options": ["b"]}
    assert complaints("sums", sums) == {"sums": ["b", "d", "e", "f"]}
    assert complaints("Fields", Fields) == {"Fields": ["b", "c", "d", "e", "f"]}
