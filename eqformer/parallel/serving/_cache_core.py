"""Attention to a cache of which each device of the axis `context` has some of the slots."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import nn
from .. import _send as send
from .._axes import CONTEXT
from .._vary import vary
from ..context._context import ring_block


class CacheCore(nn.Core):
    """An attention core for caches whose slots are split over the axis `context`.

    Queries, which are replicated, attend to the keys that the device holds; the results are combined by their
    logsumexps, as in flash decoding with split keys: `2 + v_dim` numbers a query and head are reduced.
    """

    inner: nn.Core

    def __call__(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
        mask: nn.Mask,
        tokens: nn.Tokens,
        kv_tokens: nn.Tokens,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
    ) -> Float[Array, "*batch seq heads v_dim"]:
        rules = nn.blockwise.Rules(mask, scale, softcap, ring_block(self.inner))
        bare = nn.Tokens(tokens.positions)
        output, logsum = nn.blockwise.attend(rules, *vary((query, key, value, bare, kv_tokens), (CONTEXT,)))
        peak = send.pmax("peaks over split caches", logsum, CONTEXT)
        share = jnp.exp(logsum - peak)
        total = send.psum("sums over split caches", share, CONTEXT)
        whole = send.psum("sums over split caches", output.astype(share.dtype) * share[..., None], CONTEXT)
        whole = (whole / total[..., None]).astype(output.dtype)
        return whole if sinks is None else nn.blockwise.with_sinks(whole, jnp.log(total) + peak, sinks)
