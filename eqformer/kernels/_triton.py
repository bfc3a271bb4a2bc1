"""Loads and stores of parts of arrays, padded to powers of two, for Pallas kernels that Triton compiles."""

import importlib
from types import ModuleType
from typing import cast, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._shapes import next_power_of_two
from ._platform import Ref


TRITON = "jax.experimental.pallas.triton"
"""Pallas's Triton backend. Once JAX removes this module, as planned, GPUs run the reference implementations."""
SMALLEST_DIM = 16
"""The smallest dim of a product on tensor cores."""
FP8_CAPABILITY = 8.9
"""Lowest compute capability of GPUs that convert E4M3 in hardware (Ada Lovelace)."""


def pallas_and_triton() -> tuple[ModuleType, ModuleType]:
    """Import and return Pallas and its Triton backend, which only programs with Triton kernels need."""
    return importlib.import_module("jax.experimental.pallas"), importlib.import_module(TRITON)


class PaddedSpan(NamedTuple):
    """`size` indices of a dim from `begin` on; the size is a power of two, and indices from `end` on are padding."""

    begin: int | Array
    size: int
    end: int | Array


def full_span(size: int) -> PaddedSpan:
    """Return the span of a whole dim, padded to the size of a dim on tensor cores."""
    return PaddedSpan(0, padded_dim(size), size)


def load_part(ref: Array | Ref, *spans: PaddedSpan) -> Array:
    """Load a part of an array, with zeros for padding."""
    _, triton = pallas_and_triton()
    return triton.load(select_part(ref, *spans), mask=is_inside(*spans), other=jnp.zeros((), ref.dtype))


def select_part(ref: Array | Ref, *spans: PaddedSpan) -> Ref:
    """Return a reference to a part of an array."""
    pl, _ = pallas_and_triton()
    return cast(Ref, ref).at[tuple(pl.ds(span.begin, span.size) for span in spans)]


def is_inside(*spans: PaddedSpan) -> Bool[Array, "..."]:
    """Return a mask for a part of an array; the mask is false at padding."""
    are_inside = [span.begin + jnp.arange(span.size, dtype=jnp.int32) < span.end for span in spans]
    return are_inside[0] if len(are_inside) == 1 else are_inside[0][:, None] & are_inside[1][None]


def padded_dim(size: int) -> int:
    """Return the size of a dim on tensor cores: a power of two, at least 16."""
    return next_power_of_two(size, least=SMALLEST_DIM)
