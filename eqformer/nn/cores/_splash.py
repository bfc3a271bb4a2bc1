"""Attention on TPUs: the kernels of `jax.experimental.pallas.ops.tpu.splash_attention`, typed for `shard_map`.

The kernels are taken one by one, forward, to the queries, to the keys and values, and differentiated by
[`_fused.py`](_fused.py), so that remat policies may keep what they gave.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._dtype import at_least_float32
from .._pallas import typed
from ._kernel import Call, Kernel, Places, Rows


LANES = 128  # of a TPU's vectors: tokens are taken in multiples of them


class SplashKernel(Kernel):
    """Splash attention, with windows, packed documents and softcaps."""

    platform = "tpu"

    def refusal(self, call: Call, query: Array, key: Array, value: Array) -> str | None:
        """Why it cannot compute a call, or None."""
        if query.dtype not in (jnp.bfloat16, jnp.float32):
            return f"it computes in bfloat16 or float32, not {query.dtype}"
        if call.rows.piece is not None and call.rows.window is not None:
            return "it has no windows over pieces of rows"
        if query.shape[-3] % LANES or key.shape[-3] % LANES:
            return f"it takes rows of a multiple of {LANES} tokens, not {query.shape[-3]} and {key.shape[-3]}"
        return None

    def forward(
        self,
        call: Call,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch kv_seq kv_heads head_dim"],
        value: Float[Array, "batch kv_seq kv_heads v_dim"],
        places: Places,
        kv_places: Places,
    ) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
        """The attended values and the logarithm of each row's sum of exponentials."""
        kernels, mask = _kernels(), _mask(call.rows, query.shape[-3], key.shape[-3], "forward")
        forward = typed(kernels._splash_attention_forward, query)
        sizes = kernels.BlockSizes(block_q=_block(query.shape[-3]), block_kv=_block(key.shape[-3]))

        def of_row(query: Array, key: Array, value: Array, segments: tuple[Array, Array] | None):
            pair = None if segments is None else kernels.SegmentIds(*segments)
            given = {"save_residuals": True, "mask_function": mask.function, "attn_logits_soft_cap": call.softcap}
            given |= {"is_mqa": False, "block_sizes": sizes, "residual_checkpoint_name": None}
            lowest = kernels.DEFAULT_MASK_VALUE
            output, (logsum,) = forward(
                mask.info, query, key, value, pair, None, mask_value=lowest, interpret=self.interpret, **given
            )
            return output, logsum

        segments = _segments(call.rows, places, kv_places)
        arrays: tuple[Any, ...] = _scaled(call, query), _heads_first(key), _heads_first(value), segments
        output, logsum = jax.vmap(of_row)(*arrays)
        return _heads_first(output), logsum

    def backward(
        self,
        call: Call,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch kv_seq kv_heads head_dim"],
        value: Float[Array, "batch kv_seq kv_heads v_dim"],
        places: Places,
        kv_places: Places,
        output: Float[Array, "batch seq heads v_dim"],
        logsum: Float[Array, "batch heads seq"],
        to_output: Float[Array, "batch seq heads v_dim"],
    ) -> tuple[
        Float[Array, "batch seq heads head_dim"],
        Float[Array, "batch kv_seq kv_heads head_dim"],
        Float[Array, "batch kv_seq kv_heads v_dim"],
    ]:
        """The gradients of query, key and value."""
        kernels, seq, kv_seq = _kernels(), query.shape[-3], key.shape[-3]
        masks = {name: _mask(call.rows, seq, kv_seq, name) for name in ("to_query", "to_key")}
        layout = kernels.QKVLayout.HEAD_DIM_MINOR
        given: dict[str, Any] = {"bq": _block(seq), "bkv": _block(kv_seq), "is_mqa": False, "interpret": self.interpret}
        given |= {"mask_value": kernels.DEFAULT_MASK_VALUE, "attn_logits_soft_cap": call.softcap}
        given |= {"q_layout": layout, "k_layout": layout, "v_layout": layout}
        to_queries = typed(kernels._splash_attention_bwd_dq, query)
        to_keys = typed(kernels._splash_attention_bwd_dkv, query)

        def of_row(query, key, value, segments, logsum, to_output, shared):
            pair = None if segments is None else kernels.SegmentIds(*segments)
            arrays = query, key, value, pair, None, logsum, to_output, shared
            mask = masks["to_query"]
            to_query = to_queries(*arrays, mask_info=mask.info, mask_function=mask.function, **given)
            mask, more = masks["to_key"], {"bkv_compute": _block(kv_seq), "use_fused_bwd_kernel": False}
            _, *rest = to_keys(*arrays, mask_info=mask.info, mask_function=mask.function, **more, **given)
            return to_query, *rest

        exact = at_least_float32(query.dtype)
        shared = jnp.sum(output.astype(exact) * to_output.astype(exact), axis=-1).swapaxes(1, 2)
        segments = _segments(call.rows, places, kv_places)
        arrays: tuple[Any, ...] = _scaled(call, query), _heads_first(key), _heads_first(value), segments
        arrays = *arrays, logsum, _heads_first(to_output), shared
        to_query, to_key, to_value = jax.vmap(of_row)(*arrays)
        to_query = (to_query.astype(exact) * call.scale).astype(query.dtype)
        return _heads_first(to_query), _heads_first(to_key), _heads_first(to_value)


class _Mask(NamedTuple):
    info: Any
    function: Any


@functools.lru_cache(maxsize=64)
def _mask(rows: Rows, seq: int, kv_seq: int, kernel: str) -> _Mask:
    """Which blocks a kernel visits and masks, of numpy arrays; one head's, as all heads have the same."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
        splash_attention_mask_info as infos,
    )

    shape = seq, kv_seq
    if rows.piece == "past":
        mask = masks.FullMask(shape)
    elif rows.window is not None:
        ahead = 1 if rows.is_causal else rows.ahead or rows.window
        mask = masks.LocalMask(shape, (rows.window - 1, ahead - 1), 0)
    else:
        mask = masks.CausalMask(shape) if rows.is_causal else masks.FullMask(shape)
    process = infos.process_mask_dkv if kernel == "to_key" else infos.process_mask
    blocks = _block(seq), _block(kv_seq)
    return _Mask(*process(masks.MultiHeadMask([mask]), blocks, head_shards=1, q_seq_shards=1))


def _kernels() -> Any:
    # Imported where it is used: what a CPU or a GPU runs needs none of it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def _block(seq: int) -> int:
    """Tokens of a block of queries and of keys."""
    return next(block for block in (512, 256, LANES) if seq % block == 0)


def _segments(
    rows: Rows, places: Places, kv_places: Places
) -> tuple[Int[Array, "batch seq"], Int[Array, "batch kv_seq"]] | None:
    """What parts documents; in rows of one document without a causal order, padding is parted from it."""
    if rows.documents is not None and places.segments is not None and kv_places.segments is not None:
        return places.segments, kv_places.segments
    if rows.is_causal or rows.piece == "past":
        return None
    return (places.positions >= 0).astype(jnp.int32), (kv_places.positions >= 0).astype(jnp.int32)


def _scaled(call: Call, query: Array) -> Array:
    """Queries times the scale, for which the kernel has no place, heads first."""
    exact = at_least_float32(query.dtype)
    return _heads_first((query.astype(exact) * call.scale).astype(query.dtype))


def _heads_first(x: Array) -> Array:
    """Heads before tokens, or tokens before heads."""
    return x.swapaxes(1, 2)
