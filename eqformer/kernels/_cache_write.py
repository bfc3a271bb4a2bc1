"""Writes of new tokens into the slots of a cache in place: by a scatter and, on TPUs, by a kernel or one pass.

The array of a cache is called its memory here. On TPUs, XLA's scatter needs another layout for 8-bit memories and for
memories whose number of channels is not a multiple of 128. XLA then copied the memory of the whole stack into that
layout, and back, in each layer. Two implementations avoid these copies. `TileWrite`, a Pallas kernel, writes up to 8
tokens of each row: it fetches the tiles with their slots from main memory (HBM), all at once, and sends them back.
`LayerFill` writes more tokens, by one pass over the memory of a layer in which each slot takes its new token or keeps
its old one.
"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int, Num

from ._op import Call, Implementation, Op
from ._platform import Ref, varying_of


class CacheWriteCall(Call):
    """Arguments of `memory[layer, row, ..., slot, :] = new[row, ..., token, :]` for each token of each row."""

    memory: Num[Array, "..."]
    """Array of the cache. Its dims are layers (if `layer` is set), batch, heads (optional), slots and channels
    (optional)."""
    slots: Int[Array, "*batch seq"]
    """Slot of each token; a token whose slot is the number of slots is dropped."""
    new: Num[Array, "..."]
    """Keys or values of the new tokens, in the dtype of the memory."""
    layer: Int[Array, ""] | None
    """Layer of the stack to write; None if the memory has no dim of layers."""
    dim: int = eqx.field(static=True)
    """Index of the dim of tokens in `new`, and of the dim of slots in the memory of a layer."""

    operation = "cache write"

    def describe(self) -> str:
        """Return shapes and dtype for an error message."""
        return f"new {list(self.new.shape)} into memory {self.memory.dtype}{list(self.memory.shape)}"


class ScatterWrite(Implementation[CacheWriteCall, Array]):
    """Write of any number of tokens by one scatter."""

    def supports(self, call: CacheWriteCall) -> str | None:
        """Return None: every call is supported."""
        return None

    def run(self, call: CacheWriteCall) -> Num[Array, "..."]:
        """Return the memory with the new tokens."""
        slots, dim = call.slots, call.dim
        shape = *call.new.shape[:dim], slots.shape[-1]
        slot_of_head = jnp.broadcast_to(jax.lax.expand_dims(slots, range(slots.ndim - 1, dim)), shape)
        # Index all dims up to the dim of slots, so that XLA scatters in place on every platform. A scatter with fewer
        # indices into a reshaped memory made XLA copy memories with one head.
        indices = [jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(dim)]
        layers = () if call.layer is None else (jnp.broadcast_to(call.layer, shape),)
        return call.memory.at[(*layers, *indices, slot_of_head)].set(call.new, mode="drop")


LANES = 128
"""Size of the last dim of a TPU's vector register."""
_FEW_TOKENS = 8  # Largest number of tokens of a row for `TileWrite`, which writes them one after another.
_TILE_BYTES = 2**21  # Largest number of bytes of tiles that are fetched at once, and of the tokens to write into them.


def stores_channels_first(kv_seq: int, width: int) -> bool:
    """Return whether XLA for TPUs stores a memory with channels before slots.

    XLA does so if the number of slots is a multiple of 128 and the number of channels is not.
    """
    return kv_seq % LANES == 0 and width % LANES != 0


def round_up_slots(tokens: int) -> int:
    """Round a number of slots above 128 up to a multiple of 128, which TPUs read in place."""
    return tokens + -tokens % LANES if tokens > LANES else tokens


