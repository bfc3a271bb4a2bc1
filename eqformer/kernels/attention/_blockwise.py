"""Blockwise attention: neither the forward nor the backward pass builds the full matrix of probabilities.

The softmax is computed online over blocks of keys, as in FlashAttention-2 (arXiv:2307.08691). The output and the
logsumexp of each query's scores are saved, and the backward pass recomputes the probabilities block by block.
"""

import functools
from collections.abc import Callable
from typing import cast, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..._mask import ChosenKeys, Mask
from .._decode_attention import DECODE_ATTENTION
from .._op import Implementation, Op
from .._platform import at_least_float32, compilers, Result, varying_zero
from ._call import (
    alibi_distances,
    apply_softcap,
    AttentionCall,
    DecodeCall,
    lowest,
    possible_pairs,
    spans,
    TokenPositions,
)
from ._flash import Gradients, LogSum, Output, scale_output


Block = int | Literal["platform"]
"""Number of tokens of a block; "platform" for the number that is fastest on the platform."""
FEW = 8
"""Largest number of queries to separate keys, as of a cache, that `decode` computes without blocks."""
_WIDEST = 16  # For few queries, blocks of keys are up to this many times longer than `block`.
_BLOCK, _TPU_BLOCK = 128, 512  # Tokens of a block by default; docs/accelerators-kernels.md has the measurements.


