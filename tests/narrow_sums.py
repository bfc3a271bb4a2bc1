"""Where a traced program adds up 16-bit numbers: over dims and devices, by scatters, and in what loops carry."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

import eqformer
from eqformer.parallel import COLLECTIVES


SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "reduce_window_sum", "scatter-add", "scatter_add")
OVER_DEVICES = ("psum", "psum2", "psum_invariant", "reduce_scatter")
ADDITIONS = ("add", "add_any", "sub")
SAME_NUMBERS = ("convert_element_type", "reshape", "transpose", "squeeze", "ppermute", "pvary", "copy")
ROOMS = Path(eqformer.__file__).parent, Path(__file__).parent


class NarrowSum(NamedTuple):
    """Its primitive, whose sum it or what it is the gradient of is, the mesh axes, and what is added.

    A sum over devices is a collective's, by its name in `COLLECTIVES`; any other is the function's in which it stands.
    """

    primitive: str
    whose: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def place(self) -> tuple[str, tuple[str, ...]]:
        """By what a sum that is meant is listed."""
        return self.whose, self.axes


def narrow_sums(program: Any) -> list[NarrowSum]:
    """Every such sum in a `ClosedJaxpr`, with those in its loops, branches, calls, custom rules and mapped functions.

    Products are none: what `dot_general` contracts, it adds up in float32 and rounds once.
    """
    return list(_walk(program.jaxpr))


def _walk(jaxpr: Any) -> Iterator[NarrowSum]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in SUMS and _is_narrow(equation.outvars[0]) and not _is_of_one_each(equation):
            yield NarrowSum(name, _function_of(equation), (), equation.invars[0].aval.shape)
        if name in OVER_DEVICES and any(map(_is_narrow, equation.outvars)):
            axes = equation.params["axes"] if "axes" in equation.params else equation.params["axis_name"]
            axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
            yield NarrowSum(name, _collective_of(equation), axes, equation.invars[0].aval.shape)
        for inner in _within(equation.params):
            yield from _walk(inner)
        for carried in _carried_sums(equation):
            yield NarrowSum(f"{name} that adds", _function_of(equation), (), carried.aval.shape)


def _is_of_one_each(equation: Any) -> bool:
    """Whether nothing is added: a dim of size 1 is taken away."""
    return equation.primitive.name == "reduce_sum" and equation.invars[0].aval.size == equation.outvars[0].aval.size


def _carried_sums(equation: Any) -> Iterator[Any]:
    """Narrow variables that a loop carries for nothing but to add to them, perhaps from device to device."""
    if equation.primitive.name == "scan":
        body, first = equation.params["jaxpr"].jaxpr, _constants_of_scan(equation.params)
    elif equation.primitive.name == "while":
        body, first = equation.params["body_jaxpr"].jaxpr, equation.params["body_nconsts"]
    else:
        return
    makers = {id(variable): inner for inner in body.eqns for variable in inner.outvars}
    uses = [id(variable) for inner in body.eqns for variable in inner.invars]
    # Of a scan's results, more than the carried ones, the first ones are carried.
    for before, after in zip(body.invars[first:], body.outvars):
        if _is_narrow(before) and uses.count(id(before)) == 1 and _is_sum_of(before, after, makers, False):
            yield before


def _constants_of_scan(params: dict[str, Any]) -> int:
    """How many of a scan's arguments its body is given each time alike; jax from 0.11 on has them in groups."""
    return params["num_consts"] if "num_consts" in params else len(list(params["ft_in"].unpack()[0]))


def _is_sum_of(before: Any, after: Any, makers: dict[int, Any], is_added: bool) -> bool:
    if after is before:
        return is_added
    maker = makers.get(id(after))
    if maker is None:
        return False
    if maker.primitive.name in SAME_NUMBERS:
        return _is_sum_of(before, maker.invars[0], makers, is_added)
    is_addition = maker.primitive.name in ADDITIONS
    return is_addition and any(_is_sum_of(before, variable, makers, True) for variable in maker.invars)


def _within(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(one, "jaxpr", one)  # closed, as jax 0.10 has them
            if isinstance(inner, core.Jaxpr):
                yield inner


def _is_narrow(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _collective_of(equation: Any) -> str:
    """The name by which it is sent; a function's where it has none."""
    parts = re.split(r"[/()]", str(equation.source_info.name_stack))
    return next((part for part in reversed(parts) if part in COLLECTIVES), _function_of(equation))


def _function_of(equation: Any) -> str:
    """The innermost of eqformer's functions or of the tests', but for those that send and `vary`, which many call."""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        path = Path(frame.file_name)
        if path.name not in ("_shard_map.py", "_collectives.py") and any(room in path.parents for room in ROOMS):
            return frame.function_name.split(".<locals>")[0]
    return "somewhere"
