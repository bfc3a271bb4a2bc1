"""Shared parts of chunked recurrences: cutting rows into chunks, decay factors within a chunk, masks inside a layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def split_chunks(x: Array, size: int, mode: str = "constant") -> Array:
    """Split dim 1 (`seq`) into chunks of `size` tokens and put the chunk number first; pad the last chunk by `mode`."""
    padded = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    return jnp.moveaxis(padded.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


def join_chunks(
    x: Float[Array, "n rows heads chunk v_dim"], batch: Sequence[int], seq: int
) -> Float[Array, "*batch seq heads v_dim"]:
    """Join chunks to whole rows and drop the padding behind `seq`."""
    rows = jnp.moveaxis(jnp.swapaxes(x, 2, 3), 0, 1).reshape(*batch, -1, x.shape[2], x.shape[-1])
    return jax.lax.slice_in_dim(rows, 0, seq, axis=len(batch))


def decay_factors(
    log_decay: Float[Array, "n batch heads chunk"], documents: Int[Array, "n batch chunk"]
) -> tuple[
    Float[Array, "n batch heads chunk chunk"],
    Float[Array, "n batch heads chunk"],
    Float[Array, "n batch heads chunk"],
    Float[Array, "n batch heads"],
]:
    """Return the decay factors of a chunk.

    In order: token to later token, initial state to token, token to chunk end, initial state to chunk end. A factor
    across a document boundary is zero.
    """
    total = jnp.cumsum(log_decay, axis=-1)
    visible, continues = same_document(documents)
    # Mask before the exponential: exp of a masked difference may overflow, and its gradient would be NaN.
    token_to_token = jnp.exp(mask_in_layer(visible, total[..., :, None] - total[..., None, :], total, -jnp.inf))
    state_to_token = mask_in_layer(continues, jnp.exp(total), total)
    return token_to_token, state_to_token, token_to_token[..., -1, :], state_to_token[..., -1]


def same_document(
    documents: Int[Array, "n batch chunk"],
) -> tuple[Bool[Array, "n batch 1 chunk chunk"], Bool[Array, "n batch 1 chunk"]]:
    """Return which earlier tokens of the chunk share a token's document, and whether the document began before it."""
    earlier = jnp.tril(jnp.ones((documents.shape[-1],) * 2, bool))
    visible = (earlier & (documents[..., :, None] == documents[..., None, :]))[:, :, None]
    last_before = jnp.concatenate([jnp.zeros_like(documents[:1, :, -1]), documents[:-1, :, -1]])
    return visible, (documents == last_before[..., None])[:, :, None]


def einsum(pattern: str, left: Array, right: Array) -> Array:
    """Contract two arrays, accumulating in the dtype of `left`."""
    return jnp.einsum(pattern, left, right, preferred_element_type=left.dtype)


def mask_in_layer(
    mask: Bool[Array, "..."], x: Float[Array, "..."], layer_array: Float[Array, "..."], fill: float = 0
) -> Float[Array, "..."]:
    """Return `x` where the mask holds and `fill` elsewhere; the mask may broadcast to the shape of `x`.

    JAX hoists loop-invariant values out of a scan over layers, so it would broadcast the mask and `fill` to the shape
    of `x` once and hand both to every iteration. A barrier ties them to `layer_array`, any small array that differs
    from layer to layer, and the backward pass keeps the mask in its own shape. Only reverse mode is defined (no
    `jax.jvp`).
    """
    barrier = jax.lax.optimization_barrier
    mask, filler, _ = barrier((mask, jnp.asarray(fill, x.dtype), jax.lax.stop_gradient(layer_array)))
    return _where(mask, x, filler)


@jax.custom_vjp
def _where(mask: Array, x: Array, fill: Array) -> Array:
    return jnp.where(mask, x, fill)


_where.defvjp(
    lambda mask, x, fill: (_where(mask, x, fill), mask),
    lambda mask, gradient: (None, jnp.where(mask, gradient, 0), None),
)


def read_before_write(state: Array, *overwritten: Array) -> list[Array]:
    """Return the arrays unchanged, and make the compiler read `overwritten` before the loop writes to their buffers."""
    return list(jax.lax.optimization_barrier((state, *overwritten)))
