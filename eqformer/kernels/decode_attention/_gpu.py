"""A kernel for NVIDIA GPUs by which newest tokens attend to a cache: flash-decoding, in Pallas by Triton.

The slots of a row are cut into chunks, as many as fill a GPU, each is read once with running sums, and the chunks'
results are put together by their sums (https://pytorch.org/blog/flash-decoding). Where many wide heads share a key
head, as the 128 of DeepSeek-V3 a latent, programs beside each other have some of them each and read the same slots.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Num

from .._op import Implementation
from .._platform import varying_of
from ..attention._reference import lowest, soft_capped
from ._call import DecodeCall, if_given, ScoreSettings


_TRITON = "jax.experimental.pallas.triton"  # which JAX means to remove: from then on the plain way is everyone's
_PROGRAMS = 264  # that fill a GPU: two for each of the 132 multiprocessors of an H100
_TILE = 8192  # numbers of keys that a turn of the loop reads: with its values 32 KB, and as much is on the way
_LEAST = 16  # places of each dim of a product on tensor cores
_MOST = 16384  # numbers of queries of a program, which stay beside the running sums


class FlashDecodingGpu(Implementation):
    """Flash-decoding in Triton: products in 16 bits, of 8-bit keys and values too.

    `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: DecodeCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        query, rotated = call.query, call.rotated
        keys = [x for x in (call.key, call.value, rotated and rotated.key) if x is not None]
        if query.shape[-3] != 1:
            return f"it takes one query a row, not {query.shape[-3]}"
        if call.bias is not None:
            return "it has no bias of scores"
        if query.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, not {query.dtype}"
        if any(x.dtype not in (query.dtype, jnp.int8) for x in keys):
            return f"it takes keys and values in {query.dtype} or int8, not {[str(x.dtype) for x in keys]}"
        if _LEAST * _power(max(x.shape[-1] for x in keys)) > _MOST:
            return f"it takes heads of up to {_MOST // _LEAST} channels, not {max(x.shape[-1] for x in keys)}"
        if importlib.util.find_spec(_TRITON) is None:
            return f"this JAX has no {_TRITON}"
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch 1 heads _"]:
        """Compute the call by the kernel, whatever the platform."""
        return _attend(ScoreSettings(call.scale, call.softcap, self.interpret), call)


def _attend(rules: ScoreSettings, read: DecodeCall) -> Float[Array, "*batch 1 heads _"]:
    visible = jnp.broadcast_to(read.visible, (*read.query.shape[:-3], 1, read.key.shape[-3]))
    batch, heads, kv_heads = read.query.shape[:-3], read.query.shape[-2], read.key.shape[-2]
    flat = lambda x: x.reshape(-1, *x.shape[len(batch) :])
    asked = lambda x: flat(x).reshape(-1, kv_heads, heads // kv_heads, x.shape[-1])
    held = lambda x: flat(x).swapaxes(1, 2)
    factors = lambda x: None if x is None else held(x).astype(jnp.float32)
    value = if_given(held, read.value)
    parts = [_Part(asked(read.query), held(read.key), factors(read.key_scales))]
    if read.rotated is not None:
        parts.append(_Part(asked(read.rotated.query), held(read.rotated.key), factors(read.rotated.scales)))
    sums = _chunks(rules, parts, value, factors(read.value_scales), flat(visible)[:, 0])
    peak, sinks = jnp.max(sums.peaks, axis=0), read.sinks
    sink = None if sinks is None else sinks.astype(peak.dtype).reshape(kv_heads, -1)
    peak = peak if sink is None else jnp.maximum(peak, sink)
    share = jnp.exp(sums.peaks - peak)
    total = jnp.sum(sums.totals * share, axis=0)
    total = total if sink is None else total + jnp.exp(sink - peak)
    output = jnp.sum(sums.values * share[..., None], axis=0) / jnp.where(total > 0, total, 1)[..., None]
    return checkpoint_name(output.reshape(*batch, 1, heads, output.shape[-1]).astype(read.query.dtype), "attended")


class _Part(NamedTuple):
    """Some channels of queries and keys."""

    query: Float[Array, "rows kv_heads group head_dim"]
    key: Num[Array, "rows kv_heads kv_seq head_dim"]
    scales: Float[Array, "rows kv_heads kv_seq"] | None


class _Given(NamedTuple):
    """Arrays that a program of the kernel reads."""

    visible: Bool[Array, "rows kv_seq"]
    filled: Int[Array, "rows 2"]
    parts: list[_Part]
    value: Num[Array, "rows kv_heads kv_seq v_dim"] | None
    value_scales: Float[Array, "rows kv_heads kv_seq"] | None


class _Sums(NamedTuple):
    """Running softmax of each chunk of slots: weighted sums of values, peaks of scores, sums of exponentials."""

    values: Float[Array, "chunks rows kv_heads group v_dim"]
    peaks: Float[Array, "chunks rows kv_heads group"]
    totals: Float[Array, "chunks rows kv_heads group"]


class _Sizes(NamedTuple):
    """Sizes of a call: heads, heads of a program, slots of a block, blocks of a chunk, and channels."""

    group: int
    heads: int
    block: int
    each: int
    of_parts: list[int]
    of_values: int


def _chunks(
    rules: ScoreSettings,
    parts: list[_Part],
    value: Num[Array, "rows kv_heads kv_seq v_dim"] | None,
    value_scales: Float[Array, "rows kv_heads kv_seq"] | None,
    visible: Bool[Array, "rows kv_seq"],
) -> _Sums:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, kv_heads, kv_seq, v_dim = (parts[0].key if value is None else value).shape
    group, widest = parts[0].query.shape[2], _power(max(v_dim, *(part.key.shape[-1] for part in parts)))
    heads = min(_places(group), _MOST // widest)
    sides = -(-group // heads)
    block = max(_LEAST, min(_TILE // widest, _power(kv_seq)))
    blocks = -(-kv_seq // block)
    each = -(-blocks // min(blocks, -(-_PROGRAMS // (rows * kv_heads * sides))))
    chunks = -(-blocks // each)
    sizes = _Sizes(group, heads, block, each, [part.key.shape[-1] for part in parts], v_dim)
    # Programs that read the same slots begin beside each other: the first number of the grid counts fastest.
    of_row = lambda x: pl.BlockSpec((None, x.shape[1]), lambda side, row, chunk: (row, 0))
    of_heads = lambda x: pl.BlockSpec(
        (None, None, heads, _places(x.shape[-1])), lambda side, row, chunk: (row, side // sides, side % sides, 0)
    )
    whole = lambda x: pl.BlockSpec(
        (None, None, kv_seq, *[_places(size) for size in x.shape[3:]]),
        lambda side, row, chunk: (row, side // sides, 0, 0)[: x.ndim],
    )
    of_chunk = lambda *sizes: pl.BlockSpec(
        (None, None, None, heads, *sizes),
        lambda side, row, chunk: (chunk, row, side // sides, side % sides, 0)[: 4 + len(sizes)],
    )
    given = _Given(visible, _filled(visible, block), parts, value, value_scales)
    specs_of = lambda part: _Part._make((of_heads(part.query), whole(part.key), if_given(whole, part.scales)))
    rows_of, of_slots = (of_row(visible), of_row(given.filled)), (if_given(whole, value), if_given(whole, value_scales))
    specs = _Given._make((*rows_of, [specs_of(part) for part in parts], *of_slots))
    varying = varying_of(given)
    result = lambda *sizes: jax.ShapeDtypeStruct(
        (chunks, rows, kv_heads, group, *sizes), jnp.float32, manual_axis_type=varying
    )
    return pl.pallas_call(
        functools.partial(_kernel, rules, sizes),
        grid=(kv_heads * sides, rows, chunks),
        in_specs=[specs],
        out_specs=_Sums._make((of_chunk(_places(v_dim)), of_chunk(), of_chunk())),
        out_shape=_Sums._make((result(v_dim), result(), result())),
        compiler_params=triton.CompilerParams(num_warps=4 if heads * widest < _MOST else 8, num_stages=2),
        interpret=rules.interpret,
        name="cached_attention",
    )(given)


def _filled(visible: Bool[Array, "rows kv_seq"], block: int) -> Int[Array, "rows 2"]:
    """Return for each row the first block with a visible slot, and the block behind the last one."""
    slots = jnp.arange(visible.shape[1], dtype=jnp.int32)
    first = jnp.min(jnp.where(visible, slots, visible.shape[1]), axis=1)
    last = jnp.max(jnp.where(visible, slots, -1), axis=1)
    return jnp.stack([first // block, last // block + 1], axis=1)


def _kernel(rules: ScoreSettings, sizes: _Sizes, given: Any, *refs: Any) -> None:
    """Some heads of a key head, and a chunk of its slots, block by block with running sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    sums, kv_seq, chunk = _Sums(*refs), given.visible.shape[0], pl.program_id(2)
    sides = -(-sizes.group // sizes.heads)
    heads = _Span(0, sizes.heads, sizes.group - pl.program_id(0) % sides * sizes.heads)
    spans, columns = [_whole(size) for size in sizes.of_parts], _whole(sizes.of_values)
    asked = [_read(part.query, heads, span) for part, span in zip(given.parts, spans)]

    def one_block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before, peak, total = carry
        slots = _Span(number * sizes.block, sizes.block, kv_seq)
        keys = [_read(part.key, slots, span).astype(asked[0].dtype) for part, span in zip(given.parts, spans)]
        dots = [triton.dot(query, key.T) for query, key in zip(asked, keys)]
        factors = lambda ref: None if ref is None else _read(ref, slots)[None]
        scales = [factors(part.scales) for part in given.parts]
        scores: Any = sum(dot if its is None else dot * its for dot, its in zip(dots, scales))
        scores = soft_capped(scores * rules.scale, rules.softcap)
        sees = _read(given.visible, slots)[None]
        scores = jnp.where(sees, scores, lowest(scores.dtype))
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(sees, jnp.exp(scores - new_peak[:, None]), 0)
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1)
        its = scales[0] if given.value is None else factors(given.value_scales)
        weights = weights if its is None else weights * its
        values = keys[0] if given.value is None else _read(given.value, slots, columns).astype(asked[0].dtype)
        return before * shrink[:, None] + triton.dot(weights.astype(values.dtype), values), new_peak, total

    zeros = jnp.zeros((heads.size, columns.size), jnp.float32)
    empty = zeros, jnp.full(heads.size, lowest(zeros.dtype)), jnp.zeros(heads.size, jnp.float32)
    first = jnp.maximum(chunk * sizes.each, given.filled[0])
    stop = jnp.minimum((chunk + 1) * sizes.each, given.filled[1])
    found = jax.lax.fori_loop(first, jnp.maximum(first, stop), one_block, empty)
    for whole, its, own in zip(sums, found, ((heads, columns), (heads,), (heads,))):
        triton.store(_part(whole, *own), its, mask=_inside(*own))


class _Span(NamedTuple):
    """So many places of a dim, a power of two as Triton has it, of which those before `end` are there."""

    begin: Any
    size: int
    end: Any


def _whole(size: int) -> _Span:
    return _Span(0, _places(size), size)


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


def _places(size: int) -> int:
    return max(_LEAST, _power(size))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
