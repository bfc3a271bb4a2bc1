"""Checks of values against annotations: arrays in public calls, values of JSON, and fields of dataclasses.

The arrays of all public calls have one rule and one error text. Their check reads shapes and dtypes in Python, so under
`jax.jit` it runs while a program is traced and leaves nothing in the program. It runs before jaxtyping's check, so that
its short error text is also seen with jaxtyping's import hook.
"""

import dataclasses
import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


Annotation = Any  # a type annotation, such as one of jaxtyping's
Function = TypeVar("Function", bound=Callable[..., object])
Class = TypeVar("Class", bound=type)
T = TypeVar("T")
# For each name of dims: its sizes, one for `batch` and any number for `*batch`, and the argument that decided them.
Sizes = dict[str, tuple[tuple[int, ...], str]]

# For each kind of dtype: the dtype in an annotation that means the kind, the kind, its name, and the cast to it.
# Unsigned integers count as integers, because ids of 16 bits are stored as unsigned integers.
_DTYPE_KINDS = (
    ("float32", jnp.floating, "floats", ".astype('float32')"),
    ("int32", jnp.integer, "integers", ".astype('int32')"),
    ("uint32", jnp.integer, "integers", ".astype('int32')"),
    ("bool", jnp.bool_, "booleans", ".astype(bool)"),
    ("prng_key", jax.dtypes.prng_key, "keys", ""),
)
# Arguments whose fields share the dims of the call's arrays. In other arguments, such as `kv_tokens`, the same names of
# dims may have other sizes.
_CALL_ARGUMENTS = ("tokens", "cache")
_RULES = "__argument_rules__"
# Types of plain fields of checked classes; jaxtyping's error for such a field would be long.
_PLAIN_TYPES = {
    int: (numbers.Integral, "whole number"),
    float: (numbers.Real, "number"),
    str: (str, "text"),
    bool: (bool, "bool"),
}


