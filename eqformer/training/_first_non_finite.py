"""The origin of a number that is not finite: a step's loss and gradients are computed again, equation by equation."""

import dataclasses
import functools
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
    """The origin of the first number that is not finite and reaches a loss or its gradients."""

    kind: str
    """`NaN` or `infinity`."""
    module: str
    """The path of the module that computes the number, or of the array that holds it; empty outside of the model."""
    layer: int | None
    """The index of the layer in the module's stack; None outside of stacks."""
    operation: str
    """JAX's name of the operation; empty for an array."""
    source: str
    """The line of code, `file:line (function)`; empty for an array."""
    is_backward: bool
    """Whether the operation is in the backward pass."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        if not self.operation:
            return f"{self.kind} in {self.module}{layer}"
        module = f"{self.module}{layer}" if self.module else "the loss"
        direction = "backward" if self.is_backward else "forward"
        return f"{self.kind} from `{self.operation}` in the {direction} pass of {module} ({self.source})"


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
    """Return the first number, in order of execution, that makes the loss or its gradients NaN or infinite.

    The loss and its gradients are computed on one device, a microbatch at a time, in the order of the program. If the
    result of a loop, a layer or a call is not finite, that result is computed again, part by part. Numbers that are
    meant to be infinite, such as those of a mask, do not count as long as the results that use them are finite. The
    result is None if the loss and its gradients are finite. Modules have names if they are `nn.Module`s.

    Args:
        loss_fn: The step's loss.
        model: The model before the step, on one device; it is not donated.
        batch: The step's batch.
        key: The step's key: the run's, into which the step's number is folded.
        microbatches: The number of microbatches into which the step splits the batch.
        trained: Picks the parameters that have gradients.
        scale: The step's `LossScale` value, in float16.
    """
    compute_gradients = make_gradient_function(loss_fn, trained=trained)
    pieces = split_microbatches(jax.tree.map(jnp.asarray, batch), microbatches)
    for number in range(microbatches):
        piece = jax.tree.map(lambda x, at=number: x[at], pieces)
        arrays, static = eqx.partition((model, piece, key, scale), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)

        def run(*leaves: Array, structure: Any = structure, static: PyTree = static) -> tuple[Array, PyTree]:
            total, _, gradients = compute_gradients(*eqx.combine(jax.tree.unflatten(structure, leaves), static))
            return total, gradients

        program, interpreter = jax.make_jaxpr(run)(*leaves), _Interpreter(model)
        results = interpreter.run_program(program.jaxpr, program.consts, interpreter.inputs(arrays), ())
        if results[0].origin is not None:
            return results[0].origin.non_finite
        if origins := [value.origin for value in results if value.origin is not None]:
            return min(origins, key=lambda origin: origin.number).non_finite
    return None


class _Origin(NamedTuple):
    number: int  # in order of execution
    non_finite: NonFinite


class _Value(NamedTuple):
    value: Any
    kind: int = 0  # an index of _KINDS
    origin: _Origin | None = None  # of a value that is not finite


_KINDS = ("finite", "infinity", "NaN")
_Scopes = tuple[str | int, ...]  # name scopes, as JAX writes them, and iterations of loops


class _Interpreter:
    """An interpreter that runs a program equation by equation, and tracks the origin of values that are not finite."""

    def __init__(self, model: PyTree):
        self._model, self._numbers = model, itertools.count()

    def inputs(self, arrays: PyTree) -> list[_Value]:
        """Return the program's inputs: the arrays of a model, a batch, a key and a scale."""
        layers = [str(name).startswith("layers") for name in jax.tree.leaves(nn.dims(arrays[0]))]
        in_stack = itertools.chain(layers, itertools.repeat(False))
        owners = "", "the batch's ", "the key ", "the loss scale "

        def to_value(path: tuple, x: Array, is_stacked: bool) -> _Value:
            if not (kind := _kind(x)):
                return _Value(x)
            layer = int(jnp.argmax(~jnp.isfinite(x).all(tuple(range(1, x.ndim))))) if is_stacked else None
            name = owners[path[0].idx] + nn.path_name(path[1:])
            return _Value(x, kind, self._origin(NonFinite(_KINDS[kind], name, layer, "", "", False)))

        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        return [to_value(path, x, is_stacked) for (path, x), is_stacked in zip(leaves, in_stack)]

    def run_program(
        self, program: core.Jaxpr, consts: Sequence, inputs: Sequence[_Value], scopes: _Scopes
    ) -> list[_Value]:
        """Return the results of a program."""
        known: dict[Any, _Value] = dict(zip(program.constvars, (_Value(x, _kind(x)) for x in consts), strict=True))
        known |= dict(zip(program.invars, inputs, strict=True))
        read = lambda atom: _Value(atom.val) if isinstance(atom, core.Literal) else known[atom]
        last_use = {atom: n for n, line in enumerate(program.eqns) for atom in line.invars if not _is_literal(atom)}
        outputs = {atom for atom in program.outvars if not _is_literal(atom)}
        for number, line in enumerate(program.eqns):
            results = self._run_line(line, [read(atom) for atom in line.invars], scopes)
            known |= dict(zip(line.outvars, results, strict=True))
            for atom in {atom for atom in line.invars if not _is_literal(atom)} - outputs:
                if last_use[atom] == number:  # frees the memory of values that no later equation reads
                    known.pop(atom, None)
        return [read(atom) for atom in program.outvars]

    def _run_line(self, line: core.JaxprEqn, inputs: list[_Value], scopes: _Scopes) -> list[_Value]:
        scopes = (*scopes, str(line.source_info.name_stack))

        def compute(*values: Any) -> Sequence:
            with line.ctx.manager:
                results = line.primitive.bind(*values, **line.primitive.get_bind_params(line.params))
            return results if line.primitive.multiple_results else (results,)

        make_origin = lambda kind: self._origin_at(kind, scopes, line)
        return self._find_origins(inputs, compute, lambda: self._inner_origins(line, inputs, scopes), make_origin)

    def _find_origins(
        self,
        inputs: Sequence[_Value],
        compute: Callable[..., Sequence],
        inner_origins: Callable[[], list[_Origin | None] | None],
        make_origin: Callable[[int], _Origin],
    ) -> list[_Value]:
        """Return the results and, for those that are not finite, their origin: an input, an inner program, or here."""
        results = compute(*(value.value for value in inputs))
        kinds = [_kind(x) for x in results]
        if not any(kinds):
            return [_Value(x) for x in results]
        first = lambda kind: min((v.origin for v in inputs if v.kind == kind and v.origin), default=None)
        origin, origins = first(_KINDS.index("NaN")), None
        if origin is None:
            origins, origin = inner_origins(), first(_KINDS.index("infinity"))
        origins = [None] * len(results) if origins is None else origins
        origin = origin or next(filter(None, origins), None) or make_origin(max(kinds))
        return [_Value(x, kind, (inner or origin) if kind else None) for x, kind, inner in zip(results, kinds, origins)]

    def _inner_origins(self, line: core.JaxprEqn, inputs: list[_Value], scopes: _Scopes) -> list[_Origin | None] | None:
        """Return the origins of the results of an equation that runs an inner program; None for other equations."""
        options = line.params
        if line.primitive.name == "scan":
            return self._scan_origins(line, inputs, scopes)
        if line.primitive.name == "cond":
            program, inputs = options["branches"][int(inputs[0].value)], inputs[1:]
        else:
            program = options.get("jaxpr", options.get("call_jaxpr"))
        # Some primitives hold a jaxpr that is not closed, without constants.
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        if jaxpr is None or len(jaxpr.invars) != len(inputs):
            return None
        return self._output_origins(jaxpr, consts, inputs, scopes)

    def _output_origins(
        self, program: core.Jaxpr, consts: Sequence, inputs: Sequence[_Value], scopes: _Scopes
    ) -> list[_Origin | None]:
        return [value.origin for value in self.run_program(program, consts, inputs, scopes)]

    def _scan_origins(self, line: core.JaxprEqn, inputs: list[_Value], scopes: _Scopes) -> list[_Origin | None]:
        """Return the origins of a scan's results; only iterations whose results are not finite are run in parts."""
        program, length = line.params["jaxpr"], line.params["length"]
        compute = jax.jit(core.jaxpr_as_fun(program))
        # Constants and the carry have as many dims in an iteration as in the scan; stacked arrays have one more.
        unstacked = _count_same_dims(line.invars, program.jaxpr.invars)
        carried = _count_same_dims(line.outvars, program.jaxpr.outvars)
        constants, carry = inputs[: unstacked - carried], inputs[unstacked - carried : unstacked]
        stacked = inputs[unstacked:]
        origins: list[_Origin | None] = [None] * (len(line.outvars) - carried)
        for iteration in reversed(range(length)) if line.params["reverse"] else range(length):
            slices = [_Value(x, kind, origin if kind else None) for x, kind, origin in _slice(stacked, iteration)]
            values, inner_scopes = [*constants, *carry, *slices], (*scopes, iteration)
            run_parts = functools.partial(self._output_origins, program.jaxpr, program.consts, values, inner_scopes)
            make_origin = functools.partial(self._origin_at, scopes=inner_scopes, line=line)
            results = self._find_origins(values, compute, run_parts, make_origin)
            carry = results[:carried]
            origins = [old or new.origin for old, new in zip(origins, results[carried:], strict=True)]
        return [value.origin for value in carry] + origins

    def _origin_at(self, kind: int, scopes: _Scopes, line: core.JaxprEqn) -> _Origin:
        module, layer = _find_module(self._model, scopes)
        is_backward = any("transpose(" in scope for scope in scopes if isinstance(scope, str))
        source = re.sub(r"^.*?([^/]+/[^/]+?:\d+)(?::\d+)?", r"\1", sources.summarize(line.source_info))
        return self._origin(NonFinite(_KINDS[kind], module, layer, line.primitive.name, source, is_backward))

    def _origin(self, non_finite: NonFinite) -> _Origin:
        return _Origin(next(self._numbers), non_finite)


