"""Checks of array arguments against their shape annotations: one rule and one error text for every public call.

A check reads shapes and dtypes in Python, so under `jax.jit` it runs while a program is traced and leaves nothing in
the program. It runs before jaxtyping's, so its short text is seen with the import hook too.
"""

import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np


Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)
# The sizes of each name, one for `batch` and any number for `*batch`, and the words that say where they are from.
Sizes = dict[str, tuple[tuple[int, ...], str]]

# The dtype that stands for a kind among an annotation's dtypes; the kind; its name; the cast to it. Unsigned integers
# count as integers: ids of 16 bits are stored so.
_KINDS = (
    ("float32", jnp.floating, "floats", ".astype('float32')"),
    ("int32", jnp.integer, "integers", ".astype('int32')"),
    ("uint32", jnp.integer, "integers", ".astype('int32')"),
    ("bool", jnp.bool_, "booleans", ".astype(bool)"),
    ("prng_key", jax.dtypes.prng_key, "keys", ""),
)
# Arguments whose fields have the dims of the call's arrays; of others, such as `kv_tokens`, the same names mean others.
_OF_THE_CALL = ("tokens", "cache")
_RULES = "__argument_rules__"
# Plain fields of checked classes, of which jaxtyping would tell an error at length.
_PLAIN = {
    int: (numbers.Integral, "whole number"),
    float: (numbers.Real, "number"),
    str: (str, "text"),
    bool: (bool, "bool"),
}