class TileWrite(Implementation[CacheWriteCall, Array]):
    """Write of up to 8 tokens of each row, by a kernel that fetches the tiles of their slots and sends them back.

    A tile has 128 slots if channels are stored first. Otherwise it has 8 slots of 32-bit numbers, 16 of 16-bit numbers
    or 32 of 8-bit numbers. The kernel holds up to 2 MB of tiles in vector memory (VMEM). `interpret` runs the kernel as
    plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: CacheWriteCall) -> str | None:
        """Return the reason why the kernel cannot write, or None."""
        if (reason := _missing_channels(call)) is not None:
            return reason
        (kv_seq, width), size = call.memory.shape[-2:], call.memory.dtype.itemsize
        if call.slots.shape[-1] > _FEW_TOKENS:
            return f"it writes up to {_FEW_TOKENS} tokens a row, not {call.slots.shape[-1]}"
        if size > 4:
            return f"it writes numbers of up to 32 bits, not {call.memory.dtype}"
        if kv_seq % (tile := _tile_slots(call.memory, kv_seq, width)):
            return f"it supports multiples of {tile} slots, not {kv_seq}"
        return None

    def run(self, call: CacheWriteCall) -> Num[Array, "..."]:
        """Return the memory with the new tokens."""
        return write_by_kernel(call.memory, call.slots, call.new, call.layer, interpret=self.interpret)


class LayerFill(Implementation[CacheWriteCall, Array]):
    """Write of more than 8 tokens of each row by one pass over the memory of a layer.

    It supports memories that XLA's scatter would copy to another layout.
    """

    def supports(self, call: CacheWriteCall) -> str | None:
        """Return the reason why the pass cannot write, or why a scatter is better, or None."""
        if (reason := _missing_channels(call)) is not None:
            return reason
        if call.slots.shape[-1] <= _FEW_TOKENS:
            return f"it writes more than {_FEW_TOKENS} tokens a row, not {call.slots.shape[-1]}"
        if call.memory.dtype.itemsize > 1 and not stores_channels_first(*call.memory.shape[-2:]):
            return "XLA's scatter works in the memory's own layout"
        return None

    def run(self, call: CacheWriteCall) -> Num[Array, "..."]:
        """Return the memory with the new tokens."""
        return fill_layer(call.memory, call.slots, call.new, call.layer)


def _missing_channels(call: CacheWriteCall) -> str | None:
    """Return a reason if the memory has no dim of channels, or no channels in this dim; None if it has channels.

    The cache of latent attention without rotary keys, for example, has an array of keys with 0 channels.
    """
    if call.memory.ndim != call.dim + (2 if call.layer is None else 3):
        return "it writes arrays with a dim of channels after the slots"
    return None if call.memory.shape[-1] else "it writes at least one channel, not 0"


def fill_layer(
    memory: Num[Array, "*layers_rows_heads kv_seq width"],
    slots: Int[Array, "*batch seq"],
    new: Num[Array, "*batch_heads seq width"],
    layer: Int[Array, ""] | None,
) -> Num[Array, "*layers_rows_heads kv_seq width"]:
    """Return the memory after a pass over all slots of the layer, in which a slot takes its new token or is kept."""
    old = _read_layer(memory, layer)
    *batch, seq = slots.shape
    indices = [jax.lax.broadcasted_iota(jnp.int32, slots.shape, dim) for dim in range(slots.ndim)]
    tokens = jnp.full((*batch, old.shape[-2]), seq, jnp.int32)
    tokens = tokens.at[(*indices[:-1], slots)].set(indices[-1], mode="drop")
    token_of_slot = jax.lax.expand_dims(tokens, (*range(len(batch), old.ndim - 2), old.ndim - 1))
    token_of_slot = jnp.broadcast_to(token_of_slot, (*old.shape[:-1], 1))
    is_written = token_of_slot < seq
    filled = jnp.where(is_written, jnp.take_along_axis(new, jnp.minimum(token_of_slot, seq - 1), axis=-2), old)
    if layer is None:
        return filled
    updated = jax.lax.dynamic_update_index_in_dim(memory, filled, layer, 0)
    if memory.dtype.itemsize > 1:
        return updated
    *leading, last, channels = range(memory.ndim)
    channels_first = stores_channels_first(*memory.shape[-2:])
    order = (*leading, channels, last) if channels_first else (*leading, last, channels)
    # Without this constraint, XLA chose another layout for 8-bit memories, and copied all layers.
    return with_layout_constraint(updated, Layout(order))


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
    """Return the memory with `memory[layer, row, :, slot] = new[row, :, token]`; slot `kv_seq` drops the token."""
    (kv_seq, width), (rows, seq) = memory.shape[-2:], (slots[..., 0].size, slots.shape[-1])
    stack = memory.reshape(1 if layer is None else len(memory), rows, -1, kv_seq, width)
    vector_dtype = jnp.int32 if jnp.issubdtype(memory.dtype, jnp.integer) else jnp.float32
    new = new.reshape(rows, -1, seq, width).swapaxes(1, 2).astype(vector_dtype)
    channels_first = stores_channels_first(kv_seq, width)
    stack = stack.swapaxes(-2, -1) if channels_first else stack
    layer_index = jnp.zeros(1, jnp.int32) if layer is None else layer[None]
    stack = _call_kernel(stack, new, slots.reshape(-1), layer_index, channels_first, interpret)
    return (stack.swapaxes(-2, -1) if channels_first else stack).reshape(memory.shape)


def _call_kernel(stack: Array, new: Array, slots: Array, layer: Array, channels_first: bool, interpret: bool) -> Array:
    """Call the kernel, which updates the stack in place in HBM; each grid step writes a chunk of rows."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    rows, seq, heads, width = new.shape
    kv_seq = stack.shape[-1 if channels_first else -2]
    tile = _tile_slots(stack, kv_seq, width)
    block = (heads, width, tile) if channels_first else (heads, tile, width)
    new_bytes = seq * -(-heads // 8) * 8 * -(-width // LANES) * LANES * new.dtype.itemsize
    limit = max(1, _TILE_BYTES // (math.prod(block) * stack.dtype.itemsize + new_bytes))
    chunk = next(size for size in range(min(rows, limit), 0, -1) if rows % size == 0)
    bytes_accessed = 2 * rows * seq * math.prod(block) * stack.dtype.itemsize + new.size * new.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_kernel, (chunk, seq, tile), channels_first),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows // chunk,),
            in_specs=[
                pl.BlockSpec((chunk, seq, heads, width), lambda chunk_index, *_: (chunk_index, 0, 0, 0)),
                pl.BlockSpec(memory_space=tpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=tpu.HBM),
            scratch_shapes=[tpu.VMEM((chunk, *block), stack.dtype), tpu.SemaphoreType.DMA((chunk,))],
        ),
        out_shape=tpu.HBM.from_type(jax.typeof(stack).update(manual_axis_type=varying_of((stack, new, slots, layer)))),
        input_output_aliases={3: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=bytes_accessed),
        interpret=interpret,
        name="written_slots",
    )(layer, slots, new, stack)


