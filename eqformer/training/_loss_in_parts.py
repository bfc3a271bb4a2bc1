"""Nats of tokens from logits of a part of the vocabulary at a time, as where no device has its table whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from ..parallel import vary, varying_axes
from ._chunks import chunks_of, sum_over_chunks


LOGITS = 2**25  # of a part and a chunk of tokens


def in_parts(unembed: PyTree) -> bool:
    """Whether a bound method of a module gives logits in parts."""
    return bool(nn.modules(unembed, nn.ChunkedUnembedding))


def nats_in_parts(
    unembed: Callable[..., Any],
    hidden: Float[Array, "tokens embed"],
    targets: Int[Array, "tokens"],
    chunk: int | None = None,
) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
    """What `token_nats` gives of all logits, from those of one part after another.

    The backward pass computes a part's logits again. The gradients of `hidden` are summed over parts, and those of a
    part's table over tokens, in float32 at least. All else that `unembed` reads must be no array.
    """
    (table,) = nn.modules(unembed, nn.ChunkedUnembedding)
    moving, rest = table.parts()

    def of_part(moving: PyTree, rest: PyTree, hidden: Array) -> tuple[Array, Array]:
        module, ids = table.of_part(moving, rest)
        axes = varying_axes(hidden) | frozenset().union(*map(varying_axes, jax.tree.leaves(moving)))
        module = vary(module, axes)
        one = jax.tree.map(lambda node: module if _is(node) else node, unembed, is_leaf=_is)

        @jax.checkpoint
        def of_chunk(piece: tuple[Array, Array]) -> tuple[tuple, tuple[Array, Array]]:
            logits = nn.in_float32(one(vary(piece[0], axes)))
            logits = jnp.where(ids >= 0, logits, -jnp.inf)
            peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
            log_normaliser = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1)) + peak[:, 0]
            is_target = (ids == piece[1][:, None]) & (ids >= 0)
            found = jnp.sum(jnp.where(is_target, logits, jnp.zeros_like(logits)), axis=-1)
            return (), (log_normaliser, jnp.where(jnp.any(is_target, axis=-1), found, -jnp.inf))

        size = max(LOGITS // len(ids), 1) if chunk is None else chunk
        return sum_over_chunks(of_chunk, (hidden, targets), chunks_of(len(targets), len(ids), size))[1]

    def of_all(moving: PyTree, hidden: Array) -> tuple[Array, Array]:
        return forward(moving, hidden)[0]

    def forward(moving: PyTree, hidden: Array) -> tuple[tuple[Array, Array], tuple]:
        normalisers, found = jax.lax.map(lambda part: of_part(part[0], part[1], hidden), (moving, rest))
        total = jax.nn.logsumexp(normalisers, axis=0)
        of_target = jnp.max(found, axis=0)  # of the one part that has the target; of no id there is none
        nats = jnp.where(of_target > -jnp.inf, total - of_target, jnp.nan)
        return (nats, total), (moving, hidden, normalisers - total)

    def backward(saved: tuple, gradients: tuple[Array, Array]) -> tuple[PyTree, Array]:
        moving, hidden, shares = saved
        of_nats, of_normaliser = gradients

        def add(sums: Array, part: tuple) -> tuple[Array, PyTree]:
            moving, rest, share = part
            _, pull = jax.vjp(lambda moving, hidden: of_part(moving, rest, hidden), moving, hidden)
            of_moving, of_hidden = pull(((of_nats + of_normaliser) * jnp.exp(share), -of_nats))
            return sums + nn.in_float32(of_hidden), of_moving

        start = vary(jnp.zeros(hidden.shape, nn.at_least_float32(hidden.dtype)), varying_axes(hidden))
        of_hidden, of_moving = jax.lax.scan(add, start, (moving, rest, shares))
        return of_moving, of_hidden.astype(hidden.dtype)

    differentiable = jax.custom_vjp(of_all)
    differentiable.defvjp(forward, backward)
    return differentiable(moving, hidden)


def _is(node: object) -> bool:
    return isinstance(node, nn.ChunkedUnembedding)