def _find_module(model: PyTree, scopes: _Scopes) -> tuple[str, int | None]:
    """Return the path of the module that scopes lead to, without names of operations, and the layer of its stack."""
    node, path, layer = model, "", None
    for scope in scopes:
        if isinstance(scope, int):
            layer = scope if layer is None and isinstance(node, nn.LayerStack) else layer
            continue
        for name in scope.split("/"):
            name = re.sub(r"^(?:\w+\()*|\)*$", "", name)
            match = re.fullmatch(r"([A-Za-z_]\w*)((?:\[\d+\])*)", name)
            child = _child(node, match[1], match[2]) if match else None
            if child is not None:
                node, path = child, f"{path}.{name}".lstrip(".")
    return path, layer


def _child(node: object, field: str, indices: str) -> eqx.Module | None:
    while isinstance(node, eqx.Module):
        fields = vars(node)
        if field in fields:
            child = fields[field]
            for index in map(int, re.findall(r"\d+", indices)):
                child = child[index] if isinstance(child, tuple | list) and index < len(child) else None
            return child if isinstance(child, eqx.Module) else None
        node = fields.get("inner")
    return None


def _slice(stacked: Sequence[_Value], iteration: int) -> list[tuple[Any, int, _Origin | None]]:
    return [(x := value.value[iteration], _kind(x) if value.kind else 0, value.origin) for value in stacked]


def _kind(x: Any) -> int:
    is_inexact = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)
    return int(_index_of_kind(x)) if is_inexact else 0


@jax.jit
def _index_of_kind(x: Array) -> Int[Array, ""]:
    return jnp.any(~jnp.isfinite(x)).astype(jnp.int32) + jnp.any(jnp.isnan(x)).astype(jnp.int32)


def _count_same_dims(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)
