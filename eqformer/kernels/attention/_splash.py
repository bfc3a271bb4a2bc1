"""Attention on TPUs: the kernels of `jax.experimental.pallas.ops.tpu.splash_attention`, typed for `shard_map`.

The forward kernel and the two backward kernels (one for the gradients of queries, one for the gradients of keys and
values) are called one by one, so that remat policies can keep the output and the logsumexp of each query's scores.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ..._mask import Mask
from .._platform import at_least_float32, type_kernel_results
from ._call import AttentionCall
from ._flash import FlashAttention, Gradients, LogSum, Output


LANES = 128
"""Entries along the last dim of a TPU's vector register; the tokens of a row must be a multiple of 128."""


class SplashAttention(FlashAttention):
    """Splash attention on TPUs, with windows, packed documents and softcaps.

    A block has up to 512 queries and 512 keys in vector memory: the largest of 512, 256 and 128 that divides the tokens
    of a row. `interpret` runs the kernel as plain JAX on any platform, which is slow: for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        query, key = call.query, call.key
        if call.has_bias:
            return "it supports no score bias"
        if (reason := call.unknown_rows) is not None:
            return reason
        if query.dtype not in (jnp.bfloat16, jnp.float32):
            return f"it computes in bfloat16 or float32, not {query.dtype}"
        if call.piece is not None and _mask_rule(call).window is not None:
            return "it has no windows if devices split rows"
        if query.shape[-3] % LANES or key.shape[-3] % LANES:
            return f"it takes rows of a multiple of {LANES} tokens, not {query.shape[-3]} and {key.shape[-3]}"
        return None

    def forward(self, call: AttentionCall) -> tuple[Output, LogSum]:
        """Return the output and the logsumexp of each query's scores."""
        query, key, value = call.query, call.key, call.value
        kernels = _kernels()
        mask = _block_mask(_mask_rule(call), call.piece, query.shape[-3], key.shape[-3], "forward")
        forward = type_kernel_results(kernels._splash_attention_forward, query)
        sizes = kernels.BlockSizes(block_q=_block(query.shape[-3]), block_kv=_block(key.shape[-3]))

        def run_row(query: Array, key: Array, value: Array, segments: tuple[Array, Array] | None):
            segment_ids = None if segments is None else kernels.SegmentIds(*segments)
            options = {"save_residuals": True, "mask_function": mask.function, "attn_logits_soft_cap": call.softcap}
            options |= {"is_mqa": False, "block_sizes": sizes, "residual_checkpoint_name": None}
            lowest = kernels.DEFAULT_MASK_VALUE
            output, (logsum,) = forward(
                mask.info, query, key, value, segment_ids, None, mask_value=lowest, interpret=self.interpret, **options
            )
            return output, logsum

        segments = _segments(call)
        arrays: tuple[PyTree, ...] = _scale_queries(call, query), _heads_first(key), _heads_first(value), segments
        output, logsum = jax.vmap(run_row)(*arrays)
        return _heads_first(output), logsum

    def backward(self, call: AttentionCall, output: Output, logsum: LogSum, output_grad: Output) -> Gradients:
        """Return the gradients of query, key and value."""
        query, key, value = call.query, call.key, call.value
        kernels, seq, kv_seq = _kernels(), query.shape[-3], key.shape[-3]
        masks = {name: _block_mask(_mask_rule(call), call.piece, seq, kv_seq, name) for name in ("query", "key")}
        layout = kernels.QKVLayout.HEAD_DIM_MINOR
        options: dict[str, object] = {
            "bq": _block(seq),
            "bkv": _block(kv_seq),
            "is_mqa": False,
            "interpret": self.interpret,
        }
        options |= {"mask_value": kernels.DEFAULT_MASK_VALUE, "attn_logits_soft_cap": call.softcap}
        options |= {"q_layout": layout, "k_layout": layout, "v_layout": layout}
        to_queries = type_kernel_results(kernels._splash_attention_bwd_dq, query)
        to_keys = type_kernel_results(kernels._splash_attention_bwd_dkv, query)

        def run_row(query, key, value, segments, logsum, output_grad, row_sums):
            segment_ids = None if segments is None else kernels.SegmentIds(*segments)
            arrays = query, key, value, segment_ids, None, logsum, output_grad, row_sums
            mask = masks["query"]
            query_grad = to_queries(*arrays, mask_info=mask.info, mask_function=mask.function, **options)
            mask, key_options = masks["key"], {"bkv_compute": _block(kv_seq), "use_fused_bwd_kernel": False}
            _, key_grad, value_grad = to_keys(
                *arrays, mask_info=mask.info, mask_function=mask.function, **key_options, **options
            )
            return query_grad, key_grad, value_grad

        wide = at_least_float32(query.dtype)
        row_sums = jnp.sum(output.astype(wide) * output_grad.astype(wide), axis=-1).swapaxes(1, 2)
        segments = _segments(call)
        arrays: tuple[PyTree, ...] = _scale_queries(call, query), _heads_first(key), _heads_first(value), segments
        arrays = *arrays, logsum, _heads_first(output_grad), row_sums
        query_grad, key_grad, value_grad = jax.vmap(run_row)(*arrays)
        query_grad = (query_grad.astype(wide) * call.scale).astype(query.dtype)
        return _heads_first(query_grad), _heads_first(key_grad), _heads_first(value_grad)


