"""How states fade in chunks of tokens where each channel has a decay of its own."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._chunks import of_one_document, product
from ._masked import masked


BLOCK = 8  # tokens that are taken in pairs; of two blocks, or more, the pairs are a product


def fading_by_channel(
    decay: Float[Array, "n batch heads chunk head_dim"], owners: Int[Array, "n batch chunk"]
) -> tuple[Callable[[Array, Array], Array], Array, Array, Array]:
    """A function that gives the products of two arrays' tokens as they have faded from one to the other; what is left
    of the state before a chunk at each token, of each token at its end, and of the state there.

    All by channel, and nothing across documents.
    """
    total, (visible, goes_on) = jnp.cumsum(decay, axis=-2), of_one_document(owners)
    passing = masked(goes_on[..., None], jnp.exp(total), total)
    ending = masked(visible[..., -1, :, None], jnp.exp(total[..., -1:, :] - total), total)
    # Computed again in the backward pass, as the blocks are much larger than what they are made of.
    pairs = jax.checkpoint(_pairs, prevent_cse=False)
    faded = lambda one, other: masked(visible, pairs(one, other, total), total)
    return faded, passing, ending, passing[..., -1, :]


def _pairs(
    one: Float[Array, "*n chunk head_dim"],
    other: Float[Array, "*n chunk head_dim"],
    total: Float[Array, "*n chunk head_dim"],
) -> Float[Array, "*n chunk chunk"]:
    """`sum_d one_id other_jd e^(total_id - total_jd)` for tokens `j <= i`; elsewhere nothing that is meant.

    No exponent is above 0. Between a token and those of earlier blocks it is cut in two at the token's block, so that
    the sum is a product of matrices; within a block it is taken pair by pair.
    """
    chunk, head_dim = one.shape[-2:]
    block = math.gcd(chunk, BLOCK)
    blocks = lambda x: x.reshape(*x.shape[:-2], chunk // block, block, head_dim)
    number = jnp.arange(chunk // block, dtype=jnp.int32)
    is_before = (jnp.arange(chunk, dtype=jnp.int32) // block < number[:, None])[..., None]  # of blocks by tokens
    first = blocks(total)[..., :1, :]
    late = blocks(one) * jnp.exp(blocks(total) - first)
    gap = masked(is_before, first - total[..., None, :, :], total)
    early = masked(is_before, other[..., None, :, :] * jnp.exp(gap), total)
    apart = product("...bid,...bjd->...bij", late, early).reshape(*one.shape[:-1], chunk)
    is_earlier = jnp.tril(jnp.ones((block, block), bool))[..., None]
    gap = masked(is_earlier, blocks(total)[..., :, None, :] - blocks(total)[..., None, :, :], total)
    near = jnp.sum(blocks(one)[..., :, None, :] * blocks(other)[..., None, :, :] * jnp.exp(gap), axis=-1)
    same = (number[:, None] == number).astype(near.dtype)
    return apart + jnp.einsum("...bij,bc->...bicj", near, same).reshape(apart.shape)
