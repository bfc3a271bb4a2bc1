"""Attention by the op that a module holds, or by the kernels for decoding where a cache is read by one query a row."""

from typing import Any

from jaxtyping import Array, Float

from ...kernels import (
    AttentionCall,
    blockwise_of,
    BlockwiseAttention,
    DecodeCall,
    decodes_by_kernels,
    Operation,
    StoredArrays,
)
from .._cache import KVCache


def attend(core: Operation, call: AttentionCall, cache: KVCache | None) -> Float[Array, "*batch seq heads v_dim"]:
    """Compute the call by `core`, or by the kernels for decoding.

    `cache` is the one that stores all keys and values of a call with one query a row, and None for every other call.
    The kernels read what is stored as it is: for 8 bits, scores are multiplied by scales instead of keys and values. A
    core of another kind computes the call itself.
    """
    if cache is None or not (decodes_by_kernels(core) if cache.key_scales is None else blockwise_of(core)):
        return core(call)
    stored = StoredArrays(
        cache.layer, cache.keys, cache.values, key_scales=cache.key_scales, value_scales=cache.value_scales
    )
    arrays: dict[str, Any] = {"key": call.key, "value": call.value} if cache.key_scales is None else cache.scaled()
    decode = (blockwise_of(core) or BlockwiseAttention()).decode
    return decode(
        DecodeCall(
            call.query,
            **arrays,
            visible=call.mask(call.tokens, call.tokens if call.kv_tokens is None else call.kv_tokens),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            bias=call.bias,
            stored=stored,
        )
    )
