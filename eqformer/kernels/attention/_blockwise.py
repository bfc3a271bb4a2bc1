"""Attention that never builds the whole matrix of probabilities, in the forward or the backward pass.

Online softmax over blocks of keys, after FlashAttention-2 (arXiv:2307.08691): the output and the logarithm of each
row's sum are saved, and the backward pass makes the probabilities again, block by block.
"""

import functools
from collections.abc import Callable
from typing import Any, cast, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from .._dtype import at_least_float32
from .._op import Implementation, Op
from .._platform import compilers
from ..decode_attention._call import DecodeCall
from ..decode_attention._decode import DECODE_ATTENTION
from ._block_pairs import possible_pairs, spans
from ._blocks import block_of, cut, grouped, joined, ungrouped
from ._call import AttentionCall
from ._flash import Gradients, LogSum, Output, scale_output
from ._mask import ChosenKeys, Mask
from ._positions import TokenPositions
from ._reference import lowest, soft_capped


Block = int | Literal["platform"]  # tokens of a block, or as many as are fastest on the platform
FEW = 8  # queries, whose scores for all keys are few too
_BLOCK, _TPU_BLOCK = 128, 512  # tokens of a block: see `docs/accelerators-kernels.md`


class BlockwiseAttention(Implementation):
    """Attention in memory linear in the sequence: a loop over blocks of queries and, in it, over blocks of keys.

    The program is of one size for any length. Pairs of blocks that the mask, the segments or padding leave empty are
    not computed. `block` is the tokens of a block, by default 512 on TPUs and 128 elsewhere; the scores of a pair of
    blocks take `4 * batch * heads * block**2` bytes, and on a CPU the loop is fastest where they fit its cache (about 1
    MB). Few queries of cached keys, as in decoding, are computed by `decode`, which reads the cache in place.
    Differentiable in reverse mode, once; `DotProductAttention` has all derivatives.
    """

    block: Block = eqx.field(static=True, default="platform")
    decode: Op = DECODE_ATTENTION

    def __check_init__(self):
        if self.block != "platform" and self.block < 1:
            raise ValueError(f"BlockwiseAttention(block={self.block}): block counts tokens and must be at least 1.")

    def supports(self, call: AttentionCall) -> str | None:
        """Return None, except for calls with a bias or with keys chosen by a matrix."""
        if call.bias is not None:
            return "it has no bias of scores"
        if isinstance(call.mask, ChosenKeys):
            return "it has no matrix of chosen keys"
        return None

    def run(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        if call.kv_tokens is not None and call.query.shape[-3] <= FEW:
            return self.decode(decode_call(call))
        output, logsum = attend(self.settings(call), call.query, call.key, call.value, call.tokens, call.kv_tokens)
        return output if call.sinks is None else with_sinks(output, logsum, call.sinks)

    def settings(self, call: AttentionCall) -> "BlockwiseSettings":
        """Return the static settings of the loop."""
        return BlockwiseSettings(cast(Mask, call.mask), call.scale, call.softcap, self.block)

    def forward(self, call: AttentionCall) -> tuple[Output, LogSum]:
        """Return the output and the sums, as `FlashAttention.forward` does."""
        output, logsum = attend_forward(self.settings(call), *_grouped_arrays(call))
        return _tokens_first(output), logsum.reshape(logsum.shape[0], -1, logsum.shape[-1])

    def backward(self, call: AttentionCall, output: Output, logsum: LogSum, output_grad: Output) -> Gradients:
        """Return the gradients, as `FlashAttention.backward` does."""
        arrays = _grouped_arrays(call)
        rows = arrays[0].shape[:-1]
        output, output_grad = (x.swapaxes(1, 2).reshape(*rows, -1) for x in (output, output_grad))
        logsum = logsum.reshape(rows)
        residuals = (*arrays, output, logsum)
        gradients = attend_backward(self.settings(call), residuals, (output_grad, jnp.zeros_like(logsum)))
        query_grad, key_grad, value_grad = gradients
        return _tokens_first(query_grad), key_grad.swapaxes(1, 2), value_grad.swapaxes(1, 2)


def decode_call(call: AttentionCall) -> DecodeCall:
    """Return the same call as one of few queries that read a cache."""
    visible = call.mask(call.tokens, call.tokens if call.kv_tokens is None else call.kv_tokens)
    return DecodeCall(
        call.query,
        call.key,
        call.value,
        visible=visible,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        bias=call.bias,
    )


def _grouped_arrays(call: AttentionCall) -> tuple[Array, Array, Array, TokenPositions, TokenPositions]:
    return grouped(call.query, call.key, call.value, call.tokens, call.kv_tokens)


def _tokens_first(x: Float[Array, "batch kv_heads group seq head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
    return x.reshape(x.shape[0], -1, *x.shape[-2:]).swapaxes(1, 2)


def with_sinks(
    output: Float[Array, "*batch seq heads v_dim"],
    logsum: Float[Array, "*batch seq heads"],
    sinks: Float[Array, "heads"],
) -> Float[Array, "*batch seq heads v_dim"]:
    """Return the output of the softmax with sinks: the output without them, times the scores' share of the sum."""
    return scale_output(output, jax.nn.sigmoid(logsum - sinks.astype(logsum.dtype))[..., None])


class BlockwiseSettings(NamedTuple):
    """The static settings of a loop over blocks."""

    mask: Mask
    scale: float
    softcap: float | None
    block: Block


def attend(
    rules: BlockwiseSettings,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch kv_seq kv_heads head_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    tokens: TokenPositions,
    kv_tokens: TokenPositions | None,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*batch seq heads"]]:
    """The attended values and the logarithm of each row's sum of exponentials (a very low number for an empty row).

    Two calls over different keys combine by their logarithms. Gradients flow through both results.

    Args:
        rules: The mask, scale and cap, and the tokens of a block.
        query: The queries.
        key: The keys.
        value: The values.
        tokens: The positions and segments of the queries.
        kv_tokens: Those of the keys; None: the queries' own.
    """
    arrays = grouped(query, key, value, tokens, kv_tokens)
    # Under `shard_map` the arrays may vary over different mesh axes (replicated key heads, split query heads). A custom
    # gradient must vary like its argument, so a zero that varies over all of these axes is added; XLA drops it.
    zero = jnp.zeros((), query.dtype)
    for array in jax.tree.leaves(arrays):
        zero += jnp.zeros_like(array, zero.dtype, shape=())
    output, logsum = _attend(rules, *(x + zero.astype(x.dtype) for x in arrays[:3]), *arrays[3:])
    return ungrouped(output, query.shape[:-3]), ungrouped(logsum[..., None], query.shape[:-3])[..., 0]


def attend_forward(
    rules: BlockwiseSettings,
    query: Float[Array, "batch kv_heads _ seq head_dim"],
    key: Float[Array, "batch kv_heads kv_seq head_dim"],
    value: Float[Array, "batch kv_heads kv_seq v_dim"],
    places: TokenPositions,
    kv_places: TokenPositions,
) -> tuple[Float[Array, "batch kv_heads _ seq v_dim"], Float[Array, "batch kv_heads _ seq"]]:
    """What `attend` gives, of `grouped` arrays that all vary over the same mesh axes, and with no gradient.

    Args:
        rules: The mask, scale and cap, and the tokens of a block.
        query: The queries, grouped by the key head that they read.
        key: The keys.
        value: The values.
        places: The positions and segments of the queries.
        kv_places: Those of the keys.
    """
    return _by_block(_forward_in_blocks, rules, query, key, value, places, kv_places)


def _by_block(attend: Callable[..., Any], rules: BlockwiseSettings, *arrays: Any) -> Any:
    """`attend(block, rules, *arrays)` with the rules' block or that of the platform."""
    if rules.block != "platform":
        return attend(rules.block, rules, *arrays)
    if "tpu" not in compilers() or arrays[1].shape[2] <= _BLOCK:  # keys of one block
        return attend(_BLOCK, rules, *arrays)
    here, there = (functools.partial(attend, block, rules) for block in (_TPU_BLOCK, _BLOCK))
    return jax.lax.platform_dependent(*arrays, tpu=here, default=there)


def _forward_in_blocks(
    block: int,
    rules: BlockwiseSettings,
    query: Array,
    key: Array,
    value: Array,
    places: TokenPositions,
    kv_places: TokenPositions,
) -> tuple[Array, Array]:
    queries, keys, here, there, zero = cut(block, query, (key, value), places, kv_places)

    def one_query_block(_, xs):
        query_block, place, first, stop = xs

        def one_key_block(number: Array, carry: tuple[Array, Array, Array]):
            output, peak, total = carry
            (key_block, value_block), kv_place = block_of((keys, there), number)
            visible = rules.mask(place, kv_place)[:, None, None]
            scores = jnp.where(visible, _scores(rules, query_block, key_block), lowest(zero.dtype))
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0)
            values = jnp.einsum(
                "bkgqs,bksd->bkgqd", weights.astype(value.dtype), value_block, preferred_element_type=zero.dtype
            )
            shrink = jnp.exp(peak - new_peak)
            return output * shrink[..., None] + values, new_peak, total * shrink + jnp.sum(weights, axis=-1)

        rows = query_block.shape[:-1]
        empty = (
            jnp.full((*rows, value.shape[-1]), zero),
            jnp.full(rows, zero + lowest(zero.dtype)),
            jnp.full(rows, zero),
        )
        output, peak, total = jax.lax.fori_loop(first, stop, one_key_block, empty)
        sighted = total > 0
        total = jnp.where(sighted, total, 1)
        logsum = jnp.where(sighted, peak + jnp.log(total), lowest(zero.dtype))
        return None, ((output / total[..., None]).astype(query.dtype), logsum)

    xs = (queries, here, *spans(possible_pairs(rules.mask, here, there)))
    _, (output, logsum) = jax.lax.scan(one_query_block, None, xs)
    return joined(output, 3, query.shape[3]), joined(logsum, 3, query.shape[3])


_attend = jax.custom_vjp(attend_forward, nondiff_argnums=(0,))


def _attend_forward(
    rules: BlockwiseSettings, query: Array, key: Array, value: Array, places: TokenPositions, kv_places: TokenPositions
):
    results = _attend(rules, query, key, value, places, kv_places)
    output, logsum = (checkpoint_name(x, "attended") for x in results)  # for remat policies that keep it
    return (output, logsum), (query, key, value, places, kv_places, output, logsum)


def attend_backward(
    rules: BlockwiseSettings, saved: tuple, gradients: tuple[Array, Array]
) -> tuple[
    Float[Array, "batch kv_heads _ seq head_dim"],
    Float[Array, "batch kv_heads kv_seq head_dim"],
    Float[Array, "batch kv_heads kv_seq v_dim"],
]:
    """The gradients of query, key and value from those of output and logsum.

    `saved` holds the array arguments of `attend_forward`, then output and logsum. If these are of a softmax over more
    keys than are given (ring attention), the results are the given keys' part of the gradients.
    """
    return _by_block(_backward_in_blocks, rules, *saved, *gradients)


def _backward_in_blocks(
    block: int,
    rules: BlockwiseSettings,
    query: Array,
    key: Array,
    value: Array,
    places: TokenPositions,
    kv_places: TokenPositions,
    *results: Array,
) -> tuple[Array, Array, Array]:
    output, logsum, to_output, to_logsum = results
    shared = jnp.sum(to_output.astype(logsum.dtype) * output.astype(logsum.dtype), axis=-1) - to_logsum
    queries, keys, here, there, zero = cut(block, (query, to_output, logsum, shared), (key, value), places, kv_places)

    def one_key_block(to_query, xs):
        (key_block, value_block), kv_place, first, stop = xs
        # Behind a barrier, as XLA's CPU compiler would turn the keys in the product, and has none of bfloat16 then.
        columns = key_block, jax.lax.optimization_barrier(key_block.swapaxes(-1, -2)), value_block

        def one_query_block(number: Array, carry: tuple[Array, Array, Array]):
            to_query, to_key, to_value = carry
            rows, place = block_of((queries, here), number)
            visible = rules.mask(place, kv_place).swapaxes(-1, -2)[:, None, :, None]
            parts = _block_gradients(rules, rows, columns, visible)
            grown = jax.lax.dynamic_index_in_dim(to_query, number, keepdims=False) + parts[0]
            to_query = jax.lax.dynamic_update_index_in_dim(to_query, grown, number, 0)
            return to_query, to_key + parts[1], to_value + parts[2]

        empty = to_query, jnp.full(key_block.shape, zero), jnp.full(value_block.shape, zero)
        to_query, to_key, to_value = jax.lax.fori_loop(first, stop, one_query_block, empty)
        return to_query, (to_key.astype(key.dtype), to_value.astype(value.dtype))

    xs = (keys, there, *spans(possible_pairs(rules.mask, here, there).T))
    empty = jnp.full(jnp.moveaxis(queries[0], -1, 3).shape, zero)
    to_query, (to_key, to_value) = jax.lax.scan(one_key_block, empty, xs)
    to_query = joined(jnp.moveaxis(to_query, 3, -1), 3, query.shape[3]).astype(query.dtype)
    return to_query, joined(to_key, 2, key.shape[2]), joined(to_value, 2, key.shape[2])


def _attend_backward(rules: BlockwiseSettings, saved: tuple, gradients: tuple[Array, Array]):
    return *attend_backward(rules, saved, gradients), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(rules: BlockwiseSettings, query: Array, key: Array) -> Array:
    scores = jnp.einsum("bkgqd,bksd->bkgqs", query, key, preferred_element_type=at_least_float32(query.dtype))
    return soft_capped(scores * rules.scale, rules.softcap)


def _block_gradients(
    rules: BlockwiseSettings,
    rows: tuple[Array, Array, Array, Array],
    columns: tuple[Array, Array, Array],
    visible: Bool[Array, "batch 1 kv_seq 1 seq"],
) -> tuple[Array, Array, Array]:
    """What a pair of blocks adds to the gradients of its queries, with channels before them, keys and values.

    Scores stand keys first, and keys come with a transposed copy: so each product sums over the last dim of what is on
    its left, as CPU kernels want it, and no array of the scores' size is transposed.
    """
    (query, to_output, logsum, shared), (key, key_turned, value) = rows, columns
    exact, (group, seq) = logsum.dtype, logsum.shape[-2:]
    merged = lambda x: x.reshape(*x.shape[:2], group * seq, -1)
    product = functools.partial(jnp.einsum, preferred_element_type=exact)
    by_key = lambda one, other: product("bksd,bkrd->bksr", one, merged(other)).reshape(*one.shape[:3], group, seq)
    scores = soft_capped(by_key(key, query) * rules.scale, rules.softcap)
    weights = jnp.where(visible, jnp.exp(scores - logsum[:, :, None]), 0)
    to_scores = weights * (by_key(value, to_output) - shared[:, :, None])
    if rules.softcap is not None:
        to_scores *= 1 - jnp.square(scores / rules.softcap)
    weights, to_scores = (
        x.astype(like.dtype).reshape(*x.shape[:3], group * seq) for x, like in ((weights, value), (to_scores, query))
    )
    to_query = product("bkds,bksr->bkdr", key_turned, to_scores).reshape(*key_turned.shape[:3], group, seq)
    to_key = product("bksr,bkrd->bksd", to_scores, merged(query))
    to_value = product("bksr,bkrd->bksd", weights, merged(to_output))
    return to_query * rules.scale, to_key * rules.scale, to_value
