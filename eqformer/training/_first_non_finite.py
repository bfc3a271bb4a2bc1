"""Where a number that is not finite comes from: a step's loss and gradients, computed again line by line."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as core
import jax.extend.source_info_util as sources
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from .. import nn
from ._gradients import make_gradient_function, split_microbatches
from .losses._loss_aux import LossFn
from .losses._loss_scale import Scale
from .optimizer._optimizer import trainable, Trained


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """Where the first number that is not finite comes from, of those that reach a loss or its gradients."""

    kind: str
    """`NaN` or `infinity`."""
    module: str
    """The path of the module that computes it, or of the array that holds it; empty outside of the model."""
    layer: int | None
    """Which layer of the module's stack; None outside of stacks."""
    operation: str
    """JAX's name of the operation; empty for an array."""
    source: str
    """The line of code, `file:line (function)`; empty for an array."""
    is_backward: bool
    """Whether it is in the backward pass."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        if not self.operation:
            return f"{self.kind} in {self.module}{layer}"
        where = f"{self.module}{layer}" if self.module else "the loss"
        which = "backward" if self.is_backward else "forward"
        return f"{self.kind} from `{self.operation}` in the {which} pass of {where} ({self.source})"


def first_non_finite(
    loss_fn: LossFn,
    model: PyTree,
    batch: PyTree,
    key: PyTree = None,
    *,
    microbatches: int = 1,
    trained: Trained = trainable,
    scale: Scale = None,
) -> NonFinite | None:
    """The first number that is not finite, in order of execution, of those that make the loss or its gradients so.

    The loss and its gradients are computed on one device, a microbatch at a time, in the order of the program; where
    the result of a loop, a layer or a call is not finite, it is computed again, part by part. Numbers that are meant to
    be infinite, such as those of a mask, are none, as long as what they go into is finite. None if loss and gradients
    are finite. Modules have names if they are `nn.Module`s.

    Args:
        loss_fn: That of the step.
        model: The model before the step, on one device; it is not donated.
        batch: The step's batch.
        key: The step's key: the run's, into which the step's number is folded.
        microbatches: How many the batch is cut into, as in the step.
        trained: What picks the parameters that have gradients.
        scale: The step's `LossScale` value, in float16.
    """
    of_batch = make_gradient_function(loss_fn, trained=trained)
    pieces = split_microbatches(jax.tree.map(jnp.asarray, batch), microbatches)
    for number in range(microbatches):
        piece = jax.tree.map(lambda x, at=number: x[at], pieces)
        arrays, rest = eqx.partition((model, piece, key, scale), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)

        def run(*leaves: Array, structure: Any = structure, rest: PyTree = rest) -> tuple[Array, PyTree]:
            total, _, gradients = of_batch(*eqx.combine(jax.tree.unflatten(structure, leaves), rest))
            return total, gradients

        program, walk = jax.make_jaxpr(run)(*leaves), _Walk(model)
        found = walk.lines(program.jaxpr, program.consts, walk.given(arrays), ())
        if found[0].origin is not None:
            return found[0].origin.what
        if origins := [value.origin for value in found if value.origin is not None]:
            return min(origins, key=lambda origin: origin.number).what
    return None


class _Origin(NamedTuple):
    number: int  # in order of execution
    what: NonFinite


class _Value(NamedTuple):
    value: Any
    kind: int = 0  # an index of _KINDS
    origin: _Origin | None = None  # where a value that is not finite has that from


_KINDS = ("finite", "infinity", "NaN")
_Place = tuple[str | int, ...]  # scopes, as JAX writes them, and turns of loops


class _Walk:
    """Runs a program line by line, and follows what is not finite from where it arises."""

    def __init__(self, model: PyTree):
        self._model, self._numbers = model, itertools.count()

    def given(self, arrays: PyTree) -> list[_Value]:
        """What the program is given: a model, a batch, a key and a scale."""
        layers = [str(name).startswith("layers") for name in jax.tree.leaves(nn.dims(arrays[0]))]
        in_stack = itertools.chain(layers, itertools.repeat(False))
        owners = "", "the batch's ", "the key ", "the loss scale "

        def one(path: tuple, x: Array, is_stacked: bool) -> _Value:
            if not (kind := _kind(x)):
                return _Value(x)
            layer = int(jnp.argmax(~jnp.isfinite(x).all(tuple(range(1, x.ndim))))) if is_stacked else None
            name = owners[path[0].idx] + nn.path_name(path[1:])
            return _Value(x, kind, self._origin(NonFinite(_KINDS[kind], name, layer, "", "", False)))

        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        return [one(path, x, is_stacked) for (path, x), is_stacked in zip(leaves, in_stack)]

    def lines(self, program: core.Jaxpr, consts: Sequence, given: Sequence[_Value], place: _Place) -> list[_Value]:
        """The results of a program."""
        known: dict[Any, _Value] = dict(zip(program.constvars, (_Value(x, _kind(x)) for x in consts), strict=True))
        known |= dict(zip(program.invars, given, strict=True))
        read = lambda atom: _Value(atom.val) if isinstance(atom, core.Literal) else known[atom]
        last = {atom: n for n, line in enumerate(program.eqns) for atom in line.invars if not _is_literal(atom)}
        kept = {atom for atom in program.outvars if not _is_literal(atom)}
        for number, line in enumerate(program.eqns):
            results = self._line(line, [read(atom) for atom in line.invars], place)
            known |= dict(zip(line.outvars, results, strict=True))
            for atom in {atom for atom in line.invars if not _is_literal(atom)} - kept:
                if last[atom] == number:  # as the program itself, it forgets what is used up
                    known.pop(atom, None)
        return [read(atom) for atom in program.outvars]

    def _line(self, line: core.JaxprEqn, given: list[_Value], place: _Place) -> list[_Value]:
        place = (*place, str(line.source_info.name_stack))

        def compute(*values: Any) -> Sequence:
            with line.ctx.manager:
                found = line.primitive.bind(*values, **line.primitive.get_bind_params(line.params))
            return found if line.primitive.multiple_results else (found,)

        blame = lambda kind: self._blamed(kind, place, line)
        return self._results(given, compute, lambda: self._inside(line, given, place), blame)

    def _results(
        self,
        given: Sequence[_Value],
        compute: Callable[..., Sequence],
        inside: Callable[[], list[_Origin | None] | None],
        blame: Callable[[int], _Origin],
    ) -> list[_Value]:
        """What is computed and, if it is not finite, from where: from what is given, from inside, or from here."""
        results = compute(*(value.value for value in given))
        kinds = [_kind(x) for x in results]
        if not any(kinds):
            return [_Value(x) for x in results]
        first = lambda kind: min((v.origin for v in given if v.kind == kind and v.origin), default=None)
        origin, origins = first(_KINDS.index("NaN")), None
        if origin is None:
            origins, origin = inside(), first(_KINDS.index("infinity"))
        origins = [None] * len(results) if origins is None else origins
        origin = origin or next((one for one in origins if one), None) or blame(max(kinds))
        return [_Value(x, kind, (one or origin) if kind else None) for x, kind, one in zip(results, kinds, origins)]

    def _inside(self, line: core.JaxprEqn, given: list[_Value], place: _Place) -> list[_Origin | None] | None:
        """The origins of the results of a line that runs a program of its own; None for one that does not."""
        options = line.params
        if line.primitive.name == "scan":
            return self._turns(line, given, place)
        if line.primitive.name == "cond":
            program, given = options["branches"][int(given[0].value)], given[1:]
        else:
            program = options.get("jaxpr", options.get("call_jaxpr"))
        lines, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())  # some are not closed
        if lines is None or len(lines.invars) != len(given):
            return None
        return [value.origin for value in self.lines(lines, consts, given, place)]

    def _turns(self, line: core.JaxprEqn, given: list[_Value], place: _Place) -> list[_Origin | None]:
        """Those of a loop, of which only the turns whose results are not finite are looked into."""
        program, length = line.params["jaxpr"], line.params["length"]
        compute = jax.jit(core.jaxpr_as_fun(program))
        # What goes round has the same dims in a turn and in all; what is stacked has one more in all.
        whole, carried = _same_dims(line.invars, program.jaxpr.invars), _same_dims(line.outvars, program.jaxpr.outvars)
        constants, carry, stacked = given[: whole - carried], given[whole - carried : whole], given[whole:]
        origins: list[_Origin | None] = [None] * (len(line.outvars) - carried)
        for turn in reversed(range(length)) if line.params["reverse"] else range(length):
            each = [_Value(x, kind, origin if kind else None) for x, kind, origin in _at(stacked, turn)]
            now, here = [*constants, *carry, *each], (*place, turn)
            inside = lambda: [v.origin for v in self.lines(program.jaxpr, program.consts, now, here)]  # noqa: B023
            results = self._results(now, compute, inside, lambda kind: self._blamed(kind, here, line))  # noqa: B023
            carry = results[:carried]
            origins = [old or new.origin for old, new in zip(origins, results[carried:], strict=True)]
        return [value.origin for value in carry] + origins

    def _blamed(self, kind: int, place: _Place, line: core.JaxprEqn) -> _Origin:
        module, layer = _resolved(self._model, place)
        is_backward = any("transpose(" in part for part in place if isinstance(part, str))
        source = re.sub(r"^.*?([^/]+/[^/]+?:\d+)(?::\d+)?", r"\1", sources.summarize(line.source_info))
        what = NonFinite(_KINDS[kind], module, layer, line.primitive.name, source, is_backward)
        return self._origin(what)

    def _origin(self, what: NonFinite) -> _Origin:
        return _Origin(next(self._numbers), what)


def _resolved(model: PyTree, place: _Place) -> tuple[str, int | None]:
    """The path of the module that scopes lead to, names of operations left out, and the layer of its stack."""
    node, path, layer = model, "", None
    for part in place:
        if isinstance(part, int):
            layer = part if layer is None and isinstance(node, nn.LayerStack) else layer
            continue
        for name in part.split("/"):
            name = re.sub(r"^(?:\w+\()*|\)*$", "", name)
            found = re.fullmatch(r"([A-Za-z_]\w*)((?:\[\d+\])*)", name)
            child = _child(node, found[1], found[2]) if found else None
            if child is not None:
                node, path = child, f"{path}.{name}".lstrip(".")
    return path, layer


def _child(node: Any, field: str, places: str) -> Any:
    while isinstance(node, eqx.Module):
        fields = vars(node)
        if field in fields:
            child = fields[field]
            for place in re.findall(r"\d+", places):
                child = child[int(place)] if isinstance(child, tuple | list) and int(place) < len(child) else None
            return child if isinstance(child, eqx.Module) else None
        node = fields.get("inner")
    return None


def _at(stacked: Sequence[_Value], turn: int) -> list[tuple[Any, int, _Origin | None]]:
    return [(x := value.value[turn], _kind(x) if value.kind else 0, value.origin) for value in stacked]


def _kind(x: Any) -> int:
    is_inexact = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)
    return int(_index_of_kind(x)) if is_inexact else 0


@jax.jit
def _index_of_kind(x: Array) -> Int[Array, ""]:
    return jnp.any(~jnp.isfinite(x)).astype(jnp.int32) + jnp.any(jnp.isnan(x)).astype(jnp.int32)


def _same_dims(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)
