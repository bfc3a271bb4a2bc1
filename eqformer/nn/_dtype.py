"""The dtype of reductions, and dtypes by their names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..kernels import at_least_float32


def in_float32(tree: PyTree) -> PyTree:
    """The tree with its floating-point arrays, of JAX or NumPy, in float32 at least: as sums and moments are kept."""
    return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)) if _is_float(x) else x, tree)


def in_dtypes_of(tree: PyTree, other: PyTree) -> PyTree:
    """The tree with its floating-point arrays in the dtypes that they have in another of the same structure."""
    return jax.tree.map(lambda x, its: x.astype(its.dtype) if _is_float(x) else x, tree, other)


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


def lossless_dtype(*dtypes: DTypeLike) -> np.dtype:
    """The narrowest floating-point dtype in which no number of these dtypes loses anything.

    float32 for bfloat16 beside float16, of which neither holds the other and for which NumPy has no answer.
    """
    given = sorted({jnp.dtype(dtype) for dtype in dtypes}, key=lambda dtype: dtype.itemsize)
    wider = [jnp.dtype(name) for name in ("float32", "float64")]
    return next(dtype for dtype in (*given, *wider) if all(_holds(dtype, other) for other in given))


def _holds(dtype: np.dtype, other: np.dtype) -> bool:
    own, its = jnp.finfo(dtype), jnp.finfo(other)
    return own.nmant >= its.nmant and own.maxexp >= its.maxexp and own.minexp <= its.minexp


def float_dtype(dtype: object, call: str) -> str:
    """The full name of a dtype that weights and computation can have, of a short one (`bf16`, `half`) or of a dtype.

    Raises a `ValueError` that begins with `call` for any other, and for float64 where JAX has it switched off.
    """
    name = dtype.strip().lower().rpartition(".")[2] if isinstance(dtype, str) else _name(dtype)
    full = next((full for full, short in _FLOATS.items() if name == full or name in short), None)
    if full is None:
        shown = repr(dtype) if isinstance(dtype, str) else name
        known = ", ".join(f"{full} ({short[0]})" for full, short in _FLOATS.items())
        raise ValueError(f"{call}: {shown} is no floating-point dtype of weights; give one of {known}.")
    if full == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{call}: JAX has float64 only where JAX_ENABLE_X64=1 is set before it starts; set it.")
    return full


def _name(dtype: Any) -> str:
    try:
        return "None" if dtype is None else jnp.dtype(dtype).name  # to NumPy None is float64
    except TypeError:
        return str(dtype)


# By their full names, their other names; messages give the first.
_FLOATS = {
    "float32": ("fp32", "f32", "float", "single"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
    "float64": ("fp64", "f64", "double"),
}
