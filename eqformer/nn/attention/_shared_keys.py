"""Latents and selected keys that a `LatentAttention` shares with later layers, which have none of their own."""

import dataclasses

import equinox as eqx
from jaxtyping import Array, Float, Int, PyTree

from .._tokens import SharedValue, Tokens
from ._indexer import SelectedKeys


class SharedLatents(eqx.Module):
    """A layer's latents and rotated keys, for all tokens that the tokens of a call may see."""

    latents: Float[Array, "*batch kv_seq latent"]
    """The latents of keys and values."""
    rope: Float[Array, "*batch kv_seq rope_dim"]
    """The rotated keys, which all heads share; without rotary positions they have no channels."""
    positions: Int[Array, "*batch kv_seq"] | None
    """Positions of the latents, if they come from a cache; None: the latents belong to the call's own tokens."""

    @property
    def tokens(self) -> Tokens | None:
        """The tokens of the latents; None: the call's own tokens."""
        return None if self.positions is None else Tokens(self.positions)


class SharedKeys(eqx.Module):
    """The selected keys and the latents that layers of latent attention have shared so far.

    Layers with rotary positions and layers without rotary positions share separate latents, because their keys differ.
    """

    selection: SelectedKeys | None = None
    """The keys that the last indexer selected for each query; None: all keys."""
    rotary_latents: SharedLatents | None = None
    """Latents of the last layer with rotary positions that shares them."""
    plain_latents: SharedLatents | None = None
    """Latents of the last layer without rotary positions that shares them."""

    def latents_for(self, has_rotary: bool) -> SharedLatents:
        """Return the latents for a layer with or without rotary positions; raise a `ValueError` if there are none."""
        latents = self.rotary_latents if has_rotary else self.plain_latents
        if latents is None:
            kind = "with" if has_rotary else "without"
            raise ValueError(
                f"LatentAttention(x): this layer {kind} rotary positions reads latents of an earlier layer, but no "
                f"such layer shares them; put a layer {kind} rotary positions, made by sharing_latents(), in "
                "Residual(shares=) before this layer, and this layer in Residual(reads=)."
            )
        return latents

    def with_latents(self, latents: SharedLatents, has_rotary: bool) -> "SharedKeys":
        """Return the shared keys with these latents of a layer with or without rotary positions."""
        return dataclasses.replace(self, **{"rotary_latents" if has_rotary else "plain_latents": latents})


def read_shared_keys(argument: PyTree) -> SharedKeys:
    """Return the keys that earlier layers share, from a layer's cache argument; empty `SharedKeys` if none are passed.

    Raises a `ValueError` if the argument is a `SharedValue` of another kind.
    """
    if not isinstance(argument, SharedValue):
        return SharedKeys()
    if not isinstance(argument.value, SharedKeys):
        raise ValueError(
            f"LatentAttention(x): it was given {type(argument.value).__name__} of an earlier layer, but it reads only "
            "the latents and the selected keys of another LatentAttention; put that layer in Residual(shares=), and "
            "this layer, later, in Residual(reads=)."
        )
    return argument.value
