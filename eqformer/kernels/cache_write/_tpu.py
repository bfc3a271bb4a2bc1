"""Writes into caches on TPUs: few tokens of each row by a kernel, in Pallas by Mosaic, many layer by layer.

XLA scatters into memories of 8 bits, and into those whose channels fill no whole vectors, in a layout of its own: the
whole stack's array was copied into it, and back, in each layer. Arrays of single layers that fit vector memory are
brought there for it, and back. The kernel fetches the tiles that hold the slots from main memory, all at once, and
sends them back.
"""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int, Num

from .._op import Implementation
from .._platform import varying_of
from ._call import CacheWriteCall


LANES = 128  # numbers of a vector, of which the last dim of an array fills whole ones
_FEW = 8  # tokens of a row, which are written one after another
_BYTES = 2**21  # of tiles that are fetched at once, with what is written into them


def is_turned(kv_seq: int, width: int) -> bool:
    """Return whether TPU compilers store channels, which fill no whole vectors, before slots, which do."""
    return kv_seq % LANES == 0 and width % LANES != 0


def rounded_slots(tokens: int) -> int:
    """Return slots for so many tokens: more than one vector's are whole vectors', which TPUs read in place."""
    return tokens + -tokens % LANES if tokens > LANES else tokens


class TileWrite(Implementation):
    """Few tokens of each row, by a kernel that fetches the tiles of their slots and sends them back.

    `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: CacheWriteCall) -> str | None:
        """Return the reason why the kernel cannot write, or None."""
        if (reason := _lacks_channels(call)) is not None:
            return reason
        (kv_seq, width), size = call.memory.shape[-2:], call.memory.dtype.itemsize
        if call.slots.shape[-1] > _FEW:
            return f"it writes up to {_FEW} tokens a row, not {call.slots.shape[-1]}"
        if size > 4:
            return f"it writes numbers of up to 32 bits, not {call.memory.dtype}"
        if kv_seq % (tile := _tile(call.memory, kv_seq, width)):
            return f"it takes a multiple of {tile} slots, not {kv_seq}"
        return None

    def run(self, call: CacheWriteCall) -> Num[Array, "..."]:
        """Return the memory with the new tokens."""
        return write_by_kernel(call.memory, call.slots, call.new, call.layer, interpret=self.interpret)


class LayerFill(Implementation):
    """Many tokens, by one pass over a layer's memory, where XLA's scatter would copy it into another layout."""

    def supports(self, call: CacheWriteCall) -> str | None:
        """Return the reason why the pass is not taken, or None."""
        if (reason := _lacks_channels(call)) is not None:
            return reason
        if call.slots.shape[-1] <= _FEW:
            return f"it writes more than {_FEW} tokens a row, not {call.slots.shape[-1]}"
        if call.memory.dtype.itemsize > 1 and not is_turned(*call.memory.shape[-2:]):
            return "XLA's scatter has the memory's own layout"
        return None

    def run(self, call: CacheWriteCall) -> Num[Array, "..."]:
        """Return the memory with the new tokens."""
        return fill(call.memory, call.slots, call.new, call.layer)


def _lacks_channels(call: CacheWriteCall) -> str | None:
    has_channels = call.memory.ndim == call.dim + (2 if call.layer is None else 3)
    return None if has_channels else "it writes arrays with channels behind the slots"


def fill(
    memory: Num[Array, "*layers_rows_heads kv_seq width"],
    slots: Int[Array, "*batch seq"],
    new: Num[Array, "*batch_heads seq width"],
    layer: Int[Array, ""] | None,
) -> Num[Array, "*layers_rows_heads kv_seq width"]:
    """Return the memory with all of the layer written anew: a slot takes its token or keeps its numbers."""
    old = _read_layer(memory, layer)
    *batch, seq = slots.shape
    places = [jax.lax.broadcasted_iota(jnp.int32, slots.shape, dim) for dim in range(slots.ndim)]
    tokens = jnp.full((*batch, old.shape[-2]), seq, jnp.int32)
    tokens = tokens.at[(*places[:-1], slots)].set(places[-1], mode="drop")
    of_heads = jax.lax.expand_dims(tokens, (*range(len(batch), old.ndim - 2), old.ndim - 1))
    of_heads = jnp.broadcast_to(of_heads, (*old.shape[:-1], 1))
    filled = jnp.where(of_heads < seq, jnp.take_along_axis(new, jnp.minimum(of_heads, seq - 1), axis=-2), old)
    if layer is None:
        return filled
    whole = jax.lax.dynamic_update_index_in_dim(memory, filled, layer, 0)
    if memory.dtype.itemsize > 1:
        return whole
    *front, last, channels = range(memory.ndim)
    order = (*front, channels, last) if is_turned(*memory.shape[-2:]) else (*front, last, channels)
    return with_layout_constraint(whole, Layout(order))  # of 8 bits XLA chose another, and copied all layers


def _read_layer(memory: Array, layer: Int[Array, ""] | None) -> Array:
    return memory if layer is None else jax.lax.dynamic_index_in_dim(memory, layer, 0, keepdims=False)


def write_by_kernel(
    memory: Num[Array, "*layers_rows_heads kv_seq width"],
    slots: Int[Array, "*batch seq"],
    new: Num[Array, "*batch_heads seq width"],
    layer: Int[Array, ""] | None,
    *,
    interpret: bool = False,
) -> Num[Array, "*layers_rows_heads kv_seq width"]:
    """Return the memory with `memory[layer, row, :, slot] = new[row]`; slots at the capacity are dropped."""
    (kv_seq, width), (rows, seq) = memory.shape[-2:], (slots[..., 0].size, slots.shape[-1])
    whole = memory.reshape(1 if layer is None else len(memory), rows, -1, kv_seq, width)
    wide = jnp.int32 if jnp.issubdtype(memory.dtype, jnp.integer) else jnp.float32
    new = new.reshape(rows, -1, seq, width).swapaxes(1, 2).astype(wide)
    turned = is_turned(kv_seq, width)
    whole = whole.swapaxes(-2, -1) if turned else whole
    number = jnp.zeros(1, jnp.int32) if layer is None else layer[None]
    whole = _called(whole, new, slots.reshape(-1), number, turned, interpret)
    return (whole.swapaxes(-2, -1) if turned else whole).reshape(memory.shape)


def _called(whole: Array, new: Array, slots: Array, layer: Array, turned: bool, interpret: bool) -> Array:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    rows, seq, heads, width = new.shape
    kv_seq = whole.shape[-1 if turned else -2]
    tile = _tile(whole, kv_seq, width)
    block = (heads, width, tile) if turned else (heads, tile, width)
    in_vectors = seq * -(-heads // 8) * 8 * -(-width // LANES) * LANES * new.dtype.itemsize
    most = max(1, _BYTES // (math.prod(block) * whole.dtype.itemsize + in_vectors))
    chunk = next(size for size in range(min(rows, most), 0, -1) if rows % size == 0)
    moved = 2 * rows * seq * math.prod(block) * whole.dtype.itemsize + new.size * new.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_kernel, (chunk, seq, tile), turned),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows // chunk,),
            in_specs=[
                pl.BlockSpec((chunk, seq, heads, width), lambda number, *_: (number, 0, 0, 0)),
                pl.BlockSpec(memory_space=tpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=tpu.HBM),
            scratch_shapes=[tpu.VMEM((chunk, *block), whole.dtype), tpu.SemaphoreType.DMA((chunk,))],
        ),
        out_shape=tpu.HBM.from_type(jax.typeof(whole).update(manual_axis_type=varying_of((whole, new, slots, layer)))),
        input_output_aliases={3: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="written_slots",
    )(layer, slots, new, whole)


def _kernel(
    sizes: tuple[int, int, int],
    turned: bool,
    layer: Any,
    slots: Any,
    new: Any,
    _: Any,
    memory: Any,
    tiles: Any,
    arrived: Any,
) -> None:
    """Some rows, whose tiles are under way together; `memory` is the one that is given."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    chunk, seq, tile = sizes
    begin, kv_seq = pl.program_id(0) * chunk, memory.shape[-1 if turned else -2]

    def write(token: int) -> None:
        slot = lambda row: slots[(begin + row) * seq + token]
        start = lambda row: pl.multiple_of(jax.lax.div(jnp.minimum(slot(row), kv_seq - 1), tile) * tile, tile)

        def place(row: Any) -> Any:
            its, every = pl.ds(start(row), tile), slice(None)
            return memory.at[(layer[0], begin + row, every, *((every, its) if turned else (its, every)))]

        def fetch(row: Any, _: None) -> None:
            tpu.make_async_copy(place(row), tiles.at[row], arrived.at[row]).start()

        def put(row: Any, _: None) -> None:
            tpu.make_async_copy(place(row), tiles.at[row], arrived.at[row]).wait()
            old, its = tiles[row], new[row, token]
            its = its[:, :, None] if turned else its[:, None, :]
            numbers = start(row) + jax.lax.broadcasted_iota(jnp.int32, old.shape, 2 if turned else 1)
            tiles[row] = jnp.where(numbers == slot(row), its, old.astype(its.dtype)).astype(old.dtype)
            tpu.make_async_copy(tiles.at[row], place(row), arrived.at[row]).start()

        def end(row: Any, _: None) -> None:
            tpu.make_async_copy(tiles.at[row], place(row), arrived.at[row]).wait()

        for step in (fetch, put, end):
            jax.lax.fori_loop(0, chunk, step, None)

    for token in range(seq):  # two of a row may be of one tile
        write(token)


def _tile(memory: Array, kv_seq: int, width: int) -> int:
    """Slots of a tile, the least that is read of main memory."""
    return LANES if is_turned(kv_seq, width) else 32 // memory.dtype.itemsize