@dataclasses.dataclass(frozen=True)
class ArrayRule:
    """Rule of one jaxtyping annotation: the kinds of dtype, as in `_DTYPE_KINDS`, and the names of the dims."""

    kinds: tuple[tuple[str, Any, str, str], ...]
    dims: tuple[str, ...]

    @property
    def variadic(self) -> int | None:
        """The index of `*dims` or `...` among the dims."""
        indices = [index for index, dim in enumerate(self.dims) if dim[0] == "*" or dim == "..."]
        return indices[0] if indices else None

    def is_old_key(self, dtype: Any) -> bool:
        """Return whether a dtype is the one of `jax.random.PRNGKey(seed)`, which `jax.random` accepts as a key."""
        return not self.dims and dtype == jnp.uint32 and any(kind[2] == "keys" for kind in self.kinds)

    def has_kind(self, dtype: Any) -> bool:
        """Return whether a dtype is of one of the kinds; always true if the annotation names no kind."""
        return not self.kinds or self.is_old_key(dtype) or any(jnp.issubdtype(dtype, kind[1]) for kind in self.kinds)

    def has_rank(self, rank: int) -> bool:
        """Return whether an array of this rank has all dims."""
        return rank == len(self.dims) if self.variadic is None else rank >= len(self.dims) - 1

    def name_sizes(self, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Return each dim's name with its size, or with its sizes for `*dims`."""
        first = len(self.dims) if self.variadic is None else self.variadic
        last = len(shape) - (len(self.dims) - first - 1)
        middle = [] if self.variadic is None else [tuple(shape[first:last])]
        sizes = [(size,) for size in shape[:first]] + middle + [(size,) for size in shape[last:]]
        return list(zip(self.dims, sizes))


@dataclasses.dataclass(frozen=True)
class ArgumentRule:
    """Rule of an argument: it fits one of `arrays`, or is an instance of one of `classes`, whose fields are checked."""

    arrays: tuple[ArrayRule, ...]
    classes: tuple[type, ...]
    is_open: bool
    """Whether the annotation also accepts types that are not checked."""
    is_optional: bool
    has_integers: bool = False
    """Whether the argument may also be a sequence of integers; floats in the sequence would be truncated."""
    plain: tuple[type, ...] = ()
    """The Python types, as in `_PLAIN_TYPES`, of an argument that is neither an array nor one of `classes`."""

    @property
    def field_dims(self) -> set[str]:
        """The names of the dims of the checked fields of `classes`."""
        rules = [rule for cls in self.classes for rule in getattr(cls, _RULES).values()]
        return {dim for rule in rules for array in rule.arrays for dim in array.dims}


def argument_rules(annotations: Mapping[str, Annotation]) -> dict[str, ArgumentRule]:
    """Return the rules of the arguments whose annotations name arrays or classes with checked fields."""
    rules = {name: _make_argument_rule(annotation) for name, annotation in annotations.items()}
    return {name: rule for name, rule in rules.items() if rule.arrays or rule.classes or rule.has_integers}


def check_arguments(
    call: str, rules: Mapping[str, ArgumentRule], arguments: Mapping[str, object], sizes: Sizes | None = None
) -> None:
    """Raise a `ValueError` for the first argument whose kind, rank or sizes differ from its annotation.

    In one call, each name of a dim has one size; `sizes` has the sizes that are known before the check. No check runs
    inside `jax.shard_map`, where each array is only a device's shard.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return
    sizes = {} if sizes is None else sizes
    for name, rule in rules.items():
        if name in arguments:
            _check_argument(call, name, arguments[name], rule, sizes)


def check_cache(call: str, cache: PyTree, sizes: Sizes) -> None:
    """Raise a `ValueError` for a cache, or a tree of caches, whose rows differ from the call's rows.

    The caches of a stack have a dim of layers before the dims of rows.
    """
    if "batch" not in sizes or jax.sharding.get_abstract_mesh().manual_axes:
        return
    rows, source = sizes["batch"]
    is_cache = lambda node: hasattr(type(node), _RULES)
    for layer_cache in filter(is_cache, jax.tree.leaves(cache, is_leaf=is_cache)):
        for field, rule in getattr(type(layer_cache), _RULES).items():
            value = getattr(layer_cache, field)
            if value is None or not rule.arrays or rule.arrays[0].dims[:1] != ("*batch",):
                continue
            cache_rows = value.shape[: value.ndim - len(rule.arrays[0].dims) + 1]
            if cache_rows[len(cache_rows) - len(rows) :] != rows:
                raise ValueError(
                    f"{call}(cache): its {field} of shape {value.shape} have {cache_rows} rows, with the dims "
                    f"{_format_dims(rule.arrays[0])}, but {source} has {rows} rows; make the cache by "
                    f"init_cache({rows}, ...)."
                )


def checked(function: Function) -> Function:
    """Return the function with a check of its array arguments against their annotations at every call."""
    signature = inspect.signature(function)
    names, rules = list(signature.parameters), rules_of(signature)
    call = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__call__")

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        check_arguments(call, rules, dict(zip(names, args)) | kwargs)
        return function(*args, **kwargs)

    return typing.cast(Function, wrapper)


def checked_fields(cls: Class) -> Class:
    """Return the dataclass with checks of its fields, at construction and when it is a checked function's argument."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    annotations = {field.name: field.type for field in fields}
    names, plain = list(annotations), {name: _make_plain_rule(annotation) for name, annotation in annotations.items()}
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
    """Return the rules of a call's arguments."""
    return argument_rules({name: parameter.annotation for name, parameter in signature.parameters.items()})


def _union_members(annotation: Annotation) -> tuple[Annotation, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _make_plain_rule(annotation: Annotation) -> ArgumentRule:
    options = _union_members(annotation)
    plain = tuple(option for option in options if option in _PLAIN_TYPES)
    is_known = all(option in (*plain, type(None)) for option in options)
    return ArgumentRule((), (), not is_known, type(None) in options, plain=plain if is_known else ())


def _make_argument_rule(annotation: Annotation) -> ArgumentRule:
    options = _union_members(annotation)
    option_classes = [option for option in options if isinstance(option, type)]
    arrays = [option for option in option_classes if "dim_str" in dir(option)]
    classes = [option for option in option_classes if _RULES in option.__dict__]
    unchecked = [option for option in options if option not in (*arrays, *classes, type(None))]
    # jax's and numpy's arrays have the same rule.
    distinct = dict.fromkeys(_make_array_rule(option) for option in arrays)
    return ArgumentRule(
        tuple(distinct), tuple(classes), bool(unchecked), type(None) in options, Sequence[int] in options
    )


def _make_array_rule(annotation: Annotation) -> ArrayRule:
    dtypes = annotation.dtypes if isinstance(annotation.dtypes, list | tuple) else ()  # `Shaped` accepts any dtype.
    kinds = tuple(kind for kind in _DTYPE_KINDS if kind[0] in dtypes)
    return ArrayRule(kinds, tuple(annotation.dim_str.split()))


def _check_argument(call: str, name: str, value: object, rule: ArgumentRule, sizes: Sizes) -> None:
    """Raise a `ValueError` if an argument does not fit its rule."""
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
        if not isinstance(value, tuple(_PLAIN_TYPES[kind][0] for kind in rule.plain)):
            kinds = " or ".join(_PLAIN_TYPES[kind][1] for kind in rule.plain)
            raise ValueError(f"{call}({name}={value!r:.40}): it is {name_class(value)}; give a {kinds}.")
    elif not rule.arrays:
        names, cls = " or ".join(cls.__name__ for cls in rule.classes), rule.classes[0]
        fields = [field for field, field_rule in getattr(cls, _RULES).items() if not field_rule.is_optional]
        raise ValueError(
            f"{call}({name} {_describe_value(value)}): it must be of the class {names}; make one, as {cls.__name__}"
            f"({', '.join(fields)})."
        )
    elif not is_array:
        expected = _describe_kinds(rule.arrays[0])
        maker = "jax.random.key(seed)" if "keys" in expected else "jnp.asarray"
        is_swapped = hasattr(type(value), _RULES)
        fix = "give each argument by its name, if two are swapped" if is_swapped else f"make one by {maker}"
        raise ValueError(f"{call}({name} {_describe_value(value)}): it must be an array of {expected}; {fix}.")
    else:
        fitting = [array for array in rule.arrays if array.has_kind(dtype)]
        if not fitting:
            cast = rule.arrays[0].kinds[0][3]
            fix = f"cast it, as {name}{cast}, or give" if cast else "make keys by jax.random.key(seed), and give"
            raise ValueError(
                f"{call}({name} of {dtype} and shape {shape}): it must hold {_describe_kinds(rule.arrays[0])}; {fix} "
                "the array that is meant."
            )
        if not fitting[0].is_old_key(dtype):
            _check_shape(call, name, shape, fitting[0], sizes)


def _check_fields(call: str, name: str, value: object, sizes: Sizes) -> None:
    """Check the arrays of an argument; the arrays of `tokens` and `cache` share dims with the call's other arrays."""
    shares_dims, cls = name in _CALL_ARGUMENTS, type(value)
    for field, rule in getattr(cls, _RULES).items():
        if shares_dims and rule.arrays:
            _check_argument(call, f"{name}.{field}", getattr(value, field), rule, sizes)
    if not shares_dims:
        fields = {field: getattr(value, field) for field in getattr(cls, _RULES)}
        check_arguments(cls.__name__, getattr(cls, _RULES), fields)


def _check_shape(call: str, name: str, shape: tuple[int, ...], rule: ArrayRule, sizes: Sizes) -> None:
    """Raise a `ValueError` if a shape does not fit its rule; add the sizes of new names to `sizes`."""
    if not rule.has_rank(len(shape)):
        min_rank = len(rule.dims) - (rule.variadic is not None)
        count = f"{min_rank}" if rule.variadic is None else f"at least {min_rank}"
        fix = f"add the missing dims, as {name}[None]" if len(shape) < min_rank else "remove the other dims"
        raise ValueError(
            f"{call}({name} of shape {shape}): it must have the dims {_format_dims(rule)}, {count} of them; {fix}."
        )
    named_sizes = rule.name_sizes(shape)
    for dim, dim_sizes in named_sizes:
        if dim in ("...", "_") or not (key := dim.lstrip("#*")).isidentifier():
            continue
        entry = (dim_sizes, f"{name} of shape {shape}")
        known_sizes, source = sizes.get(key, entry) if "#" in dim else sizes.setdefault(key, entry)
        if dim_sizes != known_sizes and not ("#" in dim and _broadcasts(dim_sizes, known_sizes)):
            expected = [sizes.get(part.lstrip("#*"), (size, ""))[0] for part, size in named_sizes]
            expected_shape = tuple(number for part_sizes in expected for number in part_sizes)
            raise ValueError(
                f"{call}({name} of shape {shape}): with {source} it has shape {expected_shape}, its dims being "
                f"{_format_dims(rule)}; give it that shape."
            )


def _broadcasts(sizes: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether an array of these sizes broadcasts to the target sizes."""
    return len(sizes) <= len(target) and all(x in (1, y) for x, y in zip(reversed(sizes), reversed(target)))


def _describe_kinds(rule: ArrayRule) -> str:
    kinds = " or ".join(dict.fromkeys(kind[2] for kind in rule.kinds)) or "values"
    return f"{kinds}, with the dims {_format_dims(rule)}"


def _format_dims(rule: ArrayRule) -> str:
    return f"({', '.join(rule.dims)})"


def add_article(name: str) -> str:
    """Return a name with its indefinite article: `an int`, `a Linear`, `an LFM2Config`, `a UnionType`."""
    is_acronym = re.match(r"[AEFHILMNORSX][A-Z0-9]", name) is not None
    starts_with_vowel = re.match(r"[aeioAEIO]|[uU](?!ni|se|[A-Z])", name) is not None
    return f"an {name}" if is_acronym or starts_with_vowel else f"a {name}"


def name_class(value: object) -> str:
    """Return the name of a value's class with its article, for errors: `an int`."""
    return add_article(type(value).__name__)


def _describe_value(value: object) -> str:
    shape = getattr(value, "shape", None)
    if value is None or shape is None:
        return "none" if value is None else f"of type {type(value).__name__}"
    return f"of type {type(value).__name__} and shape {tuple(shape)}"


# Plain values: of JSON texts, and of dataclasses.


def fits(value: object, field_type: type[T] | object) -> TypeGuard[T]:
    """Return whether a value of a JSON text is of a type.

    The type is a class, a class with a range (`Annotated`), or a union, a list, a tuple or a dict of types. A whole
    number is also a float. True and False are neither integers nor floats.
    """
    origin, args = typing.get_origin(field_type), typing.get_args(field_type)
    if origin is Annotated:
        return fits(value, args[0]) and value in args[1]
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in args)
    if origin is dict:
        return isinstance(value, dict) and fits([*value], list[args[0]]) and fits([*value.values()], list[args[1]])
    if origin in (list, tuple):
        if not isinstance(value, origin):
            return False
        has_any_length = origin is list or args[1:] == (...,)
        args = args[:1] * len(value) if has_any_length else args
        return len(value) == len(args) and all(map(fits, value, args))
    if field_type in (int, float):
        return isinstance(value, int if field_type is int else int | float) and not isinstance(value, bool)
    return not isinstance(field_type, type) or isinstance(value, field_type)


_type_hints = functools.cache(typing.get_type_hints)


def violated_annotation(kind: Any, name: str, value: Any) -> str | None:
    """Return the annotation of a dataclass's field if the value is of another type; None if it fits.

    The text leaves out the modules of types, which differ between versions of Python (`Path | None`).
    """
    from beartype import BeartypeConf  # Imported at the first use, because each import of eqformer imports this file.
    from beartype.door import is_bearable

    try:
        hint = _type_hints(kind)[name]
    except NameError:  # The annotations of a class in a user's file may name types that only type checkers know.
        return None
    numbers = BeartypeConf(is_pep484_tower=True)  # An integer is a float too, as in annotations.
    if is_bearable(value, hint, conf=numbers):
        return None
    return hint.__name__ if isinstance(hint, type) else re.sub(r"(?<!['\w])([A-Za-z_]\w*\.)+(?=\w)", "", str(hint))
