"""`Optimizer`: an optax transformation, the parameters that it trains, and their learning rates.

An `Optimizer` may combine several named optimizers. The kind of a parameter decides which of them trains it, unless
the user chooses one by the parameter's path.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from ... import nn
from ..._annotation_checks import name_class
from ._learning_rates import Rates
from ._moments import compress_moments, decompress_moments, map_moments, MOMENTS


def trainable(model: PyTree) -> PyTree:
    """Return a tree like the model with its floating-point arrays, and None in place of everything else."""
    return eqx.filter(model, nn.is_trainable)


Trained = Callable[[PyTree], PyTree]  # a model -> its trained parameters, with None in the place of everything else


def partition_trained(model: PyTree, trained: Trained) -> tuple[PyTree, PyTree]:
    """Split a model into its trained parameters and everything else; `equinox.combine` joins them."""
    parameters = trained_parameters(model, trained)
    untrained = jax.tree.map(lambda parameter, x: x if parameter is None else None, parameters, model, is_leaf=is_none)
    return parameters, untrained


def trained_parameters(model: PyTree, trained: Trained) -> PyTree:
    """Return the parameters that `trained` picks.

    Raises a `ValueError` if the result is not a tree like the model, or has arrays that have no gradients.
    """
    parameters = trained(model)
    rule = "the function must return a tree like the model, with None for all that is not trained, as eqx.filter does"
    try:
        jax.tree.map(lambda parameter, x: None, parameters, model, is_leaf=is_none)
    except (ValueError, TypeError) as error:
        raise ValueError(f"Optimizer(trained=...): for {name_class(model)} {rule}; return such a tree.") from error
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        if not nn.is_trainable(leaf):
            kind = f"{leaf.dtype} of shape {leaf.shape}" if nn.has_shape(leaf) else name_class(leaf)
            raise ValueError(
                f"Optimizer(trained=...): it picks {nn.path_name(path)}, {kind}, which has no gradient; pick "
                "only floating-point arrays, as training.trainable does."
            )
    return parameters


def is_none(node: object) -> TypeGuard[None]:
    """Return whether a node is None, for trees in which None is a leaf."""
    return node is None


class ScheduleFreeState(eqx.Module):
    """The state of an optimizer whose updates move fast weights, which are not the model's parameters.

    The model's parameters are averages of the fast weights, and are evaluated, sampled from and saved.
    """

    inner: PyTree
    """The transformation's state."""
    fast: PyTree
    """The fast weights, which the updates move, in float32 at least."""
    weight_sum: Float[Array, ""]
    """The sum of the weights of all steps in the average; a step's weight is its `max_rate`, squared."""
    max_rate: Float[Array, ""]
    """The largest learning rate so far."""


