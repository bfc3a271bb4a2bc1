"""Find the sums of 16-bit numbers in a traced program: over dims, over devices, by scatters, and in loop carries."""

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
    """A sum of 16-bit numbers in a program."""

    primitive: str
    whose: str
    """The collective, by its name in `COLLECTIVES`, of a sum over devices; else the function that sums, or whose
    gradient sums."""
    axes: tuple[str, ...]
    """The mesh axes of a sum over devices."""
    shape: tuple[int, ...]
    """The shape of the summed array."""

    @property
    def place(self) -> tuple[str, tuple[str, ...]]:
        """The key by which tests list the sums that are intended."""
        return self.whose, self.axes


def narrow_sums(program: Any) -> list[NarrowSum]:
    """Return all narrow sums in a `ClosedJaxpr`, with its loops, branches, calls, custom rules and mapped functions.

    Matrix products do not count: `dot_general` sums in float32 and rounds once.
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
    """Return whether a sum adds nothing, because it only removes dims of size 1."""
    return equation.primitive.name == "reduce_sum" and equation.invars[0].aval.size == equation.outvars[0].aval.size


def _carried_sums(equation: Any) -> Iterator[Any]:
    """Yield the narrow variables that a loop carries only to add to them, perhaps from device to device."""
    if equation.primitive.name == "scan":
        body, first = equation.params["jaxpr"].jaxpr, _constants_of_scan(equation.params)
    elif equation.primitive.name == "while":
        body, first = equation.params["body_jaxpr"].jaxpr, equation.params["body_nconsts"]
    else:
        return
    makers = {id(variable): inner for inner in body.eqns for variable in inner.outvars}
    uses = [id(variable) for inner in body.eqns for variable in inner.invars]
    # The first results of a scan are the carried variables; the other results are stacked outputs.
    for before, after in zip(body.invars[first:], body.outvars):
        if _is_narrow(before) and uses.count(id(before)) == 1 and _is_sum_of(before, after, makers, False):
            yield before


def _constants_of_scan(params: dict[str, Any]) -> int:
    """Return how many of a scan's arguments are constants of its body; from JAX 0.11 on, arguments are in groups."""
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
            inner = getattr(one, "jaxpr", one)  # JAX 0.10 has closed jaxprs here
            if isinstance(inner, core.Jaxpr):
                yield inner


def _is_narrow(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _collective_of(equation: Any) -> str:
    """Return the name of the collective; without such a name, the name of the function."""
    parts = re.split(r"[/()]", str(equation.source_info.name_stack))
    return next((part for part in reversed(parts) if part in COLLECTIVES), _function_of(equation))


def _function_of(equation: Any) -> str:
    """Return the innermost function of eqformer or of the tests, except helpers for collectives, which many call."""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        path = Path(frame.file_name)
        if path.name not in ("_shard_map.py", "_collectives.py") and any(room in path.parents for room in ROOMS):
            return frame.function_name.split(".<locals>")[0]
    return "somewhere"
