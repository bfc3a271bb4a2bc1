"""Caches of past tokens, preallocated: keys and values, latents, or the state of a recurrence."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from .._array_checks import checked, checked_fields
from ._dtype import float_dtype
from ._layer_cache import index_layer, LayerCache
from ._slots import empty_slots, remembered, SlotCache, slots_for
from ._tokens import Tokens
from .quantization._kv_cache import dequantize_rows


@checked_fields
class KVCache(SlotCache):
    """Keys and values of past tokens, those of a head side by side, so that products of heads read them in place."""

    keys: Num[Array, "*batch kv_heads kv_seq head_dim"]
    """The keys, rotated."""
    values: Num[Array, "*batch kv_heads kv_seq v_dim"]
    """The values."""
    positions: Int[Array, "*batch kv_seq"]
    """The position in each slot; -1: it is empty."""
    rolling: bool = eqx.field(static=True, default=False)
    """Whether new tokens take the slots of the oldest."""
    first: Int[Array, "*batch"] | None = None
    """Of a shard, its first slot; None: the cache is whole."""
    capacity: int | None = eqx.field(static=True, default=None)
    """Of a shard, the slots of the whole cache."""
    layer: Int[Array, ""] | None = None
    """Of a stack's cache, the layer that reads and writes; None: there is no dim of layers."""
    key_scales: Float[Array, "*batch kv_heads kv_seq"] | None = None
    """What keys of 8 bits are multiplied by."""
    value_scales: Float[Array, "*batch kv_heads kv_seq"] | None = None
    """What values of 8 bits are multiplied by."""
    turned: Int[Array, "*batch"] | None = None
    """Of each row, a length by whose frequencies its keys are rotated, where a row may get others; see `nn.Rotary`."""

    @classmethod
    def empty(
        cls,
        batch: Sequence[int],
        capacity: int,
        keys: Sequence[int],
        values: Sequence[int],
        dtype: str,
        *,
        reach: int | None = None,
    ) -> "KVCache":
        """An empty cache.

        Args:
            batch: Its dims of rows.
            capacity: Up to how many tokens a row may have.
            keys: Heads of keys, and channels of each.
            values: The same of values.
            dtype: Of both, a float.
            reach: How many tokens are kept, or a few more; fewer than `capacity` roll.
        """
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        size = capacity if reach is None else slots_for(reach, capacity)
        slots = lambda heads, width: jnp.zeros((*batch, heads, size, width), dtype)
        return cls(
            keys=slots(*keys), values=slots(*values), positions=empty_slots(batch, size), rolling=size < capacity
        )

    def with_scales(self, dtype: str) -> "KVCache":
        """An empty cache like this one, with keys and values of 8 bits."""
        (keys, key_scales), (values, value_scales) = (_emptied(x, dtype) for x in (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)

    def scaled(self) -> dict[str, Array]:
        """What is read of all slots, of 8 bits: keys and values as they are stored, and what they are to be times."""
        own = lambda x: index_layer(x, self.layer)
        return {
            "key": _swapped(own(self.keys)),
            "value": _swapped(own(self.values)),
            "key_scales": own(self.key_scales).swapaxes(-2, -1),
            "value_scales": own(self.value_scales).swapaxes(-2, -1),
        }

    def stored(
        self, dtype: jnp.dtype
    ) -> tuple[Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens]:
        """All keys and values that it holds, and their tokens."""
        own = lambda x: index_layer(x, self.layer)
        memories = (self.keys, self.key_scales), (self.values, self.value_scales)
        keys, values = (
            own(rows) if scales is None else dequantize_rows(own(rows), own(scales), dtype) for rows, scales in memories
        )
        return _swapped(keys), _swapped(values), Tokens(own(self.positions))

    @checked
    def update(
        self,
        keys: Float[Array, "*batch seq kv_heads head_dim"],
        values: Float[Array, "*batch seq kv_heads v_dim"],
        tokens: Tokens,
    ) -> tuple[
        "KVCache", Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens
    ]:
        """Store new tokens; return the cache and all keys and values, with their tokens, that the new ones may see."""
        new, scales = (_swapped(keys), _swapped(values)), (self.key_scales, self.value_scales)
        (k, v, *more, positions), seen = remembered(self, (self.keys, self.values), scales, new, tokens, heads=1)
        kept = dataclasses.replace(self, keys=k, values=v, positions=positions)
        if more:
            kept = dataclasses.replace(kept, key_scales=more[0], value_scales=more[1])
        return kept, _swapped(seen[0]), _swapped(seen[1]), Tokens(seen[2])


@checked_fields
class LatentCache(SlotCache):
    """Compressed keys and values of past tokens and their rotated keys (MLA's two caches)."""

    latents: Num[Array, "*batch kv_seq latent"]
    """The latents of keys and values."""
    rotary_keys: Num[Array, "*batch kv_seq rope_dim"]
    """The rotated keys, which all heads share."""
    positions: Int[Array, "*batch kv_seq"]
    """The position in each slot; -1: it is empty."""
    rolling: bool = eqx.field(static=True, default=False)
    """Whether new tokens take the slots of the oldest."""
    first: Int[Array, "*batch"] | None = None
    """Of a shard, its first slot; None: the cache is whole."""
    capacity: int | None = eqx.field(static=True, default=None)
    """Of a shard, the slots of the whole cache."""
    layer: Int[Array, ""] | None = None
    """Of a stack's cache, the layer that reads and writes; None: there is no dim of layers."""
    latent_scales: Float[Array, "*batch kv_seq"] | None = None
    """What latents of 8 bits are multiplied by."""
    rotary_scales: Float[Array, "*batch kv_seq"] | None = None
    """What rotated keys of 8 bits are multiplied by."""

    def with_scales(self, dtype: str) -> "LatentCache":
        """An empty cache like this one, with latents and rotated keys of 8 bits."""
        (latents, scales), (rotated, others) = (_emptied(x, dtype) for x in (self.latents, self.rotary_keys))
        return dataclasses.replace(
            self, latents=latents, rotary_keys=rotated, latent_scales=scales, rotary_scales=others
        )

    def scaled(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Of all slots, of 8 bits: latents as they are stored and what they are to be times; rotated keys likewise."""
        own = lambda x: index_layer(x, self.layer)
        return (own(self.latents), own(self.latent_scales)), (own(self.rotary_keys), own(self.rotary_scales))

    @checked
    def update(
        self,
        latents: Float[Array, "*batch seq latent"],
        rotary_keys: Float[Array, "*batch seq rope_dim"],
        tokens: Tokens,
    ) -> tuple["LatentCache", Float[Array, "*batch all latent"], Float[Array, "*batch all rope_dim"], Tokens]:
        """Store new tokens; return the cache and all that the new ones may see."""
        new, scales = (latents, rotary_keys), (self.latent_scales, self.rotary_scales)
        (c, r, *more, positions), seen = remembered(self, (self.latents, self.rotary_keys), scales, new, tokens)
        kept = dataclasses.replace(self, latents=c, rotary_keys=r, positions=positions)
        if more:
            kept = dataclasses.replace(kept, latent_scales=more[0], rotary_scales=more[1])
        return kept, seen[0], seen[1], Tokens(seen[2])


@checked_fields
class RecurrentCache(LayerCache):
    """The cache of a gated delta net or a Mamba-2, whose size does not depend on the length of its rows."""

    state: Float[Array, "*batch heads head_dim v_dim"]
    """The recurrent state, in float32 at least."""
    queries: Float[Array, "*batch kept kv_heads head_dim"]
    """Queries of the last tokens, before their convolution."""
    keys: Float[Array, "*batch kept kv_heads head_dim"]
    """Keys of the last tokens, before theirs."""
    values: Float[Array, "*batch kept heads v_dim"]
    """Values of the last tokens, before theirs."""
    lengths: Int[Array, "*batch"]
    """The position of each row's next token."""
    layer: Int[Array, ""] | None = None
    """Of a stack's cache, the layer that reads and writes; None: there is no dim of layers."""


@checked_fields
class ConvCache(eqx.Module):
    """The cache of a short convolution, whose size does not depend on the length of its rows.

    `inputs` is what the convolution was given for the last tokens; `lengths` is the position of each row's next token.
    """

    inputs: Float[Array, "*batch kept mlp"]
    lengths: Int[Array, "*batch"]


def _emptied(x: Num[Array, "*dims row"], dtype: str) -> tuple[Num[Array, "*dims row"], Float[Array, "*dims"]]:
    return jnp.zeros(x.shape, dtype), jnp.zeros(x.shape[:-1], jnp.float32)


def _swapped(x: Array) -> Array:
    """Heads before tokens, or tokens before heads."""
    return x.swapaxes(-3, -2)
