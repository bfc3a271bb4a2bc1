"""Tables that logits read in fewer bits than they are held in: they are cast once, not once for each chunk.

A table that is held, or has its gradient, in float32 is multiplied in bfloat16. In a loop over chunks, XLA for GPUs
carries the wide table along and casts all of it in each turn.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped


def read_dtypes(program: Any, tables: Sequence[Any]) -> list[np.dtype | None]:
    """For each variable of a jaxpr the dtype to which it is cast wherever it is read, if that has fewer bits."""
    return [_if_narrower(_read_as(program, table), table.aval.dtype) for table in tables]


def cast(tables: Sequence[Array], dtypes: Sequence[np.dtype | None]) -> list[Array | None]:
    """The tables of which `read_dtypes` knows a dtype, in that dtype; None for the others."""
    return [None if dtype is None else table.astype(dtype) for table, dtype in zip(tables, dtypes, strict=True)]


def read_from(values: Sequence[Array | None], tables: Sequence[Array]) -> list[Array]:
    """The tables, with the values of those that were cast and all gradients as wide as the tables."""
    return [table if value is None else _valued(value, table) for value, table in zip(values, tables, strict=True)]


@jax.custom_vjp
def _valued(value: Shaped[Array, "..."], table: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return value.astype(table.dtype)


_valued.defvjp(lambda value, table: (value.astype(table.dtype), None), lambda _, gradient: (None, gradient))


def _read_as(program: Any, variable: Any) -> set[np.dtype]:
    """The dtypes that a variable of a jaxpr is cast to; its own among them where it is read as it is."""
    found = {variable.aval.dtype for one in program.outvars if one is variable}
    for equation in program.eqns:
        for place, one in enumerate(equation.invars):
            if one is not variable:
                continue
            inner = [getattr(x, "jaxpr", x) for x in equation.params.values() if hasattr(x, "eqns")]
            if equation.primitive.name == "convert_element_type":
                found.add(np.dtype(equation.params["new_dtype"]))
            elif len(inner) == 1 and len(inner[0].invars) == len(equation.invars):
                found |= _read_as(inner[0], inner[0].invars[place])
            else:
                found.add(variable.aval.dtype)
    return found


def _if_narrower(found: set[np.dtype], than: np.dtype) -> np.dtype | None:
    """The one dtype that was found, if it is of floating-point numbers of fewer bits."""
    (one, *others) = found or {than}
    is_narrower = jnp.issubdtype(one, jnp.floating) and jnp.finfo(one).bits < jnp.finfo(than).bits
    return one if is_narrower and not others else None