class Optimizer(eqx.Module):
    """An optax transformation built for a learning rate of 1, and the learning rate that multiplies its updates.

    `trained` picks the parameters that are trained; other parameters have no gradients and no optimizer state.

    `rate` is a function of the run's step, not of a counter in the optimizer's state: a step that is skipped because
    its gradients are not finite still counts for the rate, and leaves the state unchanged. Each array that the state
    holds for a parameter has the parameter's shape, in which some sizes may be 1. During a step the arrays are float32
    or wider; between steps `moments` may store them in fewer bits. `map_state` maps over these arrays.
    """

    transform: optax.GradientTransformation = eqx.field(static=True)
    """The optax transformation, for a learning rate of 1."""
    rate: Rates
    """The learning rate as a function of the step."""
    trained: Trained = eqx.field(static=True, default=trainable)
    """Picks the trained parameters of a model."""
    moments: str = eqx.field(static=True, default="float32")
    """The dtype of the moments between steps: float32, bfloat16 or 8bit."""
    average: float | None = eqx.field(static=True, default=None)
    """For schedule-free training (arXiv 2405.15682): the weight of the averaged parameters in the point below.

    Gradients are computed at `average * parameters + (1 - average) * fast weights` (see `ScheduleFreeState`). None: the
    optimizer is not schedule-free.
    """
    assignment: tuple[tuple[str, str], ...] = eqx.field(static=True, default=())
    """The path of each trained parameter and the name of its optimizer; empty for a user's own transformation."""

    def __check_init__(self):
        if self.moments not in MOMENTS:
            raise ValueError(f"Optimizer(moments={self.moments!r}): moments are stored in {' or '.join(MOMENTS)}.")
        if self.average is not None and not 0 < self.average < 1:
            raise ValueError(f"Optimizer(average={self.average}): average must be between 0 and 1; 0.9 is usual.")

    def init(self, model: PyTree) -> PyTree:
        """Return the state before the first step, for the trained parameters of `model`."""
        parameters = nn.in_float32(trained_parameters(model, self.trained))
        state = compress_moments(self.moments, self.transform, self.transform.init(parameters))
        if self.average is None:
            return state
        zeros = (jnp.zeros((), _widest_dtype(parameters)) for _ in range(2))
        return ScheduleFreeState(state, jax.tree.map(jnp.copy, parameters), *zeros)

    def gradient_point(self, model: PyTree, state: PyTree) -> PyTree:
        """Return the model at which a step computes gradients: the model itself, except in schedule-free training."""
        if self.average is None:
            return model
        parameters, untrained = partition_trained(model, self.trained)
        points = self._interpolate(nn.in_float32(parameters), state)
        points = jax.tree.map(lambda point, x: point.astype(x.dtype), points, parameters)
        return eqx.combine(points, untrained)

    def update(
        self, gradients: PyTree, state: PyTree, parameters: PyTree, learning_rate: Float[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        """Return `parameters + learning_rate * transform(gradients)`, in float32 at least, and the new state.

        In schedule-free training, the updates move the fast weights, and the new parameters are averages of these.
        """
        wide = nn.in_float32(parameters)

        def add_update(value: Array, update: Array) -> Array:
            return value + learning_rate.astype(value.dtype) * update

        if self.average is not None:
            updates, inner = self._transform_updates(gradients, state.inner, self._interpolate(wide, state))
            max_rate = jnp.maximum(state.max_rate, learning_rate.astype(state.max_rate.dtype))
            weight_sum = state.weight_sum + max_rate**2
            share = max_rate**2 / jnp.where(weight_sum > 0, weight_sum, 1)
            fast = jax.tree.map(add_update, state.fast, updates)
            state = ScheduleFreeState(inner, fast, weight_sum, max_rate)
            wide = jax.tree.map(lambda x, z: x + share.astype(x.dtype) * (z - x), wide, fast)
        else:
            updates, state = self._transform_updates(gradients, state, wide)
            wide = jax.tree.map(add_update, wide, updates)
        return jax.tree.map(lambda x, parameter: x.astype(parameter.dtype), wide, parameters), state

    def map_fast_weights(self, function: Callable[[PyTree], PyTree], state: PyTree) -> PyTree:
        """Return the state with `function` applied to the fast weights; the same state if there are none."""
        if self.average is None:
            return state
        return eqx.tree_at(lambda s: s.fast, state, function(state.fast))

    def _transform_updates(self, gradients: PyTree, state: PyTree, parameters: PyTree) -> tuple[PyTree, PyTree]:
        """Return the transformation's updates at these parameters, and its new state as it is stored."""
        wide_state = decompress_moments(self.moments, self.transform, state)
        with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to the power of integer counts.
            updates, wide_state = self.transform.update(nn.in_float32(gradients), wide_state, parameters)
        return updates, compress_moments(self.moments, self.transform, wide_state, state)

    def _interpolate(self, parameters: PyTree, state: ScheduleFreeState) -> PyTree:
        """Return the point between the averaged and the fast weights at which gradients are computed."""
        share = self.average
        assert share is not None
        return jax.tree.map(lambda x, z: share * x + (1 - share) * z, parameters, state.fast)

    def map_state(
        self, function: Callable[..., PyTree], state: PyTree, *like_parameters: PyTree, other: PyTree
    ) -> PyTree:
        """Apply `function` to each parameter's moments in `state`: arrays, `MomentCodes` or a `Preconditioner`.

        `function` also takes the same parameter's leaves of `like_parameters`, which are trees like the trained
        parameters, such as partition specs. Counters become `other`.
        """
        if self.average is None:
            return self._map_stored(function, state, *like_parameters, other=other)
        inner = self._map_stored(function, state.inner, *like_parameters, other=other)
        parts = inner, jax.tree.map(function, state.fast, *like_parameters), other, other
        return eqx.tree_at(lambda s: (s.inner, s.fast, s.weight_sum, s.max_rate), state, parts)

    def _map_stored(
        self, function: Callable[..., PyTree], state: PyTree, *like_parameters: PyTree, other: PyTree
    ) -> PyTree:
        """Apply `map_state` to the transformation's state, as `compress_moments` stores it."""
        if self.moments != "8bit":
            return map_moments(self.transform, function, state, *like_parameters, other=lambda _: other)
        inner = map_moments(self.transform, function, state.inner, *like_parameters, other=lambda _: other)
        return eqx.tree_at(lambda s: (s.inner, s.coded), state, (inner, other), is_leaf=is_none)

    def describe(self, model: PyTree) -> list[str]:
        """Return a line for each named optimizer: how many arrays and parameters the optimizer trains, and their paths.

        The paths are the shortest paths below which the optimizer trains everything. `model` may have shapes instead of
        arrays. A user's own transformation has no name, and no line.
        """
        return describe_assignment(dict(self.assignment), model)


@dataclasses.dataclass(frozen=True)
class GroupRates:
    """Factors of the learning rate for groups of parameters; hidden matrices always have the factor 1.

    With suitable factors, models of different widths can share one learning rate. For AdamW, the head's factor is then
    proportional to `1 / embed`, and the factors of embeddings and vectors are constant (muP, arXiv 2203.03466).
    """

    embedding: float = 1.0
    """The factor for tables that are looked up: embeddings of tokens, values, positions and types."""
    head: float = 1.0
    """The factor for a head that is not tied to the embedding."""
    vectors: float = 1.0
    """The factor for everything that is not a matrix: norms, biases, factors of the residual stream."""

    def scaling(self, marks: PyTree) -> Callable[[PyTree, PyTree], PyTree]:
        """Return the function that multiplies updates; `marks` has an `nn.Matrix` or False for each parameter."""

        def scale(mark: nn.Matrix | Literal[False], update: Array) -> Array:
            if not mark:
                factor = self.vectors
            else:
                factor = self.head if mark.head else self.embedding if mark.table else 1.0
            return update if factor == 1 else update * factor

        def scale_all(updates: PyTree, _: PyTree) -> PyTree:
            return jax.tree.map(lambda mark, x: None if x is None else scale(mark, x), marks, updates, is_leaf=is_none)

        return scale_all


def check_optimizer(optimizer: object, call: str) -> None:
    """Raise a `ValueError` for anything but an `Optimizer`, such as a plain optax transformation."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{call}: the optimizer must be a training.Optimizer, not {name_class(optimizer)}; build an optax "
            "transformation for a learning rate of 1 and pass it with the rate, as "
            "training.Optimizer(optax.adam(1.0), training.constant(1e-3))."
        )


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """Return the root of the sum of squares over all entries of all leaves, accumulated in float32 at least."""
    leaves = jax.tree.leaves(nn.in_float32(tree))
    widest = _widest_dtype(leaves)
    squares = (jnp.sum(jnp.square(leaf)).astype(widest) for leaf in leaves)
    return jnp.sqrt(sum(squares, start=jnp.zeros((), widest)))


def _widest_dtype(wide: PyTree) -> jnp.dtype:
    """Return the widest dtype of a tree's arrays, which `nn.in_float32` has widened; float32 for an empty tree."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(wide)]
    return jnp.result_type(*dtypes) if dtypes else jnp.dtype(jnp.float32)


MATRIX_OPTIMIZERS = ("muon", "normuon", "soap")
"""Optimizers that take hidden matrices only; AdamW trains the other parameters of a model."""
AVERAGING_OPTIMIZERS = ("schedule-free-adamw",)
"""Optimizers that average all trained weights, and therefore cannot be chosen for some parameters by path."""
_MAX_GROUPS = 8  # A line of `describe_assignment` shows at most this many groups of paths.


def assign(
    name: str, marks: PyTree, paths: Sequence[str] = (), optimizers: Sequence[str] = ()
) -> tuple[tuple[str, str], ...]:
    """Return the path of each trained parameter and the name of its optimizer.

    Args:
        name: The optimizer of the model. `MATRIX_OPTIMIZERS` leave all but hidden matrices to AdamW.
        marks: A tree like the trained parameters, with an `nn.Matrix` for each matrix and False for other parameters.
        paths: Choices `PATTERN=NAME` of other optimizers, see `optimizer`; a later choice overrides an earlier choice.
        optimizers: The names that may be chosen.
    """
    default = {path: _default(name, mark) for path, mark in _by_path(marks).items()}
    return tuple((default | choose_optimizers(marks, paths, optimizers, name)).items())


def _by_path(marks: PyTree) -> dict[str, nn.Matrix | Literal[False]]:
    """Return the mark of each parameter by the parameter's path."""
    return {nn.path_name(path): mark for path, mark in jax.tree_util.tree_leaves_with_path(marks)}


def choose_optimizers(marks: PyTree, paths: Sequence[str], optimizers: Sequence[str], name: str) -> dict[str, str]:
    """Return the optimizer's name for each parameter that a choice in `paths` matches; arguments as in `assign`."""
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
                f"optimizer({name!r}, paths={choice!r}): {chosen} averages all weights; pass {chosen} as the "
                f"optimizer's name, and choose {name} by path."
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
                f"optimizer(paths={choice!r}): later choices take all parameters that this choice matches; leave this "
                "choice out, or put it last."
            )
    return {path: choice.rpartition("=")[2] for path, choice in chosen_by.items()}


def _default(name: str, mark: nn.Matrix | Literal[False]) -> str:
    return name if name not in MATRIX_OPTIMIZERS or is_hidden(mark) else "adamw"


def is_hidden(mark: nn.Matrix | Literal[False] | None) -> bool:
    """Return whether a mark belongs to a hidden matrix, not to a table, a vector or an untrained parameter."""
    return bool(mark and not mark.table)


def _matches(pattern: str, path: str) -> bool:
    """Return whether consecutive names of a path match the pattern, in which `*` stands for any text."""
    names = ".*".join(map(re.escape, pattern.split("*")))
    return re.search(rf"(?:^|\.){names}(?=$|[.\[])", path) is not None


def _nearest(pattern: str, paths: Mapping[str, object]) -> list[str]:
    """Return up to three names or paths of parameters that are most similar to a pattern."""
    candidates = dict.fromkeys(name for path in paths for name in (path, *path.split(".")))
    return difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.5) or list(paths)[:3]


