"""Attention masks as functions of positions and segments; nothing of size T x T is ever stored."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._tokens import Tokens


class Mask(eqx.Module):
    """Which keys a query may attend to, from the positions and segments of the two tokens alone.

    A key at position `j` is visible to a query at position `i` when both are of one segment, `j` is not padding (-1),
    and each rule that is set holds: `causal` (`j <= i`), `window` (`i - j < window`, and `j - i < window` where not
    causal), `chunk` (`i // chunk == j // chunk`). Cores ask for any part of the matrix, or skip a part that the rules
    make empty.
    """

    is_causal: bool = eqx.field(static=True, default=True)
    window: int | None = eqx.field(static=True, default=None)
    chunk: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise ValueError(
                    f"Mask({name}={value}): {name} counts tokens and must be at least 1; pass None for no {name}."
                )

    def reach(self, seq: int) -> int:
        """Of the last `seq` tokens, how many a query can see at most: what a cache has to keep."""
        return min(n for n in (seq, self.window, self.chunk) if n is not None)

    def check_cached(self, mixer: str) -> None:
        """Raise a `ValueError` where a token sees later ones, so that nothing of it can be kept for them."""
        if not self.is_causal:
            raise ValueError(
                f"{mixer}.init_cache: with {self} a token sees later ones, and changes with each; call the model on "
                "whole rows, without a cache, or take a causal mask."
            )

    def __call__(self, queries: Tokens, keys: Tokens) -> Bool[Array, "*batch seq kv_seq"]:
        """True where the query of the row may attend to the key of the column."""
        query, key = queries.positions[..., :, None], keys.positions[..., None, :]
        visible = jnp.broadcast_to(key >= 0, jnp.broadcast_shapes(query.shape, key.shape))
        if self.is_causal:
            visible &= key <= query
        if self.window is not None:
            visible &= jnp.abs(query - key) < self.window
        if self.chunk is not None:
            visible &= query // self.chunk == key // self.chunk
        if queries.segments is not None and keys.segments is not None:
            visible &= queries.segments[..., :, None] == keys.segments[..., None, :]
        return visible


class Chosen(eqx.Module):
    """A matrix in the place of a mask: which keys each query sees, of one call."""

    visible: Bool[Array, "*batch seq kv_seq"]

    def __call__(self, queries: Tokens, keys: Tokens) -> Bool[Array, "*batch seq kv_seq"]:
        """The matrix."""
        return self.visible


def causal() -> Mask:
    """Each token sees itself and every earlier token."""
    return Mask()


def full() -> Mask:
    """Each token sees every token, as in an encoder."""
    return Mask(is_causal=False)


def sliding_window(window: int) -> Mask:
    """Each token sees itself and the `window - 1` tokens before it (Mistral, Gemma's local layers)."""
    return Mask(window=window)


def chunked(chunk: int) -> Mask:
    """Each token sees itself and the earlier tokens of its own chunk of positions (Llama 4's local layers)."""
    return Mask(chunk=chunk)
