"""A kernel for TPUs by which newest tokens attend to a cache where it lies: flash-decoding, in Pallas by Mosaic.

A program reads a block of a row's slots once, for scores and for values, and leaves running sums in vector memory to
the row's next. It is given a stack's whole arrays and the layer's number, as what is cut out for a kernel is copied.
Blocks before the first slot that a token sees and behind the last are not fetched: the nearest stands for them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Num

from .._pallas import varying_of
from .._slots_tpu import is_turned, LANES
from ._cached_read import Held, if_given, Read, Rules
from ._core import lowest, soft_capped


_TILE = 2**20  # numbers of keys of a block: 2 MB in bfloat16, and as much is on the way
_SCORES = 2**19  # of a block: 2 MB, and their exponentials as much


def kernel_has(read: Read, held: Held) -> bool:
    """Whether the kernel has the call: products in bfloat16, of integers too, and no more heads than fit its memory."""
    keys = [x for x in (held.key, held.value, held.rotated, read.rotated and read.rotated.key) if x is not None]
    fits = read.query.shape[-2] // read.key.shape[-2] <= _SCORES // LANES
    return fits and read.query.dtype == jnp.bfloat16 and all(x.dtype in (jnp.bfloat16, jnp.int8) for x in keys)


def attend_by_kernel(
    rules: Rules, read: Read, visible: Bool[Array, "*batch 1 kv_seq"], held: Held
) -> Float[Array, "*batch 1 heads _"]:
    """The same by the kernel, whatever the platform."""
    kv_heads, kv_seq = read.key.shape[-2], visible.shape[-1]
    rows = math.prod(read.query.shape[:-3]) * kv_heads
    asked = lambda x: x.reshape(rows, -1, x.shape[-1])
    whole = lambda x: x.reshape(1 if held.layer is None else x.shape[0], rows, *x.shape[-2:])
    factors = lambda x: x.swapaxes(-2, -1).reshape(rows, 1, kv_seq).astype(jnp.float32)
    parts = [_Part(asked(read.query), whole(held.key), if_given(factors, read.key_scales))]
    if (its := read.rotated) is not None:
        made = its.key.swapaxes(-3, -2).reshape(1, rows, kv_seq, -1)
        key = made if held.rotated is None else whole(held.rotated)
        parts.append(_Part(asked(its.query), key, if_given(factors, its.scales)))
    of_rows = lambda x: jnp.broadcast_to(x, (rows // kv_heads, *x.shape)).reshape(rows, -1, 1).astype(jnp.float32)
    given = _Given(
        visible.reshape(-1, 1, kv_seq),
        parts,
        if_given(whole, held.value),
        if_given(factors, read.value_scales),
        if_given(of_rows, read.sinks),
    )
    output = _attended(rules, given, jnp.zeros((), jnp.int32) if held.layer is None else held.layer)
    return checkpoint_name(output.reshape(*read.query.shape[:-1], output.shape[-1]), "attended")


class _Part(NamedTuple):
    """Some channels of queries and keys."""

    query: Float[Array, "rows group head_dim"]
    key: Num[Array, "layers rows kv_seq head_dim"]
    scales: Float[Array, "rows 1 kv_seq"] | None


class _Given(NamedTuple):
    """What the kernel reads: a row is one of the batch and a key head."""

    visible: Bool[Array, "batch 1 kv_seq"]
    parts: list[_Part]
    value: Num[Array, "layers rows kv_seq v_dim"] | None
    """None: the first keys."""
    value_scales: Float[Array, "rows 1 kv_seq"] | None
    sinks: Float[Array, "rows group 1"] | None


class _Seen(NamedTuple):
    """What is known before the first program: the layer and, of each row of the batch, the first and the last block."""

    layer: Int[Array, "1"]
    first: Int[Array, "batch"]
    last: Int[Array, "batch"]


class _Sizes(NamedTuple):
    """Slots of a block and of a row, key heads, and channels of values."""

    block: int
    kv_seq: int
    kv_heads: int
    v_dim: int


class _Sums(NamedTuple):
    """Of a row's slots so far the values, weighted by exponentials, their peaks, and the exponentials' sums."""

    values: Float[Array, "group v_dim"]
    peaks: Float[Array, "group 1"]
    totals: Float[Array, "group 1"]


def _attended(rules: Rules, given: _Given, layer: Int[Array, ""]) -> Float[Array, "rows group v_dim"]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    (rows, group, _), (batch, _, kv_seq) = given.parts[0].query.shape, given.visible.shape
    keys = [part.key for part in given.parts]
    v_dim = (keys[0] if given.value is None else given.value).shape[-1]
    block = min(_TILE // max(LANES, v_dim, *(x.shape[-1] for x in keys)), _SCORES // group) // LANES * LANES
    sizes = _Sizes(min(max(block, LANES), kv_seq), kv_seq, rows // batch, v_dim)
    result = jax.ShapeDtypeStruct(
        (rows, group, v_dim), given.parts[0].query.dtype, manual_axis_type=varying_of((given, layer))
    )
    seen = _seen(given.visible[:, 0], layer, sizes.block)
    given = given._replace(
        visible=given.visible.astype(jnp.int32),
        parts=[part._replace(key=_laid(part.key)) for part in given.parts],
        value=if_given(_laid, given.value),
    )
    return pl.pallas_call(
        functools.partial(_kernel, rules, sizes),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(seen),
            grid=(rows, -(-kv_seq // sizes.block)),
            in_specs=[_specs(sizes, given)],
            out_specs=pl.BlockSpec((None, group, v_dim), lambda row, *_: (row, 0, 0)),
            scratch_shapes=[tpu.VMEM((group, size), jnp.float32) for size in (v_dim, 1, 1)],
        ),
        out_shape=result,
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(sizes, seen, given, result),
        interpret=rules.interpret,
        name="cached_attention",
    )(*seen, given)


def _seen(visible: Bool[Array, "batch kv_seq"], layer: Int[Array, ""], block: int) -> _Seen:
    """Of rows whose token sees nothing, the first block, of which nothing counts."""
    slots = jnp.arange(visible.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(visible, slots, 0), axis=1)
    first = jnp.min(jnp.where(visible, slots, last[:, None]), axis=1)
    return _Seen(layer[None], first // block, last // block)


def _laid(x: Num[Array, "layers rows kv_seq width"]) -> Num[Array, "layers rows _ _"]:
    """Memories as compilers for TPUs lay them out, so that nothing is copied."""
    return x.swapaxes(-2, -1) if is_turned(*x.shape[-2:]) else x


def _specs(sizes: _Sizes, given: _Given) -> Any:
    """Which block of each array a program reads, of memories as they are laid."""
    from jax.experimental import pallas as pl

    def of_block(row: Any, number: Any, seen: _Seen) -> Any:
        row = jax.lax.div(row, sizes.kv_heads)
        return jnp.minimum(jnp.maximum(number, seen.first[row]), seen.last[row])

    def spec(shape: tuple, index: Callable[[Any, Any, _Seen], tuple]) -> Any:
        return pl.BlockSpec(shape, lambda row, number, *seen: index(row, number, _Seen(*seen)))

    def memory(x: Array, width: int) -> Any:
        layer = lambda seen: jnp.minimum(seen.layer[0], x.shape[0] - 1)  # what is of no stack has one
        if is_turned(sizes.kv_seq, width):
            its = lambda row, number, seen: (layer(seen), row, 0, of_block(row, number, seen))
            return spec((None, None, width, sizes.block), its)
        its = lambda row, number, seen: (layer(seen), row, of_block(row, number, seen), 0)
        return spec((None, None, sizes.block, width), its)

    def line(heads: int) -> Any:
        return spec(
            (None, 1, sizes.block), lambda row, number, seen: (jax.lax.div(row, heads), 0, of_block(row, number, seen))
        )

    own = lambda x: spec((None, *x.shape[1:]), lambda row, *_: (row, 0, 0))
    scales = lambda x: if_given(lambda _: line(1), x)
    part = lambda one: _Part(own(one.query), memory(one.key, one.query.shape[-1]), scales(one.scales))
    value = if_given(lambda x: memory(x, sizes.v_dim), given.value)
    parts = [part(one) for one in given.parts]
    return _Given(line(sizes.kv_heads), parts, value, scales(given.value_scales), if_given(own, given.sinks))


def _cost(sizes: _Sizes, seen: _Seen, given: _Given, result: Any) -> Any:
    """Of a call whose tokens see all slots: each array is read once, of a stack's one layer, and the mask by each head.

    What a program's text is counted by, and what XLA orders its work by.
    """
    from jax.experimental import pallas as pl

    rows, group, v_dim = result.shape
    of_layer = [part.key for part in given.parts] + ([] if given.value is None else [given.value])
    read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((seen, given, result)))
    read -= sum((x.shape[0] - 1) * x.size // x.shape[0] * x.dtype.itemsize for x in of_layer)
    read += (sizes.kv_heads - 1) * given.visible.size * given.visible.dtype.itemsize
    scores, channels = rows * group * sizes.kv_seq, sum(part.query.shape[-1] for part in given.parts) + v_dim
    return pl.CostEstimate(flops=2 * scores * channels, transcendentals=scores, bytes_accessed=read)


def _kernel(
    rules: Rules, sizes: _Sizes, layer: Any, first: Any, last: Any, given: Any, result: Any, *refs: Any
) -> None:
    """A block of a row's slots."""
    from jax.experimental import pallas as pl

    sums, row, number = _Sums(*refs), jax.lax.div(pl.program_id(0), sizes.kv_heads), pl.program_id(1)

    @pl.when(number == 0)
    def begin() -> None:
        is_free = given.sinks is None
        sums.values[...] = jnp.zeros_like(sums.values)
        sums.peaks[...] = jnp.full_like(sums.peaks, lowest(jnp.dtype(jnp.float32))) if is_free else given.sinks[...]
        sums.totals[...] = jnp.full_like(sums.totals, 0 if is_free else 1)

    @pl.when((number >= first[row]) & (number <= last[row]))
    def one_block() -> None:
        _add_block(rules, sizes, given, sums, number)

    @pl.when(number == pl.num_programs(1) - 1)
    def end() -> None:
        totals = sums.totals[...]
        result[...] = (sums.values[...] / jnp.where(totals > 0, totals, 1)).astype(result.dtype)