def _kernel(
    sizes: tuple[int, int, int],
    channels_first: bool,
    layer: Ref,
    slots: Ref,
    new: Ref,
    _: Ref,
    memory: Ref,
    tiles: Ref,
    arrived: Ref,
) -> None:
    """Write the tokens of a chunk of rows into `memory`, in place; the tiles of all rows are copied concurrently."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    chunk, seq, tile = sizes
    begin, kv_seq = pl.program_id(0) * chunk, memory.shape[-1 if channels_first else -2]

    def write(token: int) -> None:
        def slot(row: Array) -> Array:
            return slots[(begin + row) * seq + token]

        def start(row: Array) -> Array:
            return pl.multiple_of(jax.lax.div(jnp.minimum(slot(row), kv_seq - 1), tile) * tile, tile)

        def select_tile(row: Array) -> Ref:
            tile_slots, all_heads = pl.ds(start(row), tile), slice(None)
            index = (all_heads, tile_slots) if channels_first else (tile_slots, all_heads)
            return memory.at[(layer[0], begin + row, all_heads, *index)]

        def start_fetch(row: Array, _: None) -> None:
            tpu.make_async_copy(select_tile(row), tiles.at[row], arrived.at[row]).start()

        def write_token(row: Array, _: None) -> None:
            tpu.make_async_copy(select_tile(row), tiles.at[row], arrived.at[row]).wait()
            old, vectors = tiles[row], new[row, token]
            vectors = vectors[:, :, None] if channels_first else vectors[:, None, :]
            slot_index = start(row) + jax.lax.broadcasted_iota(jnp.int32, old.shape, 2 if channels_first else 1)
            updated = jnp.where(slot_index == slot(row), vectors, old.astype(vectors.dtype))
            tiles[row] = updated.astype(old.dtype)
            tpu.make_async_copy(tiles.at[row], select_tile(row), arrived.at[row]).start()

        def wait_for_store(row: Array, _: None) -> None:
            tpu.make_async_copy(tiles.at[row], select_tile(row), arrived.at[row]).wait()

        for step in (start_fetch, write_token, wait_for_store):
            jax.lax.fori_loop(0, chunk, step, None)

    for token in range(seq):  # Write tokens one after another, because two tokens of a row may be in one tile.
        write(token)


def _tile_slots(memory: Array, kv_seq: int, width: int) -> int:
    """Return the number of slots of a tile, the smallest part of main memory that a kernel can copy."""
    return LANES if stores_channels_first(kv_seq, width) else 32 // memory.dtype.itemsize


CACHE_WRITE = Op(ScatterWrite(), (("tpu", TileWrite()), ("tpu", LayerFill())))
"""Writes of new tokens into a cache, in place on every platform."""
