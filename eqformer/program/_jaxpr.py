"""Reader of traced programs (jaxprs) as `Program`s, with calls inlined and dead code removed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import partial_eval

from .._shapes import as_tuple
from . import _ir as ir


Aval = Any
"""An abstract value: an array's shape and dtype. `Any`, because JAX's annotated type lacks these fields."""


def read_traced(jaxpr: Jaxpr, platform: str | None = None) -> tuple[ir.Program, ...]:
    """Read the programs that each device runs: the bodies of a jaxpr's `shard_map`s.

    With a `platform` (`cpu`, `tpu` or `cuda`), each `platform_dependent` is replaced by the branch of this platform.
    """
    return tuple(read_jaxpr(body, platform, sizes) for body, sizes in _device_jaxprs(jaxpr))


def read_jaxpr(jaxpr: Jaxpr, platform: str | None = None, axis_sizes: Mapping[str, int] | None = None) -> ir.Program:
    """Read a jaxpr; `axis_sizes` are the sizes of the mesh axes that collectives run over (1 if left out)."""
    chosen = jaxpr if platform is None else _choose_platform(jaxpr, platform)
    return _JaxprReader(axis_sizes or {}).read(_without_dead_code(chosen))


class _JaxprReader:
    """Reader of one jaxpr; another reader reads each body of a loop or a conditional."""

    def __init__(self, axis_sizes: Mapping[str, int]):
        self._axis_sizes = axis_sizes
        self._operations: list[ir.Operation] = []
        self._avals: list[Aval] = []
        self._casts: dict[tuple[int | None, str], int] = {}
        self._narrower: dict[int, int] = {}  # value that is an exact, wider cast -> the value that was cast

    def read(self, jaxpr: Jaxpr) -> ir.Program:
        """Return the jaxpr as a program."""
        inputs = self._new_values(jaxpr.invars)
        results = self._inline(jaxpr, self._new_values(jaxpr.constvars), inputs, "")
        is_on_host = [getattr(aval, "memory_space", None) == jax.memory.Space.Host for aval in self._avals]
        sizes = [_byte_size(aval) for aval in self._avals]
        on_device = tuple(0 if host else size for host, size in zip(is_on_host, sizes, strict=True))
        on_host = tuple(size if host else 0 for host, size in zip(is_on_host, sizes, strict=True))
        return ir.Program(tuple(self._operations), on_device, on_host, tuple(inputs), tuple(results))

    def _new_values(self, variables: Sequence[Var]) -> list[int]:
        """Return the indices of new values, one for each variable."""
        start = len(self._avals)
        self._avals += [variable.aval for variable in variables]
        return list(range(start, len(self._avals)))

    def _inline(
        self, jaxpr: Jaxpr, consts: Sequence[int | None], inputs: Sequence[int | None], scopes: str
    ) -> list[int | None]:
        """Append a jaxpr's operations, with calls inlined, and return the indices of the jaxpr's results."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

        def index_of(atom: Var | Literal) -> int | None:
            return None if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            reads, inner_scopes = tuple(map(index_of, eqn.invars)), f"{scopes}/{eqn.source_info.name_stack}"
            name = eqn.primitive.name
            callee = callee_of(eqn) if name in _CALLS else None
            if callee is not None:
                body = open_jaxpr(callee)
                results = self._inline(body, self._new_values(body.constvars), reads, inner_scopes)
            elif name == "convert_element_type" and (known := self._known_cast(eqn, reads[0])) is not None:
                results = [known]
            else:
                results = self._new_values(eqn.outvars)
                self._operations.append(self._operation(eqn, reads, tuple(results), inner_scopes))
                if name == "convert_element_type":
                    self._casts[reads[0], str(_aval_of(eqn.outvars[0]).dtype)] = results[0]
                    if reads[0] is not None and _is_exact_cast(self._avals[reads[0]], _aval_of(eqn.outvars[0])):
                        self._narrower[results[0]] = reads[0]
            values.update(zip(eqn.outvars, results, strict=True))
        return [index_of(atom) for atom in jaxpr.outvars]

    def _known_cast(self, eqn: JaxprEqn, value: int | None) -> int | None:
        """Return an earlier value that equals the result of this cast; None if there is none.

        Compilers merge equal casts, and remove a cast to a wider dtype if a cast back follows it.
        """
        dtype = _aval_of(eqn.outvars[0]).dtype
        narrower = None if value is None else self._narrower.get(value)
        if narrower is not None and self._avals[narrower].dtype == dtype:
            return narrower
        return self._casts.get((value, str(dtype)))

    def _operation(
        self, eqn: JaxprEqn, reads: tuple[int | None, ...], writes: tuple[int, ...], scopes: str
    ) -> ir.Operation:
        name, params, scope_names = eqn.primitive.name, eqn.params, ir.split_scopes(scopes)
        transfer = self._transfer(eqn, scope_names) if name in _COLLECTIVES else None
        is_backward, flops = ir.in_backward_pass(scopes), _count_product_flops(eqn)
        operation = ir.Operation(name, reads, writes, scope_names, is_backward, flops=flops, transfer=transfer)
        if name == "scan":
            body, (consts, carry) = self._read_body(params["jaxpr"].jaxpr), count_consts_and_carry(params)
            return replace(operation, bodies=(body,), trips=params["length"], consts=consts, carry=carry)
        if name == "while":
            consts, cond_consts = params["body_nconsts"], params["cond_nconsts"]
            bodies = (self._read_body(_without_dead_code(params["body_jaxpr"].jaxpr)),)
            reads = (*reads[cond_consts:], *reads[:cond_consts])
            # Costs leave out the loops that only an uneven load enters; other loops have an unknown length.
            trips = 0 if ir.FURTHER_ROUNDS in scope_names else None
            return replace(operation, reads=reads, bodies=bodies, trips=trips, consts=consts, carry=len(writes))
        if name == "cond":
            return replace(operation, bodies=tuple(self._read_body(branch.jaxpr) for branch in params["branches"]))
        return operation

    def _read_body(self, jaxpr: Jaxpr) -> ir.Program:
        return _JaxprReader(self._axis_sizes).read(jaxpr)

    def _transfer(self, eqn: JaxprEqn, scopes: tuple[str, ...]) -> ir.Transfer | None:
        """Return the transfer of a collective; None if the collective sends nothing."""
        kind, params = _COLLECTIVES[eqn.primitive.name], eqn.params
        operands = [_byte_size(atom.aval) for atom in eqn.invars if not isinstance(atom, Literal)]
        size = ir.count_ragged_bytes(*operands) if kind == "ragged-all-to-all" else sum(operands)
        axes = as_tuple(params.get("axes", params.get("axis_name", ())))
        devices, groups = math.prod(self._axis_sizes.get(axis, 1) for axis in axes), params.get("axis_index_groups")
        if kind == "collective-permute":
            members = len(params["perm"])
            sent = size * members / devices
        else:
            members = len(groups[0]) if groups else devices
            sent = float(ir.sent_share(kind, members) * size)
        return ir.Transfer(kind, axes, members, sent, times=1, scopes=scopes) if sent else None


