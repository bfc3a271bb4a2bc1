"""The base class of modules, and the names of the dims of their parameters.

The calls of modules check their arguments, and are named by the modules' paths in programs and profiles. The names of
dims are read from the fields' annotations, which also check the shapes of the parameters.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._annotation_checks import ArgumentRule, check_arguments, check_cache, rules_of, Sizes
from .._shapes import ArrayOrShape


Result = TypeVar("Result")


class Module(eqx.Module):
    """An `equinox.Module` whose calls have its name in compiled programs, profiles and `first_non_finite`.

    The name is the field in which the calling module holds the module. The names of nested calls make up a path, as in
    `stacks[0]/blocks/sublayers[0]/layer/query`. A module that a wrapper holds as `inner` has the wrapper's name, and
    the outermost module has no name. A name is a `jax.named_scope`, which does not change what is computed.

    The outermost call checks its arrays by their annotations: kind of dtype, rank, and the sizes of named dims. The
    constructor checks its `key`.
    """

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        for name in _CALLS & cls.__dict__.keys():
            if callable(method := cls.__dict__[name]):  # and no field, such as `TopKRouter.normalize`
                setattr(cls, name, _with_name_and_checks(method))
        for name in {"__init__"} & cls.__dict__.keys():
            setattr(cls, name, _with_checked_key(cls.__name__, cls.__dict__[name]))


# Methods by which modules call one another; their calls get names and checks.
_CALLS = {"__call__", "encode", "embed", "unembed", "run_branch", "product", "normalize", "slots", "sorted_rows"}
# The module whose call is being traced; None outside of calls. A module does not know which other module holds it, and
# in which field, so its name is found through the caller.
_RUNNING: contextvars.ContextVar[eqx.Module | None] = contextvars.ContextVar("running", default=None)

CallObserver = Callable[..., Any]
"""A function `observer(name, method, module, *args, **kwargs)` that runs `method(module, *args, **kwargs)`, and returns
the result or a replacement. `name` is the module's name in the calling module, empty for a module without a name."""
_OBSERVER: contextvars.ContextVar[CallObserver | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def observe_calls(observer: CallObserver) -> Iterator[None]:
    """Return a context in which `observer` runs each call of a module; the observer may replace results.

    Calls are observed while a program is traced. A nested call is observed inside of the call that makes it. Programs
    that are traced without an observer are not affected.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def call_observer() -> CallObserver | None:
    """Return the observer of the calls that are being traced, or None."""
    return _OBSERVER.get()


def _with_name_and_checks(method: Callable[..., Result]) -> Callable[..., Result]:
    """Return a method that runs under the module's name and, in the outermost call, checks its arguments."""
    signature = inspect.signature(method)
    names, rules = list(signature.parameters)[1:], rules_of(signature)

    @functools.wraps(method)
    def call(self: eqx.Module, *args: object, **kwargs: object) -> Result:
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
                observer = _OBSERVER.get()
                if observer is not None:
                    return observer(name, method, self, *args, **kwargs)
                return method(self, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return call


def _with_checked_key(class_name: str, construct: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor with a check of its `key`, or the constructor itself if it has no such argument."""
    rules = {name: rule for name, rule in rules_of(inspect.signature(construct)).items() if name == "key"}
    if not rules:
        return construct

    @functools.wraps(construct)
    def __init__(self: eqx.Module, *args: object, **kwargs: object) -> None:
        check_arguments(class_name, rules, kwargs)
        construct(self, *args, **kwargs)

    return __init__


def running_call() -> str:
    """Return the name for error messages of the call that runs: the module's class, or `update` outside of calls."""
    return "update" if (module := _RUNNING.get()) is None else type(module).__name__


def _input_sizes(module: eqx.Module, rules: dict[str, ArgumentRule]) -> Sizes:
    """Return the sizes of the last dims of a module's arguments and of all dims of its cache.

    Sizes are read from the module's linear maps. A dim has no entry if no map has the dim, or if maps disagree about
    its size.
    """
    last_dims = {array.dims[-1] for rule in rules.values() for array in rule.arrays if len(array.dims) > 1}
    dims = last_dims | (rules["cache"].field_dims if "cache" in rules else set[str]())
    if not dims - {"*batch", "seq", "kv_seq", "..."}:
        return {}
    from ._linear import linear_maps

    sizes_by_dim: dict[str, set[int]] = {}
    for linear in linear_maps(module):
        for dim, size in linear.sizes.items():
            sizes_by_dim.setdefault(dim, set()).add(size)
    source = f"the weights of this {type(module).__name__}"
    return {dim: ((sizes.pop(),), source) for dim, sizes in sizes_by_dim.items() if dim in dims and len(sizes) == 1}


def _name_in(caller: eqx.Module, module: eqx.Module) -> str:
    """Return the name of the caller's field that holds the module.

    A module that was rebuilt for the call is in no field. It then has the name of the caller's only field that holds a
    module of the same class, alone or in a wrapper; if there is not exactly one such field, it has the name of its
    class. If the caller is a wrapper, the fields of its `inner` module are searched, too.
    """
    holder: Any = caller
    while isinstance(holder, eqx.Module):
        fields_of_class, wrapped_fields = [], []
        for name, value in vars(holder).items():
            if value is module:
                return _visible_name(name)
            if isinstance(value, tuple | list):
                for index, element in enumerate(value):
                    if element is module:
                        return f"{name}[{index}]"
            if type(value) is type(module):
                fields_of_class.append(name)
            elif type(_innermost(value)) is type(module):
                wrapped_fields.append(name)
        candidates = fields_of_class or wrapped_fields
        if len(candidates) == 1:
            return _visible_name(candidates[0])
        holder = vars(holder).get("inner")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower().lstrip("_")


def _innermost(module: object) -> object:
    """Return the module that a wrapper, or a wrapper of wrappers, holds as `inner`."""
    while isinstance(module, eqx.Module) and "inner" in vars(module):
        module = vars(module)["inner"]
    return module


def _visible_name(field: str) -> str:
    return "" if field == "inner" else field


def named_by(attribute: str, *, keeps_float32: bool = False) -> Any:
    """Return a field whose dims differ from instance to instance: the instance's `attribute` holds their names.

    With `keeps_float32`, the array stays float32 at least when a model is cast.
    """
    return eqx.field(metadata={"named_by": attribute} | ({"keeps_float32": True} if keeps_float32 else {}))


def ensemble(dim: str) -> Any:
    """Return a field that holds a vmapped ensemble of modules: each array has `dim` in front of its other dims."""
    return eqx.field(metadata={"ensemble": dim})


def take_members(modules: PyTree, index: int | slice) -> PyTree:
    """Return one module of an ensemble, or the ensemble of some of its modules."""
    arrays, static = eqx.partition(modules, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda x: x[index], arrays), static)


def float32_field() -> Any:
    """Return a field whose array stays float32 at least when a model is cast.

    Use it for arrays whose rounding would change decisions, such as the choice of experts.
    """
    return eqx.field(metadata={"keeps_float32": True})


def dims(model: PyTree) -> PyTree:
    """Return a tree like `model` with the names of its dims, `"layers heads head_dim embed"`, for each array.

    Names come from the jaxtyping annotations of fields, also in modules of other libraries. A dim that no annotation
    names is `_`. The model may hold arrays or the `ShapeDtypeStruct`s of `equinox.filter_eval_shape`, so the layout of
    a model can be computed without allocating it.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    return jax.tree_util.tree_unflatten(structure, [_dims_at(model, path, leaf) for path, leaf in leaves])


def field_dim_names(tree: PyTree) -> PyTree:
    """Return a tree of the same structure with the set of dim names of each array's field, without ensemble dims."""

    def names(path: tuple, leaf: object) -> frozenset[str]:
        nodes = list(_nodes_on_path(tree, path)) if has_shape(leaf) else []
        node, field = nodes[-1] if nodes else (None, None)
        return frozenset(() if field is None else _annotated_dims(node, field) or ())

    return jax.tree_util.tree_map_with_path(names, tree)


def float32_flags(model: PyTree) -> PyTree:
    """Return a tree like `model` of flags: whether the field of each leaf is `float32_field`."""

    def is_wide(path: tuple, _: object) -> bool:
        fields = [field for _, field in _nodes_on_path(model, path)]
        return bool(fields) and fields[-1] is not None and "keeps_float32" in fields[-1].metadata

    return jax.tree_util.tree_map_with_path(is_wide, model)


def map_modules(change: Callable[..., PyTree], tree: PyTree, kinds: type | tuple[type, ...], *trees: PyTree) -> PyTree:
    """Return the tree with each outermost module of these classes replaced by `change(module, *subtrees)`.

    `subtrees` are the parts of the other `trees` at the module's path, as in `jax.tree.map`.
    """
    is_kind = _class_check(kinds)

    def change_node(node: PyTree, *subtrees: PyTree) -> PyTree:
        return change(node, *subtrees) if is_kind(node) else node

    return jax.tree.map(change_node, tree, *trees, is_leaf=is_kind)


def modules(tree: PyTree, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the outermost modules of these classes in a tree, in order."""
    is_kind = _class_check(kinds)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_kind) if is_kind(node)]


def named_modules(tree: PyTree, kinds: type | tuple[type, ...]) -> list[tuple[str, Any]]:
    """Return the outermost modules of these classes in a tree, each with its path as `path_name` writes it."""
    is_kind = _class_check(kinds)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_kind)
    return [(path_name(path), node) for path, node in nodes if is_kind(node)]


def _class_check(kinds: type | tuple[type, ...]) -> Callable[[object], bool]:
    return lambda node: isinstance(node, kinds)


def path_name(path: tuple) -> str:
    """Return a leaf's path in Python's notation: `stacks[0].blocks.sublayers[0].layer.query.weight`."""
    return jax.tree_util.keystr(path).lstrip(".")


def has_shape(leaf: object) -> TypeGuard[ArrayOrShape]:
    """Return whether a leaf is an array, or the shape and dtype of an array."""
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)


def is_trainable(leaf: object) -> bool:
    """Return whether training changes a leaf: a floating-point array, or the shape of such an array."""
    return has_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def dims_table(model: PyTree) -> str:
    """Return a printable table of all arrays: path, dims, shape, dtype, bytes; and the totals."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    names = jax.tree.leaves(dims(model))
    rows = [("path", "dims", "shape", "dtype", "bytes")]
    count = total = 0
    for (path, leaf), name in zip(leaves, names, strict=True):
        if has_shape(leaf):
            itemsize = 0 if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf.dtype.itemsize
            count, total = count + leaf.size, total + leaf.size * itemsize
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            rows.append((path_name(path), name, shape, str(leaf.dtype), f"{leaf.size * itemsize:,}"))
    rows.append(("total", "", f"{count:,}", "", f"{total:,}"))
    return format_table(rows)


def format_table(rows: list[tuple[str, ...]]) -> str:
    """Return rows of text as aligned columns under the first row; columns of figures are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    figures = [all(_is_figure(cell) for cell in column[1:]) for column in zip(*rows)]
    lines = [
        "  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, figures)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _is_figure(cell: str) -> bool:
    return not cell or cell[0] in "-.0123456789"


def _dims_at(model: PyTree, path: tuple, leaf: object) -> object:
    if not has_shape(leaf):
        return leaf
    nodes = list(_nodes_on_path(model, path))
    prefix = [field.metadata["ensemble"] for _, field in nodes if field is not None and "ensemble" in field.metadata]
    node, field = nodes[-1] if nodes else (None, None)
    names = _expand_batch(None if field is None else _annotated_dims(node, field), leaf.ndim - len(prefix))
    if len(prefix) + len(names) != leaf.ndim:
        raise ValueError(
            f"dims: {path_name(path)} has shape {leaf.shape}, but its annotation names the dims "
            f"{' '.join(prefix + names)!r}; annotate the field with one name a dim."
        )
    return " ".join(prefix + names)


def _nodes_on_path(model: PyTree, path: tuple) -> Iterator[tuple[Any, dataclasses.Field | None]]:
    """Yield each node on the path to a leaf, with the field that leads to the next node, or None for other entries."""
    node = model
    for entry in path:
        match entry:
            case jax.tree_util.GetAttrKey(name=name):
                yield node, _fields(type(node)).get(name)
                node = getattr(node, name)
            case jax.tree_util.SequenceKey(idx=key) | jax.tree_util.DictKey(key=key):
                yield node, None
                node = node[key]
            case _:
                yield node, None
                return


@functools.cache
def _fields(kind: type) -> dict[str, dataclasses.Field]:
    # Named tuples, of which optimizer states are made, have attributes and no fields.
    return {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _annotated_dims(node: object, field: dataclasses.Field) -> list[str] | None:
    if "named_by" in field.metadata:
        return list(getattr(node, field.metadata["named_by"]))
    annotation = field.type
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if typing.get_origin(annotation) is typing.Union:
        options = typing.get_args(annotation)
    # jaxtyping's shapes are classes that carry the text of their dims.
    texts = [option.dim_str for option in options if isinstance(option, type) and "dim_str" in dir(option)]
    return texts[0].split() if texts and "..." not in texts[0] else None


def _expand_batch(names: list[str] | None, ndim: int) -> list[str]:
    """Return one name for each dim.

    A starred name such as `*batch` covers all dims that no other name covers: the last of these is `batch`, the others
    are `_`.
    """
    if names is None:
        return ["_"] * ndim
    stars = [name for name in names if name.startswith("*")]
    if not stars:
        return [name if name.isidentifier() else "_" for name in names]
    index, missing = names.index(stars[0]), ndim - (len(names) - 1)
    expanded = (["_"] * (missing - 1) + [stars[0][1:]])[-missing:] if missing > 0 else []
    return names[:index] + expanded + names[index + 1 :]
