"""Attention by `jax.nn.dot_product_attention`, as XLA computes it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._op import Implementation
from ._call import AttentionCall
from ._mask import Mask


class DotProductAttention(Implementation):
    """Attention by `jax.nn.dot_product_attention` as XLA computes it, with all derivatives; its memory is quadratic.

    For whole rows (`nn.Tokens.are_whole_rows`) it gets its causal flag and a window or, without a mask, the rows'
    lengths, and else a mask of `batch 1 seq kv_seq`. If `head_dim` and `v_dim` differ, the smaller is padded with
    zeros. For 16-bit arrays jax's own code needs its standard dtype promotion, while tracing and lowering.
    """

    def supports(self, call: AttentionCall) -> str | None:
        """Return the option of the call that `jax.nn.dot_product_attention` lacks, or None."""
        options = {"softcap": call.softcap, "sinks": call.sinks, "bias of scores": call.bias}
        if missing := [name for name, value in options.items() if value is not None]:
            return f"jax.nn.dot_product_attention has no {' and no '.join(missing)}"
        return None

    def run(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        query, mask, tokens = call.query, call.mask, call.tokens
        batch, v_dim = query.shape[:-3], call.value.shape[-1]
        width = max(query.shape[-1], v_dim)
        arrays = [_pad_channels(x, width) for x in (query, call.key, call.value)]
        arrays = [x.reshape(-1, *x.shape[-3:-1], width) for x in arrays]
        options: dict[str, Any] = {}
        sees_any_key = None
        if isinstance(mask, Mask) and _is_by_index(call):
            options["is_causal"] = True
            if mask.window is not None:
                options["local_window_size"] = (mask.window - 1, 0)
        elif call.kv_tokens is None and tokens.are_whole_rows and mask == Mask(is_causal=False):
            lengths = jnp.sum(jnp.broadcast_to(tokens.positions, (*batch, query.shape[-3])) >= 0, axis=-1)
            options["key_value_seq_lengths"] = jnp.maximum(lengths, 1).reshape(-1).astype(jnp.int32)
        else:
            visible = mask(tokens, call.key_tokens)
            visible = jnp.broadcast_to(visible, (*batch, *visible.shape[-2:])).reshape(-1, 1, *visible.shape[-2:])
            options["mask"] = visible
            sees_any_key = jnp.any(visible[:, 0], axis=-1)[..., None, None]
        output = _dot_product_attention(*arrays, scale=call.scale, **options)
        if sees_any_key is not None:  # the kernel gives the mean of all values to a query that sees no key
            output = jnp.where(sees_any_key, output, jnp.zeros_like(output))
        return output[..., :v_dim].reshape(*query.shape[:-1], v_dim)


def _is_by_index(call: AttentionCall) -> bool:
    """Return whether the mask is a function of indices alone: causal, on whole rows, without chunks."""
    by_index = isinstance(call.mask, Mask) and call.mask.is_causal and call.mask.chunk is None
    return by_index and call.kv_tokens is None and call.tokens.are_whole_rows


def _dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads head_dim"],
    **options: Any,
) -> Float[Array, "batch seq heads head_dim"]:
    def attend(query: Array, key: Array, value: Array) -> Array:
        return jax.nn.dot_product_attention(query, key, value, implementation="xla", **options)

    def in_float32(*arrays: Array) -> Array:
        return attend(*(x.astype(jnp.float32) for x in arrays)).astype(query.dtype)

    if query.dtype != jnp.float16:
        return attend(query, key, value)
    # jax requests float16 products with float32 sums by an algorithm that only GPUs have. The platform is known at
    # lowering only, so the choice is made there.
    return jax.lax.platform_dependent(query, key, value, cpu=in_float32, tpu=in_float32, default=attend)


def _pad_channels(array: Float[Array, "*shape channels"], width: int) -> Float[Array, "*shape width"]:
    if array.shape[-1] == width:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])
