"""Attention of one new token per row to a cache on NVIDIA GPUs: flash decoding by a Pallas (Triton) kernel.

The slots of a row are cut into as many chunks as fill a GPU. Each chunk is read once, with a running softmax in
registers, and the results of the chunks are combined by their sums of exponentials
(https://pytorch.org/blog/flash-decoding). If many wide heads share a key head, as the 128 heads of DeepSeek-V3 share a
latent, neighboring programs each compute some of the heads, and read the same slots.
"""

import functools
import importlib.util
from typing import cast, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Num

from .._shapes import next_power_of_two
from ._op import Implementation
from ._platform import E4M3, gpu_capability, Ref, varying_of
from ._triton import (
    FP8_CAPABILITY,
    full_span,
    is_inside,
    load_part,
    padded_dim,
    PaddedSpan,
    pallas_and_triton,
    select_part,
    SMALLEST_DIM,
    TRITON,
)
from .attention._call import apply_softcap, DecodeCall, if_given, lowest, ScoreSettings


_PROGRAMS = 264  # Number of programs that fill a GPU: two for each of the 132 multiprocessors of an H100.
_BLOCK_ENTRIES = 8192  # Entries of keys in a block. Keys and values of a block have 32 KB; two blocks are in flight.
_QUERY_ENTRIES = 16384  # Largest number of entries of a program's queries, which stay in registers with the softmax.


class FlashDecodingGpu(Implementation[DecodeCall, Array]):
    """Flash decoding with products in 16 bits; 8-bit keys and values are converted to the dtype of the queries.

    A program reads its chunk of slots in blocks of 8,192 entries of keys, but of at least 16 slots. Chunks are as long
    as possible while there are at least 264 programs. These constants are for an H100 (compute capability 9.0).
    `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: DecodeCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        query, rotated = call.query, call.rotated
        keys = [x for x in (call.key, call.value, rotated and rotated.key) if x is not None]
        if query.shape[-3] != 1:
            return f"it supports one query per row, not {query.shape[-3]}"
        if call.bias is not None:
            return "it supports no score bias"
        if query.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, not {query.dtype}"
        if any(x.dtype not in (query.dtype, jnp.int8, E4M3) for x in keys):
            return f"it takes keys and values in {query.dtype}, int8 or fp8, not {[str(x.dtype) for x in keys]}"
        if any(x.dtype == E4M3 for x in keys) and gpu_capability() < FP8_CAPABILITY:
            return f"Triton reads fp8 on GPUs of compute capability {FP8_CAPABILITY} and above"
        if SMALLEST_DIM * next_power_of_two(max(x.shape[-1] for x in keys)) > _QUERY_ENTRIES:
            widest, limit = max(x.shape[-1] for x in keys), _QUERY_ENTRIES // SMALLEST_DIM
            return f"it takes heads of up to {limit} channels, not {widest}"
        if importlib.util.find_spec(TRITON) is None:
            return f"this JAX has no {TRITON}"
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch 1 heads _"]:
        """Compute the call by the kernel on every platform."""
        return _attend(ScoreSettings(call.scale, call.softcap, self.interpret), call)


class _ChannelPart(NamedTuple):
    """Part of the channels of queries and keys; scores are sums over the parts.

    The parts are the call's `query` and `key`, and its `rotated` channels if it has them.
    """

    query: Float[Array, "rows kv_heads group head_dim"]
    key: Num[Array, "rows kv_heads kv_seq head_dim"]
    scales: Float[Array, "rows kv_heads kv_seq"] | None


class _ProgramArrays(NamedTuple):
    """Arrays that the kernel reads. In the kernel, the fields are references to a program's blocks of the arrays."""

    visible: Bool[Array, "rows kv_seq"]
    visible_blocks: Int[Array, "rows 2"]
    """The first block with a visible slot, and the block after the last such block."""
    parts: list[_ChannelPart]
    value: Num[Array, "rows kv_heads kv_seq v_dim"] | None
    """The values; None if the keys of the first part, with their scales, are also the values."""
    value_scales: Float[Array, "rows kv_heads kv_seq"] | None


class _ChunkSoftmax(NamedTuple):
    """Softmax of each chunk of slots."""

    values: Float[Array, "chunks rows kv_heads group v_dim"]
    """Sums of values, weighted by exponentials of scores."""
    peaks: Float[Array, "chunks rows kv_heads group"]
    """Largest scores, which are subtracted from scores before the exponential."""
    totals: Float[Array, "chunks rows kv_heads group"]
    """Sums of exponentials."""


class _GridSizes(NamedTuple):
    """Static sizes of a call to the kernel."""

    group: int
    """Number of query heads that share a key head."""
    program_heads: int
    """Number of query heads of a program, padded to a power of two."""
    block: int
    """Number of slots of a block."""
    chunk_blocks: int
    """Number of blocks of a chunk."""
    key_channels: list[int]
    """Number of channels of each part."""
    v_dim: int
    """Number of channels of a value."""


