"""Calls of attention for the tests of context parallelism, and functions that run and compare them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haste import FAST

from eqformer import kernels, nn


METHODS = ["ring", "gather", "heads"]
BATCH, SEQ = 2, 32


class Case(NamedTuple):
    """A call of attention: its mask, its core and its sizes.

    Head counts are even, for tests that split the heads over an axis `tensor` of two devices.
    """

    mask: nn.Mask = nn.causal()
    core: Any = kernels.BlockwiseAttention(block=3)
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 4
    v_dim: int = 4
    softcap: float | None = None
    has_sinks: bool = False
    is_packed: bool = False
    is_padded: bool = False
    is_noisy: bool = False


class Unknown(kernels.Operation):
    """A user's own attention core, which declares nothing about itself."""

    def supports(self, call):
        return None

    def __call__(self, call):
        raise NotImplementedError


CASES = {
    "causal": Case(core=kernels.DotProductAttention()),
    "window": Case(mask=nn.sliding_window(7), kv_heads=4),
    "chunks": Case(mask=nn.chunked(6), v_dim=6),
    "full": Case(mask=nn.full(), core=kernels.ReferenceAttention(), is_padded=True),
    "documents": Case(kv_heads=2, is_packed=True, is_padded=True),
    "documents, any core": Case(core=kernels.DotProductAttention(), is_packed=True, mask=nn.sliding_window(5)),
    "noisy blocks": Case(nn.block_causal(3), kv_heads=4, is_packed=True, is_padded=True, is_noisy=True),
    "softcap": Case(core=kernels.BlockwiseAttention(block=8), head_dim=6, v_dim=2, softcap=0.7),
    "sinks": Case(kv_heads=4, has_sinks=True, mask=nn.Mask(is_causal=False, window=9)),
    "all at once": Case(
        nn.sliding_window(6),
        kernels.ReferenceAttention(),
        8,
        2,
        6,
        4,
        0.9,
        has_sinks=True,
        is_packed=True,
        is_padded=True,
    ),
}


def drawn(case: Case, dtype: str = "float64") -> tuple[tuple, nn.Tokens, jax.Array]:
    """Return `(query, key, value, sinks)`, the tokens of whole rows in reading order, and the output's cotangent."""
    draw = np.random.default_rng(3)
    heads = (case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.v_dim)
    arrays = [draw.normal(size=(BATCH, SEQ, *last)) for last in heads]
    sinks = draw.normal(size=case.heads) if case.has_sinks else None
    direction = draw.normal(size=(BATCH, SEQ, case.heads, case.v_dim))
    starts = np.array([[0, 5, 19], [0, 16, 17]]) if case.is_packed else np.zeros((BATCH, 1), int)
    segments = (np.arange(SEQ)[None, None] >= starts[:, :, None]).sum(1) - 1
    positions = np.arange(SEQ)[None] - np.take_along_axis(starts, segments, 1)
    if case.is_noisy:
        positions, segments = np.tile(positions[:, : SEQ // 2], 2), segments[:, : SEQ // 2]
        segments = np.hstack([~segments, segments])
    if case.is_padded:
        positions[0, -3:], positions[1, -9:] = -1, -1
    direction *= (positions >= 0)[:, :, None, None]
    tokens = nn.Tokens(jnp.asarray(positions), jnp.asarray(segments) if case.is_packed else None)
    rounded = lambda x: jnp.asarray(np.asarray(x, jnp.dtype(dtype)))
    return tuple(None if x is None else rounded(x) for x in (*arrays, sinks)), tokens, rounded(direction)


def call(core, case: Case, arrays: tuple, tokens: nn.Tokens, direction: jax.Array):
    """Return the output, with 0 for padding, and the gradients of the sum of `output * direction`."""

    def product(arrays: tuple) -> tuple[jax.Array, jax.Array]:
        query, key, value, sinks = arrays
        given: dict[str, Any] = {"mask": case.mask, "scale": 0.6, "softcap": case.softcap, "sinks": sinks}
        output = core(kernels.AttentionCall(query, key, value, tokens=tokens, **given))
        return jnp.sum(output * direction), output * (tokens.positions >= 0).astype(output.dtype)[..., None, None]

    gradients, output = jax.grad(product, has_aux=True)(arrays)
    return output, gradients


def compiled(fn, *args):
    """Return `fn(*args)`, from a program compiled with little optimisation: tests look only at the numbers."""
    return compiled_for(fn, *args)(*args)


def compiled_for(fn, *args):
    """Compile a function for arguments whose arrays have the shapes and dtypes of these."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    lowered = jax.jit(lambda arrays: fn(*eqx.combine(arrays, rest))).lower(arrays)
    program = lowered.compile(compiler_options=FAST)
    return lambda *args: program(eqx.filter(args, eqx.is_array))


def distance(got, want) -> float:
    """Return the largest of the arrays' differences; each is relative to the norm of the expected array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in wide)