@dataclasses.dataclass(frozen=True)
class ArrayRule:
    """What one annotation of jaxtyping asks of an array: its kinds, as in `_KINDS`, and the names of its dims."""

    kinds: tuple[tuple[str, Any, str, str], ...]
    dims: tuple[str, ...]

    @property
    def variadic(self) -> int | None:
        """The place of `*dims` or `...`."""
        places = [place for place, dim in enumerate(self.dims) if dim[0] == "*" or dim == "..."]
        return places[0] if places else None

    def is_old_key(self, dtype: Any) -> bool:
        """Whether a dtype is that of `jax.random.PRNGKey`, which functions of `jax.random` take for a single key."""
        return not self.dims and dtype == jnp.uint32 and any(kind[2] == "keys" for kind in self.kinds)

    def has_kind(self, dtype: Any) -> bool:
        """Whether a dtype is of one of the kinds, or none is named."""
        return not self.kinds or self.is_old_key(dtype) or any(jnp.issubdtype(dtype, kind[1]) for kind in self.kinds)

    def has_rank(self, rank: int) -> bool:
        """Whether an array of this rank has all dims."""
        return rank == len(self.dims) if self.variadic is None else rank >= len(self.dims) - 1

    def parts(self, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Each dim's name and its size, or sizes."""
        first = len(self.dims) if self.variadic is None else self.variadic
        last = len(shape) - (len(self.dims) - first - 1)
        middle = [] if self.variadic is None else [tuple(shape[first:last])]
        sizes = [(size,) for size in shape[:first]] + middle + [(size,) for size in shape[last:]]
        return list(zip(self.dims, sizes))


@dataclasses.dataclass(frozen=True)
class ArgumentRule:
    """What an annotation asks of an argument: one of `arrays`, or an instance of one of `classes` of checked fields."""

    arrays: tuple[ArrayRule, ...]
    classes: tuple[type, ...]
    is_open: bool
    """Whether the annotation has other options, of which nothing is known here."""
    is_optional: bool
    has_integers: bool = False
    """Whether it may be a sequence of integers beside; floats in it would be cut off."""
    plain: tuple[type, ...] = ()
    """Where it is of neither, the types of Python that it may have, as in `_PLAIN`."""


def argument_rules(annotations: Mapping[str, Any]) -> dict[str, ArgumentRule]:
    """The rules of those arguments whose annotations name arrays or classes of checked fields."""
    rules = {name: _argument_rule(annotation) for name, annotation in annotations.items()}
    return {name: rule for name, rule in rules.items() if rule.arrays or rule.classes or rule.has_integers}


def check_arguments(
    call: str, rules: Mapping[str, ArgumentRule], arguments: Mapping[str, Any], sizes: Sizes | None = None
) -> None:
    """Raise a `ValueError` for the first argument whose kind, rank or sizes are not those of its annotation.

    A dim of one name has one size in a call, `sizes` where it is known before. Inside of `jax.shard_map` nothing is
    checked: arrays are pieces there, and eqformer cuts them.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return
    sizes = {} if sizes is None else sizes
    for name, rule in rules.items():
        if name in arguments:
            _check_argument(call, name, arguments[name], rule, sizes)


def check_cache(call: str, cache: Any, sizes: Sizes) -> None:
    """Raise a `ValueError` for a cache, or a tree of caches, that was made for other rows than the call's.

    The caches of a stack have a dim of layers before those of rows.
    """
    if "batch" not in sizes or jax.sharding.get_abstract_mesh().manual_axes:
        return
    rows, source = sizes["batch"]
    is_cache = lambda node: hasattr(type(node), _RULES)
    for part in filter(is_cache, jax.tree.leaves(cache, is_leaf=is_cache)):
        for field, rule in getattr(type(part), _RULES).items():
            value = getattr(part, field)
            if value is None or not rule.arrays or rule.arrays[0].dims[:1] != ("*batch",):
                continue
            own = value.shape[: value.ndim - len(rule.arrays[0].dims) + 1]
            if own[len(own) - len(rows) :] != rows:
                raise ValueError(
                    f"{call}(cache): its {field} of shape {value.shape} are of {own} rows, the dims being "
                    f"{_dims(rule.arrays[0])}, but with {source} there are {rows}; make it by init_cache({rows}, ...)."
                )


def checked(function: Function) -> Function:
    """Check the array arguments of a function by its annotations whenever it is called."""
    signature = inspect.signature(function)
    names, rules = list(signature.parameters), rules_of(signature)
    call = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__call__")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        check_arguments(call, rules, dict(zip(names, args)) | kwargs)
        return function(*args, **kwargs)

    return typing.cast(Function, wrapper)


def checked_fields(cls: Class) -> Class:
    """Check the arrays of a dataclass when one is made, and where a checked call is given one."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    annotations = {field.name: field.type for field in fields}
    names, plain = list(annotations), {name: _plain_rule(annotation) for name, annotation in annotations.items()}
    rules = argument_rules(annotations) | {name: rule for name, rule in plain.items() if rule.plain}
    construct, call = cls.__init__, cls.__name__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        check_arguments(call, rules, dict(zip(names, args)) | kwargs)
        construct(self, *args, **kwargs)

    for name, value in (("__init__", __init__), (_RULES, rules)):
        setattr(cls, name, value)
    return cls


def rules_of(signature: inspect.Signature) -> dict[str, ArgumentRule]:
    """The rules of a call's arguments."""
    return argument_rules({name: parameter.annotation for name, parameter in signature.parameters.items()})


def _options(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _plain_rule(annotation: Any) -> ArgumentRule:
    options = _options(annotation)
    plain = tuple(option for option in options if option in _PLAIN)
    is_known = all(option in (*plain, type(None)) for option in options)
    return ArgumentRule((), (), not is_known, type(None) in options, plain=plain if is_known else ())


def _argument_rule(annotation: Any) -> ArgumentRule:
    options = _options(annotation)
    arrays = [option for option in options if isinstance(option, type) and "dim_str" in dir(option)]
    classes = [option for option in options if isinstance(option, type) and _RULES in option.__dict__]
    others = [option for option in options if option not in (*arrays, *classes, type(None))]
    unlike = dict.fromkeys(_array_rule(option) for option in arrays)  # jax's and numpy's arrays have one rule
    return ArgumentRule(tuple(unlike), tuple(classes), bool(others), type(None) in options, Sequence[int] in options)


def _array_rule(annotation: Any) -> ArrayRule:
    dtypes = annotation.dtypes if isinstance(annotation.dtypes, list | tuple) else ()  # any, of `Shaped`
    kinds = tuple(kind for kind in _KINDS if kind[0] in dtypes)
    return ArrayRule(kinds, tuple(annotation.dim_str.split()))


def _check_argument(call: str, name: str, value: Any, rule: ArgumentRule, sizes: Sizes) -> None:
    shape: tuple[int, ...] = tuple(getattr(value, "shape", None) or ())
    dtype = getattr(value, "dtype", None)
    is_array = dtype is not None
    if isinstance(value, rule.classes):
        _check_fields(call, name, value, sizes)
    elif value is not None and rule.has_integers and not (is_array and rule.arrays):
        array = np.asarray(value)
        if array.size and array.dtype.kind in "fcSU":
            raise ValueError(f"{call}({name}={value!r:.60}): it holds {array.dtype}; give integers.")
    elif (value is None and rule.is_optional) or (rule.is_open and not (is_array and rule.arrays)):
        return
    elif rule.plain:
        if not isinstance(value, tuple(_PLAIN[kind][0] for kind in rule.plain)):
            kinds = " or ".join(_PLAIN[kind][1] for kind in rule.plain)
            raise ValueError(f"{call}({name}={value!r:.40}): it is a {type(value).__name__}; give a {kinds}.")
    elif not rule.arrays:
        names, cls = " or ".join(cls.__name__ for cls in rule.classes), rule.classes[0]
        fields = [field for field, own in getattr(cls, _RULES).items() if not own.is_optional]
        raise ValueError(
            f"{call}({name} {_shown(value)}): it must be of the class {names}; make one, as {cls.__name__}"
            f"({', '.join(fields)})."
        )
    elif not is_array:
        wanted = _words(rule.arrays[0])
        maker = "jax.random.key(seed)" if "keys" in wanted else "jnp.asarray"
        raise ValueError(f"{call}({name} {_shown(value)}): it must be an array of {wanted}; make one by {maker}.")
    else:
        fitting = [array for array in rule.arrays if array.has_kind(dtype)]
        if not fitting:
            cast = rule.arrays[0].kinds[0][3]
            fix = f"cast it, as {name}{cast}, or give" if cast else "make keys by jax.random.key(seed), and give"
            raise ValueError(
                f"{call}({name} of {dtype} and shape {shape}): it must hold {_words(rule.arrays[0])}; {fix} the "
                "array that is meant."
            )
        if not fitting[0].is_old_key(dtype):
            _check_shape(call, name, shape, fitting[0], sizes)


def _check_fields(call: str, name: str, value: Any, sizes: Sizes) -> None:
    """Check the arrays of an argument; those of `tokens` and `cache` have the rows and tokens of the call's arrays."""
    is_of_the_call, own = name in _OF_THE_CALL, type(value)
    for field, rule in getattr(own, _RULES).items():
        if is_of_the_call and rule.arrays:
            _check_argument(call, f"{name}.{field}", getattr(value, field), rule, sizes)
    if not is_of_the_call:
        fields = {field: getattr(value, field) for field in getattr(own, _RULES)}
        check_arguments(own.__name__, getattr(own, _RULES), fields)


def _check_shape(call: str, name: str, shape: tuple[int, ...], rule: ArrayRule, sizes: Sizes) -> None:
    if not rule.has_rank(len(shape)):
        least = len(rule.dims) - (rule.variadic is not None)
        count = f"{least}" if rule.variadic is None else f"at least {least}"
        fix = f"add what is missing, as {name}[None]" if len(shape) < least else "take the others away"
        raise ValueError(
            f"{call}({name} of shape {shape}): it must have the dims {_dims(rule)}, {count} of them; {fix}."
        )
    parts = rule.parts(shape)
    for dim, own in parts:
        if dim in ("...", "_") or not (key := dim.lstrip("#*")).isidentifier():
            continue
        here = (own, f"{name} of shape {shape}")
        known, source = sizes.get(key, here) if "#" in dim else sizes.setdefault(key, here)
        if own != known and not ("#" in dim and _broadcasts(own, known)):
            right = [sizes.get(part.lstrip("#*"), (size, ""))[0] for part, size in parts]
            wanted = tuple(number for sizes_of_part in right for number in sizes_of_part)
            raise ValueError(
                f"{call}({name} of shape {shape}): with {source} it has shape {wanted}, its dims being {_dims(rule)}; "
                "give it that shape."
            )


def _broadcasts(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(sizes) <= len(wanted) and all(x in (1, y) for x, y in zip(reversed(sizes), reversed(wanted)))


def _words(rule: ArrayRule) -> str:
    kinds = " or ".join(dict.fromkeys(kind[2] for kind in rule.kinds)) or "values"
    return f"{kinds}, with the dims {_dims(rule)}"


def _dims(rule: ArrayRule) -> str:
    return f"({', '.join(rule.dims)})"


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    if value is None or shape is None:
        return "none" if value is None else f"of type {type(value).__name__}"
    return f"of type {type(value).__name__} and shape {tuple(shape)}"
