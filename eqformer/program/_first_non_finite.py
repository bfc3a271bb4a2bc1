"""Search for the origin of a NaN or infinity in a traced program, which is run equation by equation."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as core
import jax.extend.source_info_util as sources
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ._ir import in_backward_pass
from ._jaxpr import callee_of, count_consts_and_carry, open_jaxpr


class NonFiniteOrigin(NamedTuple):
    """The equation, or the input of the program, that a NaN or an infinity comes from."""

    number: int
    """Place among all origins, in order of execution."""
    kind: str
    """`NaN` or `infinity`."""
    input: int | None = None
    """Index of the program's input that has the NaN or infinity; None if an equation computes it."""
    scopes: tuple[str | int, ...] = ()
    """Name scopes of the equation, as JAX writes them, and iterations of the loops between them."""
    operation: str = ""
    """JAX's name of the operation."""
    source: str = ""
    """The line of code, `file:line (function)`."""
    is_backward: bool = False
    """Whether the equation is in a backward pass."""


def find_non_finite(
    program: core.ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    inputs: Sequence[Array],
) -> list[NonFiniteOrigin | None]:
    """Run a closed jaxpr, and return the origin of the NaN or infinity in each result; None for a finite result.

    A scan, a branch or a call with a result that is not finite is run again, equation by equation. A `while` loop
    counts as one equation. An intended infinity, such as in a mask, is not reported as long as the results that are
    computed from it are finite.
    """
    interpreter = _Interpreter()
    values = [interpreter.check_input(index, x) for index, x in enumerate(inputs)]
    return [value.origin for value in interpreter.run_program(program.jaxpr, program.consts, values, ())]


class _Value(NamedTuple):
    """A value of the program, with its origin if it is not finite."""

    value: Any
    kind: int = 0
    """Index of the value's kind in `_KINDS`."""
    origin: NonFiniteOrigin | None = None


_KINDS = ("finite", "infinity", "NaN")
_Scopes = tuple[str | int, ...]


