"""A kernel for TPUs by which newest tokens attend to a cache where it lies: flash-decoding, in Pallas by Mosaic.

A program reads a block of a row's slots once, for scores and for values, and leaves running sums in vector memory to
the row's next. It is given a stack's whole arrays and the layer's number, as what is cut out for a kernel is copied.
Blocks before the first slot that a token sees and behind the last are not fetched: the nearest stands for them.
"""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from .._op import Implementation
from .._platform import varying_of
from ..attention._reference import lowest, soft_capped
from ..cache_write._tpu import is_turned, LANES
from ._call import DecodeCall, if_given, ScoreSettings, StoredArrays
from ._tpu_blocks import cost_of, Given, laid, Part, seen_of, Sizes, specs_of


_TILE = 2**20  # numbers of keys of a block: 2 MB in bfloat16, and as much is on the way
_SCORES = 2**19  # of a block: 2 MB, and their exponentials as much
_SUBLANES = 8  # heads whose numbers in float32 fill vectors
_LEAST = 2**18  # bytes of a row's slots of a head: what takes as long to read as a program to begin


class FlashDecodingTpu(Implementation):
    """Flash-decoding in Mosaic: products in bfloat16, of 8-bit keys and values too, from arrays where they are stored.

    `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: DecodeCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        query, stored = call.query, call.stored
        if query.shape[-3] != 1:
            return f"it takes one query a row, not {query.shape[-3]}"
        if call.bias is not None:
            return "it has no bias of scores"
        if stored is None:
            return "it reads keys and values where a cache stores them, and the call has none"
        arrays = (stored.key, stored.value, stored.rotated, call.rotated and call.rotated.key)
        keys = [x for x in arrays if x is not None]
        if (group := query.shape[-2] // call.key.shape[-2]) > _SCORES // LANES:
            return f"it takes up to {_SCORES // LANES} heads a key head, not {group}"
        if (size := sum(x.shape[-2] * x.shape[-1] * x.dtype.itemsize for x in keys)) < _LEAST:
            return f"a row's slots of a head must have {_LEAST} bytes to be worth a program, not {size}"
        if query.dtype != jnp.bfloat16:
            return f"it computes in bfloat16, not {query.dtype}"
        if any(x.dtype not in (jnp.bfloat16, jnp.int8) for x in keys):
            return f"it takes keys and values in bfloat16 or int8, not {[str(x.dtype) for x in keys]}"
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch 1 heads _"]:
        """Compute the call by the kernel, whatever the platform."""
        assert call.stored is not None
        return _attend(ScoreSettings(call.scale, call.softcap, self.interpret), call, call.stored)


def _attend(rules: ScoreSettings, read: DecodeCall, held: StoredArrays) -> Float[Array, "*batch 1 heads _"]:
    visible = jnp.broadcast_to(read.visible, (*read.query.shape[:-3], 1, read.key.shape[-3]))
    kv_heads, kv_seq = read.key.shape[-2], visible.shape[-1]
    batch = math.prod(read.query.shape[:-3])
    rows, block = batch * kv_heads, _block(read, kv_seq)
    asked = lambda x: x.reshape(rows, -1, x.shape[-1])
    in_front = lambda x: 1 if held.layer is None else x.shape[0]
    whole = lambda x: x.reshape(in_front(x), rows, *x.shape[-2:])
    factors = lambda x: x.swapaxes(-2, -1).reshape(rows, 1, kv_seq).astype(jnp.float32)

    def factors_of(x: Array | None, where: Array | None) -> Array | None:
        # In blocks each of a row's heads would fetch those of all; those that fill no vectors compilers lay otherwise.
        if where is None or block < kv_seq or kv_heads % _SUBLANES:
            return if_given(factors, x)
        return where.reshape(in_front(where), batch, kv_heads, kv_seq)

    parts = [Part(asked(read.query), whole(held.key), factors_of(read.key_scales, held.key_scales))]
    if (its := read.rotated) is not None:
        made = its.key.swapaxes(-3, -2).reshape(1, rows, kv_seq, -1)
        key = made if held.rotated is None else whole(held.rotated)
        parts.append(Part(asked(its.query), key, if_given(factors, its.scales)))
    of_rows = lambda x: jnp.broadcast_to(x, (rows // kv_heads, *x.shape)).reshape(rows, -1, 1).astype(jnp.float32)
    given = Given(
        visible.reshape(-1, 1, kv_seq),
        parts,
        if_given(whole, held.value),
        factors_of(read.value_scales, held.value_scales),
        if_given(of_rows, read.sinks),
    )
    output = _attended(rules, given, jnp.zeros((), jnp.int32) if held.layer is None else held.layer, block)
    return checkpoint_name(output.reshape(*read.query.shape[:-1], output.shape[-1]), "attended")


class _Sums(NamedTuple):
    """Running softmax of a row: weighted sums of values, peaks of scores, sums of exponentials."""

    values: Float[Array, "group v_dim"]
    peaks: Float[Array, "group 1"]
    totals: Float[Array, "group 1"]


def _block(read: DecodeCall, kv_seq: int) -> int:
    """Return the slots that a program reads at once."""
    widest = max(x.shape[-1] for x in (read.query, read.value, read.rotated and read.rotated.key) if x is not None)
    group = read.query.shape[-2] // read.key.shape[-2]
    return min(max(min(_TILE // max(LANES, widest), _SCORES // group) // LANES * LANES, LANES), kv_seq)


def _attended(
    rules: ScoreSettings, given: Given, layer: Int[Array, ""], block: int
) -> Float[Array, "rows group v_dim"]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    (rows, group, _), (batch, _, kv_seq) = given.parts[0].query.shape, given.visible.shape
    keys = [part.key for part in given.parts]
    v_dim = (keys[0] if given.value is None else given.value).shape[-1]
    sizes = Sizes(block, kv_seq, rows // batch, v_dim)
    result = jax.ShapeDtypeStruct(
        (rows, group, v_dim), given.parts[0].query.dtype, manual_axis_type=varying_of((given, layer))
    )
    seen = seen_of(given.visible[:, 0], layer, sizes.block)
    given = given._replace(
        visible=given.visible.astype(jnp.int8),
        parts=[part._replace(key=laid(part.key)) for part in given.parts],
        value=if_given(laid, given.value),
    )
    return pl.pallas_call(
        functools.partial(_kernel, rules, sizes),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(seen),
            grid=(rows, -(-kv_seq // sizes.block)),
            in_specs=[specs_of(sizes, given)],
            out_specs=pl.BlockSpec((None, group, v_dim), lambda row, *_: (row, 0, 0)),
            scratch_shapes=[tpu.VMEM((group, size), jnp.float32) for size in (v_dim, 1, 1)],
        ),
        out_shape=result,
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=cost_of(sizes, seen, given, result),
        interpret=rules.interpret,
        name="cached_attention",
    )(*seen, given)


def _kernel(
    rules: ScoreSettings, sizes: Sizes, layer: Any, first: Any, last: Any, given: Any, result: Any, *refs: Any
) -> None:
    """A block of a row's slots."""
    from jax.experimental import pallas as pl

    sums, number = _Sums(*refs), pl.program_id(1)
    row, head = (each(pl.program_id(0), sizes.kv_heads) for each in (jax.lax.div, jax.lax.rem))

    @pl.when(number == 0)
    def begin() -> None:
        is_free = given.sinks is None
        sums.values[...] = jnp.zeros_like(sums.values)
        sums.peaks[...] = jnp.full_like(sums.peaks, lowest(jnp.dtype(jnp.float32))) if is_free else given.sinks[...]
        sums.totals[...] = jnp.full_like(sums.totals, 0 if is_free else 1)

    @pl.when((number >= first[row]) & (number <= last[row]))
    def one_block() -> None:
        _add_block(rules, sizes, given, sums, number, head)

    @pl.when(number == pl.num_programs(1) - 1)
    def end() -> None:
        totals = sums.totals[...]
        result[...] = (sums.values[...] / jnp.where(totals > 0, totals, 1)).astype(result.dtype)


