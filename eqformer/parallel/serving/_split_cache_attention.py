"""Attention to a KV cache whose slots are split over the axis `context`."""

from typing import cast

import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import kernels
from ...kernels import blockwise
from .. import _collectives as send
from .._axes import CONTEXT
from .._shard_map import vary
from ..context._context_attention import require_blockwise


class SplitCacheAttention(kernels.Operation):
    """Attention to KV caches whose slots are split over the axis `context`.

    Queries, which are replicated, attend to the keys that the device holds. The results are combined by their
    logsumexps, as in flash decoding with split keys: `2 + v_dim` numbers a query and head are reduced.
    """

    inner: kernels.Operation

    def supports(self, call: kernels.AttentionCall) -> str | None:
        """Return why the loop over blocks, which computes each device's part, does not support a call, or None."""
        return require_blockwise(self.inner).supports(call)

    def __call__(self, call: kernels.AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Attend to the slots of all devices."""
        mask = cast(kernels.Mask, call.mask)
        settings = blockwise.BlockwiseSettings(mask, call.scale, call.softcap, require_blockwise(self.inner).block)
        tokens = kernels.TokenPositions(call.tokens.positions)
        arrays = vary((call.query, call.key, call.value, tokens, call.kv_tokens), (CONTEXT,))
        output, logsum = blockwise.attend(settings, *arrays)
        peak = send.pmax("peaks over split caches", logsum, CONTEXT)
        share = jnp.exp(logsum - peak)
        total = send.psum("sums over split caches", share, CONTEXT)
        combined = send.psum("sums over split caches", output.astype(share.dtype) * share[..., None], CONTEXT)
        combined = (combined / total[..., None]).astype(output.dtype)
        return combined if call.sinks is None else blockwise.with_sinks(combined, jnp.log(total) + peak, call.sinks)
