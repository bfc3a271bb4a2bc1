"""Attention of few queries to keys of several sources, in one softmax."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..._array_checks import checked
from .._dtype import at_least_float32
from ._reference import soft_capped, softmax_of


KeysAndValues = tuple[Float[Array, "*batch _ kv_heads head_dim"], Float[Array, "*batch _ kv_heads v_dim"]]


@checked
def attend_to_sources(
    query: Float[Array, "*batch seq heads head_dim"],
    sources: Sequence[KeysAndValues],
    visible: Bool[Array, "*batch seq kv_seq"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "*batch seq heads v_dim"]:
    """Return what `ReferenceAttention` returns for the concatenated sources; scores are concatenated instead.

    `sources` are keys and values, and `visible` says which of all keys, one source's after another's, a query sees.
    """
    heads, kv_heads = query.shape[-2], sources[0][0].shape[-2]
    exact = at_least_float32(query.dtype)
    grouped = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, query.shape[-1])
    dots = [jnp.einsum("...qkgd,...skd->...kgqs", grouped, key, preferred_element_type=exact) for key, _ in sources]
    scores = soft_capped(jnp.concatenate(dots, axis=-1) * scale, softcap)
    probabilities = softmax_of(scores, visible).astype(sources[0][1].dtype)
    output, start = jnp.zeros((), exact), 0
    for _, value in sources:
        visible_weights = probabilities[..., start : start + value.shape[-3]]
        output += jnp.einsum("...kgqs,...skd->...kgqd", visible_weights, value, preferred_element_type=exact)
        start += value.shape[-3]
    return jnp.moveaxis(output, -2, -4).reshape(*query.shape[:-1], -1).astype(query.dtype)
