"""Attention in plain JAX: the definition, with every option, which all other implementations must equal."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Num

from ..._annotation_checks import checked
from .._platform import at_least_float32
from ._call import apply_softcap, AttentionCall, lowest, RotatedChannels


def attend_by_definition(
    call: AttentionCall,
    *,
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
    rotated: RotatedChannels | None = None,
) -> Float[Array, "*batch seq heads v_dim"]:
    """Return softmax(scale * query key^T + bias) value, with float32 softmax and sums.

    Args:
        call: The call.
        key_scales: Factors of the keys. They multiply the scores, instead of the keys.
        value_scales: Factors of the values. They multiply the probabilities, instead of the values.
        rotated: Further channels of queries and keys, whose products are added to the scores.
    """
    probabilities = _probabilities(call, key_scales, rotated)
    if value_scales is not None:
        probabilities = probabilities * _over_scores(value_scales, probabilities.dtype)
    return _weigh_values(probabilities, call.value, call.query.dtype)


def attention_probabilities(call: AttentionCall) -> Float[Array, "*batch heads seq kv_seq"]:
    """Return the softmax of the scores, in float32 at least; zeros for keys that a query does not see.

    With sinks the weights of a query add up to less than 1.
    """
    probabilities = _probabilities(call)
    return probabilities.reshape(*probabilities.shape[:-4], -1, *probabilities.shape[-2:])


@checked
def weigh_values(
    weights: Float[Array, "*batch heads seq kv_seq"],
    value: Num[Array, "*batch kv_seq kv_heads v_dim"],
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*batch seq heads v_dim"]:
    """Return weighted sums of the values, in `dtype`; `attention_probabilities` returns such weights."""
    *batch, heads, seq, kv_seq = weights.shape
    kv_heads = value.shape[-2]
    by_kv_head = weights.reshape(*batch, kv_heads, heads // kv_heads, seq, kv_seq)
    return _weigh_values(by_kv_head, value, jnp.dtype(dtype))


def _probabilities(
    call: AttentionCall,
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
    rotated: RotatedChannels | None = None,
) -> Float[Array, "*batch kv_heads group seq kv_seq"]:
    """Return the softmax of the scores; for the arguments see `attend_by_definition`."""
    heads, kv_heads = call.query.shape[-2], call.key.shape[-2]
    wide = at_least_float32(call.query.dtype)

    def products(query: Array, key: Array, scales: Array | None) -> Float[Array, "*batch kv_heads group seq kv_seq"]:
        by_kv_head = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, query.shape[-1])
        dots = jnp.einsum("...qkgd,...skd->...kgqs", by_kv_head, key, preferred_element_type=wide)
        return dots if scales is None else dots * _over_scores(scales, wide)

    scores = products(call.query, call.key, key_scales)
    scores = scores if rotated is None else scores + products(*rotated)
    scores = apply_softcap(scores * call.scale, call.softcap)
    if (bias := call.total_bias) is not None:
        scores = scores + bias.reshape(*bias.shape[:-3], kv_heads, -1, *bias.shape[-2:]).astype(wide)
    visible = call.mask(call.tokens, call.key_tokens)
    sinks = None if call.sinks is None else call.sinks.astype(wide).reshape(kv_heads, heads // kv_heads, 1, 1)
    return softmax_of(scores, visible, sinks)


def _over_scores(
    scales: Float[Array, "*batch kv_seq kv_heads"], dtype: jnp.dtype
) -> Float[Array, "*batch kv_heads 1 1 kv_seq"]:
    """Return factors of keys or values with the dims of scores."""
    return jnp.moveaxis(scales, -1, -2)[..., None, None, :].astype(dtype)


def _weigh_values(
    probabilities: Float[Array, "*batch kv_heads group seq kv_seq"],
    value: Num[Array, "*batch kv_seq kv_heads v_dim"],
    dtype: jnp.dtype,
) -> Float[Array, "*batch seq heads v_dim"]:
    """Return sums of values weighted by probabilities, computed in float32 at least and returned in a dtype."""
    narrow = probabilities.astype(value.dtype)
    output = jnp.einsum("...kgqs,...skd->...kgqd", narrow, value, preferred_element_type=at_least_float32(dtype))
    *batch, kv_heads, group, seq, v_dim = output.shape
    output = jnp.moveaxis(output, -2, -4).reshape(*batch, seq, kv_heads * group, v_dim).astype(dtype)
    return checkpoint_name(output, "attended")  # Remat policies save this name.


def softmax_of(
    scores: Float[Array, "*batch kv_heads group seq kv_seq"],
    visible: Bool[Array, "*#batch seq kv_seq"],
    sink: Float[Array, "kv_heads group 1 1"] | None = None,
) -> Float[Array, "*batch kv_heads group seq kv_seq"]:
    """Return the probabilities of visible keys, zeros if no key is visible; a `sink` takes a share of the softmax."""
    visible = visible[..., None, None, :, :]
    scores = jnp.where(visible, scores, lowest(scores.dtype))
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jax.lax.stop_gradient(peak if sink is None else jnp.maximum(peak, sink))
    weights = jnp.where(visible, jnp.exp(scores - peak), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - peak)
    return weights / jnp.where(total > 0, total, 1)


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
    """Return the attention of queries to several sources of keys and values under one softmax.

    The result equals `ReferenceAttention`'s for concatenated sources. Here the scores are concatenated instead,
    so that no keys or values are copied. `sources` are pairs of keys and values. The last dim of `visible` counts the
    keys of all sources, one source after another.
    """
    heads, kv_heads = query.shape[-2], sources[0][0].shape[-2]
    wide = at_least_float32(query.dtype)
    grouped = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, query.shape[-1])
    dots = [jnp.einsum("...qkgd,...skd->...kgqs", grouped, key, preferred_element_type=wide) for key, _ in sources]
    scores = apply_softcap(jnp.concatenate(dots, axis=-1) * scale, softcap)
    probabilities = softmax_of(scores, visible).astype(sources[0][1].dtype)
    output, start = jnp.zeros((), wide), 0
    for _, value in sources:
        visible_weights = probabilities[..., start : start + value.shape[-3]]
        output += jnp.einsum("...kgqs,...skd->...kgqd", visible_weights, value, preferred_element_type=wide)
        start += value.shape[-3]
    return jnp.moveaxis(output, -2, -4).reshape(*query.shape[:-1], -1).astype(query.dtype)