class _BlockMask(NamedTuple):
    """A mask as splash attention takes it: arrays about blocks, and the mask within a block as a function of
    indices."""

    info: object
    function: Callable[..., Array] | None


@functools.lru_cache(maxsize=64)
def _block_mask(rule: Mask, piece: str | None, seq: int, kv_seq: int, kernel: str) -> _BlockMask:
    """Return which blocks a kernel visits and masks, in numpy arrays; all heads use the same arrays."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
        splash_attention_mask_info as infos,
    )

    shape = seq, kv_seq
    if piece == "past":
        mask = masks.FullMask(shape)
    elif rule.window is not None:
        ahead = 1 if rule.is_causal else rule.ahead or rule.window
        mask = masks.LocalMask(shape, (rule.window - 1, ahead - 1), 0)
    else:
        mask = masks.CausalMask(shape) if rule.is_causal else masks.FullMask(shape)
    process = infos.process_mask_dkv if kernel == "key" else infos.process_mask
    blocks = _block(seq), _block(kv_seq)
    return _BlockMask(*process(masks.MultiHeadMask([mask]), blocks, head_shards=1, q_seq_shards=1))


def _kernels() -> ModuleType:
    # Imported only for programs with this kernel, because programs for CPUs and GPUs do not need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def _block(seq: int) -> int:
    """Return the tokens of a block of queries and of keys: the largest of 512, 256 and 128 that divides the row."""
    return next(block for block in (512, 256, LANES) if seq % block == 0)


def _mask_rule(call: AttentionCall) -> Mask:
    """Return the mask of a call whose `unknown_rows` is None: a `Mask`."""
    assert isinstance(call.mask, Mask)
    return call.mask


def _segments(call: AttentionCall) -> tuple[Int[Array, "batch seq"], Int[Array, "batch kv_seq"]] | None:
    """Return segments of queries and keys; tokens see only their own segment.

    The segments of packed rows are their documents. In other rows, segments separate padding from the document. The
    result is None if a causal mask hides padding, or if all keys are in the past.
    """
    tokens, kv_tokens = call.tokens, call.key_tokens
    if call.documents is not None and tokens.segments is not None and kv_tokens.segments is not None:
        return tokens.segments, kv_tokens.segments
    if _mask_rule(call).is_causal or call.piece == "past":
        return None
    return (tokens.positions >= 0).astype(jnp.int32), (kv_tokens.positions >= 0).astype(jnp.int32)


def _scale_queries(call: AttentionCall, query: Array) -> Array:
    """Return queries times the scale, heads first; the kernel has no argument for the scale."""
    exact = at_least_float32(query.dtype)
    return _heads_first((query.astype(exact) * call.scale).astype(query.dtype))


def _heads_first(x: Array) -> Array:
    """Swap heads and tokens."""
    return x.swapaxes(1, 2)
