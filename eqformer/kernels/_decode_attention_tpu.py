"""Attention of one new token per row to a cache on TPUs: flash decoding in place by a Pallas (Mosaic) kernel.

A program reads a block of a row's slots once, for scores and for values, and leaves a running softmax in vector memory
(VMEM) to the next program of the row. The kernel gets the arrays of the whole stack in main memory (HBM) and the index
of the layer, because XLA would copy a slice that is passed to a kernel. Blocks before the first and after the last
visible slot are not fetched: instead of such a block, a program gets the nearest visible block, which is already in
VMEM, and computes nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import cast, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Num

from ._cache_write import LANES, stores_channels_first
from ._op import Implementation
from ._platform import Ref, varying_of
from .attention._call import apply_softcap, DecodeCall, if_given, lowest, ScoreSettings, StoredArrays


_BLOCK_ENTRIES = 2**20  # Largest number of entries of keys in a block: 2 MB in bfloat16; the next block needs as much.
_SCORES = 2**19  # Largest number of scores of a block: 2 MB; their exponentials need as much.
_SUBLANES = 8  # Number of rows of a vector register of float32 numbers.
_LEAST_BYTES = 2**18  # Least number of bytes of a head's slots in a row; for fewer, starting a program costs more.


class FlashDecodingTpu(Implementation[DecodeCall, Array]):
    """Flash decoding with products in bfloat16; 8-bit keys and values are converted to bfloat16.

    A block has a multiple of 128 slots, with up to 2^20 entries of keys and 2^19 scores. `interpret` runs the kernel as
    plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: DecodeCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        query, stored = call.query, call.stored
        if query.shape[-3] != 1:
            return f"it supports one query per row, not {query.shape[-3]}"
        if call.bias is not None:
            return "it supports no score bias"
        if stored is None:
            return "it reads keys and values where a cache stores them, and the call has no stored arrays"
        arrays = (stored.key, stored.value, stored.rotated, call.rotated and call.rotated.key)
        keys = [x for x in arrays if x is not None]
        if (group := query.shape[-2] // call.key.shape[-2]) > _SCORES // LANES:
            return f"it supports up to {_SCORES // LANES} query heads per key head, not {group}"
        if (size := sum(x.shape[-2] * x.shape[-1] * x.dtype.itemsize for x in keys)) < _LEAST_BYTES:
            return f"the slots of a head must have {_LEAST_BYTES} bytes to be worth a program, not {size}"
        if query.dtype != jnp.bfloat16:
            return f"it computes in bfloat16, not {query.dtype}"
        if any(x.dtype not in (jnp.bfloat16, jnp.int8) for x in keys):
            return f"it takes keys and values in bfloat16 or int8, not {[str(x.dtype) for x in keys]}"
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch 1 heads _"]:
        """Compute the call by the kernel on every platform."""
        assert call.stored is not None
        return _attend(ScoreSettings(call.scale, call.softcap, self.interpret), call, call.stored)


class Part(NamedTuple):
    """Part of the channels of queries and keys; scores are sums over the parts.

    The parts are the call's `query` and `key`, and its `rotated` channels if it has them.
    """

    query: Float[Array, "rows group head_dim"]
    key: Num[Array, "layers rows kv_seq head_dim"]
    scales: Float[Array, "rows 1 kv_seq"] | Float[Array, "layers batch kv_heads kv_seq"] | None
    """Scales of the keys: the call's scales, one array per row, or the stored array with all heads."""


class KernelArrays(NamedTuple):
    """Arrays that the kernel reads; `rows` are pairs of a batch row and a key head.

    In the kernel, the fields are references to a program's blocks of the arrays.
    """

    visible: Bool[Array, "batch 1 kv_seq"] | Int[Array, "batch 1 kv_seq"]
    parts: list[Part]
    value: Num[Array, "layers rows kv_seq v_dim"] | None
    """The values; None if the keys of the first part are also the values."""
    value_scales: Float[Array, "rows 1 kv_seq"] | Float[Array, "layers batch kv_heads kv_seq"] | None
    sinks: Float[Array, "rows group 1"] | None


class PrefetchedScalars(NamedTuple):
    """Scalars that determine which blocks are fetched."""

    layer: Int[Array, "1"]
    first: Int[Array, "batch"]
    """First block with a visible slot in each batch row."""
    last: Int[Array, "batch"]
    """Last block with a visible slot in each batch row."""


class BlockSizes(NamedTuple):
    """Static sizes of a call to the kernel."""

    block: int
    """Number of slots of a block."""
    kv_seq: int
    """Number of slots of the cache."""
    kv_heads: int
    """Number of key heads of a batch row."""
    v_dim: int
    """Number of channels of a value."""


class _RunningSoftmax(NamedTuple):
    """Softmax over the blocks of a row so far, in VMEM."""

    values: Ref
    """Sums of values weighted by exponentials, `group v_dim`."""
    peaks: Ref
    """Largest scores, `group 1`."""
    totals: Ref
    """Sums of exponentials, `group 1`."""


def _attend(settings: ScoreSettings, call: DecodeCall, stored: StoredArrays) -> Float[Array, "*batch 1 heads _"]:
    visible = jnp.broadcast_to(call.visible, (*call.query.shape[:-3], 1, call.key.shape[-3]))
    kv_heads, kv_seq = call.key.shape[-2], visible.shape[-1]
    batch = math.prod(call.query.shape[:-3])
    rows, block = batch * kv_heads, _choose_block(call, kv_seq)

    def to_queries(x: Array) -> Array:
        return x.reshape(rows, -1, x.shape[-1])

    def to_memory(x: Array) -> Array:
        return x.reshape(1 if stored.layer is None else x.shape[0], rows, *x.shape[-2:])

    def to_row_scales(x: Array) -> Array:
        return x.swapaxes(-2, -1).reshape(rows, 1, kv_seq).astype(jnp.float32)

    def select_scales(scales: Array | None, stored_scales: Array | None) -> Array | None:
        # The stored scales of a batch row are fetched once, as one block of all heads and all slots. So a block of keys
        # must have all slots too. And the heads must fill vector registers, because compilers store scales in another
        # order otherwise. In all other cases the kernel gets the scales of the call.
        if stored_scales is None or block < kv_seq or kv_heads % _SUBLANES:
            return if_given(to_row_scales, scales)
        return stored_scales.reshape(1 if stored.layer is None else len(stored_scales), batch, kv_heads, kv_seq)

    parts = [
        Part(to_queries(call.query), to_memory(stored.key), select_scales(call.key_scales, stored.key_scales)),
    ]
    if (rotated := call.rotated) is not None:
        one_layer = rotated.key.swapaxes(-3, -2).reshape(1, rows, kv_seq, -1)
        key = one_layer if stored.rotated is None else to_memory(stored.rotated)
        parts.append(Part(to_queries(rotated.query), key, if_given(to_row_scales, rotated.scales)))

    def repeat_rows(x: Array) -> Array:
        return jnp.broadcast_to(x, (rows // kv_heads, *x.shape)).reshape(rows, -1, 1).astype(jnp.float32)

    arrays = KernelArrays(
        visible.reshape(-1, 1, kv_seq),
        parts,
        if_given(to_memory, stored.value),
        select_scales(call.value_scales, stored.value_scales),
        if_given(repeat_rows, call.sinks),
    )
    layer = jnp.zeros((), jnp.int32) if stored.layer is None else stored.layer
    output = _call_kernel(settings, arrays, layer, block)
    return checkpoint_name(output.reshape(*call.query.shape[:-1], output.shape[-1]), "attended")


def _choose_block(call: DecodeCall, kv_seq: int) -> int:
    """Return the number of slots of a block."""
    widest = max(x.shape[-1] for x in (call.query, call.value, call.rotated and call.rotated.key) if x is not None)
    group = call.query.shape[-2] // call.key.shape[-2]
    slots = min(_BLOCK_ENTRIES // max(LANES, widest), _SCORES // group)
    return min(max(slots // LANES * LANES, LANES), kv_seq)


def _call_kernel(
    settings: ScoreSettings, arrays: KernelArrays, layer: Int[Array, ""], block: int
) -> Float[Array, "rows group v_dim"]:
    """Call the kernel; the dims of its grid are rows and blocks of slots."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    (rows, group, _), (batch, _, kv_seq) = arrays.parts[0].query.shape, arrays.visible.shape
    keys = [part.key for part in arrays.parts]
    v_dim = (keys[0] if arrays.value is None else arrays.value).shape[-1]
    sizes = BlockSizes(block, kv_seq, rows // batch, v_dim)
    result = jax.ShapeDtypeStruct(
        (rows, group, v_dim), arrays.parts[0].query.dtype, manual_axis_type=varying_of((arrays, layer))
    )
    scalars = find_visible_blocks(arrays.visible[:, 0], layer, sizes.block)
    arrays = arrays._replace(
        visible=arrays.visible.astype(jnp.int8),
        parts=[part._replace(key=to_stored_order(part.key)) for part in arrays.parts],
        value=if_given(to_stored_order, arrays.value),
    )
    return pl.pallas_call(
        functools.partial(_kernel, settings, sizes),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(rows, -(-kv_seq // sizes.block)),
            in_specs=[block_specs(sizes, arrays)],
            out_specs=pl.BlockSpec((None, group, v_dim), lambda row, *_: (row, 0, 0)),
            scratch_shapes=[tpu.VMEM((group, size), jnp.float32) for size in (v_dim, 1, 1)],
        ),
        out_shape=result,
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(**estimate_cost(sizes, scalars, arrays, result)),
        interpret=settings.interpret,
        name="cached_attention",
    )(*scalars, arrays)


def find_visible_blocks(visible: Bool[Array, "batch kv_seq"], layer: Int[Array, ""], block: int) -> PrefetchedScalars:
    """Return the prefetched scalars; a row whose query sees no key reads block 0, which is fully masked."""
    slots = jnp.arange(visible.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(visible, slots, 0), axis=1)
    first = jnp.min(jnp.where(visible, slots, last[:, None]), axis=1)
    return PrefetchedScalars(layer[None], first // block, last // block)


def to_stored_order(x: Num[Array, "layers rows kv_seq width"]) -> Num[Array, "layers rows _ _"]:
    """Return an array of a cache with its dims in the order in which XLA for TPUs stores them, which avoids a copy."""
    return x.swapaxes(-2, -1) if stores_channels_first(*x.shape[-2:]) else x


def _nearest_visible_block(kv_heads: int, row: int | Array, block: int | Array, scalars: PrefetchedScalars) -> Array:
    """Return `block` if the block of this index is visible, else the index of the nearest visible block."""
    row = jax.lax.div(row, kv_heads)
    return jnp.minimum(jnp.maximum(block, scalars.first[row]), scalars.last[row])


def _layer_of(x: Array, scalars: PrefetchedScalars) -> Array:
    """Return the index of the layer to read, or 0 for an array of one layer."""
    return jnp.minimum(scalars.layer[0], x.shape[0] - 1)


def block_specs(sizes: BlockSizes, arrays: KernelArrays) -> KernelArrays:
    """Return the `BlockSpec` of each array, which determines the block of the array that a program reads.

    The arrays of the cache are in the order of `to_stored_order`.
    """
    from jax.experimental import pallas as pl

    nearest_visible = functools.partial(_nearest_visible_block, sizes.kv_heads)

    def spec(shape: tuple, index: Callable[[Array, Array, PrefetchedScalars], tuple]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda row, block, *scalars: index(row, block, PrefetchedScalars(*scalars)))

    def memory_spec(x: Array, width: int) -> pl.BlockSpec:
        if stores_channels_first(sizes.kv_seq, width):
            return spec(
                (None, None, width, sizes.block),
                lambda row, block, scalars: (_layer_of(x, scalars), row, 0, nearest_visible(row, block, scalars)),
            )
        return spec(
            (None, None, sizes.block, width),
            lambda row, block, scalars: (_layer_of(x, scalars), row, nearest_visible(row, block, scalars), 0),
        )

    def slots_spec(heads: int) -> pl.BlockSpec:
        return spec(
            (None, 1, sizes.block),
            lambda row, block, scalars: (jax.lax.div(row, heads), 0, nearest_visible(row, block, scalars)),
        )

    row_spec = lambda x: spec((None, *x.shape[1:]), lambda row, *_: (row, 0, 0))

    def scales_spec(x: Array | None) -> pl.BlockSpec | None:
        if x is None:
            return None
        if x.ndim == 3:
            return slots_spec(1)
        index = lambda row, block, scalars: (_layer_of(x, scalars), jax.lax.div(row, sizes.kv_heads), 0, 0)
        return spec((None, None, *x.shape[2:]), index)

    def part_specs(part: Part) -> Part:
        key_spec = memory_spec(part.key, part.query.shape[-1])
        return Part._make((row_spec(part.query), key_spec, scales_spec(part.scales)))

    value_spec = None if arrays.value is None else memory_spec(arrays.value, sizes.v_dim)
    value_specs = value_spec, scales_spec(arrays.value_scales)
    parts, sinks_spec = [part_specs(part) for part in arrays.parts], if_given(row_spec, arrays.sinks)
    return KernelArrays._make((slots_spec(sizes.kv_heads), parts, *value_specs, sinks_spec))


def estimate_cost(
    sizes: BlockSizes, scalars: PrefetchedScalars, arrays: KernelArrays, result: jax.ShapeDtypeStruct
) -> dict[str, int]:
    """Return the costs of a call in which queries see all slots, for XLA's scheduler and analyses of programs.

    Each array of the layer is read once. The mask is read once, or once for each key head if it has several blocks.
    """
    rows, group, v_dim = result.shape
    scales = [arrays.value_scales, *(part.scales for part in arrays.parts)]
    candidates = (*(part.key for part in arrays.parts), arrays.value, *scales)
    stack_arrays = [x for x in candidates if x is not None and x.ndim == 4]
    read_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((scalars, arrays, result)))
    read_bytes -= sum((x.shape[0] - 1) * x.size // x.shape[0] * x.dtype.itemsize for x in stack_arrays)
    mask_rereads = sizes.kv_heads - 1 if sizes.block < sizes.kv_seq else 0
    read_bytes += mask_rereads * arrays.visible.size * arrays.visible.dtype.itemsize
    scores, channels = rows * group * sizes.kv_seq, sum(part.query.shape[-1] for part in arrays.parts) + v_dim
    return {"flops": 2 * scores * channels, "transcendentals": scores, "bytes_accessed": read_bytes}


# The kernel.


def _kernel(
    settings: ScoreSettings,
    sizes: BlockSizes,
    _: Ref,
    first: Ref,
    last: Ref,
    arrays: KernelArrays,
    result: Ref,
    *scratch: Ref,
) -> None:
    """Add a block of a row's slots to the row's running softmax. The last program of the row writes the result."""
    from jax.experimental import pallas as pl

    softmax, block = _RunningSoftmax(*scratch), pl.program_id(1)
    row, head = (divide(pl.program_id(0), sizes.kv_heads) for divide in (jax.lax.div, jax.lax.rem))

    @pl.when(block == 0)
    def begin() -> None:
        sinks, peaks = arrays.sinks, softmax.peaks
        softmax.values[...] = jnp.zeros_like(softmax.values)
        no_score = lowest(jnp.dtype(jnp.float32))
        softmax.peaks[...] = jnp.full_like(peaks, no_score) if sinks is None else sinks[...]
        softmax.totals[...] = jnp.full_like(softmax.totals, 0 if sinks is None else 1)

    @pl.when((block >= first[row]) & (block <= last[row]))
    def add_block() -> None:
        _add_block(settings, sizes, arrays, softmax, block, head)

    @pl.when(block == pl.num_programs(1) - 1)
    def end() -> None:
        totals = softmax.totals[...]
        result[...] = (softmax.values[...] / jnp.where(totals > 0, totals, 1)).astype(result.dtype)


def _add_block(
    settings: ScoreSettings,
    sizes: BlockSizes,
    arrays: KernelArrays,
    softmax: _RunningSoftmax,
    block: Array,
    head: Array,
) -> None:
    parts, dtype = arrays.parts, arrays.parts[0].query.dtype

    def slot_index(shape: tuple[int, ...], dim: int) -> Array:
        return block * sizes.block + jax.lax.broadcasted_iota(jnp.int32, shape, dim)

    def scale(x: Array, scales: Array | Ref | None) -> Array:
        return x if scales is None else x * _select_head(scales, head)

    visible = (arrays.visible[...].astype(jnp.int32) != 0) & (slot_index((1, sizes.block), 1) < sizes.kv_seq)
    keys = [part.key[...].astype(dtype) for part in parts]
    dots = [
        _multiply(part.query[...], key, not stores_channels_first(sizes.kv_seq, part.query.shape[-1]))
        for part, key in zip(parts, keys)
    ]
    scores = cast(Array, sum(scale(dot, part.scales) for part, dot in zip(parts, dots)))
    scores = jnp.where(visible, apply_softcap(scores * settings.scale, settings.softcap), lowest(scores.dtype))
    old_peak = softmax.peaks[...]
    peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - peak), 0)
    shrink = jnp.exp(old_peak - peak)
    softmax.peaks[...] = peak
    softmax.totals[...] = softmax.totals[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    scales = parts[0].scales if arrays.value is None else arrays.value_scales
    weights = weights if scales is None else jnp.where(visible, scale(weights, scales), 0)
    is_transposed = stores_channels_first(sizes.kv_seq, sizes.v_dim)
    values = keys[0] if arrays.value is None else arrays.value[...].astype(dtype)
    if sizes.kv_seq % sizes.block:  # The last block extends beyond the last slot, where memory may hold NaN.
        is_inside = slot_index(values.shape, int(is_transposed)) < sizes.kv_seq
        values = jnp.where(is_inside, values, jnp.zeros_like(values))
    softmax.values[...] = softmax.values[...] * shrink + _multiply(weights.astype(dtype), values, is_transposed)


def _select_head(scales: Array | Ref, head: Array) -> Float[Array, "1 _"]:
    """Return a head's scales from a block with the scales of all heads, or of this head alone."""
    from jax.experimental import pallas as pl

    return scales[pl.ds(head if scales.shape[0] > 1 else 0, 1), :]


def _multiply(left: Array, right: Array, is_transposed: bool) -> Float[Array, "_ _"]:
    """Return the product of two matrices, with sums in float32; the right matrix may be transposed."""
    dims = (((1,), (int(is_transposed),)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
