"""Attention masks: rules for which keys a query sees, by positions and segments of tokens."""

from typing import ClassVar, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@runtime_checkable
class HasPositions(Protocol):
    """Tokens with positions, and with segments where rows hold several documents."""

    @property
    def positions(self) -> Int[Array, "*batch seq"]:
        """The position of each token in its document; -1 marks padding."""
        ...

    @property
    def segments(self) -> Int[Array, "*batch seq"] | None:
        """The number of each token's document; None: each row is one document."""
        ...


OF_SOURCE = -2
"""The position of keys that come from another sequence; a query may see them beside the keys of its own sequence."""


class Mask(eqx.Module):
    """An attention mask: a rule for the positions and segments of a query and a key.

    A key at position `j` is visible to a query at position `i` when both belong to the same segment, the key is not
    padding (`j` is not -1), and the rule of each field that is set holds. Kernels compute the mask tile by tile, and
    skip tiles in which the rules leave no key visible.

    A row may hold noisy copies of its tokens beside the clean tokens, as in the training of block diffusion (BD3-LM,
    arXiv:2503.09573). The noisy copies of segment `s` have the positions of the clean tokens and the segment `~s`,
    which is negative. With `block`, a noisy copy sees the noisy copies of its own block and the clean tokens of earlier
    blocks, and clean tokens see no noisy copies.
    """

    is_causal: bool = eqx.field(static=True, default=True)
    """Whether a query sees no later keys: `j <= i`."""
    window: int | None = eqx.field(static=True, default=None)
    """The bound of a window around the query: `i - j < window`, and `j - i < ahead`."""
    chunk: int | None = eqx.field(static=True, default=None)
    """The length of chunks, if a query sees only keys of its own chunk: `i // chunk == j // chunk`."""
    ahead: int | None = eqx.field(static=True, default=None)
    """The bound of later tokens in a window on both sides; None: the window."""
    source: bool = eqx.field(static=True, default=False)
    """Whether every query also sees its segment's keys at position `OF_SOURCE`."""
    block: int | None = eqx.field(static=True, default=None)
    """The length of blocks, if a query sees its own and earlier blocks: `j // block <= i // block`; see above."""

    def __check_init__(self):
        for name in ("window", "chunk", "ahead", "block"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(
                    f"Mask({name}={value}): {name} counts tokens and must be at least 1; pass None for no {name}."
                )
        if self.ahead is not None and (self.is_causal or self.window is None):
            raise ValueError(
                f"Mask(is_causal={self.is_causal}, window={self.window}, ahead={self.ahead}): ahead limits the later "
                "tokens of a window over both sides; pass it with a window and is_causal=False."
            )
        if self.block is not None and (self.is_causal or self.chunk is not None or self.source):
            raise ValueError(
                f"Mask(block={self.block}, is_causal={self.is_causal}, chunk={self.chunk}, source={self.source}): "
                "tokens of a block see one another and all earlier blocks; pass block with is_causal=False, without a "
                "chunk or a source."
            )

    def reach(self, seq: int) -> int:
        """Return how many of the last `seq` tokens a query can see at most; a cache must store that many."""
        return min(n for n in (seq, self.window, self.chunk) if n is not None)

    def check_cached(self, mixer: str) -> None:
        """Raise a `ValueError` if tokens see later tokens: then keys and values change, and cannot be cached."""
        if self.block is not None:
            raise ValueError(
                f"{mixer}.init_cache: with {self} a token sees later tokens of its block, so tokens cannot be sampled "
                "one by one; sample blocks, by eqformer.generation.generate_blocks, or call the model without a cache."
            )
        if not self.is_causal:
            raise ValueError(
                f"{mixer}.init_cache: with {self} a token sees later tokens, so keys and values change with each new "
                "token; call the model on whole rows, without a cache, or take a causal mask."
            )

    def __call__(self, queries: HasPositions, keys: HasPositions) -> Bool[Array, "*batch seq kv_seq"]:
        """Return a matrix that is true where the query of a row may attend to the key of a column."""
        query, key = queries.positions[..., :, None], keys.positions[..., None, :]
        visible = jnp.broadcast_to(key >= 0, jnp.broadcast_shapes(query.shape, key.shape))
        if self.is_causal:
            visible &= key <= query
        if self.window is not None:
            visible &= (query - key < self.window) & (key - query < (self.ahead or self.window))
        if self.chunk is not None:
            visible &= query // self.chunk == key // self.chunk
        if self.source:
            visible |= key == OF_SOURCE
        if self.block is not None:
            visible &= key // self.block <= query // self.block
        if queries.segments is not None and keys.segments is not None:
            query_segment, key_segment = queries.segments[..., :, None], keys.segments[..., None, :]
            if self.block is None:
                return visible & (query_segment == key_segment)
            is_earlier, is_clean = key // self.block < query // self.block, key_segment >= 0
            visible &= ((query_segment == key_segment) & (is_clean | ~is_earlier)) | (
                (query_segment == ~key_segment) & is_clean & is_earlier
            )
        return visible


class ChosenKeys(eqx.Module):
    """An attention mask as a matrix: the keys that each query of a call sees. It has no rules for positions."""

    visible: Bool[Array, "*batch seq kv_seq"]
    is_causal: ClassVar[bool] = False
    window: ClassVar[None] = None
    chunk: ClassVar[None] = None
    block: ClassVar[None] = None

    def __call__(self, queries: HasPositions, keys: HasPositions) -> Bool[Array, "*batch seq kv_seq"]:
        """Return the matrix; the tokens are not read."""
        return self.visible


def causal() -> Mask:
    """Return the mask by which each token sees itself and every earlier token."""
    return Mask()


def full() -> Mask:
    """Return the mask by which each token sees every token, as in an encoder."""
    return Mask(is_causal=False)


def sliding_window(window: int) -> Mask:
    """Return the mask by which each token sees itself and the `window - 1` tokens before it (Mistral, Gemma)."""
    return Mask(window=window)


def window_both_ways(window: int) -> Mask:
    """Return the mask of a window on both sides: `(window - 1) // 2` tokens before, `window // 2` after (T5Gemma 2)."""
    back, ahead = (window + 1) // 2, window // 2 + 1
    return Mask(is_causal=False, window=back, ahead=None if back == ahead else ahead)


def chunked(chunk: int) -> Mask:
    """Return the mask by which each token sees itself and the earlier tokens of its chunk of positions (Llama 4)."""
    return Mask(chunk=chunk)


def block_causal(block: int) -> Mask:
    """Return the mask by which each token sees all tokens of its block of positions and of earlier blocks (BD3-LM)."""
    return Mask(is_causal=False, block=block)
