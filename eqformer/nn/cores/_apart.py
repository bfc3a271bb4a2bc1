"""Attention of few queries to keys that stand in several arrays, in one softmax."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._dtype import at_least_float32
from ._core import check_heads, soft_capped, softmax_of


Piece = tuple[Float[Array, "*batch _ kv_heads head_dim"], Float[Array, "*batch _ kv_heads v_dim"]]


def attend_apart(
    query: Float[Array, "*batch seq heads head_dim"],
    pieces: Sequence[Piece],
    visible: Bool[Array, "*batch seq kv_seq"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "*batch seq heads v_dim"]:
    """What `ReferenceCore` gives of keys and values that are put together, which they are not: scores are.

    `pieces` are keys and values, and `visible` says which of all keys, one piece's after another's, a query sees.
    """
    heads, kv_heads = check_heads(query, pieces[0][0])
    exact = at_least_float32(query.dtype)
    grouped = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, query.shape[-1])
    dots = [jnp.einsum("...qkgd,...skd->...kgqs", grouped, key, preferred_element_type=exact) for key, _ in pieces]
    scores = soft_capped(jnp.concatenate(dots, axis=-1) * scale, softcap)
    probabilities = softmax_of(scores, visible).astype(pieces[0][1].dtype)
    output, start = jnp.zeros((), exact), 0
    for _, value in pieces:
        own = probabilities[..., start : start + value.shape[-3]]
        output += jnp.einsum("...kgqs,...skd->...kgqd", own, value, preferred_element_type=exact)
        start += value.shape[-3]
    return jnp.moveaxis(output, -2, -4).reshape(*query.shape[:-1], -1).astype(query.dtype)
