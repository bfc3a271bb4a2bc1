"""Base class of modules: calls are named by the module's path in programs and profiles, and check their arguments."""

import contextlib
import contextvars
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._array_checks import ArgumentRule, check_arguments, check_cache, rules_of, Sizes


class Module(eqx.Module):
    """An `equinox.Module` whose calls have its name in compiled programs, profiles and `first_non_finite`.

    The name is the field in which the calling module holds it, so that names make up a path, as in
    `stacks[0]/blocks/sublayers[0]/layer/query`. A module that a wrapper holds as `inner` has the wrapper's name, and
    the outermost module has no name. Names are a `jax.named_scope`, which changes nothing that is computed.

    The outermost call checks its arrays by their annotations: kind of dtype, rank, and the sizes of named dims.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in _CALLS & cls.__dict__.keys():
            setattr(cls, name, _with_name_and_checks(cls.__dict__[name]))


# Methods that modules call of each other.
_CALLS = {"__call__", "encode", "embed", "unembed", "branch", "product", "normalize", "slots", "sorted_rows"}
# The module whose call is being traced. It is set during the call alone, like JAX's own scopes, because a module does
# not know which module holds it in which field.
_RUNNING: contextvars.ContextVar[eqx.Module | None] = contextvars.ContextVar("running", default=None)


def _with_name_and_checks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs under the module's name and, in the outermost call, checks its arguments."""
    signature = inspect.signature(method)
    names, rules = list(signature.parameters)[1:], rules_of(signature)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        caller = _RUNNING.get()
        if caller is self:
            return method(self, *args, **kwargs)
        if caller is None and rules:
            label = type(self).__name__ if method.__name__ == "__call__" else f"{type(self).__name__}.{method.__name__}"
            arguments, sizes = dict(zip(names, args)) | kwargs, _input_sizes(self, rules)
            check_arguments(label, rules, arguments, sizes)
            check_cache(label, arguments.get("cache"), sizes)
        name = "" if caller is None else _name_in(caller, self)
        token = _RUNNING.set(self)
        try:
            with jax.named_scope(name) if name else contextlib.nullcontext():
                return method(self, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return call


def _input_sizes(module: eqx.Module, rules: dict[str, ArgumentRule]) -> Sizes:
    """Return the sizes of the last dims of a module's arguments, for dims of which all its linear maps agree."""
    last_dims = {array.dims[-1] for rule in rules.values() for array in rule.arrays if len(array.dims) > 1}
    if not last_dims - {"seq", "kv_seq", "..."}:
        return {}
    from ._linear import linear_maps

    sizes_by_dim: dict[str, set[int]] = {}
    for linear in linear_maps(module):
        for dim, size in linear.sizes.items():
            sizes_by_dim.setdefault(dim, set()).add(size)
    source = f"the weights of this {type(module).__name__}"
    return {
        dim: ((sizes.pop(),), source) for dim, sizes in sizes_by_dim.items() if dim in last_dims and len(sizes) == 1
    }


def _name_in(caller: eqx.Module, module: eqx.Module) -> str:
    """Return the name of the caller's field that holds the module.

    A module that was rebuilt for the call is in no field: the name is that of the caller's only field of its class, or
    else the name of the class. A wrapper calls parts of its `inner` module by the names that they have there.
    """
    holder: Any = caller
    while isinstance(holder, eqx.Module):
        fields_of_class = []
        for name, value in vars(holder).items():
            if value is module:
                return _visible_name(name)
            if isinstance(value, tuple | list):
                for number, element in enumerate(value):
                    if element is module:
                        return f"{name}[{number}]"
            if type(value) is type(module):
                fields_of_class.append(name)
        if len(fields_of_class) == 1:
            return _visible_name(fields_of_class[0])
        holder = vars(holder).get("inner")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower().lstrip("_")


def _visible_name(field: str) -> str:
    return "" if field == "inner" else field
