"""The base of modules: what a call computes stands, in programs and profiles, under the module's path in its model."""

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
    """An `equinox.Module` whose calls stand under its name in compiled programs, profiles and `first_non_finite`.

    The name is the field of the module that calls it, so that names make up a path, as in
    `stacks[0]/blocks/mixer/layer/query`. What a wrapper holds as `inner` has the wrapper's own name, and so has the
    outermost module none. Nothing is computed otherwise: names are a `jax.named_scope`.

    The outermost call checks its arrays by their annotations: kind, rank, and the sizes of dims that have a name.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in _CALLS & cls.__dict__.keys():
            setattr(cls, name, _under_its_name(cls.__dict__[name]))


# What modules call of each other, beside `__call__`.
_CALLS = {"__call__", "encode", "embed", "unembed", "branch", "product", "normalised", "slots", "sorted_rows"}
# The module whose call is being traced. It is set during the call alone, as JAX's own scopes are: how else would a
# module know in which field of which other it stands?
_RUNNING: contextvars.ContextVar[eqx.Module | None] = contextvars.ContextVar("running", default=None)


def _under_its_name(method: Callable[..., Any]) -> Callable[..., Any]:
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
        before = _RUNNING.set(self)
        try:
            with jax.named_scope(name) if name else contextlib.nullcontext():
                return method(self, *args, **kwargs)
        finally:
            _RUNNING.reset(before)

    return call


def _input_sizes(module: eqx.Module, rules: dict[str, ArgumentRule]) -> Sizes:
    """The sizes that a module's linear maps give to the last dims of its arguments, where all maps agree."""
    wanted = {array.dims[-1] for rule in rules.values() for array in rule.arrays if len(array.dims) > 1}
    if not wanted - {"seq", "kv_seq", "..."}:
        return {}
    from ._linear import linear_maps

    found: dict[str, set[int]] = {}
    for linear in linear_maps(module):
        for dim, size in linear.sizes.items():
            found.setdefault(dim, set()).add(size)
    source = f"the weights of this {type(module).__name__}"
    return {dim: ((sizes.pop(),), source) for dim, sizes in found.items() if dim in wanted and len(sizes) == 1}


def _name_in(caller: eqx.Module, module: eqx.Module) -> str:
    """The field of the caller that holds the module or, where that was put together anew, the only one of its class.

    A wrapper calls parts of what it holds as `inner` too, by the names that they have there.
    """
    holder: Any = caller
    while isinstance(holder, eqx.Module):
        of_its_class = []
        for name, value in vars(holder).items():
            if value is module:
                return _shown(name)
            if isinstance(value, tuple | list):
                for number, each in enumerate(value):
                    if each is module:
                        return f"{name}[{number}]"
            if type(value) is type(module):
                of_its_class.append(name)
        if len(of_its_class) == 1:
            return _shown(of_its_class[0])
        holder = vars(holder).get("inner")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower().lstrip("_")


def _shown(field: str) -> str:
    return "" if field == "inner" else field
