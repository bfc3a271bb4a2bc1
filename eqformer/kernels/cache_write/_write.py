"""Writes into a cache, in place: by XLA's scatter on CPUs and GPUs, by other means on TPUs where these apply."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from .._op import Implementation, Op
from ._call import CacheWriteCall
from ._tpu import LayerFill, TileWrite


class ScatterWrite(Implementation):
    """One scatter, of any number of tokens."""

    def supports(self, call: CacheWriteCall) -> str | None:
        """Return None: it computes every call."""
        return None

    def run(self, call: CacheWriteCall) -> Num[Array, "..."]:
        """Return the memory with the new tokens."""
        slots, dim = call.slots, call.dim
        shape = *call.new.shape[:dim], slots.shape[-1]
        slot_of_head = jnp.broadcast_to(jax.lax.expand_dims(slots, range(slots.ndim - 1, dim)), shape)
        # All dims up to that of the slots are indexed, which is in place everywhere: for a reshaped memory XLA would
        # copy the memory of one head.
        indices = [jax.lax.broadcasted_iota(jnp.int32, shape, number) for number in range(dim)]
        layers = () if call.layer is None else (jnp.broadcast_to(call.layer, shape),)
        return call.memory.at[(*layers, *indices, slot_of_head)].set(call.new, mode="drop")


CACHE_WRITE = Op(ScatterWrite(), (("tpu", TileWrite()), ("tpu", LayerFill())))
"""Writes into a cache, in place on every platform."""
