"""Attention of a row's newest token to what a cache holds, which reads keys and values once on NVIDIA GPUs.

In plain XLA the scores of all slots stand in main memory in float32, and a softmax reads them three times: where many
heads share a key head, as the eight of Llama 3 70B on each of eight devices, that is a sixth of what a step moves. A
kernel keeps them where they are computed (flash-decoding: https://pytorch.org/blog/flash-decoding). The slots of a row
are cut into chunks, as many as fill a GPU, and the chunks' results are put together by their sums.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Num

from .._pallas import compilers
from .._tokens import Tokens
from ..attention._mask import Chosen, Mask
from ._core import lowest, ReferenceCore, soft_capped


class Read(NamedTuple):
    """What single tokens attend to, under a mask that is made: the arrays of a call of `ReferenceCore`."""

    query: Float[Array, "*batch 1 heads head_dim"]
    key: Num[Array, "*batch kv_seq kv_heads head_dim"]
    value: Num[Array, "*batch kv_seq kv_heads v_dim"]
    visible: Bool[Array, "*batch 1 kv_seq"]
    sinks: Float[Array, "heads"] | None
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None


class Rules(NamedTuple):
    """The static settings of a call."""

    scale: float
    softcap: float | None
    interpret: bool = False


def attend_cached(
    query: Float[Array, "*batch seq heads head_dim"],
    key: Num[Array, "*batch kv_seq kv_heads head_dim"],
    value: Num[Array, "*batch kv_seq kv_heads v_dim"],
    *,
    mask: Mask,
    tokens: Tokens,
    kv_tokens: Tokens,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    bias: Float[Array, "*#batch heads seq kv_seq"] | None = None,
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None,
) -> Float[Array, "*batch seq heads v_dim"]:
    """What `ReferenceCore` gives of few queries; of one a row, in 16 bits, by a kernel in programs for NVIDIA GPUs.

    Args:
        query: The queries.
        key: The keys; of 8 bits, with scales.
        value: The values.
        mask: Which keys a query may see.
        tokens: The positions and segments of the queries.
        kv_tokens: Those of the keys.
        scale: What the scores are multiplied by.
        softcap: The bound of the scores; None: there is none.
        sinks: A score of each head that joins its softmax.
        bias: What is added to the scores, which the kernel has not; None: nothing.
        key_scales: What each key is to be multiplied by; None: nothing.
        value_scales: What each value is to be multiplied by; None: nothing.
    """
    if "cuda" not in compilers() or query.shape[-3] != 1 or bias is not None or not _has(query, key, value):
        given: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap, "sinks": sinks}
        given |= {"bias": bias, "key_scales": key_scales, "value_scales": value_scales}
        return _by_reference(query, key, value, tokens=tokens, kv_tokens=kv_tokens, **given)
    visible = jnp.broadcast_to(mask(tokens, kv_tokens), (*query.shape[:-3], 1, key.shape[-3]))
    return _attend(Rules(scale, softcap), Read(query, key, value, visible, sinks, key_scales, value_scales))


def _has(query: Array, key: Array, value: Array) -> bool:
    """Whether the kernel has the call: products in 16 bits, of integers too, whose queries fit a multiprocessor.

    So the 128 heads of DeepSeek-V3, which share a latent, are the kernel's over 8 devices and not on one.
    """
    its = jnp.bfloat16, jnp.float16
    group, widest = query.shape[-2] // key.shape[-2], max(key.shape[-1], value.shape[-1])
    fits = max(_LEAST, _power(group)) * _power(widest) <= _MOST and importlib.util.find_spec(_TRITON) is not None
    return fits and query.dtype in its and all(x.dtype in (query.dtype, jnp.int8) for x in (key, value))


def _by_reference(query: Array, key: Array, value: Array, **given: Any) -> Array:
    return ReferenceCore()(query, key.astype(query.dtype), value.astype(query.dtype), **given)


def _plainly(rules: Rules, read: Read) -> Float[Array, "*batch 1 heads v_dim"]:
    query, key, value, visible, *rest = read
    nowhere = Tokens(jnp.zeros((*query.shape[:-3], 1), jnp.int32))  # the mask is made
    names = "sinks", "key_scales", "value_scales"
    given: dict[str, Any] = {"mask": Chosen(visible), "tokens": nowhere, "scale": rules.scale, "softcap": rules.softcap}
    return _by_reference(query, key, value, **given, **dict(zip(names, rest)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(rules: Rules, read: Read) -> Array:
    by_kernel, plainly = (functools.partial(way, rules) for way in (attend_by_kernel, _plainly))
    return jax.lax.platform_dependent(read, cuda=by_kernel, default=plainly)


# The kernel has no derivative, so that gradients are those of the plain way.
_attend.defjvp(lambda rules, primals, tangents: jax.jvp(functools.partial(_plainly, rules), primals, tangents))


_TRITON = "jax.experimental.pallas.triton"  # which JAX means to remove: from then on the plain way is everyone's
_PROGRAMS = 264  # that fill a GPU: two for each of the 132 multiprocessors of an H100
_TILE = 8192  # numbers of keys that a turn of the loop reads: with its values 32 KB, and as much is on the way
_LEAST = 16  # places of each dim of a product on tensor cores
_MOST = 16384  # numbers of queries, which stay beside the running sums


def attend_by_kernel(rules: Rules, read: Read) -> Float[Array, "*batch 1 heads v_dim"]:
    """The same by the kernel, whatever the platform."""
    query, key, value, visible, sinks, *scales = read
    batch, heads, (kv_heads, v_dim) = query.shape[:-3], query.shape[-2], value.shape[-2:]
    flat = lambda x: x.reshape(-1, *x.shape[len(batch) :])
    queries = flat(query).reshape(-1, kv_heads, heads // kv_heads, query.shape[-1])
    keys, values = (flat(x).swapaxes(1, 2) for x in (key, value))
    factors = [None if x is None else flat(x).swapaxes(1, 2).astype(jnp.float32) for x in scales]
    outputs, peaks, totals = _chunks(rules, queries, keys, values, flat(visible)[:, 0], factors)
    peak = jnp.max(peaks, axis=0)
    sink = None if sinks is None else sinks.astype(peak.dtype).reshape(kv_heads, -1)
    peak = peak if sink is None else jnp.maximum(peak, sink)
    share = jnp.exp(peaks - peak)
    total = jnp.sum(totals * share, axis=0)
    total = total if sink is None else total + jnp.exp(sink - peak)
    output = jnp.sum(outputs * share[..., None], axis=0) / jnp.where(total > 0, total, 1)[..., None]
    return checkpoint_name(output.reshape(*batch, 1, heads, v_dim).astype(query.dtype), "attended")


def _chunks(
    rules: Rules,
    query: Float[Array, "batch kv_heads group head_dim"],
    key: Num[Array, "batch kv_heads kv_seq head_dim"],
    value: Num[Array, "batch kv_heads kv_seq v_dim"],
    visible: Bool[Array, "batch kv_seq"],
    scales: list[Float[Array, "batch kv_heads kv_seq"] | None],
) -> tuple[
    Float[Array, "chunks batch kv_heads group v_dim"],
    Float[Array, "chunks batch kv_heads group"],
    Float[Array, "chunks batch kv_heads group"],
]:
    """Of each chunk of slots the sums of values, weighted by exponentials, their peaks, and the exponentials' sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, kv_heads, kv_seq, v_dim = value.shape
    group = query.shape[2]
    block = max(_LEAST, min(_TILE // _power(max(key.shape[-1], v_dim)), _power(kv_seq)))
    blocks = -(-kv_seq // block)
    each = -(-blocks // min(blocks, -(-_PROGRAMS // (rows * kv_heads))))  # blocks of a chunk
    chunks = -(-blocks // each)
    heads, channels, columns = (_whole(size) for size in (group, key.shape[-1], v_dim))
    whole = lambda *sizes: pl.BlockSpec((None, None, *sizes), lambda row, head, _: (row, head, *[0] * len(sizes)))
    of_row = lambda x: pl.BlockSpec((None, x.shape[1]), lambda row, head, _: (row, 0))
    of_chunk = lambda *sizes: pl.BlockSpec(
        (None, None, None, *sizes), lambda row, head, chunk: (chunk, row, head, *[0] * len(sizes))
    )
    read = whole(heads.size, channels.size), whole(kv_seq, channels.size), whole(kv_seq, columns.size)
    filled, given = _filled(visible, block), [x for x in scales if x is not None]
    arrays = query, key, value, *given
    varying = jax.typeof(sum(jnp.zeros_like(x, jnp.float32, shape=()) for x in (*arrays, visible))).manual_axis_type
    result = lambda *sizes: jax.ShapeDtypeStruct(
        (chunks, rows, kv_heads, group, *sizes), jnp.float32, manual_axis_type=varying
    )
    kernel = functools.partial(_kernel, rules, block, each, (heads, channels, columns), [x is not None for x in scales])
    return pl.pallas_call(
        kernel,
        grid=(rows, kv_heads, chunks),
        in_specs=[of_row(visible), of_row(filled), *read, *[whole(kv_seq)] * len(given)],
        out_specs=(of_chunk(heads.size, columns.size), of_chunk(heads.size), of_chunk(heads.size)),
        out_shape=(result(v_dim), result(), result()),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=rules.interpret,
        name="cached_attention",
    )(visible, filled, *arrays)


def _filled(visible: Bool[Array, "batch kv_seq"], block: int) -> Num[Array, "batch 2"]:
    """Of each row the first block with a slot that its token sees, and the first behind the last such."""
    slots = jnp.arange(visible.shape[1], dtype=jnp.int32)
    first = jnp.min(jnp.where(visible, slots, visible.shape[1]), axis=1)
    last = jnp.max(jnp.where(visible, slots, -1), axis=1)
    return jnp.stack([first // block, last // block + 1], axis=1)


def _kernel(
    rules: Rules,
    block: int,
    each: int,
    spans: "tuple[_Span, _Span, _Span]",
    are_scaled: list[bool],
    visible: Any,
    filled: Any,
    query: Any,
    *rest: Any,
) -> None:
    """A chunk of a key head's slots, block by block with running sums; `spans` are heads, their channels, values'."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    key, value, *scales, output, peaks, totals = rest
    (heads, channels, columns), kv_seq, chunk = spans, value.shape[0], pl.program_id(2)
    key_scales = scales[0] if are_scaled[0] else None
    value_scales = scales[-1] if are_scaled[1] else None
    asked = _read(query, heads, channels)

    def one_block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before, peak, total = carry
        slots = _Span(number * block, block, kv_seq)
        scores = triton.dot(asked, _read(key, slots, channels).astype(asked.dtype).T)
        if key_scales is not None:
            scores = scores * _read(key_scales, slots)[None]
        scores = soft_capped(scores * rules.scale, rules.softcap)
        sees = _read(visible, slots)[None]
        scores = jnp.where(sees, scores, lowest(scores.dtype))
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(sees, jnp.exp(scores - new_peak[:, None]), 0)
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1)
        if value_scales is not None:
            weights = weights * _read(value_scales, slots)[None]
        values = _read(value, slots, columns).astype(asked.dtype)
        return before * shrink[:, None] + triton.dot(weights.astype(asked.dtype), values), new_peak, total

    zeros = jnp.zeros((heads.size, columns.size), jnp.float32)
    empty = zeros, jnp.full(heads.size, lowest(zeros.dtype)), jnp.zeros(heads.size, jnp.float32)
    first, stop = jnp.maximum(chunk * each, filled[0]), jnp.minimum((chunk + 1) * each, filled[1])
    sums, peak, total = jax.lax.fori_loop(first, jnp.maximum(first, stop), one_block, empty)
    for whole, x, own in ((output, sums, (heads, columns)), (peaks, peak, (heads,)), (totals, total, (heads,))):
        triton.store(_part(whole, *own), x, mask=_inside(*own))


class _Span(NamedTuple):
    """So many places of a dim, a power of two as Triton has it, of which those before `end` are there."""

    begin: Any
    size: int
    end: int


def _whole(size: int) -> _Span:
    return _Span(0, max(_LEAST, _power(size)), size)


def _read(ref: Any, *spans: _Span) -> Array:
    """A part of an array, with zeros beyond its end."""
    from jax.experimental.pallas import triton

    return triton.load(_part(ref, *spans), mask=_inside(*spans), other=jnp.zeros((), ref.dtype))


def _part(ref: Any, *spans: _Span) -> Any:
    from jax.experimental import pallas as pl

    return ref.at[tuple(pl.ds(span.begin, span.size) for span in spans)]


def _inside(*spans: _Span) -> Bool[Array, "..."]:
    """Which places of a part are there."""
    are = [span.begin + jnp.arange(span.size, dtype=jnp.int32) < span.end for span in spans]
    return are[0] if len(are) == 1 else are[0][:, None] & are[1][None]


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
