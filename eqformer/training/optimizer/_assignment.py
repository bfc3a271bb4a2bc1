"""The optimizer of each parameter: by the parameter's kind, or as a user chooses by paths; and its description."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import jax
from jaxtyping import PyTree

from ... import nn


MATRIX_OPTIMIZERS = ("muon", "normuon", "soap")
"""Optimizers that take hidden matrices only; AdamW trains the other parameters of a model."""
AVERAGING_OPTIMIZERS = ("schedule-free-adamw",)
"""Optimizers that average all trained weights, so that no path chooses them."""
_MAX_GROUPS = 8  # The most groups of paths of an optimizer in a line of `describe_assignment`.


def assign(
    name: str, marks: PyTree, paths: Sequence[str] = (), optimizers: Sequence[str] = ()
) -> tuple[tuple[str, str], ...]:
    """Return the path of each trained parameter and the name of its optimizer.

    Args:
        name: The optimizer of the model. `MATRIX_OPTIMIZERS` leave all but hidden matrices to AdamW.
        marks: A tree like the trained parameters, with an `nn.Matrix` for each matrix and False for other parameters.
        paths: Choices `PATTERN=NAME` of other optimizers, see `optimizer`; a later choice comes before an earlier one.
        optimizers: The names that may be chosen.
    """
    default = {path: _default(name, mark) for path, mark in _by_path(marks).items()}
    return tuple((default | choose_optimizers(marks, paths, optimizers, name)).items())


def _by_path(marks: PyTree) -> dict[str, nn.Matrix | Literal[False]]:
    """Return the marks of parameters by the parameters' paths."""
    return {nn.path_name(path): mark for path, mark in jax.tree_util.tree_leaves_with_path(marks)}


def choose_optimizers(marks: PyTree, paths: Sequence[str], optimizers: Sequence[str], name: str) -> dict[str, str]:
    """Return the name of the optimizer of each parameter that a choice in `paths` matches, as `assign` takes them."""
    marks_by_path = _by_path(marks)
    chosen_by: dict[str, str] = {}
    for choice in paths:
        pattern, _, chosen = choice.rpartition("=")
        if not pattern or chosen not in optimizers:
            near = difflib.get_close_matches(chosen, optimizers, n=1)
            hint = f"; the nearest name is {near[0]}" if near else ""
            raise ValueError(
                f"optimizer(paths={choice!r}): give PATTERN=NAME, where NAME is {', '.join(optimizers)}{hint}."
            )
        if chosen in AVERAGING_OPTIMIZERS and chosen != name:
            raise ValueError(
                f"optimizer({name!r}, paths={choice!r}): {chosen} averages all weights; take it as the optimizer, and "
                f"choose {name} by path."
            )
        matched = [path for path in marks_by_path if _matches(pattern, path)]
        if not matched:
            raise ValueError(
                f"optimizer(paths={choice!r}): no trained parameter has such a path; the nearest are "
                f"{', '.join(_nearest(pattern, marks_by_path))}."
            )
        _check_matrices(choice, chosen, {path: marks_by_path[path] for path in matched})
        chosen_by |= dict.fromkeys(matched, choice)
    for choice in paths:
        if choice not in chosen_by.values():
            raise ValueError(
                f"optimizer(paths={choice!r}): later choices take all parameters that this one matches; leave it out, "
                "or put it last."
            )
    return {path: choice.rpartition("=")[2] for path, choice in chosen_by.items()}


def _default(name: str, mark: nn.Matrix | Literal[False]) -> str:
    return name if name not in MATRIX_OPTIMIZERS or is_hidden(mark) else "adamw"


def is_hidden(mark: nn.Matrix | Literal[False] | None) -> bool:
    """Return whether a mark is that of a hidden matrix, and not of a table, a vector or an untrained parameter."""
    return bool(mark and not mark.table)


def _matches(pattern: str, path: str) -> bool:
    """Return whether a path has consecutive names like the pattern, in which `*` stands for any text."""
    names = ".*".join(map(re.escape, pattern.split("*")))
    return re.search(rf"(?:^|\.){names}(?=$|[.\[])", path) is not None


def _nearest(pattern: str, paths: Mapping[str, object]) -> list[str]:
    """Return the names, or paths, of parameters that are nearest to a pattern."""
    candidates = dict.fromkeys(name for path in paths for name in (path, *path.split(".")))
    return difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.5) or list(paths)[:3]


def _check_matrices(choice: str, name: str, marks: Mapping[str, nn.Matrix | Literal[False]]) -> None:
    """Raise a `ValueError` if an optimizer of hidden matrices is chosen for other parameters."""
    refused = {path: mark for path, mark in marks.items() if not is_hidden(mark)}
    if name not in MATRIX_OPTIMIZERS or not refused:
        return
    path, mark = next(iter(refused.items()))
    matrices = [path for path in marks if path not in refused]
    fix = f"choose {matrices[0]}, for example" if matrices else "take adamw or sgd for these"
    raise ValueError(
        f"optimizer(paths={choice!r}): {name} takes hidden matrices only, and {path} is a "
        f"{'table' if mark else 'vector'}; {fix}."
    )


def describe_assignment(assignment: Mapping[str, str], model: PyTree) -> list[str]:
    """Return a line for each optimizer: its arrays, their parameters, and the shortest paths that hold no others."""
    leaves = {nn.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    names_below: dict[str, set[str]] = {}
    for path, name in assignment.items():
        for prefix in _prefixes(path):
            names_below.setdefault(prefix, set()).add(name)
    lines = []
    for name in dict.fromkeys(assignment.values()):
        paths = [path for path, path_name in assignment.items() if path_name == name]
        parameters = sum(math.prod(leaves[path].shape) for path in paths)
        alike = [next(prefix for prefix in _prefixes(path) if names_below[prefix] == {name}) for path in paths]
        groups = _join_siblings(dict.fromkeys(alike))
        shown = ", ".join(groups[:_MAX_GROUPS])
        shown += f" and {len(groups) - _MAX_GROUPS} more" if len(groups) > _MAX_GROUPS else ""
        if len(paths) == len(assignment):
            shown = "all that are trained"
        lines.append(f"{name} trains {len(paths)} array{'s' * (len(paths) > 1)} of {parameters:,} parameters: {shown}")
    return lines


def _prefixes(path: str) -> list[str]:
    """Return a path's beginnings, the shortest first: `stacks[0]`, `stacks[0].blocks`, ..., the path itself."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(1, len(names) + 1)]


def _join_siblings(paths: Iterable[str]) -> list[str]:
    """Return paths with those joined that differ in the last name but one only: `layer.{up,down}.weight`."""
    siblings: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        *parents, name, last = ["", "", *path.split(".")]
        key = (*parents[2:], last) if parents[2:] else (path,)
        siblings.setdefault(key, []).append(name)
    groups = []
    for (*parents, last), names in siblings.items():
        middle = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
        groups.append(".".join([*parents, middle, last]) if parents else last)
    return groups
