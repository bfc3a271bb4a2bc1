"""A traced program (jaxpr) as lines in order, with calls written out and what nothing needs left out."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import partial_eval


Aval = Any  # the shape and dtype of a value, as JAX's tracing knows it


class Line(NamedTuple):
    """An operation, the numbers of the values that it reads (None for constants) and writes, and its scopes."""

    name: str
    params: dict[str, Any]
    reads: tuple[int | None, ...]
    writes: tuple[int, ...]
    scopes: str


class Lines:
    """A program's lines; values are numbers, and `avals` has the shape of each."""

    def __init__(self, jaxpr: Any):
        self.lines: list[Line] = []
        self.avals: list[Aval] = []
        self._casts: dict[tuple[int, str], int] = {}
        self._widened: dict[int, int] = {}  # what is cast to more bits, and what it is cast from
        self.given = [self._fresh(v.aval) for v in jaxpr.invars]
        self.results = self._written_out(jaxpr, [self._fresh(v.aval) for v in jaxpr.constvars], self.given, "")

    def size(self, value: int) -> int:
        """A value's bytes on the device; of random keys and tokens none."""
        return 0 if _is_on_host(self.avals[value]) else _size(self.avals[value])

    def _fresh(self, aval: Aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _written_out(
        self, jaxpr: Any, consts: Sequence[int | None], given: Sequence[int | None], scopes: str
    ) -> list[int | None]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given)))
        read = lambda atom: None if isinstance(atom, Literal) else values[atom]
        for eqn in jaxpr.eqns:
            reads, stands = tuple(map(read, eqn.invars)), f"{scopes}/{eqn.source_info.name_stack}"
            name = eqn.primitive.name
            inner = next((eqn.params[key] for key in _CALLS if name in _CALLED and key in eqn.params), None)
            if inner is not None:
                closed = getattr(inner, "jaxpr", inner)
                own = [self._fresh(v.aval) for v in closed.constvars]
                results = self._written_out(closed, own, reads, stands)
            elif name == "convert_element_type" and (kept := self._cast_before(eqn, reads)) is not None:
                results = [kept]
            else:
                results = [self._fresh(v.aval) for v in eqn.outvars]
                self.lines.append(Line(name, eqn.params, reads, tuple(results), stands))
                if name == "convert_element_type":
                    self._casts[_cast(eqn, reads)] = results[0]
                    if reads[0] is not None and _is_exact(self.avals[reads[0]].dtype, self.avals[results[0]].dtype):
                        self._widened[results[0]] = reads[0]
            values.update(zip(eqn.outvars, results))
        return [read(atom) for atom in jaxpr.outvars]

    def _cast_before(self, eqn: Any, reads: tuple[int | None, ...]) -> int | None:
        """What a cast gives, if it is there: compilers make equal casts once, and none that is cast back."""
        source = None if reads[0] is None else self._widened.get(reads[0])
        if source is not None and self.avals[source].dtype == eqn.outvars[0].aval.dtype:
            return source
        return self._casts.get(_cast(eqn, reads))


def carry_of(line: Line) -> tuple[int, int]:
    """Where the carry of a `scan` begins among what it reads, and how long it is."""
    if "num_carry" in line.params:
        return line.params["num_consts"], line.params["num_carry"]
    consts, carry, *_ = line.params["ft_in"].unpack()  # as JAX says it from 0.12 on
    return len(list(consts)), len(list(carry))


def host_bytes(jaxpr: Any) -> int:
    """Bytes that a program's loops leave in the memory of the device's host for what comes after them."""
    program, kept, inside = Lines(jaxpr), 0, [0]
    for line in program.lines:
        if line.name == "scan":
            kept += sum(_size(program.avals[value]) for value in line.writes if _is_on_host(program.avals[value]))
        key = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}.get(line.name)
        bodies = () if key is None else line.params[key]
        inside += [host_bytes(one.jaxpr) for one in (bodies if isinstance(bodies, tuple) else (bodies,))]
    return kept + max(inside)


def needed(jaxpr: Any) -> Any:
    """The program without what its results do not need."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def of_platform(jaxpr: Any, platform: str) -> Any:
    """The program with each choice by the platform written as a call of its own branch."""

    def inside(value: Any) -> Any:
        inner = getattr(value, "jaxpr", value)
        if not hasattr(inner, "eqns"):
            return value
        made = of_platform(inner, platform)
        return made if type(value) is type(made) else value.replace(jaxpr=made)

    eqns = []
    for eqn in jaxpr.eqns:
        named = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
        if named:
            own = [number for number, some in enumerate(named) if some is not None and platform in some]
            own = own or [number for number, some in enumerate(named) if some is None]
            call = {"call_jaxpr": inside(eqn.params["branches"][own[0]])}
            eqns.append(eqn.replace(primitive=closed_call_p, params=call, invars=eqn.invars[1:]))
        elif eqn.primitive.name == "cond":
            eqns.append(eqn.replace(params=eqn.params | {"branches": tuple(map(inside, eqn.params["branches"]))}))
        elif eqn.primitive.name in (*_CALLED, "scan", "while"):
            eqns.append(eqn.replace(params={key: inside(value) for key, value in eqn.params.items()}))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def per_device(jaxpr: Any) -> list[Any]:
    """The programs that run on each device, inside of `shard_map`."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            found.append(eqn.params["jaxpr"])
            continue
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += per_device(inner) if hasattr(inner, "eqns") else []
    return found


def _size(aval: Aval) -> int:
    if not hasattr(aval, "shape") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def _is_on_host(aval: Aval) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _is_exact(dtype: Any, wider: Any) -> bool:
    """Whether a dtype holds all floating-point numbers of another that has fewer bits."""
    if dtype == wider or not all(jnp.issubdtype(each, jnp.floating) for each in (dtype, wider)):
        return False
    own, other = jnp.finfo(dtype), jnp.finfo(wider)
    return own.nmant <= other.nmant and own.maxexp <= other.maxexp


def _cast(eqn: Any, reads: tuple[int | None, ...]) -> tuple[int, str]:
    return -1 if reads[0] is None else reads[0], str(eqn.outvars[0].aval.dtype)


_CALLED = {"pjit", "jit", "closed_call", "eval_jaxpr", "core_call", "remat", "remat2", "checkpoint"}
_CALLED |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