def _device_jaxprs(jaxpr: Jaxpr) -> list[tuple[Jaxpr, Mapping[str, int]]]:
    """Return the body of each `shard_map` in a jaxpr, with the sizes of the mesh's axes."""
    bodies = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            bodies.append((eqn.params["jaxpr"], dict(eqn.params["mesh"].shape)))
            continue
        for inner in inner_jaxprs(eqn):
            bodies += _device_jaxprs(inner)
    return bodies


def _without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr without the equations that its results do not need."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def _choose_platform(jaxpr: Jaxpr, platform: str) -> Jaxpr:
    """Replace each `platform_dependent` by a call of the branch for this platform."""

    def choose_in_param(value: Any) -> Any:
        inner = getattr(value, "jaxpr", value)
        if not hasattr(inner, "eqns"):
            return value
        chosen = _choose_platform(inner, platform)
        return chosen if type(value) is type(chosen) else value.replace(jaxpr=chosen)

    eqns = []
    for eqn in jaxpr.eqns:
        branch_platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
        if branch_platforms:
            matches = [index for index, names in enumerate(branch_platforms) if names is not None and platform in names]
            default = [index for index, names in enumerate(branch_platforms) if names is None]
            call = {"call_jaxpr": choose_in_param(eqn.params["branches"][(matches or default)[0]])}
            eqns.append(eqn.replace(primitive=closed_call_p, params=call, invars=eqn.invars[1:]))
        elif eqn.primitive.name == "cond":
            branches = tuple(map(choose_in_param, eqn.params["branches"]))
            eqns.append(eqn.replace(params=eqn.params | {"branches": branches}))
        elif eqn.primitive.name in (*_CALLS, "scan", "while"):
            eqns.append(eqn.replace(params={key: choose_in_param(value) for key, value in eqn.params.items()}))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def callee_of(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """Return the jaxpr, closed or not, that an equation calls; None if the equation calls none."""
    return next((eqn.params[key] for key in _CALLEES if key in eqn.params), None)


def open_jaxpr(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """Return a closed jaxpr without its constants; return a jaxpr that is not closed as it is."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among an equation's parameters, such as a loop's body, but not a conditional's branches."""
    values = (getattr(value, "jaxpr", value) for value in eqn.params.values())
    return [value for value in values if hasattr(value, "eqns")]


def count_consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many constants a `scan` has, and how many values it carries."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, *_ = params["ft_in"].unpack()  # JAX 0.12 and later
    return len(list(consts)), len(list(carry))


def _count_product_flops(eqn: JaxprEqn) -> float:
    """Return the floating-point operations of a matrix product or a convolution; 0 for any other equation."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(_aval_of(eqn.invars[0]).shape[dim] for dim in contracted)
    elif eqn.primitive.name == "conv_general_dilated":
        _, features, *spatial = eqn.params["dimension_numbers"].rhs_spec
        inner = math.prod(_aval_of(eqn.invars[1]).shape[dim] for dim in (features, *spatial))
    else:
        return 0.0
    return 2.0 * math.prod(_aval_of(eqn.outvars[0]).shape) * inner


def _aval_of(atom: Var | Literal) -> Aval:
    """Return the abstract value of a variable or a literal."""
    return atom.aval


def _byte_size(aval: Aval) -> int:
    """Return the bytes of a value; 0 for random keys, and for tokens, which only order operations."""
    if not hasattr(aval, "shape") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def _is_exact_cast(source: Aval, target: Aval) -> bool:
    """Return whether the target has another floating-point dtype that holds every number of the source's dtype."""
    if source.dtype == target.dtype or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (source, target)):
        return False
    narrow, wide = jnp.finfo(source.dtype), jnp.finfo(target.dtype)
    return narrow.nmant <= wide.nmant and narrow.maxexp <= wide.maxexp


_CALLS = {"pjit", "jit", "closed_call", "eval_jaxpr", "core_call", "remat", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CALLEES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# JAX's collective primitives -> names of the same collectives in HLO.
_COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "psum_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}