def _add_block(rules: ScoreSettings, sizes: Sizes, given: Any, sums: Any, number: Any, head: Any) -> None:
    parts, dtype = given.parts, given.parts[0].query.dtype
    places = lambda shape, dim: number * sizes.block + jax.lax.broadcasted_iota(jnp.int32, shape, dim)
    sees = (given.visible[...].astype(jnp.int32) != 0) & (places((1, sizes.block), 1) < sizes.kv_seq)
    keys = [part.key[...].astype(dtype) for part in parts]
    dots = [
        _product(part.query[...], key, not is_turned(sizes.kv_seq, part.query.shape[-1]))
        for part, key in zip(parts, keys)
    ]
    times = lambda x, scales: x if scales is None else x * _of_head(scales, head)
    scores: Any = sum(times(dot, part.scales) for part, dot in zip(parts, dots))
    scores = jnp.where(sees, soft_capped(scores * rules.scale, rules.softcap), lowest(scores.dtype))
    before = sums.peaks[...]
    peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(sees, jnp.exp(scores - peak), 0)
    shrink = jnp.exp(before - peak)
    sums.peaks[...] = peak
    sums.totals[...] = sums.totals[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    scales = parts[0].scales if given.value is None else given.value_scales
    weights = weights if scales is None else jnp.where(sees, times(weights, scales), 0)
    turned = is_turned(sizes.kv_seq, sizes.v_dim)
    values = keys[0] if given.value is None else given.value[...].astype(dtype)
    if sizes.kv_seq % sizes.block:  # what lies behind the last slot may be no numbers
        values = jnp.where(places(values.shape, int(turned)) < sizes.kv_seq, values, jnp.zeros_like(values))
    sums.values[...] = sums.values[...] * shrink + _product(weights.astype(dtype), values, turned)


def _of_head(scales: Any, head: Any) -> Float[Array, "1 _"]:
    """Return the scales of a head from a block of scales; a block of one head is shared."""
    from jax.experimental import pallas as pl

    return scales[pl.ds(head if scales.shape[0] > 1 else 0, 1), :]


def _product(left: Array, right: Array, turned: bool) -> Float[Array, "_ _"]:
    """The product of two matrices, of which the right one is turned or not, with sums in float32."""
    dims = (((1,), (int(turned),)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