class BlockwiseAttention(Implementation[AttentionCall, Array]):
    """Attention by a loop over blocks of queries and blocks of keys, with memory linear in the sequence length.

    The size of the program does not depend on the sequence length. Pairs of blocks in which no query sees a key are
    skipped. `block` is the number of tokens of a block, by default 512 on TPUs and 128 elsewhere. The scores of a pair
    of blocks take `4 * batch * heads * block**2` bytes; on a CPU the loop is fastest if they fit the cache (about
    1 MB). `decode` computes the attention of up to 8 queries to cached keys, as in decode steps, and reads the cache in
    place. Only first derivatives in reverse mode are supported; `DotProductAttention` supports all derivatives.
    """

    block: Block = eqx.field(static=True, default="platform")
    decode: Op = DECODE_ATTENTION

    def __check_init__(self):
        if self.block != "platform" and self.block < 1:
            raise ValueError(f"BlockwiseAttention(block={self.block}): block counts tokens and must be at least 1.")

    def supports(self, call: AttentionCall) -> str | None:
        """Return None, except for calls with a bias or with keys chosen by a matrix."""
        if call.bias is not None:
            return "it supports no score bias"
        if isinstance(call.mask, ChosenKeys):
            return "it supports no matrix of chosen keys"
        return None

    def decode_op(self, *, has_codes: bool) -> Op:
        """Return `decode`."""
        return self.decode

    def run(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        if call.kv_tokens is not None and call.query.shape[-3] <= FEW:
            return self.decode(decode_call(call))
        arrays = call.query, call.key, call.value, call.tokens, call.kv_tokens, call.alibi_slopes
        output, logsum = attend(self.settings(call), *arrays)
        return output if call.sinks is None else with_sinks(output, logsum, call.sinks)

    def settings(self, call: AttentionCall) -> "BlockwiseSettings":
        """Return the static settings of the loop over blocks."""
        return BlockwiseSettings(cast(Mask, call.mask), call.scale, call.softcap, self.block)

    def forward(self, call: AttentionCall) -> tuple[Output, LogSum]:
        """Return output and logsumexp, as `FlashAttention.forward` does."""
        output, logsum = attend_forward(self.settings(call), *_grouped_arrays(call), *_grouped_slopes(call))
        return _tokens_first(output), logsum.reshape(logsum.shape[0], -1, logsum.shape[-1])

    def backward(self, call: AttentionCall, output: Output, logsum: LogSum, output_grad: Output) -> Gradients:
        """Return the gradients, as `FlashAttention.backward` does."""
        arrays = _grouped_arrays(call)
        rows = arrays[0].shape[:-1]
        output, output_grad = (x.swapaxes(1, 2).reshape(*rows, -1) for x in (output, output_grad))
        logsum = logsum.reshape(rows)
        residuals = (*arrays, *_grouped_slopes(call), output, logsum)
        gradients = attend_backward(self.settings(call), residuals, (output_grad, jnp.zeros_like(logsum)))
        query_grad, key_grad, value_grad = gradients
        return _tokens_first(query_grad), key_grad.swapaxes(1, 2), value_grad.swapaxes(1, 2)


def decode_call(call: AttentionCall) -> DecodeCall:
    """Convert an `AttentionCall` to a `DecodeCall`, whose mask is a matrix."""
    visible = call.mask(call.tokens, call.key_tokens)
    return DecodeCall(
        call.query,
        call.key,
        call.value,
        visible=visible,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        bias=call.total_bias,
    )


def _grouped_arrays(call: AttentionCall) -> tuple[Array, Array, Array, TokenPositions, TokenPositions]:
    """Return the arrays of a call in the form of `group_heads`."""
    return group_heads(call.query, call.key, call.value, call.tokens, call.kv_tokens)


def _grouped_slopes(call: AttentionCall) -> tuple[Array | None]:
    """Return the ALiBi slopes of a call in the form of `group_slopes`."""
    return (group_slopes(call.alibi_slopes, call.key.shape[-2]),)


def _tokens_first(x: Float[Array, "batch kv_heads group seq head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
    return x.reshape(x.shape[0], -1, *x.shape[-2:]).swapaxes(1, 2)


def with_sinks(
    output: Float[Array, "*batch seq heads v_dim"],
    logsum: Float[Array, "*batch seq heads"],
    sinks: Float[Array, "heads"],
) -> Float[Array, "*batch seq heads v_dim"]:
    """Return the output of the softmax with sinks, from output and logsumexp of the softmax without sinks.

    The output is multiplied by the share of the keys in the sum of exponentials of keys and sinks.
    """
    return scale_output(output, jax.nn.sigmoid(logsum - sinks.astype(logsum.dtype))[..., None])


class BlockwiseSettings(NamedTuple):
    """Static settings of the loop over blocks."""

    mask: Mask
    scale: float
    softcap: float | None
    block: Block


def attend(
    settings: BlockwiseSettings,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch kv_seq kv_heads head_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    tokens: TokenPositions,
    kv_tokens: TokenPositions | None,
    alibi_slopes: Float[Array, "heads"] | None = None,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*batch seq heads"]]:
    """Return the output and the logsumexp of each query's scores.

    The logsumexp is a very low number for a query that sees no key. Results for different keys can be combined by their
    logsumexps, as in ring attention. Both results are differentiable.

    Args:
        settings: Mask, scale, softcap and block size.
        query: The queries.
        key: The keys.
        value: The values.
        tokens: Positions and segments of the queries.
        kv_tokens: Positions and segments of the keys; None if queries and keys have the same tokens.
        alibi_slopes: The slope of each query head, as in `AttentionCall`; None for no ALiBi.
    """
    arrays = *group_heads(query, key, value, tokens, kv_tokens), group_slopes(alibi_slopes, key.shape[-2])
    # Under `shard_map` the arrays may vary over different mesh axes, for example if key heads are replicated and query
    # heads are split. A custom gradient must vary over the axes of its argument. So add to each array a zero that
    # varies over the axes of all arrays; XLA removes the addition.
    zero = varying_zero(arrays, query.dtype)
    output, logsum = _attend(settings, *(x + zero.astype(x.dtype) for x in arrays[:3]), *arrays[3:])
    return ungroup_heads(output, query.shape[:-3]), ungroup_heads(logsum[..., None], query.shape[:-3])[..., 0]


def attend_forward(
    settings: BlockwiseSettings,
    query: Float[Array, "batch kv_heads _ seq head_dim"],
    key: Float[Array, "batch kv_heads kv_seq head_dim"],
    value: Float[Array, "batch kv_heads kv_seq v_dim"],
    tokens: TokenPositions,
    kv_tokens: TokenPositions,
    slopes: Float[Array, "kv_heads _ 1 1"] | None,
) -> tuple[Float[Array, "batch kv_heads _ seq v_dim"], Float[Array, "batch kv_heads _ seq"]]:
    """Return the results of `attend` without a derivative, for arrays in the form of `group_heads`.

    The arrays must vary over the same mesh axes.

    Args:
        settings: Mask, scale, softcap and block size.
        query: The queries, grouped by the key head that they read.
        key: The keys.
        value: The values.
        tokens: Positions and segments of the queries.
        kv_tokens: Positions and segments of the keys.
        slopes: The ALiBi slopes, in the form of `group_slopes`.
    """
    return _by_block(_forward_in_blocks, settings, query, key, value, tokens, kv_tokens, slopes)


def _by_block(attend: Callable[..., Result], settings: BlockwiseSettings, *arrays: PyTree) -> Result:
    """Return `attend(block, settings, *arrays)` with the block size of the settings or of the platform."""
    if settings.block != "platform":
        return attend(settings.block, settings, *arrays)
    if "tpu" not in compilers() or arrays[1].shape[2] <= _BLOCK:  # All keys are in one block.
        return attend(_BLOCK, settings, *arrays)
    on_tpus, elsewhere = (functools.partial(attend, block, settings) for block in (_TPU_BLOCK, _BLOCK))
    return jax.lax.platform_dependent(*arrays, tpu=on_tpus, default=elsewhere)


def _forward_in_blocks(
    block: int,
    settings: BlockwiseSettings,
    query: Array,
    key: Array,
    value: Array,
    tokens: TokenPositions,
    kv_tokens: TokenPositions,
    slopes: Array | None,
) -> tuple[Array, Array]:
    queries, keys, token_blocks, kv_token_blocks, zero = split_into_blocks(
        block, query, (key, value), tokens, kv_tokens
    )

    def attend_query_block(_, xs):
        query_block, query_tokens, first, stop = xs

        def add_key_block(index: Array, carry: tuple[Array, Array, Array]):
            output, peak, total = carry
            (key_block, value_block), key_tokens = select_block((keys, kv_token_blocks), index)
            visible = settings.mask(query_tokens, key_tokens)[:, None, None]
            scores = _scores(settings, query_block, key_block)
            if slopes is not None:
                distances = alibi_distances(query_tokens, key_tokens, scores.dtype)
                scores -= slopes.astype(scores.dtype) * distances[:, None, None]
            scores = jnp.where(visible, scores, lowest(zero.dtype))
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
        output, peak, total = jax.lax.fori_loop(first, stop, add_key_block, empty)
        sees_any_key = total > 0
        total = jnp.where(sees_any_key, total, 1)
        logsum = jnp.where(sees_any_key, peak + jnp.log(total), lowest(zero.dtype))
        return None, ((output / total[..., None]).astype(query.dtype), logsum)

    xs = (queries, token_blocks, *spans(possible_pairs(settings.mask, token_blocks, kv_token_blocks)))
    _, (output, logsum) = jax.lax.scan(attend_query_block, None, xs)
    return join_blocks(output, 3, query.shape[3]), join_blocks(logsum, 3, query.shape[3])


_attend = jax.custom_vjp(attend_forward, nondiff_argnums=(0,))


def _attend_forward(
    settings: BlockwiseSettings,
    query: Array,
    key: Array,
    value: Array,
    tokens: TokenPositions,
    kv_tokens: TokenPositions,
    slopes: Array | None,
):
    results = _attend(settings, query, key, value, tokens, kv_tokens, slopes)
    output, logsum = (checkpoint_name(x, "attended") for x in results)  # Remat policies may save both by this name.
    return (output, logsum), (query, key, value, tokens, kv_tokens, slopes, output, logsum)


def attend_backward(
    settings: BlockwiseSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[
    Float[Array, "batch kv_heads _ seq head_dim"],
    Float[Array, "batch kv_heads kv_seq head_dim"],
    Float[Array, "batch kv_heads kv_seq v_dim"],
]:
    """Return the gradients of query, key and value from the gradients of output and logsumexp.

    `residuals` are the array arguments of `attend_forward`, then output and logsumexp. In ring attention, output and
    logsumexp belong to a softmax over more keys than `key`. The result for the query is then only the part of its
    gradient that comes from `key`.
    """
    return _by_block(_backward_in_blocks, settings, *residuals, *gradients)


def _backward_in_blocks(
    block: int,
    settings: BlockwiseSettings,
    query: Array,
    key: Array,
    value: Array,
    tokens: TokenPositions,
    kv_tokens: TokenPositions,
    slopes: Array | None,
    *outputs_and_grads: Array,
) -> tuple[Array, Array, Array]:
    output, logsum, output_grad, logsum_grad = outputs_and_grads
    row_sums = jnp.sum(output_grad.astype(logsum.dtype) * output.astype(logsum.dtype), axis=-1) - logsum_grad
    query_arrays = query, output_grad, logsum, row_sums
    blocks = split_into_blocks(block, query_arrays, (key, value), tokens, kv_tokens)
    queries, keys, token_blocks, kv_token_blocks, zero = blocks

    def differentiate_key_block(query_grad, xs):
        (key_block, value_block), key_tokens, first, stop = xs
        # Without the barrier, XLA for CPUs would merge the transposition into the product, which it does not support in
        # bfloat16.
        columns = key_block, jax.lax.optimization_barrier(key_block.swapaxes(-1, -2)), value_block

        def add_query_block(index: Array, carry: tuple[Array, Array, Array]):
            query_grad, key_grad, value_grad = carry
            rows, query_tokens = select_block((queries, token_blocks), index)
            visible = settings.mask(query_tokens, key_tokens).swapaxes(-1, -2)[:, None, :, None]
            penalties = None
            if slopes is not None:
                distances = alibi_distances(query_tokens, key_tokens, zero.dtype).swapaxes(-1, -2)
                penalties = slopes.astype(zero.dtype)[:, None, ..., 0] * distances[:, None, :, None]
            parts = _block_gradients(settings, rows, columns, visible, penalties)
            updated = jax.lax.dynamic_index_in_dim(query_grad, index, keepdims=False) + parts[0]
            query_grad = jax.lax.dynamic_update_index_in_dim(query_grad, updated, index, 0)
            return query_grad, key_grad + parts[1], value_grad + parts[2]

        empty = query_grad, jnp.full(key_block.shape, zero), jnp.full(value_block.shape, zero)
        query_grad, key_grad, value_grad = jax.lax.fori_loop(first, stop, add_query_block, empty)
        return query_grad, (key_grad.astype(key.dtype), value_grad.astype(value.dtype))

    xs = (keys, kv_token_blocks, *spans(possible_pairs(settings.mask, token_blocks, kv_token_blocks).T))
    empty = jnp.full(jnp.moveaxis(queries[0], -1, 3).shape, zero)
    query_grad, (key_grad, value_grad) = jax.lax.scan(differentiate_key_block, empty, xs)
    query_grad = join_blocks(jnp.moveaxis(query_grad, 3, -1), 3, query.shape[3]).astype(query.dtype)
    return query_grad, join_blocks(key_grad, 2, key.shape[2]), join_blocks(value_grad, 2, key.shape[2])


def _attend_backward(settings: BlockwiseSettings, residuals: tuple, gradients: tuple[Array, Array]):
    return *attend_backward(settings, residuals, gradients), None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(settings: BlockwiseSettings, query: Array, key: Array) -> Array:
    scores = jnp.einsum("bkgqd,bksd->bkgqs", query, key, preferred_element_type=at_least_float32(query.dtype))
    return apply_softcap(scores * settings.scale, settings.softcap)


def _block_gradients(
    settings: BlockwiseSettings,
    rows: tuple[Array, Array, Array, Array],
    columns: tuple[Array, Array, Array],
    visible: Bool[Array, "batch 1 kv_seq 1 seq"],
    penalties: Float[Array, "batch kv_heads kv_seq group seq"] | None,
) -> tuple[Array, Array, Array]:
    """Return the terms of a pair of blocks in the gradients of queries, keys and values.

    The queries' gradient has channels before tokens. The scores have keys before queries, and `columns` includes a
    transposed copy of the keys. So each product contracts the last dim of its left factor, which is fastest on CPUs,
    and no array of the scores' size is transposed. `penalties` are subtracted from the scores.
    """
    (query, output_grad, logsum, row_sums), (key, key_transposed, value) = rows, columns
    wide, (group, seq) = logsum.dtype, logsum.shape[-2:]
    product = functools.partial(jnp.einsum, preferred_element_type=wide)

    def merge_group(x: Array) -> Array:
        return x.reshape(*x.shape[:2], group * seq, -1)

    def by_key(keys: Array, rows: Array) -> Array:
        return product("bksd,bkrd->bksr", keys, merge_group(rows)).reshape(*keys.shape[:3], group, seq)

    scores = apply_softcap(by_key(key, query) * settings.scale, settings.softcap)
    biased_scores = scores if penalties is None else scores - penalties
    weights = jnp.where(visible, jnp.exp(biased_scores - logsum[:, :, None]), 0)
    scores_grad = weights * (by_key(value, output_grad) - row_sums[:, :, None])
    if settings.softcap is not None:
        scores_grad *= 1 - jnp.square(scores / settings.softcap)
    weights, scores_grad = (
        x.astype(like.dtype).reshape(*x.shape[:3], group * seq) for x, like in ((weights, value), (scores_grad, query))
    )
    query_grad = product("bkds,bksr->bkdr", key_transposed, scores_grad).reshape(*key_transposed.shape[:3], group, seq)
    key_grad = product("bksr,bkrd->bksd", scores_grad, merge_group(query))
    value_grad = product("bksr,bkrd->bksd", weights, merge_group(output_grad))
    return query_grad * settings.scale, key_grad * settings.scale, value_grad


def group_heads(
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch kv_seq kv_heads head_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    tokens: TokenPositions,
    kv_tokens: TokenPositions | None,
) -> tuple[Array, Array, Array, TokenPositions, TokenPositions]:
    """Return arrays with one batch dim and heads before tokens; queries are grouped by the key head that they read."""
    heads, kv_heads = query.shape[-2], key.shape[-2]
    batch, seq, kv_seq = query.shape[:-3], query.shape[-3], key.shape[-3]
    queries = query.reshape(-1, seq, kv_heads, heads // kv_heads, query.shape[-1]).transpose(0, 2, 3, 1, 4)
    keys = key.reshape(-1, kv_seq, kv_heads, key.shape[-1]).transpose(0, 2, 1, 3)
    values = value.reshape(-1, kv_seq, kv_heads, value.shape[-1]).transpose(0, 2, 1, 3)
    merged = _merge_batch(tokens, batch, seq)
    return queries, keys, values, merged, merged if kv_tokens is None else _merge_batch(kv_tokens, batch, kv_seq)


def group_slopes(alibi_slopes: Float[Array, "heads"] | None, kv_heads: int) -> Float[Array, "kv_heads _ 1 1"] | None:
    """Return the slope of each query head with the dims of scores, grouped as `group_heads` groups queries."""
    return None if alibi_slopes is None else alibi_slopes.reshape(kv_heads, -1, 1, 1)


def ungroup_heads(
    output: Float[Array, "_ kv_heads group seq v_dim"], batch: tuple[int, ...]
) -> Float[Array, "*batch seq heads v_dim"]:
    """Undo `group_heads` for an array of the form of grouped queries."""
    _, kv_heads, group, seq, v_dim = output.shape
    return output.transpose(0, 3, 1, 2, 4).reshape(*batch, seq, kv_heads * group, v_dim)


def _merge_batch(tokens: TokenPositions, batch: tuple[int, ...], seq: int) -> TokenPositions:
    """Return positions and segments with one batch dim."""

    def merge(x: Array) -> Array:
        return jnp.broadcast_to(x, (*batch, seq)).reshape(-1, seq)

    return TokenPositions(merge(tokens.positions), None if tokens.segments is None else merge(tokens.segments))


def split_into_blocks(
    max_block: int, query_arrays: PyTree, key_arrays: PyTree, tokens: TokenPositions, kv_tokens: TokenPositions
) -> tuple[PyTree, PyTree, TokenPositions, TokenPositions, Float[Array, ""]]:
    """Split all arrays into blocks of up to `max_block` tokens; return the blocks, and a zero of the loop carry's type.

    If there are few queries, blocks of keys are up to `_WIDEST` times larger, so that the number of scores of a pair of
    blocks is about the same.
    """
    block = min(max_block, tokens.positions.shape[-1])
    kv_block = min(max_block * min(max_block // max(block, 1), _WIDEST), kv_tokens.positions.shape[-1])

    def split_tokens(tokens: TokenPositions, size: int) -> TokenPositions:
        segments = None if tokens.segments is None else split_blocks(tokens.segments, 1, size)
        return TokenPositions(split_blocks(tokens.positions, 1, size, fill=-1), segments)

    zero = jnp.zeros_like(key_arrays[0], at_least_float32(key_arrays[0].dtype), shape=())
    query_blocks = jax.tree.map(lambda x: split_blocks(x, 3, block), query_arrays)
    key_blocks = jax.tree.map(lambda x: split_blocks(x, 2, kv_block), key_arrays)
    return query_blocks, key_blocks, split_tokens(tokens, block), split_tokens(kv_tokens, kv_block), zero


def split_blocks(array: Array, dim: int, block: int, fill: int = 0) -> Array:
    """Split an array along `dim` into blocks, with a new first dim of blocks; pad the last block with `fill`."""
    count = -(-array.shape[dim] // block)
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, count * block - array.shape[dim])
    array = jnp.pad(array, widths, constant_values=fill)
    return jnp.moveaxis(array.reshape(*array.shape[:dim], count, block, *array.shape[dim + 1 :]), dim, 0)


def join_blocks(array: Array, dim: int, length: int) -> Array:
    """Undo `split_blocks`: join the blocks along `dim` to `length` tokens, without the padding."""
    array = jnp.moveaxis(array, 0, dim)
    padded = array.shape[dim] * array.shape[dim + 1]  # not -1, which is ambiguous for an array without rows
    array = array.reshape(*array.shape[:dim], padded, *array.shape[dim + 2 :])
    return jax.lax.slice_in_dim(array, 0, length, axis=dim)


def select_block(tree: PyTree, index: Int[Array, ""]) -> PyTree:
    """Return one block of each array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