def _add_block(rules: Rules, sizes: _Sizes, given: Any, sums: Any, number: Any) -> None:
    parts, dtype = given.parts, given.parts[0].query.dtype
    places = lambda shape, dim: number * sizes.block + jax.lax.broadcasted_iota(jnp.int32, shape, dim)
    sees = (given.visible[...] != 0) & (places((1, sizes.block), 1) < sizes.kv_seq)
    keys = [part.key[...].astype(dtype) for part in parts]
    dots = [
        _product(part.query[...], key, not is_turned(sizes.kv_seq, part.query.shape[-1]))
        for part, key in zip(parts, keys)
    ]
    scores: Any = sum(dot if part.scales is None else dot * part.scales[...] for part, dot in zip(parts, dots))
    scores = jnp.where(sees, soft_capped(scores * rules.scale, rules.softcap), lowest(scores.dtype))
    before = sums.peaks[...]
    peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(sees, jnp.exp(scores - peak), 0)
    shrink = jnp.exp(before - peak)
    sums.peaks[...] = peak
    sums.totals[...] = sums.totals[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    scales = parts[0].scales if given.value is None else given.value_scales
    weights = weights if scales is None else jnp.where(sees, weights * scales[...], 0)
    turned = is_turned(sizes.kv_seq, sizes.v_dim)
    values = keys[0] if given.value is None else given.value[...].astype(dtype)
    if sizes.kv_seq % sizes.block:  # what lies behind the last slot may be no numbers
        values = jnp.where(places(values.shape, int(turned)) < sizes.kv_seq, values, jnp.zeros_like(values))
    sums.values[...] = sums.values[...] * shrink + _product(weights.astype(dtype), values, turned)


def _product(left: Array, right: Array, turned: bool) -> Float[Array, "_ _"]:
    """The product of two matrices, of which the right one is turned or not, with sums in float32."""
    dims = (((1,), (int(turned),)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
