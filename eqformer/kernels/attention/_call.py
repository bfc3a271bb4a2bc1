"""Arguments of attention: positions of tokens, and the records of a call.

An `AttentionCall` is for softmax(scale * query key^T + bias) value under a mask. A `DecodeCall` is for the same
attention of few queries to the keys and values of a cache.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from ..._annotation_checks import checked_fields
from ..._mask import ChosenKeys, HasPositions, Mask, OF_SOURCE
from .._op import Call
from .._platform import Result


class TokenPositions(eqx.Module):
    """Positions and documents of tokens, and facts about their order that are known at trace time.

    `whole_rows`, `documents` and `pieces` mean the same as in `nn.Tokens`.
    """

    positions: Int[Array, "*batch seq"]
    segments: Int[Array, "*batch seq"] | None = None
    whole_rows: int | None = eqx.field(static=True, default=None)
    documents: int | None = eqx.field(static=True, default=None)
    pieces: int | None = eqx.field(static=True, default=None)

    @property
    def are_whole_rows(self) -> bool:
        """Whether each row is known to be one document in order, from position 0 on, with padding only at its end."""
        return self.segments is None and self._are_all_of_their_rows

    @property
    def are_packed_in_order(self) -> bool:
        """Whether each row is known to consist of up to `documents` whole documents, one after another."""
        return self.segments is not None and self.documents is not None and self._are_all_of_their_rows

    @property
    def _are_all_of_their_rows(self) -> bool:
        """Whether the arrays are known to contain all tokens of each row."""
        return self.pieces is None and self.whole_rows == self.positions.shape[-1]


def token_positions(tokens: HasPositions) -> TokenPositions:
    """Return the `TokenPositions` of any tokens, with the facts about their order that the tokens have."""
    if isinstance(tokens, TokenPositions):
        return tokens
    known = (getattr(tokens, name, None) for name in ("whole_rows", "documents", "pieces"))
    return TokenPositions(tokens.positions, tokens.segments, *known)


def optional_token_positions(tokens: HasPositions | None) -> TokenPositions | None:
    """Return the `TokenPositions` of tokens, or None for None."""
    return None if tokens is None else token_positions(tokens)


@checked_fields
class AttentionCall(Call):
    """Arguments of an attention, the same for every implementation.

    Query head `h` reads key head `h // (heads / kv_heads)`. The output of a query that sees no key is zero. The outputs
    of padding queries are finite and meaningless.
    """

    query: Float[Array, "*batch seq heads head_dim"]
    """The queries."""
    key: Num[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys."""
    value: Num[Array, "*batch kv_seq kv_heads v_dim"]
    """The values."""
    mask: Mask | ChosenKeys = eqx.field(kw_only=True)
    """The keys that a query sees. The mask reads positions and segments, so the arrays may have tokens in any order."""
    tokens: TokenPositions = eqx.field(kw_only=True, converter=token_positions)
    """Positions and segments of the queries."""
    kv_tokens: TokenPositions | None = eqx.field(kw_only=True, default=None, converter=optional_token_positions)
    """Positions and segments of the keys; None if queries and keys are of the same tokens."""
    scale: float = eqx.field(kw_only=True, static=True)
    """Factor of the scores."""
    softcap: float | None = eqx.field(kw_only=True, static=True, default=None)
    """Bound of the scores, `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118); None for no bound."""
    sinks: Float[Array, "heads"] | None = eqx.field(kw_only=True, default=None)
    """A further score per head, which is in the softmax but has no value (gpt-oss); None for no sinks."""
    bias: Float[Array, "*#batch heads seq kv_seq"] | None = eqx.field(kw_only=True, default=None)
    """Terms to add to the scores, before the mask; None to add nothing."""
    alibi_slopes: Float[Array, "heads"] | None = eqx.field(kw_only=True, default=None)
    """A slope per head: `-slope * |query position - key position|` is added to the scores (ALiBi, arXiv:2108.12409).
    The slopes are constants, which get no gradient; None to add nothing."""
    piece: Literal["own", "past"] | None = eqx.field(kw_only=True, static=True, default=None)
    """The keys' piece of the rows, if devices split rows: `own` if it is also the queries' piece, `past` if all its
    keys are before all queries. None if rows are not split."""

    operation = "attention"

    def __check_init__(self):
        heads, kv_heads = self.query.shape[-2], self.key.shape[-2]
        if heads % kv_heads:
            raise ValueError(
                f"attention over {heads} query heads and {kv_heads} key/value heads: heads must be a multiple of "
                "kv_heads; change one of the two numbers."
            )

    @property
    def key_tokens(self) -> TokenPositions:
        """Positions and segments of the keys: `kv_tokens` or, if it is None, `tokens`."""
        return self.tokens if self.kv_tokens is None else self.kv_tokens

    @property
    def documents(self) -> int | None:
        """Largest number of documents in a packed row, if known; None for rows of one document."""
        return None if self.tokens.segments is None else self.tokens.documents

    @property
    def has_bias(self) -> bool:
        """Whether terms are added to the scores: `bias`, or the terms of `alibi_slopes`."""
        return self.bias is not None or self.alibi_slopes is not None

    @property
    def total_bias(self) -> Float[Array, "*#batch heads seq kv_seq"] | None:
        """`bias` and the terms of `alibi_slopes` together, as a matrix for each head; None if both are None."""
        if self.alibi_slopes is None:
            return self.bias
        distances = alibi_distances(self.tokens, self.key_tokens, self.alibi_slopes.dtype)
        terms = -jax.lax.stop_gradient(self.alibi_slopes)[:, None, None] * distances[..., None, :, :]
        return terms if self.bias is None else terms + self.bias

    @property
    def unknown_rows(self) -> str | None:
        """Reason why the mask cannot be computed from the order of tokens in the arrays alone, or None if it can."""
        if self.kv_tokens is not None and self.piece is None:
            return "it takes no keys of a cache or of another sequence"
        is_known = self.piece is not None or self.tokens.are_packed_in_order or self.tokens.are_whole_rows
        if not is_known or isinstance(self.mask, ChosenKeys) or (self.mask.chunk, self.mask.block) != (None, None):
            return (
                "it needs rows of one text (nn.positions_like) or documents in order (Batch.documents), and a mask "
                "without chunks and blocks"
            )
        return None

    def describe(self) -> str:
        """Return shapes, dtype and mask for an error message."""
        return (
            f"query {self.query.dtype}{list(self.query.shape)}, key {list(self.key.shape)} and value "
            f"{list(self.value.shape)} under {self.mask}"
        )


