"""What recurrences by chunks of tokens share: how chunks are cut and put together, and how states fade in them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._masked import masked


def fading(decay: Float[Array, "n batch heads chunk"], owners: Int[Array, "n batch chunk"]) -> tuple[Array, ...]:
    """What is left of a token at a later one of its chunk, of the state before it at each token, of each token at its
    end, and of the state there; nothing across documents.
    """
    total, (visible, goes_on) = jnp.cumsum(decay, axis=-1), of_one_document(owners)
    # Masked before the exponential, which may be infinite, and its gradient NaN.
    within = jnp.exp(masked(visible, total[..., :, None] - total[..., None, :], total, -jnp.inf))
    passing = masked(goes_on, jnp.exp(total), total)
    return within, passing, within[..., -1, :], passing[..., -1]


def of_one_document(
    owners: Int[Array, "n batch chunk"],
) -> tuple[Bool[Array, "n batch 1 chunk chunk"], Bool[Array, "n batch 1 chunk"]]:
    """Which earlier tokens of its chunk are of a token's document, and whether that had begun before the chunk."""
    earlier = jnp.tril(jnp.ones((owners.shape[-1],) * 2, bool))
    visible = (earlier & (owners[..., :, None] == owners[..., None, :]))[:, :, None]
    before = jnp.concatenate([jnp.zeros_like(owners[:1, :, -1]), owners[:-1, :, -1]])
    return visible, (owners == before[..., None])[:, :, None]


def cut(x: Array, size: int, mode: str = "constant") -> Array:
    """Chunks of tokens, counted by a new first dim."""
    filled = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    return jnp.moveaxis(filled.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


def put_together(x: Float[Array, "n rows heads chunk v_dim"], batch: Sequence[int], seq: int) -> Array:
    """All rows' tokens, of shape `*batch seq heads v_dim`, from chunks; those beyond `seq` are left out."""
    rows = jnp.moveaxis(jnp.swapaxes(x, 2, 3), 0, 1).reshape(*batch, -1, x.shape[2], x.shape[-1])
    return jax.lax.slice_in_dim(rows, 0, seq, axis=len(batch))


def product(pattern: str, one: Array, other: Array) -> Array:
    """An einsum in the dtype of `one`."""
    return jnp.einsum(pattern, one, other, preferred_element_type=one.dtype)
