"""Chunks of tokens, whose logits exist one chunk after another."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..parallel import vary, varying_axes


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
