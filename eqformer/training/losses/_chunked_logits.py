"""Chunks of tokens, whose logits exist one chunk after another."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from ...parallel import vary, varying_axes


def chunk_size(vocab: int) -> int:
    """The default number of tokens whose logits exist at once: 1024, and more where `vocab` is below 4096.

    With fewer than a thousand tokens, adding each chunk's gradient of the table costs more than the products.
    """
    return max(1024, 2**22 // vocab)


def chunks_of(num_tokens: int, vocab: int, chunk: int | None) -> tuple[int, int]:
    """How many chunks there are, and the tokens of each, of which the last may have fewer."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"cross_entropy(chunk={chunk}): a chunk holds at least one token; pass None for the default.")
    number = -(-num_tokens // (chunk_size(vocab) if chunk is None else chunk))
    return number, -(-num_tokens // number)


def sum_over_chunks(of_chunk: Callable, flat: tuple, sizes: tuple[int, int], tables: PyTree = ()) -> tuple:
    """Sums the first result of `of_chunk` over chunks and concatenates the second, which has one entry a token.

    `flat` holds the hidden states, targets and weights of all tokens; those that pad the last chunk are zeros. Sums
    begin when there are the `tables` that `of_chunk` reads: while they are cast, there are no sums of their size.
    """
    (number, size), num_tokens = sizes, flat[1].shape[0]
    if number == 1:
        return of_chunk(flat)
    spare = number * size - num_tokens

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1)) if spare else x
        return padded.reshape(number, size, *x.shape[1:])

    pieces = jax.tree.map(split, flat)
    shapes = jax.eval_shape(lambda piece: of_chunk(piece)[0], jax.tree.map(lambda x: x[0], pieces))
    start = jax.tree.map(lambda x: _zeros_behind((flat[0], *jax.tree.leaves(tables)), x), shapes)

    def body(sums, piece):
        more, each = of_chunk(piece)
        return jax.tree.map(jnp.add, sums, more), each

    sums, each = jax.lax.scan(body, start, pieces)
    return sums, jax.tree.map(lambda x: x.reshape(number * size, *x.shape[2:])[:num_tokens], each)


def _zeros_behind(given: Sequence[Array], like: jax.ShapeDtypeStruct) -> Array:
    """Zeros that are made once there is what is given; others, a table's too, GPUs make before the first layer."""
    axes = varying_axes(like)
    given = [x for x in given if varying_axes(x) <= axes]
    zero = sum((0 * jnp.abs(x.reshape(-1)[0].astype(like.dtype)) for x in given), jnp.zeros((), like.dtype))
    return vary(jnp.full(like.shape, zero), axes)


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