def _attend(settings: ScoreSettings, call: DecodeCall) -> Float[Array, "*batch 1 heads _"]:
    visible = jnp.broadcast_to(call.visible, (*call.query.shape[:-3], 1, call.key.shape[-3]))
    batch, heads, kv_heads = call.query.shape[:-3], call.query.shape[-2], call.key.shape[-2]

    def merge_batch(x: Array) -> Array:
        return x.reshape(-1, *x.shape[len(batch) :])

    def to_queries(x: Array) -> Array:
        return merge_batch(x).reshape(-1, kv_heads, heads // kv_heads, x.shape[-1])

    def heads_first(x: Array) -> Array:
        return merge_batch(x).swapaxes(1, 2)

    def to_scales(x: Array | None) -> Array | None:
        return None if x is None else heads_first(x).astype(jnp.float32)

    value = if_given(heads_first, call.value)
    parts = [_ChannelPart(to_queries(call.query), heads_first(call.key), to_scales(call.key_scales))]
    if (rotated := call.rotated) is not None:
        parts.append(_ChannelPart(to_queries(rotated.query), heads_first(rotated.key), to_scales(rotated.scales)))
    chunks = _attend_to_chunks(settings, parts, value, to_scales(call.value_scales), merge_batch(visible)[:, 0])
    output = _combine_chunks(chunks, call.sinks)
    return checkpoint_name(output.reshape(*batch, 1, heads, output.shape[-1]).astype(call.query.dtype), "attended")


def _combine_chunks(
    chunks: _ChunkSoftmax, sinks: Float[Array, "heads"] | None
) -> Float[Array, "rows kv_heads group v_dim"]:
    """Return the output of the softmax over all chunks and the sinks."""
    peak = jnp.max(chunks.peaks, axis=0)
    sink = None if sinks is None else sinks.astype(peak.dtype).reshape(peak.shape[1], -1)
    peak = peak if sink is None else jnp.maximum(peak, sink)
    factor = jnp.exp(chunks.peaks - peak)
    total = jnp.sum(chunks.totals * factor, axis=0)
    total = total if sink is None else total + jnp.exp(sink - peak)
    return jnp.sum(chunks.values * factor[..., None], axis=0) / jnp.where(total > 0, total, 1)[..., None]


def _attend_to_chunks(
    settings: ScoreSettings,
    parts: list[_ChannelPart],
    value: Num[Array, "rows kv_heads kv_seq v_dim"] | None,
    value_scales: Float[Array, "rows kv_heads kv_seq"] | None,
    visible: Bool[Array, "rows kv_seq"],
) -> _ChunkSoftmax:
    """Call the kernel.

    The dims of its grid are: pairs of a key head and a share of its query heads; rows; and chunks of slots.
    """
    pl, triton = pallas_and_triton()

    rows, kv_heads, kv_seq, v_dim = (parts[0].key if value is None else value).shape
    group, widest = parts[0].query.shape[2], next_power_of_two(max(v_dim, *(part.key.shape[-1] for part in parts)))
    program_heads = min(padded_dim(group), _QUERY_ENTRIES // widest)
    shares = -(-group // program_heads)
    block = max(SMALLEST_DIM, min(_BLOCK_ENTRIES // widest, next_power_of_two(kv_seq)))
    blocks = -(-kv_seq // block)
    chunk_blocks = -(-blocks // min(blocks, -(-_PROGRAMS // (rows * kv_heads * shares))))
    chunks = -(-blocks // chunk_blocks)
    sizes = _GridSizes(group, program_heads, block, chunk_blocks, [part.key.shape[-1] for part in parts], v_dim)
    arrays = _ProgramArrays(visible, _visible_blocks(visible, block), parts, value, value_scales)
    varying = varying_of(arrays)
    num_warps = 4 if program_heads * widest < _QUERY_ENTRIES else 8

    # Programs that read the same slots run at about the same time, because the first dim of the grid counts fastest.
    def chunk_spec(*channels: int) -> object:
        index = lambda share, row, chunk: (chunk, row, share // shares, share % shares, 0)[: 4 + len(channels)]
        return pl.BlockSpec((None, None, None, program_heads, *channels), index)

    def result(*channels: int) -> jax.ShapeDtypeStruct:
        shape = chunks, rows, kv_heads, group, *channels
        return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying)

    return pl.pallas_call(
        functools.partial(_kernel, settings, sizes),
        grid=(kv_heads * shares, rows, chunks),
        in_specs=[_block_specs(sizes, arrays)],
        out_specs=_ChunkSoftmax._make((chunk_spec(padded_dim(v_dim)), chunk_spec(), chunk_spec())),
        out_shape=_ChunkSoftmax._make((result(v_dim), result(), result())),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=settings.interpret,
        name="cached_attention",
    )(arrays)


def _block_specs(sizes: _GridSizes, arrays: _ProgramArrays) -> _ProgramArrays:
    """Return the `BlockSpec` of each array, which determines the block of the array that a program reads."""
    pl, _ = pallas_and_triton()
    shares, kv_seq = -(-sizes.group // sizes.program_heads), arrays.visible.shape[1]

    def row_spec(x: Array) -> object:
        return pl.BlockSpec((None, x.shape[1]), lambda share, row, chunk: (row, 0))

    def query_spec(x: Array) -> object:
        index = lambda share, row, chunk: (row, share // shares, share % shares, 0)
        return pl.BlockSpec((None, None, sizes.program_heads, padded_dim(x.shape[-1])), index)

    def slots_spec(x: Array) -> object:
        index = lambda share, row, chunk: (row, share // shares, 0, 0)[: x.ndim]
        return pl.BlockSpec((None, None, kv_seq, *[padded_dim(size) for size in x.shape[3:]]), index)

    def part_specs(part: _ChannelPart) -> _ChannelPart:
        specs = query_spec(part.query), slots_spec(part.key), if_given(slots_spec, part.scales)
        return _ChannelPart._make(specs)

    row_specs = row_spec(arrays.visible), row_spec(arrays.visible_blocks)
    value_specs = if_given(slots_spec, arrays.value), if_given(slots_spec, arrays.value_scales)
    return _ProgramArrays._make((*row_specs, list(map(part_specs, arrays.parts)), *value_specs))


def _visible_blocks(visible: Bool[Array, "rows kv_seq"], block: int) -> Int[Array, "rows 2"]:
    """Return for each row the first block with a visible slot, and the block after the last such block."""
    slots = jnp.arange(visible.shape[1], dtype=jnp.int32)
    first = jnp.min(jnp.where(visible, slots, visible.shape[1]), axis=1)
    last = jnp.max(jnp.where(visible, slots, -1), axis=1)
    return jnp.stack([first // block, last // block + 1], axis=1)


def _kernel(settings: ScoreSettings, sizes: _GridSizes, arrays: _ProgramArrays, *results: Ref) -> None:
    """Compute the attention of some query heads to a chunk of their key head's slots, with a running softmax."""
    pl, triton = pallas_and_triton()

    kv_seq, chunk = arrays.visible.shape[0], pl.program_id(2)
    shares = -(-sizes.group // sizes.program_heads)
    heads = PaddedSpan(0, sizes.program_heads, sizes.group - pl.program_id(0) % shares * sizes.program_heads)
    spans, columns = [full_span(size) for size in sizes.key_channels], full_span(sizes.v_dim)
    queries = [load_part(part.query, heads, span) for part, span in zip(arrays.parts, spans)]

    def add_block(block_index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        output, peak, total = carry
        slots = PaddedSpan(block_index * sizes.block, sizes.block, kv_seq)
        keys = [load_part(part.key, slots, span).astype(queries[0].dtype) for part, span in zip(arrays.parts, spans)]
        dots = [triton.dot(query, key.T) for query, key in zip(queries, keys)]
        load_scales = lambda ref: None if ref is None else load_part(ref, slots)[None]
        key_scales = [load_scales(part.scales) for part in arrays.parts]
        scores = cast(Array, sum(dot if scale is None else dot * scale for dot, scale in zip(dots, key_scales)))
        scores = apply_softcap(scores * settings.scale, settings.softcap)
        visible = load_part(arrays.visible, slots)[None]
        scores = jnp.where(visible, scores, lowest(scores.dtype))
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp(scores - new_peak[:, None]), 0)
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1)
        value_scales = key_scales[0] if arrays.value is None else load_scales(arrays.value_scales)
        weights = weights if value_scales is None else weights * value_scales
        values = keys[0] if arrays.value is None else load_part(arrays.value, slots, columns).astype(queries[0].dtype)
        return output * shrink[:, None] + triton.dot(weights.astype(values.dtype), values), new_peak, total

    zeros = jnp.zeros((heads.size, columns.size), jnp.float32)
    empty = zeros, jnp.full(heads.size, lowest(zeros.dtype)), jnp.zeros(heads.size, jnp.float32)
    first = jnp.maximum(chunk * sizes.chunk_blocks, arrays.visible_blocks[0])
    stop = jnp.minimum((chunk + 1) * sizes.chunk_blocks, arrays.visible_blocks[1])
    carry = jax.lax.fori_loop(first, jnp.maximum(first, stop), add_block, empty)
    for result, value, spans in zip(results, carry, ((heads, columns), (heads,), (heads,))):
        triton.store(select_part(result, *spans), value, mask=is_inside(*spans))
