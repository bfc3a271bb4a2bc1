"""Logits in chunks: of tokens, or of the vocabulary. The logits of all tokens and all ids never exist at once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from ...parallel import vary, varying_axes


def chunk_size(vocab: int) -> int:
    """Return the default number of tokens whose logits exist at once: 1024, and more for a `vocab` below 4096.

    With fewer than a thousand tokens, adding each chunk's gradient of the table costs more than the matrix products.
    """
    return max(1024, 2**22 // vocab)


def split_into_chunks(num_tokens: int, vocab: int, chunk: int | None) -> tuple[int, int]:
    """Return the number of chunks and the tokens of a chunk; the last chunk may have fewer tokens."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"cross_entropy(chunk={chunk}): a chunk holds at least one token; pass None for the default.")
    num_chunks = -(-num_tokens // (chunk_size(vocab) if chunk is None else chunk))
    return num_chunks, -(-num_tokens // num_chunks)


def sum_over_chunks(
    chunk_fn: Callable[..., Any], token_arrays: tuple, sizes: tuple[int, int], tables: PyTree = ()
) -> tuple:
    """Sum the first result of `chunk_fn` over chunks, and concatenate the second, which has one entry per token.

    `token_arrays` holds the hidden states, targets and weights of all tokens; zeros pad the last chunk. `sizes` is the
    result of `split_into_chunks`. The sums start from zeros that depend on `tables`, which `chunk_fn` reads: no buffer
    for the sums exists while the tables are cast.
    """
    (num_chunks, size), num_tokens = sizes, token_arrays[1].shape[0]
    if num_chunks == 1:
        return chunk_fn(token_arrays)
    padding = num_chunks * size - num_tokens

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x
        return padded.reshape(num_chunks, size, *x.shape[1:])

    chunks = jax.tree.map(split, token_arrays)
    shapes = jax.eval_shape(lambda chunk: chunk_fn(chunk)[0], jax.tree.map(lambda x: x[0], chunks))
    zeros = jax.tree.map(lambda x: _zeros_after((token_arrays[0], *jax.tree.leaves(tables)), x), shapes)

    def body(sums, chunk):
        summands, per_token = chunk_fn(chunk)
        return jax.tree.map(jnp.add, sums, summands), per_token

    sums, per_token = jax.lax.scan(body, zeros, chunks)
    return sums, jax.tree.map(lambda x: x.reshape(num_chunks * size, *x.shape[2:])[:num_tokens], per_token)


def _zeros_after(arrays: Sequence[Array], like: jax.ShapeDtypeStruct) -> Array:
    """Return zeros that depend on `arrays`, so that they are not allocated before the arrays exist.

    Compilers for GPUs allocate constant zeros, of a table's size, before the first layer.
    """
    axes = varying_axes(like)
    arrays = [x for x in arrays if varying_axes(x) <= axes]
    zero = sum((0 * jnp.abs(x.reshape(-1)[0].astype(like.dtype)) for x in arrays), jnp.zeros((), like.dtype))
    return vary(jnp.full(like.shape, zero), axes)


# Chunks of the vocabulary.

MAX_LOGITS = 2**25
"""Logits of a chunk of the vocabulary and a chunk of tokens that exist at once."""


def has_chunked_vocabulary(unembed: PyTree) -> bool:
    """Return whether a bound method of a module returns logits for one chunk of the vocabulary after another."""
    return bool(nn.modules(unembed, nn.ChunkedUnembedding))


def vocabulary_chunk_nats(
    unembed: Callable[..., Any],
    hidden: Float[Array, "tokens embed"],
    targets: Int[Array, "tokens"],
    chunk: int | None = None,
) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
    """Return what `token_nats` returns for all logits, from the logits of one vocabulary chunk after another.

    No device needs the whole table. The backward pass recomputes a chunk's logits. The gradients of `hidden` are summed
    over vocabulary chunks, and those of a chunk's table over tokens, in float32 at least. `unembed` must read no
    arrays beside the `nn.ChunkedUnembedding`'s.
    """
    (table,) = nn.modules(unembed, nn.ChunkedUnembedding)
    trained, static = table.parts()

    def chunk_log_sums(trained: PyTree, static: PyTree, hidden: Array) -> tuple[Array, Array]:
        """Return each token's log-normalizer over a vocabulary chunk, and its target's logit, -inf in other chunks."""
        module, ids = table.of_part(trained, static)
        axes = varying_axes(hidden) | frozenset().union(*map(varying_axes, jax.tree.leaves(trained)))
        module = vary(module, axes)
        chunk_unembed = jax.tree.map(lambda node: module if _is_chunked(node) else node, unembed, is_leaf=_is_chunked)

        @jax.checkpoint
        def token_chunk(arrays: tuple[Array, Array]) -> tuple[tuple, tuple[Array, Array]]:
            logits = nn.in_float32(chunk_unembed(vary(arrays[0], axes)))
            logits = jnp.where(ids >= 0, logits, -jnp.inf)
            peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
            log_normalizer = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1)) + peak[:, 0]
            is_target = (ids == arrays[1][:, None]) & (ids >= 0)
            target_logit = jnp.sum(jnp.where(is_target, logits, jnp.zeros_like(logits)), axis=-1)
            return (), (log_normalizer, jnp.where(jnp.any(is_target, axis=-1), target_logit, -jnp.inf))

        size = max(MAX_LOGITS // len(ids), 1) if chunk is None else chunk
        sizes = split_into_chunks(len(targets), len(ids), size)
        return sum_over_chunks(token_chunk, (hidden, targets), sizes)[1]

    def all_nats(trained: PyTree, hidden: Array) -> tuple[Array, Array]:
        return forward(trained, hidden)[0]

    def forward(trained: PyTree, hidden: Array) -> tuple[tuple[Array, Array], tuple]:
        log_normalizers, target_logits = jax.lax.map(
            lambda part: chunk_log_sums(part[0], part[1], hidden), (trained, static)
        )
        log_normalizer = jax.nn.logsumexp(log_normalizers, axis=0)
        # Only the chunk that holds the target has a finite logit for it; a target that is no id has none.
        target_logit = jnp.max(target_logits, axis=0)
        nats = jnp.where(target_logit > -jnp.inf, log_normalizer - target_logit, jnp.nan)
        return (nats, log_normalizer), (trained, hidden, log_normalizers - log_normalizer)

    def backward(residuals: tuple, cotangents: tuple[Array, Array]) -> tuple[PyTree, Array]:
        trained, hidden, log_shares = residuals
        nats_grad, log_normalizer_grad = cotangents

        def add(hidden_grad: Array, part: tuple) -> tuple[Array, PyTree]:
            trained, static, log_share = part
            _, pull_back = jax.vjp(lambda trained, hidden: chunk_log_sums(trained, static, hidden), trained, hidden)
            trained_grad, chunk_grad = pull_back(((nats_grad + log_normalizer_grad) * jnp.exp(log_share), -nats_grad))
            return hidden_grad + nn.in_float32(chunk_grad), trained_grad

        zeros = vary(jnp.zeros(hidden.shape, nn.at_least_float32(hidden.dtype)), varying_axes(hidden))
        hidden_grad, trained_grads = jax.lax.scan(add, zeros, (trained, static, log_shares))
        return trained_grads, hidden_grad.astype(hidden.dtype)

    differentiable = jax.custom_vjp(all_nats)
    differentiable.defvjp(forward, backward)
    return differentiable(trained, hidden)


def _is_chunked(node: object) -> bool:
    return isinstance(node, nn.ChunkedUnembedding)