class _Interpreter:
    """Interpreter that runs a program equation by equation, and tracks the origins of values that are not finite."""

    def __init__(self):
        self._numbers = itertools.count()

    def check_input(self, index: int, x: Array) -> _Value:
        """Return an input of the program as a value; if it is not finite, the input is its own origin."""
        kind = _kind_of(x)
        return _Value(x, kind, NonFiniteOrigin(next(self._numbers), _KINDS[kind], index)) if kind else _Value(x)

    def run_program(
        self, program: core.Jaxpr, consts: Sequence[object], inputs: Sequence[_Value], scopes: _Scopes
    ) -> list[_Value]:
        """Return the results of a program."""
        known: dict[core.Var, _Value] = dict(
            zip(program.constvars, (_Value(x, _kind_of(x)) for x in consts), strict=True)
        )
        known |= dict(zip(program.invars, inputs, strict=True))

        def read(atom: core.Var | core.Literal) -> _Value:
            return _Value(atom.val) if isinstance(atom, core.Literal) else known[atom]

        last_use = {variable: index for index, eqn in enumerate(program.eqns) for variable in _variables(eqn.invars)}
        outputs = _variables(program.outvars)
        for index, eqn in enumerate(program.eqns):
            results = self._run_equation(eqn, [read(atom) for atom in eqn.invars], scopes)
            known |= dict(zip(eqn.outvars, results, strict=True))
            for variable in _variables(eqn.invars) - outputs:
                if last_use[variable] == index:  # Free the memory of values that no later equation reads.
                    known.pop(variable, None)
        return [read(atom) for atom in program.outvars]

    def _run_equation(self, eqn: core.JaxprEqn, inputs: list[_Value], scopes: _Scopes) -> list[_Value]:
        scopes = (*scopes, str(eqn.source_info.name_stack))

        def compute(*values: object) -> Sequence[object]:
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            return results if eqn.primitive.multiple_results else (results,)

        run_parts = functools.partial(self._inner_origins, eqn, inputs, scopes)
        make_origin = functools.partial(self._origin_at, scopes=scopes, eqn=eqn)
        return self._find_origins(inputs, compute, run_parts, make_origin)

    def _find_origins(
        self,
        inputs: Sequence[_Value],
        compute: Callable[..., Sequence[object]],
        inner_origins: Callable[[], list[NonFiniteOrigin | None] | None],
        make_origin: Callable[[int], NonFiniteOrigin],
    ) -> list[_Value]:
        """Return the results, each with its origin if it is not finite.

        The origin is the first of these four that exists: the origin of a NaN among the inputs, an origin inside the
        inner program, the origin of an infinity among the inputs, this equation itself (or this iteration of a loop).
        """
        results = compute(*(value.value for value in inputs))
        kinds = [_kind_of(x) for x in results]
        if not any(kinds):
            return [_Value(x) for x in results]
        origin, origins = _first_origin(inputs, "NaN"), None
        if origin is None:
            origins, origin = inner_origins(), _first_origin(inputs, "infinity")
        origins = [None] * len(results) if origins is None else origins
        origin = origin or next(filter(None, origins), None) or make_origin(max(kinds))
        return [_Value(x, kind, (inner or origin) if kind else None) for x, kind, inner in zip(results, kinds, origins)]

    def _inner_origins(
        self, eqn: core.JaxprEqn, inputs: list[_Value], scopes: _Scopes
    ) -> list[NonFiniteOrigin | None] | None:
        """Return the origins of the results of a scan, a conditional or a call; None for other equations."""
        if eqn.primitive.name == "scan":
            return self._scan_origins(eqn, inputs, scopes)
        if eqn.primitive.name == "cond":
            program, inputs = eqn.params["branches"][int(inputs[0].value)], inputs[1:]
        else:
            program = callee_of(eqn)
        if program is None or len((jaxpr := open_jaxpr(program)).invars) != len(inputs):
            return None
        return self._program_origins(jaxpr, getattr(program, "consts", ()), inputs, scopes)

    def _program_origins(
        self, program: core.Jaxpr, consts: Sequence[object], inputs: Sequence[_Value], scopes: _Scopes
    ) -> list[NonFiniteOrigin | None]:
        """Run a program equation by equation, and return the origins of its results."""
        return [value.origin for value in self.run_program(program, consts, inputs, scopes)]

    def _scan_origins(self, eqn: core.JaxprEqn, inputs: list[_Value], scopes: _Scopes) -> list[NonFiniteOrigin | None]:
        """Return the origins of a scan's results; only iterations with results that are not finite are searched."""
        program, length = eqn.params["jaxpr"], eqn.params["length"]
        compute = jax.jit(core.jaxpr_as_fun(program))
        consts, carried = count_consts_and_carry(eqn.params)
        constants, carry, stacked = inputs[:consts], inputs[consts : consts + carried], inputs[consts + carried :]
        origins: list[NonFiniteOrigin | None] = [None] * (len(eqn.outvars) - carried)
        for iteration in reversed(range(length)) if eqn.params["reverse"] else range(length):
            slices = [_slice(value, iteration) for value in stacked]
            values, inner_scopes = [*constants, *carry, *slices], (*scopes, iteration)
            run_parts = functools.partial(self._program_origins, program.jaxpr, program.consts, values, inner_scopes)
            make_origin = functools.partial(self._origin_at, scopes=inner_scopes, eqn=eqn)
            results = self._find_origins(values, compute, run_parts, make_origin)
            carry = results[:carried]
            origins = [old or new.origin for old, new in zip(origins, results[carried:], strict=True)]
        return [value.origin for value in carry] + origins

    def _origin_at(self, kind: int, scopes: _Scopes, eqn: core.JaxprEqn) -> NonFiniteOrigin:
        """Return an equation as an origin, with its line of code shortened to the last folder and the file."""
        is_backward = any(in_backward_pass(scope) for scope in scopes if isinstance(scope, str))
        source = re.sub(r"^.*?([^/]+/[^/]+?:\d+)(?::\d+)?", r"\1", sources.summarize(eqn.source_info))
        name = eqn.primitive.name
        return NonFiniteOrigin(next(self._numbers), _KINDS[kind], None, scopes, name, source, is_backward)


def _first_origin(values: Iterable[_Value], kind: str) -> NonFiniteOrigin | None:
    """Return the earliest origin among the values of one kind, `NaN` or `infinity`; None if there is none."""
    origins = (value.origin for value in values if value.kind == _KINDS.index(kind) and value.origin)
    return min(origins, default=None)


def _slice(stacked: _Value, iteration: int) -> _Value:
    """Return the part of a stacked value that an iteration reads; a part that is not finite has an origin."""
    x = stacked.value[iteration]
    kind = _kind_of(x) if stacked.kind else 0
    return _Value(x, kind, stacked.origin if kind else None)


def _kind_of(x: object) -> int:
    """Return the index in `_KINDS` of an array's kind; 0 for integers and for objects that are no arrays."""
    is_inexact = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)
    return int(_index_of_kind(x)) if is_inexact else 0


@jax.jit
def _index_of_kind(x: Array) -> Int[Array, ""]:
    return jnp.any(~jnp.isfinite(x)).astype(jnp.int32) + jnp.any(jnp.isnan(x)).astype(jnp.int32)


def _variables(atoms: Iterable[core.Var | core.Literal]) -> set[core.Var]:
    return {atom for atom in atoms if isinstance(atom, core.Var)}
