"""Attention of the newest token of each row to a cache: the definition, and implementations for GPUs, TPUs and CPUs.

The kernels read the cache once. XLA's own program writes the scores of all slots to main memory in float32, and reads
them three times for the softmax. If many query heads share a key head, scores are a large part of a decode step's
memory traffic: a sixth for Llama 3 70B on eight devices, with eight query heads and one key head on each device. The
GPU kernel (`FlashDecodingGpu`) keeps scores in registers. On TPUs, XLA's program read latents twice, because they are
both keys and values, and its products of few queries took longer than reading the cache. The TPU kernel
(`FlashDecodingTpu`) reads the cache where it is stored. On CPUs, `FilledSlotsDecoding` does not read the empty slots of
a large cache.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from .._mask import ChosenKeys
from ._decode_attention_gpu import FlashDecodingGpu
from ._decode_attention_tpu import FlashDecodingTpu
from ._op import Implementation, Op
from .attention._call import AttentionCall, DecodeCall, if_given, TokenPositions
from .attention._reference import attend_by_definition


class ReferenceDecoding(Implementation[DecodeCall, Array]):
    """Attention by its definition, for keys and values in the dtype and with the scales in which they are stored."""

    def supports(self, call: DecodeCall) -> str | None:
        """Return None: every call is supported."""
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch seq heads _"]:
        """Compute the call."""
        key, value, value_scales, rotated = call.key, call.value, call.value_scales, call.rotated
        if value is None:
            value, value_scales = key, call.key_scales
        # The mask is a matrix, so the call needs no positions of tokens.
        no_positions = jnp.zeros((*call.query.shape[:-3], call.query.shape[-3]), jnp.int32)
        attention = AttentionCall(
            call.query,
            key.astype(call.query.dtype),
            value.astype(call.query.dtype),
            mask=ChosenKeys(call.visible),
            tokens=TokenPositions(no_positions),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            bias=call.bias,
        )
        rotated = None if rotated is None else rotated._replace(key=rotated.key.astype(call.query.dtype))
        return attend_by_definition(attention, key_scales=call.key_scales, value_scales=value_scales, rotated=rotated)


_FEWEST_SLOTS = 1024
"""Least number of slots of a cache for `FilledSlotsDecoding`.

A decode step of 6 layers of 576 channels took 1.15 times as long with all of 2,048 slots as with an eighth of them.
With fewer slots there is less to gain.
"""
_PARTS = (8, 4, 2, 1)
"""Divisors of the number of slots: an eighth, a quarter, half or all of the slots are read."""


class FilledSlotsDecoding(Implementation[DecodeCall, Array]):
    """Attention by its definition to the first slots of a cache, which include all visible slots.

    An eighth, a quarter, half or all of the slots are read. The compiled program has a branch for each of these
    numbers, and runs one branch; under `jax.vmap` it runs all four.
    """

    definition: Implementation[DecodeCall, Array]

    def supports(self, call: DecodeCall) -> str | None:
        """Return the reason why the call must read all slots, or None."""
        if (slots := call.key.shape[-3]) < _FEWEST_SLOTS:
            return f"it supports caches of at least {_FEWEST_SLOTS} slots, not of {slots}"
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch seq heads _"]:
        """Compute the call."""
        slots = call.key.shape[-3]
        filled = jnp.max(jnp.where(call.visible, jnp.arange(1, slots + 1, dtype=jnp.int32), 0))
        return self._attend([-(-slots // part) for part in _PARTS], filled, call)

    def _attend(
        self, sizes: Sequence[int], filled: Int[Array, ""], call: DecodeCall
    ) -> Float[Array, "*batch seq heads _"]:
        """Attend to the first slots; their number is the smallest of `sizes` that is at least `filled`."""
        size, *larger = sizes
        if not larger:
            return self._attend_to_first(size, call)
        attend_to_more = functools.partial(self._attend, larger, filled)
        return jax.lax.cond(filled <= size, functools.partial(self._attend_to_first, size), attend_to_more, call)

    def _attend_to_first(self, size: int, call: DecodeCall) -> Float[Array, "*batch seq heads _"]:
        return self.definition.run(_first_slots(call, size))


def _first_slots(call: DecodeCall, size: int) -> DecodeCall:
    """Return the call for only the first `size` slots."""
    stored, rotated = call.stored, call.rotated

    def take_arrays(x: Num[Array, "*batch kv_seq kv_heads _"], in_cache: Array | None) -> Array:
        if stored is None or in_cache is None:
            return x[..., :size, :, :]
        taken = _read_cache(in_cache, stored.layer, size)
        return taken.swapaxes(-3, -2) if taken.ndim == x.ndim else taken[..., None, :]  # Latents have no dim of heads.

    def take_scales(x: Float[Array, "*batch kv_seq kv_heads"]) -> Float[Array, "*batch _ kv_heads"]:
        return x[..., :size, :]

    if rotated is not None:
        rotated_key = take_arrays(rotated.key, None if stored is None else stored.rotated)
        rotated = rotated._replace(key=rotated_key, scales=if_given(take_scales, rotated.scales))
    return dataclasses.replace(
        call,
        key=take_arrays(call.key, None if stored is None else stored.key),
        value=if_given(lambda value: take_arrays(value, None if stored is None else stored.value), call.value),
        visible=call.visible[..., :size],
        bias=if_given(lambda bias: bias[..., :size], call.bias),
        key_scales=if_given(take_scales, call.key_scales),
        value_scales=if_given(take_scales, call.value_scales),
        rotated=rotated,
        stored=None,
    )


def _read_cache(
    x: Num[Array, "*layers_batch kv_seq _"], layer: Int[Array, ""] | None, size: int
) -> Num[Array, "*batch _ _"]:
    """Return the first slots of a layer by one slice; if the layer were sliced first, XLA would copy all its slots."""
    if layer is None:
        return x[..., :size, :]
    starts = (layer, *(jnp.zeros_like(layer) for _ in x.shape[1:]))
    return jax.lax.dynamic_slice(x, starts, (1, *x.shape[1:-2], size, x.shape[-1]))[0]


DECODE_ATTENTION = Op(
    ReferenceDecoding(),
    (
        ("cuda", FlashDecodingGpu()),
        ("tpu", FlashDecodingTpu()),
        ("cpu", FilledSlotsDecoding(ReferenceDecoding())),
    ),
)
"""Attention of few queries to a cache.

On GPUs and TPUs, flash decoding supports one query per row in 16 bits. On CPUs, the filled slots of large caches are
read. Other calls are computed by the definition.
"""
