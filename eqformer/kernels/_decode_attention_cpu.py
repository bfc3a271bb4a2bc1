"""Attention of newest tokens to a cache on CPUs: by the definition, but of the filled slots alone.

A cache has slots for a row's last token from the first token on, and the definition reads empty slots too.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from ._op import Implementation
from .attention._call import DecodeCall, if_given


_FEWEST_SLOTS = 1024
"""A decode step of 6 layers of 576 channels took 1.15 times as long with all of 2,048 slots as with an eighth of them;
with fewer slots there is less to gain."""
_PARTS = (8, 4, 2, 1)
"""The call reads an eighth of the slots, a quarter, half or all of them."""


class FilledSlotsDecoding(Implementation[DecodeCall, Array]):
    """The definition for the slots up to the last visible one, rounded up to an eighth, a quarter, half or all of them.

    The compiled program has a branch for each of the four numbers of slots and runs one branch. Under `jax.vmap` it
    runs all four.
    """

    definition: Implementation[DecodeCall, Array]

    def supports(self, call: DecodeCall) -> str | None:
        """Return the reason why all slots are read, or None."""
        if (slots := call.key.shape[-3]) < _FEWEST_SLOTS:
            return f"it takes caches of at least {_FEWEST_SLOTS} slots, not of {slots}"
        return None

    def run(self, call: DecodeCall) -> Float[Array, "*batch seq heads _"]:
        """Compute the call."""
        slots = call.key.shape[-3]
        filled = jnp.max(jnp.where(call.visible, jnp.arange(1, slots + 1, dtype=jnp.int32), 0))
        return self._attend([-(-slots // part) for part in _PARTS], filled, call)

    def _attend(
        self, sizes: Sequence[int], filled: Int[Array, ""], call: DecodeCall
    ) -> Float[Array, "*batch seq heads _"]:
        """Attend to the first of these numbers of slots that holds the filled slots."""
        size, *larger = sizes
        if not larger:
            return self._attend_to_first(size, call)
        attend_to_more = functools.partial(self._attend, larger, filled)
        return jax.lax.cond(filled <= size, functools.partial(self._attend_to_first, size), attend_to_more, call)

    def _attend_to_first(self, size: int, call: DecodeCall) -> Float[Array, "*batch seq heads _"]:
        return self.definition.run(_first_slots(call, size))


def _first_slots(call: DecodeCall, size: int) -> DecodeCall:
    """Return the call for the first slots alone."""
    stored, rotated = call.stored, call.rotated

    def take_arrays(x: Num[Array, "*batch kv_seq kv_heads _"], in_cache: Array | None) -> Array:
        if stored is None or in_cache is None:
            return x[..., :size, :, :]
        taken = _read_cache(in_cache, stored.layer, size)
        return taken.swapaxes(-3, -2) if taken.ndim == x.ndim else taken[..., None, :]  # latents have no dim of heads

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
    """Return a layer's first slots by one slice of the stack, so that XLA does not copy the layer's other slots."""
    if layer is None:
        return x[..., :size, :]
    starts = (layer, *(jnp.zeros_like(layer) for _ in x.shape[1:]))
    return jax.lax.dynamic_slice(x, starts, (1, *x.shape[1:-2], size, x.shape[-1]))[0]