def _check_matrices(choice: str, name: str, marks: Mapping[str, nn.Matrix | Literal[False]]) -> None:
    """Raise a `ValueError` if an optimizer that trains only hidden matrices is chosen for other parameters."""
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
    """Return a line per optimizer, as `Optimizer.describe` does."""
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
            shown = "all trained parameters"
        lines.append(f"{name} trains {len(paths)} array{'s' * (len(paths) > 1)} of {parameters:,} parameters: {shown}")
    return lines


def _prefixes(path: str) -> list[str]:
    """Return a path's beginnings, the shortest first: `stacks[0]`, `stacks[0].blocks`, ..., the path itself."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(1, len(names) + 1)]


def _join_siblings(paths: Iterable[str]) -> list[str]:
    """Join paths that differ only in the second to last name, as in `layer.{up,down}.weight`."""
    siblings: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        names = path.split(".")
        # A path of fewer than three names is a group of its own.
        key = (*names[:-2], names[-1]) if len(names) > 2 else (path,)
        siblings.setdefault(key, []).append(names[-2] if len(names) > 2 else "")
    groups = []
    for (*parents, last), middle_names in siblings.items():
        middle = middle_names[0] if len(middle_names) == 1 else f"{{{','.join(middle_names)}}}"
        groups.append(".".join([*parents, middle, last]) if parents else last)
    return groups
