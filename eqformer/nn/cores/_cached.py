"""Attention of a row's newest token to what a cache holds, which reads keys and values once on NVIDIA GPUs.

In plain XLA the scores of all slots stand in main memory in float32, and a softmax reads them three times: where many
heads share a key head, as the eight of Llama 3 70B on each of eight devices, that is a sixth of what a step moves. A
kernel (`_cached_kernel.py`) keeps them where they are computed. What it cannot compute is `ReferenceCore`'s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from .._pallas import compilers
from .._tokens import Tokens
from ..attention._mask import Chosen, Mask
from ._cached_kernel import attend_by_kernel, kernel_has, Read, Rules
from ._core import ReferenceCore, Rotated


def attend_cached(
    query: Float[Array, "*batch seq heads head_dim"],
    key: Num[Array, "*batch kv_seq kv_heads head_dim"],
    value: Num[Array, "*batch kv_seq kv_heads v_dim"] | None,
    *,
    mask: Mask,
    tokens: Tokens,
    kv_tokens: Tokens,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    bias: Float[Array, "*#batch heads seq kv_seq"] | None = None,
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
    rotated: Rotated | None = None,
) -> Float[Array, "*batch seq heads _"]:
    """What `ReferenceCore` gives of few queries; of one a row, in 16 bits, by a kernel in programs for NVIDIA GPUs.

    Args:
        query: The queries.
        key: The keys; of 8 bits, with scales.
        value: The values; None: the keys with their scales, which are read once, as latents are.
        mask: Which keys a query may see.
        tokens: The positions and segments of the queries.
        kv_tokens: Those of the keys.
        scale: What the scores are multiplied by.
        softcap: The bound of the scores; None: there is none.
        sinks: A score of each head that joins its softmax.
        bias: What is added to the scores, which the kernel has not; None: nothing.
        key_scales: What each key is to be multiplied by; None: nothing.
        value_scales: What each value is to be multiplied by; None: nothing.
        rotated: Further channels of queries and keys, in arrays of their own; None: there are none.
    """
    read = Read(query, key, value, sinks, key_scales, value_scales, rotated)
    seen = mask(tokens, kv_tokens)
    if "cuda" not in compilers() or query.shape[-3] != 1 or bias is not None or not kernel_has(read):
        return _plainly(Rules(scale, softcap), read, seen, bias)
    visible = jnp.broadcast_to(seen, (*query.shape[:-3], 1, key.shape[-3]))
    return _attend(Rules(scale, softcap), read, visible)


def _plainly(rules: Rules, read: Read, visible: Array, bias: Array | None = None) -> Array:
    query, key, value, sinks, key_scales, value_scales, rotated = read
    value, value_scales = (key, key_scales) if value is None else (value, value_scales)
    wide = lambda x: x.astype(query.dtype)
    nowhere = Tokens(jnp.zeros((*query.shape[:-3], query.shape[-3]), jnp.int32))  # the mask is made
    given: dict[str, Any] = {"mask": Chosen(visible), "tokens": nowhere, "scale": rules.scale, "softcap": rules.softcap}
    given |= {"sinks": sinks, "bias": bias, "key_scales": key_scales, "value_scales": value_scales}
    given["rotated"] = None if rotated is None else rotated._replace(key=wide(rotated.key))
    return ReferenceCore()(query, wide(key), wide(value), **given)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(rules: Rules, read: Read, visible: Array) -> Array:
    by_kernel, plainly = (functools.partial(way, rules) for way in (attend_by_kernel, _plainly))
    return jax.lax.platform_dependent(read, visible, cuda=by_kernel, default=plainly)


# The kernel has no derivative, so that gradients are those of the plain way.
_attend.defjvp(lambda rules, primals, tangents: jax.jvp(functools.partial(_plainly, rules), primals, tangents))
