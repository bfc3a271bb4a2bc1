"""Attention of a row's newest token to what a cache holds, which reads keys and values once on NVIDIA GPUs and TPUs.

In plain XLA the scores of all slots stand in main memory in float32, and a softmax reads them three times: where many
heads share a key head, as the eight of Llama 3 70B on each of eight devices, that is a sixth of what a step moves. A
kernel (`_cached_kernel.py`) keeps them where they are computed. On TPUs latents, which are keys and values, were read
twice, and products of few queries took longer than memory: their kernel (`_cached_kernel_tpu.py`) reads what a mixer
says where it is held. What the kernels cannot compute is `ReferenceCore`'s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from .._pallas import compilers
from .._tokens import Tokens
from ..attention._mask import Chosen, Mask
from . import _cached_kernel as gpu, _cached_kernel_tpu as tpu
from ._cached_read import Held, Read, Rules
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
    held: Held | None = None,
) -> Float[Array, "*batch seq heads _"]:
    """What `ReferenceCore` gives of few queries; of one a row, in 16 bits, by kernels on NVIDIA GPUs and TPUs.

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
        held: The same keys and values where they lie, which TPUs' kernel reads in their place; None: it is not used.
    """
    read = Read(query, key, value, sinks, key_scales, value_scales, rotated)
    seen = mask(tokens, kv_tokens)
    ways = _kernels(read, held) if query.shape[-3] == 1 and bias is None else ()
    if not ways:
        return _plainly(Rules(scale, softcap), read, seen, bias)
    visible = jnp.broadcast_to(seen, (*query.shape[:-3], 1, key.shape[-3]))
    return _attend(Rules(scale, softcap), ways, read, visible, held)


def _kernels(read: Read, held: Held | None) -> tuple[str, ...]:
    """The platforms that this installation can compile for, whose kernels have the call."""
    has = {"cuda": gpu.kernel_has(read), "tpu": held is not None and tpu.kernel_has(read, held)}
    return tuple(name for name in compilers() if has[name])


def _plainly(rules: Rules, read: Read, visible: Array, bias: Array | None = None) -> Array:
    query, key, value, sinks, key_scales, value_scales, rotated = read
    value, value_scales = (key, key_scales) if value is None else (value, value_scales)
    wide = lambda x: x.astype(query.dtype)
    nowhere = Tokens(jnp.zeros((*query.shape[:-3], query.shape[-3]), jnp.int32))  # the mask is made
    given: dict[str, Any] = {"mask": Chosen(visible), "tokens": nowhere, "scale": rules.scale, "softcap": rules.softcap}
    given |= {"sinks": sinks, "bias": bias, "key_scales": key_scales, "value_scales": value_scales}
    given["rotated"] = None if rotated is None else rotated._replace(key=wide(rotated.key))
    return ReferenceCore()(query, wide(key), wide(value), **given)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(rules: Rules, ways: tuple[str, ...], read: Read, visible: Array, held: Held | None) -> Array:
    by_kernel = {
        "cuda": lambda read, visible, _: gpu.attend_by_kernel(rules, read, visible),
        "tpu": lambda read, visible, held: tpu.attend_by_kernel(rules, read, visible, held),
    }
    plainly = lambda read, visible, _: _plainly(rules, read, visible)
    own = {name: by_kernel[name] for name in ways}
    return jax.lax.platform_dependent(read, visible, held, **own, default=plainly)


@_attend.defjvp
def _slope(rules: Rules, ways: tuple[str, ...], primals: tuple, tangents: tuple) -> tuple:
    """The kernels have no derivatives: those are the plain way's, to what was read of what is held."""
    return jax.jvp(functools.partial(_plainly, rules), primals[:2], tangents[:2])