def alibi_distances(
    queries: TokenPositions, keys: TokenPositions, dtype: jnp.dtype
) -> Float[Array, "*batch seq kv_seq"]:
    """Return `|query position - key position|` for each query and key, subtracted in whole numbers."""
    return jnp.abs(queries.positions[..., :, None] - keys.positions[..., None, :]).astype(dtype)


def with_one_batch_dim(call: AttentionCall) -> AttentionCall:
    """Return the call with all batch dims merged into one, and with positions and segments broadcast to all rows."""
    batch = call.query.shape[:-3]

    def merge_rows(x: Int[Array, "*#batch seq"]) -> Int[Array, "_ seq"]:
        return jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(-1, x.shape[-1])

    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    tokens, kv_tokens = jax.tree.map(merge_rows, (call.tokens, call.kv_tokens))
    return dataclasses.replace(call, query=query, key=key, value=value, tokens=tokens, kv_tokens=kv_tokens)


def possible_pairs(mask: Mask, queries: TokenPositions, keys: TokenPositions) -> Bool[Array, "_ _"]:
    """Return, for each pair of a query block and a key block, whether any of its queries may see any of its keys.

    The result depends on the smallest and largest position and segment of each block, in each row, so it is right for
    packed rows and for tokens in any order. A query sees only keys of its own segment. The mask's rules for positions
    are therefore applied to pairs (segment, position), which are in the order of the tokens of a packed row. So key
    blocks after the query block, and key blocks before the window, are excluded although positions restart in each
    document.
    """
    is_packed = queries.segments is not None and keys.segments is not None
    (low, high), (kv_low, kv_high) = (_range(part.positions, part.positions) for part in (queries, keys))
    low, high, kv_low, kv_high = low[:, None], high[:, None], kv_low[None], kv_high[None]
    possible = (high >= 0) & (kv_high >= 0)
    if mask.chunk is not None:
        possible &= (low // mask.chunk <= kv_high // mask.chunk) & (kv_low // mask.chunk <= high // mask.chunk)
    clean_queries, clean_keys = (queries, keys) if mask.block is None else map(_as_clean, (queries, keys))
    (first, last), (kv_first, kv_last) = (_ends(part, is_packed) for part in (clean_queries, clean_keys))
    first, last = jax.tree.map(lambda x: x[:, None], (first, last))
    kv_first, kv_last = jax.tree.map(lambda x: x[None], (kv_first, kv_last))
    possible &= (first[0] <= kv_last[0]) & (kv_first[0] <= last[0])
    if mask.is_causal:
        possible &= _not_after(kv_first, last)
    for reach, ahead in ((mask.window, mask.ahead), (mask.chunk, None)):
        if reach is not None:
            possible &= _not_after(first, (kv_last[0], kv_last[1] + reach - 1))
            possible &= _not_after(kv_first, (last[0], last[1] + (ahead or reach) - 1))
    if mask.block is not None:
        possible &= _possible_by_block(mask.block, queries, keys)
    if mask.source:
        possible |= (high >= 0) & jnp.any(keys.positions == OF_SOURCE, axis=-1)[None]
    return jnp.any(possible, axis=-1)


def _as_clean(tokens: TokenPositions) -> TokenPositions:
    """Return the tokens with noisy copies in the segments of their clean tokens (see `Mask`)."""
    segments = tokens.segments
    return tokens if segments is None else TokenPositions(tokens.positions, jnp.maximum(segments, ~segments))


def _possible_by_block(block: int, queries: TokenPositions, keys: TokenPositions) -> Bool[Array, "_ _ _"]:
    """Return, for each pair of tiles in each row, whether the rule `Mask.block` may hold for any pair of tokens."""

    def ends(tokens: TokenPositions) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        blocks = jnp.where(tokens.positions >= 0, tokens.positions // block, -1)
        return _ends(TokenPositions(blocks, _as_clean(tokens).segments), is_packed)

    is_packed = queries.segments is not None and keys.segments is not None
    first, last = jax.tree.map(lambda x: x[:, None], ends(queries))
    kv_first, kv_last = jax.tree.map(lambda x: x[None], ends(keys))
    possible = _not_after(kv_first, last)
    if queries.segments is not None and keys.segments is not None:
        # Keys that are all noisy copies are seen only by noisy copies of the same blocks.
        has_noisy = jnp.any((queries.segments < 0) & (queries.positions >= 0), axis=-1)[:, None]
        is_noisy = jnp.all((keys.segments < 0) | (keys.positions < 0), axis=-1)[None]
        possible &= ~is_noisy | (has_noisy & _not_after(first, kv_last))
    return possible


def _ends(tokens: TokenPositions, is_packed: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the smallest and the largest (segment, position) of each block in each row."""
    positions = tokens.positions
    if not is_packed or tokens.segments is None:
        low, high = _range(positions, positions)
        return (jnp.zeros_like(low), low), (jnp.zeros_like(high), high)
    segments = tokens.segments
    first, last = _range(segments, positions)
    low, _ = _range(positions, jnp.where(segments == first[..., None], positions, -1))
    _, high = _range(positions, jnp.where(segments == last[..., None], positions, -1))
    return (first, low), (last, high)


def _not_after(left: tuple[Array, Array], right: tuple[Array, Array]) -> Bool[Array, "_ _ _"]:
    """Return whether the left (segment, position) is not after the right (segment, position)."""
    return (left[0] < right[0]) | ((left[0] == right[0]) & (left[1] <= right[1]))


def _range(values: Int[Array, "_ batch _"], positions: Int[Array, "_ batch _"]) -> tuple[Array, Array]:
    """Return the smallest and the largest value of each block in each row; padding (position -1) does not count."""
    real, largest = positions >= 0, jnp.iinfo(values.dtype).max // 2
    return jnp.min(jnp.where(real, values, largest), axis=-1), jnp.max(jnp.where(real, values, -largest), axis=-1)


def spans(possible: Bool[Array, "_ _"]) -> tuple[Int[Array, "_"], Int[Array, "_"]]:
    """Return each row's first possible column and the column after the last possible column; both are equal if a row
    has no possible column."""
    first = jnp.argmax(possible, axis=1)
    stop = possible.shape[1] - jnp.argmax(possible[:, ::-1], axis=1)
    return first, jnp.where(jnp.any(possible, axis=1), stop, first)


class RotatedChannels(NamedTuple):
    """Further channels of queries and keys in separate arrays, such as the rotated channels of latent attention."""

    query: Float[Array, "*batch seq heads rope_dim"]
    key: Num[Array, "*batch kv_seq kv_heads rope_dim"]
    scales: Float[Array, "*batch kv_seq kv_heads"] | None = None
    """Scales of 8-bit keys; None for keys of more bits."""


class StoredArrays(NamedTuple):
    """Keys and values of a call as the cache stores them, with heads before slots; latents have no dim of heads."""

    layer: Int[Array, ""] | None
    """Layer to read, if the arrays have a leading dim of layers; None if they are of one layer."""
    key: Num[Array, "*layers_batch kv_seq head_dim"]
    """Keys."""
    value: Num[Array, "*layers_batch kv_seq v_dim"] | None = None
    """Values; None if the keys are the values."""
    rotated: Num[Array, "*layers_batch kv_seq rope_dim"] | None = None
    """Rotated channels of the keys; None if the cache does not store them."""
    key_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None
    """Scales of the keys for each head; None if the cache does not store them."""
    value_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None
    """Scales of the values for each head; None if the cache does not store them."""


@checked_fields
class DecodeCall(Call):
    """Arguments of the attention of few queries to a cache; kernels support one query per row."""

    query: Float[Array, "*batch seq heads head_dim"]
    """The queries."""
    key: Num[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys; 8-bit keys have `key_scales`."""
    value: Num[Array, "*batch kv_seq kv_heads v_dim"] | None
    """The values; None if the keys with their scales are also the values, as for latents, and are read once."""
    visible: Bool[Array, "*#batch seq kv_seq"] = eqx.field(kw_only=True)
    """Whether a query sees a key."""
    scale: float = eqx.field(kw_only=True, static=True)
    """Factor of the scores."""
    softcap: float | None = eqx.field(kw_only=True, static=True, default=None)
    """Bound of the scores; None for no bound."""
    sinks: Float[Array, "heads"] | None = eqx.field(kw_only=True, default=None)
    """A further score per head in the softmax; None for no sinks."""
    bias: Float[Array, "*#batch heads seq kv_seq"] | None = eqx.field(kw_only=True, default=None)
    """Terms to add to the scores; None to add nothing."""
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = eqx.field(kw_only=True, default=None)
    """Factors of the keys; None for 1."""
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = eqx.field(kw_only=True, default=None)
    """Factors of the values; None for 1."""
    rotated: RotatedChannels | None = eqx.field(kw_only=True, default=None)
    """Further channels of queries and keys; None if there are none."""
    stored: StoredArrays | None = eqx.field(kw_only=True, default=None)
    """The cache with the same keys and values, which the TPU kernel reads in place; None if that kernel is not used.
    The kernel gets the stack of all layers, because XLA would copy a slice for one layer."""

    operation = "decode attention"

    def describe(self) -> str:
        """Return shapes and dtypes for an error message."""
        return f"query {self.query.dtype}{list(self.query.shape)} and key {self.key.dtype}{list(self.key.shape)}"


class ScoreSettings(NamedTuple):
    """Static settings of a decode kernel."""

    scale: float
    softcap: float | None
    interpret: bool = False


def if_given(function: Callable[[Array], Result], array: Array | None) -> Result | None:
    """Return `function(array)`, or None if the array is None."""
    return None if array is None else function(array)


def lowest(dtype: jnp.dtype) -> float:
    """Return the score of a masked key; it is finite, because the difference of two infinite scores would be NaN."""
    return float(jnp.finfo(dtype).min) / 4


def apply_softcap(scores: Array, softcap: float | None) -> Array:
    """Return `softcap * tanh(scores / softcap)`, or the scores unchanged if `softcap` is None."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
