"""Attention cores: softmax(scale * query key^T) value under a mask, and nothing else.

All cores have the same signature. `kv_tokens=None` says that the keys are the queries' own tokens. What a query sees
depends on positions and segments, wherever tokens stand; only if `tokens.are_whole_rows` are positions equal to
indices. Query head `h` reads kv head `h // (heads // kv_heads)`. Outputs of padding queries are finite and meaningless.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Num

from .._dtype import at_least_float32
from .._tokens import Tokens
from ..attention._mask import Chosen, Mask
from ._contract import Block, Core


FEW = 8  # queries, whose scores for all keys are few too


class Rotated(NamedTuple):
    """Channels of queries and keys that stand in arrays of their own, as the rotated ones of latent attention."""

    query: Float[Array, "*batch seq heads rope_dim"]
    key: Num[Array, "*batch kv_seq kv_heads rope_dim"]
    scales: Float[Array, "*batch kv_seq kv_heads"] | None = None
    """What these of each key are to be multiplied by."""


class ReferenceCore(Core):
    """Attention in plain jnp, with any mask, a softcap, sinks and a bias; builds the whole matrix of probabilities.

    Softmax and sums are float32, or float64 for such inputs. A query that sees nothing gets zeros. Keys and values that
    are to be multiplied by scales are read without: scores and probabilities are multiplied in their place.
    """

    def __call__(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
        mask: Mask | Chosen,
        tokens: Tokens,
        kv_tokens: Tokens | None = None,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
        bias: Float[Array, "*#batch heads seq kv_seq"] | None = None,
        key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
        value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
        rotated: Rotated | None = None,
    ) -> Float[Array, "*batch seq heads v_dim"]:
        """Attend.

        Args:
            query: The queries.
            key: The keys.
            value: The values.
            mask: Which keys a query may see.
            tokens: The positions and segments of the queries.
            kv_tokens: Those of the keys; None: the queries' own.
            scale: What the scores are multiplied by.
            softcap: The bound of the scores; None: there is none.
            sinks: A score of each head that joins its softmax.
            bias: What is added to the scores; without the dims of the batch the same for all rows; None: nothing.
            key_scales: What each key is to be multiplied by; None: nothing.
            value_scales: What each value is to be multiplied by; None: nothing.
            rotated: Further channels of queries and keys; None: there are none.
        """
        heads, kv_heads = check_heads(query, key)
        exact = at_least_float32(query.dtype)
        by_scores = lambda scales: jnp.moveaxis(scales, -1, -2)[..., None, None, :].astype(exact)

        def scored(query: Array, key: Array, scales: Array | None) -> Array:
            grouped = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, query.shape[-1])
            dots = jnp.einsum("...qkgd,...skd->...kgqs", grouped, key, preferred_element_type=exact)
            return dots if scales is None else dots * by_scores(scales)

        scores = scored(query, key, key_scales)
        scores = scores if rotated is None else scores + scored(*rotated)
        scores = soft_capped(scores * scale, softcap)
        if bias is not None:
            scores = scores + bias.reshape(*bias.shape[:-3], kv_heads, -1, *bias.shape[-2:]).astype(exact)
        visible = mask(tokens, tokens if kv_tokens is None else kv_tokens)
        sink = None if sinks is None else sinks.astype(exact).reshape(kv_heads, heads // kv_heads, 1, 1)
        probabilities = softmax_of(scores, visible, sink)
        if value_scales is not None:
            probabilities = probabilities * by_scores(value_scales)
        narrow = probabilities.astype(value.dtype)
        output = jnp.einsum("...kgqs,...skd->...kgqd", narrow, value, preferred_element_type=exact)
        output = jnp.moveaxis(output, -2, -4).reshape(*query.shape[:-1], value.shape[-1]).astype(query.dtype)
        return checkpoint_name(output, "attended")  # for remat policies that keep it

    def lacks(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def ring_block(self) -> Block:
        """That of `BlockwiseCore()`."""
        return "platform"


class DotProductCore(Core):
    """Attention by `jax.nn.dot_product_attention` as XLA computes it, with all derivatives; its memory is quadratic.

    For whole rows (`Tokens.are_whole_rows`) it gets its causal flag and a window or, without a mask, the rows' lengths,
    and else a mask of `batch 1 seq kv_seq`. It has no sinks and softcaps (`ReferenceCore` and `BlockwiseCore` have). If
    `head_dim` and `v_dim` differ, the smaller is padded with zeros. For 16-bit arrays jax's own code needs its standard
    dtype promotion, while tracing and lowering.
    """

    def __call__(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens | None = None,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
    ) -> Float[Array, "*batch seq heads v_dim"]:
        check_heads(query, key)
        given = {"softcap": softcap is not None, "sinks": sinks is not None}
        if lacking := [name for name, is_given in given.items() if is_given]:
            raise ValueError(
                f"DotProductCore was given {' and '.join(lacking)}, which jax.nn.dot_product_attention has no place "
                "for: pass core=BlockwiseCore() or core=ReferenceCore()."
            )
        batch, v_dim = query.shape[:-3], value.shape[-1]
        width = max(query.shape[-1], v_dim)
        arrays = [_widened(x, width).reshape(-1, *x.shape[-3:-1], width) for x in (query, key, value)]
        rules: dict[str, Any] = {}
        sighted = None
        if is_structural(mask, tokens, kv_tokens):
            rules["is_causal"] = True
            if mask.window is not None:
                rules["local_window_size"] = (mask.window - 1, 0)
        elif kv_tokens is None and tokens.are_whole_rows and mask == Mask(is_causal=False):
            lengths = jnp.sum(jnp.broadcast_to(tokens.positions, (*batch, query.shape[-3])) >= 0, axis=-1)
            rules["key_value_seq_lengths"] = jnp.maximum(lengths, 1).reshape(-1).astype(jnp.int32)
        else:
            visible = mask(tokens, tokens if kv_tokens is None else kv_tokens)
            visible = jnp.broadcast_to(visible, (*batch, *visible.shape[-2:])).reshape(-1, 1, *visible.shape[-2:])
            rules["mask"] = visible
            sighted = jnp.any(visible[:, 0], axis=-1)[..., None, None]
        output = _dot_product_attention(*arrays, scale=scale, **rules)
        if sighted is not None:  # the kernel gives the mean of all values to a query that sees no key
            output = jnp.where(sighted, output, jnp.zeros_like(output))
        return output[..., :v_dim].reshape(*query.shape[:-1], v_dim)

    def lacks(self) -> tuple[str, ...]:
        """All of them."""
        return "softcap", "sinks", "bias"

    def ring_block(self) -> Block:
        """That of `BlockwiseCore()`."""
        return "platform"


def _dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads head_dim"],
    **rules: Any,
) -> Float[Array, "batch seq heads head_dim"]:
    def attend(query: Array, key: Array, value: Array) -> Array:
        return jax.nn.dot_product_attention(query, key, value, implementation="xla", **rules)

    def in_float32(*arrays: Array) -> Array:
        return attend(*(x.astype(jnp.float32) for x in arrays)).astype(query.dtype)

    if query.dtype != jnp.float16:
        return attend(query, key, value)
    # jax requests float16 products with float32 sums by an algorithm that only GPUs have. The platform is known at
    # lowering only, so the choice is made there.
    return jax.lax.platform_dependent(query, key, value, cpu=in_float32, tpu=in_float32, default=attend)


def _widened(array: Array, width: int) -> Array:
    if array.shape[-1] == width:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])


def is_structural(mask: Mask, tokens: Tokens, kv_tokens: Tokens | None) -> bool:
    """Whether the mask of this call is known to be a function of indices alone: causal, on whole rows, no chunks."""
    return kv_tokens is None and tokens.are_whole_rows and mask.is_causal and mask.chunk is None


def check_heads(query: Array, key: Array) -> tuple[int, int]:
    """The numbers of query and of kv heads, or `ValueError` when the first is not a multiple of the second."""
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if heads % kv_heads:
        raise ValueError(
            f"attention over {heads} query heads and {kv_heads} key/value heads: heads must be a multiple of kv_heads; "
            "change one of the two."
        )
    return heads, kv_heads


def softmax_of(
    scores: Float[Array, "*batch kv_heads group seq kv_seq"],
    visible: Bool[Array, "*#batch seq kv_seq"],
    sink: Float[Array, "kv_heads group 1 1"] | None = None,
) -> Float[Array, "*batch kv_heads group seq kv_seq"]:
    """The probabilities of the keys that a query sees, beside a `sink` where there is one; zeros where it sees none."""
    seen = visible[..., None, None, :, :]
    scores = jnp.where(seen, scores, lowest(scores.dtype))
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jax.lax.stop_gradient(peak if sink is None else jnp.maximum(peak, sink))
    weights = jnp.where(seen, jnp.exp(scores - peak), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - peak)
    return weights / jnp.where(total > 0, total, 1)


def lowest(dtype: jnp.dtype) -> float:
    """The score of a masked key: finite, so that the difference of two of them is not NaN."""
    return float(jnp.finfo(dtype).min) / 4


def soft_capped(scores: Array, softcap: float | None) -> Array:
    """`softcap * tanh(scores / softcap)`, or the scores themselves."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
