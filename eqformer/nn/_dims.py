"""The name of every dim of every parameter, read from the annotations that check their shapes."""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._shapes import ArrayOrShape


def named_by(attribute: str, *, float32_at_least: bool = False) -> Any:
    """A field whose dims differ from instance to instance: the instance's `attribute` holds their names.

    It may be `float32_at_least` too.
    """
    return eqx.field(metadata={"named_by": attribute} | ({"float32_at_least": True} if float32_at_least else {}))


def ensemble(dim: str) -> Any:
    """A field that holds a vmapped ensemble of modules: each of its arrays has `dim` in front of its own dims."""
    return eqx.field(metadata={"ensemble": dim})


def float32_at_least() -> Any:
    """A field whose array stays float32 at least when a model is cast: rounding it would change what it decides."""
    return eqx.field(metadata={"float32_at_least": True})


def dims(model: PyTree) -> PyTree:
    """A tree like `model` in which each array is replaced by the names of its dims: `"layers heads head_dim embed"`.

    Names come from the fields' jaxtyping annotations, in eqformer's modules and in anybody's. A dim that no annotation
    names is `_`. Works on arrays and on the `ShapeDtypeStruct`s of `equinox.filter_eval_shape`, so that nothing need be
    allocated to lay a model out.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    return jax.tree_util.tree_unflatten(structure, [_dims_at(model, path, leaf) for path, leaf in leaves])


def field_dim_names(tree: PyTree) -> PyTree:
    """A tree like this one with the set of names that the annotation of each array's own field has, of no ensemble."""

    def names(path: tuple, leaf: object) -> frozenset[str]:
        way = list(_along(tree, path)) if has_shape(leaf) else []
        node, field = way[-1] if way else (None, None)
        return frozenset(() if field is None else _own_dims(node, field) or ())

    return jax.tree_util.tree_map_with_path(names, tree)


def float32_flags(model: PyTree) -> PyTree:
    """A tree like `model` of flags: which leaves are of a field that is `float32_at_least`."""

    def is_wide(path: tuple, _: object) -> bool:
        fields = [field for _, field in _along(model, path)]
        return bool(fields) and fields[-1] is not None and "float32_at_least" in fields[-1].metadata

    return jax.tree_util.tree_map_with_path(is_wide, model)


def modules(tree: PyTree, kinds: type | tuple[type, ...]) -> list[Any]:
    """Every module of some kinds in a tree, in order; not those within another of them."""
    return [module for _, module in named_modules(tree, kinds)]


def named_modules(tree: PyTree, kinds: type | tuple[type, ...]) -> list[tuple[str, Any]]:
    """Like `modules`, each with its path as `path_name` writes it."""
    is_kind = lambda node: isinstance(node, kinds)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_kind)
    return [(path_name(path), node) for path, node in nodes if is_kind(node)]


def path_name(path: tuple) -> str:
    """A leaf's path as one writes it in Python: `stacks[0].blocks.sublayers[0].layer.query.weight`."""
    return jax.tree_util.keystr(path).lstrip(".")


def has_shape(leaf: object) -> TypeGuard[ArrayOrShape]:
    """Whether a leaf is an array or the shape and dtype of one."""
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)


def is_trainable(leaf: object) -> bool:
    """Whether a leaf is a floating-point array, or the shape of one: what training changes."""
    return has_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def dims_table(model: PyTree) -> str:
    """A printable table of every array: path, dims, shape, dtype, bytes; and the totals."""
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
    """Rows of text as aligned columns, the first row a heading; columns of figures are set flush right."""
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
    way = list(_along(model, path))
    prefix = [field.metadata["ensemble"] for _, field in way if field is not None and "ensemble" in field.metadata]
    node, field = way[-1] if way else (None, None)
    names = _expand(None if field is None else _own_dims(node, field), leaf.ndim - len(prefix))
    if len(prefix) + len(names) != leaf.ndim:
        raise ValueError(
            f"dims: {path_name(path)} has shape {leaf.shape}, but its annotation names the dims "
            f"{' '.join(prefix + names)!r}; annotate the field with one name a dim."
        )
    return " ".join(prefix + names)


def _along(model: PyTree, path: tuple) -> Iterator[tuple[Any, dataclasses.Field | None]]:
    """Each node on the way to a leaf, with the field that leads on, or None where none does."""
    node = model
    for entry in path:
        if isinstance(entry, jax.tree_util.GetAttrKey):
            yield node, _fields(type(node)).get(entry.name)
            node = getattr(node, entry.name)
            continue
        yield node, None
        if isinstance(entry, jax.tree_util.SequenceKey):
            node = node[entry.idx]
        elif isinstance(entry, jax.tree_util.DictKey):
            node = node[entry.key]
        else:
            return


@functools.cache
def _fields(kind: type) -> dict[str, dataclasses.Field]:
    # Named tuples, of which optimizer states are made, have attributes and no fields.
    return {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _own_dims(node: object, field: dataclasses.Field) -> list[str] | None:
    if "named_by" in field.metadata:
        return list(getattr(node, field.metadata["named_by"]))
    annotation = field.type
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if typing.get_origin(annotation) is typing.Union:
        options = typing.get_args(annotation)
    # jaxtyping's shapes are classes that carry the text of their dims.
    texts = [option.dim_str for option in options if isinstance(option, type) and "dim_str" in dir(option)]
    return texts[0].split() if texts and "..." not in texts[0] else None


def _expand(names: list[str] | None, ndim: int) -> list[str]:
    """One name a dim: `*batch` stands for as many dims as are left over, of which the last is the batch."""
    if names is None:
        return ["_"] * ndim
    stars = [name for name in names if name.startswith("*")]
    if not stars:
        return [name if name.isidentifier() else "_" for name in names]
    place, missing = names.index(stars[0]), ndim - (len(names) - 1)
    expanded = (["_"] * (missing - 1) + [stars[0][1:]])[-missing:] if missing > 0 else []
    return names[:place] + expanded + names[place + 1 :]
