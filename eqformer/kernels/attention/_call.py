"""The arguments of attention: positions of tokens, and the records of a call.

An `AttentionCall` is softmax(scale * query key^T + bias) value under a mask. A `DecodeCall` is the same for few queries
to the keys and values of a cache.
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

    `whole_rows`, `documents` and `pieces` are those of `nn.Tokens`.
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
        """Whether each row is known to hold up to `documents` whole documents, one after another."""
        return self.segments is not None and self.documents is not None and self._are_all_of_their_rows

    @property
    def _are_all_of_their_rows(self) -> bool:
        return self.pieces is None and self.whole_rows == self.positions.shape[-1]


def token_positions(tokens: HasPositions) -> TokenPositions:
    """Return the `TokenPositions` of any tokens, with the known order if the tokens have it."""
    if isinstance(tokens, TokenPositions):
        return tokens
    known = (getattr(tokens, name, None) for name in ("whole_rows", "documents", "pieces"))
    return TokenPositions(tokens.positions, tokens.segments, *known)


def optional_token_positions(tokens: HasPositions | None) -> TokenPositions | None:
    """Return the `TokenPositions` of tokens, or None for None."""
    return None if tokens is None else token_positions(tokens)


@checked_fields
class AttentionCall(Call):
    """The arguments of one attention, which every implementation takes.

    Query head `h` reads key head `h // (heads / kv_heads)`. A query that sees no key gets zeros; the outputs of padding
    queries are finite and meaningless.
    """

    query: Float[Array, "*batch seq heads head_dim"]
    """The queries."""
    key: Num[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys."""
    value: Num[Array, "*batch kv_seq kv_heads v_dim"]
    """The values."""
    mask: Mask | ChosenKeys = eqx.field(kw_only=True)
    """The keys that a query sees. The mask reads positions and segments, so tokens may be in any order in the
    arrays."""
    tokens: TokenPositions = eqx.field(kw_only=True, converter=token_positions)
    """Positions and segments of the queries."""
    kv_tokens: TokenPositions | None = eqx.field(kw_only=True, default=None, converter=optional_token_positions)
    """Positions and segments of the keys; None: the keys are the queries' own tokens."""
    scale: float = eqx.field(kw_only=True, static=True)
    """The factor of the scores."""
    softcap: float | None = eqx.field(kw_only=True, static=True, default=None)
    """The bound of the scores, `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118); None: no bound."""
    sinks: Float[Array, "heads"] | None = eqx.field(kw_only=True, default=None)
    """One score a head that joins the softmax and is then dropped (gpt-oss); None: no sinks."""
    bias: Float[Array, "*#batch heads seq kv_seq"] | None = eqx.field(kw_only=True, default=None)
    """Numbers that are added to the scores, before the mask; None: nothing."""
    piece: Literal["own", "past"] | None = eqx.field(kw_only=True, static=True, default=None)
    """The piece of the keys, if rows are cut into pieces over devices: the queries' `own` piece, or a piece in the
    `past` of every query. None: rows are whole."""

    operation = "attention"

    def __check_init__(self):
        heads, kv_heads = self.query.shape[-2], self.key.shape[-2]
        if heads % kv_heads:
            raise ValueError(
                f"attention over {heads} query heads and {kv_heads} key/value heads: heads must be a multiple of "
                "kv_heads; change one of the two."
            )

    @property
    def key_tokens(self) -> TokenPositions:
        """Positions and segments of the keys: `kv_tokens`, or those of the queries."""
        return self.tokens if self.kv_tokens is None else self.kv_tokens

    @property
    def documents(self) -> int | None:
        """The most documents that a packed row holds, if known; None for rows of one document."""
        return None if self.tokens.segments is None else self.tokens.documents

    @property
    def unknown_rows(self) -> str | None:
        """The reason why the mask is not known to follow from the tokens' order in the arrays, or None if it is."""
        if self.kv_tokens is not None and self.piece is None:
            return "it takes no keys of a cache or of another sequence"
        is_known = self.piece is not None or self.tokens.are_packed_in_order or self.tokens.are_whole_rows
        if not is_known or isinstance(self.mask, ChosenKeys) or self.mask.chunk is not None:
            return (
                "it needs rows known to be whole or packed in order, and no chunks (nn.positions_like, Batch.documents)"
            )
        return None

    def describe(self) -> str:
        """Return shapes, dtype and mask for an error message."""
        return (
            f"query {self.query.dtype}{list(self.query.shape)}, key {list(self.key.shape)} and value "
            f"{list(self.value.shape)} under {self.mask}"
        )


def with_one_batch_dim(call: AttentionCall) -> AttentionCall:
    """Return the call with all batch dims merged into one, and with positions and segments of every row."""
    batch = call.query.shape[:-3]

    def merge_rows(x: Int[Array, "*#batch seq"]) -> Int[Array, "_ seq"]:
        return jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(-1, x.shape[-1])

    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    tokens, kv_tokens = jax.tree.map(merge_rows, (call.tokens, call.kv_tokens))
    return dataclasses.replace(call, query=query, key=key, value=value, tokens=tokens, kv_tokens=kv_tokens)


def possible_pairs(mask: Mask, queries: TokenPositions, keys: TokenPositions) -> Bool[Array, "_ _"]:
    """Return whether each pair of a query block and a key block may hold a visible pair of tokens.

    The blocks' ranges of positions and segments decide, row by row, so that packed and shuffled rows are handled alike.
    A query sees only keys of its own segment. The mask's rules for positions therefore also hold for pairs (segment,
    position), whose order is the order of the tokens in a packed row. These pairs exclude key blocks after the query
    block, and blocks further back than the window, although positions restart in each document.
    """
    is_packed = queries.segments is not None and keys.segments is not None
    (low, high), (kv_low, kv_high) = (_range(part.positions, part.positions) for part in (queries, keys))
    low, high, kv_low, kv_high = low[:, None], high[:, None], kv_low[None], kv_high[None]
    possible = (high >= 0) & (kv_high >= 0)
    if mask.chunk is not None:
        possible &= (low // mask.chunk <= kv_high // mask.chunk) & (kv_low // mask.chunk <= high // mask.chunk)
    (first, last), (kv_first, kv_last) = (_ends(part, is_packed) for part in (queries, keys))
    first, last = jax.tree.map(lambda x: x[:, None], (first, last))
    kv_first, kv_last = jax.tree.map(lambda x: x[None], (kv_first, kv_last))
    possible &= (first[0] <= kv_last[0]) & (kv_first[0] <= last[0])
    if mask.is_causal:
        possible &= _not_after(kv_first, last)
    for reach, ahead in ((mask.window, mask.ahead), (mask.chunk, None)):
        if reach is not None:
            possible &= _not_after(first, (kv_last[0], kv_last[1] + reach - 1))
            possible &= _not_after(kv_first, (last[0], last[1] + (ahead or reach) - 1))
    if mask.source:
        possible |= (high >= 0) & jnp.any(keys.positions == OF_SOURCE, axis=-1)[None]
    return jnp.any(possible, axis=-1)


def _ends(tokens: TokenPositions, is_packed: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the least and the greatest (segment, position) of the tokens of each block and row."""
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
    """Return whether the left (segment, position) is not after the right one."""
    return (left[0] < right[0]) | ((left[0] == right[0]) & (left[1] <= right[1]))


def _range(numbers: Int[Array, "_ batch _"], positions: Int[Array, "_ batch _"]) -> tuple[Array, Array]:
    """Return the least and the greatest number of each block and row, without padding."""
    real, largest = positions >= 0, jnp.iinfo(numbers.dtype).max // 2
    return jnp.min(jnp.where(real, numbers, largest), axis=-1), jnp.max(jnp.where(real, numbers, -largest), axis=-1)


def spans(possible: Bool[Array, "_ _"]) -> tuple[Int[Array, "_"], Int[Array, "_"]]:
    """Return each row's first possible column and the column after its last; equal if no column is possible."""
    first = jnp.argmax(possible, axis=1)
    stop = possible.shape[1] - jnp.argmax(possible[:, ::-1], axis=1)
    return first, jnp.where(jnp.any(possible, axis=1), stop, first)


class RotatedChannels(NamedTuple):
    """Channels of queries and keys in arrays of their own, such as the rotated channels of latent attention."""

    query: Float[Array, "*batch seq heads rope_dim"]
    key: Num[Array, "*batch kv_seq kv_heads rope_dim"]
    scales: Float[Array, "*batch kv_seq kv_heads"] | None = None
    """Factors of the keys, whose numbers are then of 8 bits."""


class StoredArrays(NamedTuple):
    """The keys and values of a call as the cache stores them: heads before slots; latents have no dim of heads."""

    layer: Int[Array, ""] | None
    """The layer to read, if the arrays have a dim of layers in front; None: the arrays are those of one layer."""
    key: Num[Array, "*layers_batch kv_seq head_dim"]
    """The keys."""
    value: Num[Array, "*layers_batch kv_seq v_dim"] | None = None
    """None: the keys are the values."""
    rotated: Num[Array, "*layers_batch kv_seq rope_dim"] | None = None
    """The rotated channels of the keys; None: they are not stored."""
    key_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None
    """The scales of the keys, by head; None: they are not stored, or there are none."""
    value_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None
    """The scales of the values, by head; None: they are not stored, or there are none."""


@checked_fields
class DecodeCall(Call):
    """The arguments of attention of few queries to a cache; kernels take one query a row."""

    query: Float[Array, "*batch seq heads head_dim"]
    """The queries."""
    key: Num[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys; keys of 8 bits have `key_scales`."""
    value: Num[Array, "*batch kv_seq kv_heads v_dim"] | None
    """The values; None: the keys with their scales are the values, as latents are, and are read once."""
    visible: Bool[Array, "*#batch seq kv_seq"] = eqx.field(kw_only=True)
    """Whether a query sees a key."""
    scale: float = eqx.field(kw_only=True, static=True)
    """The factor of the scores."""
    softcap: float | None = eqx.field(kw_only=True, static=True, default=None)
    """The bound of the scores; None: no bound."""
    sinks: Float[Array, "heads"] | None = eqx.field(kw_only=True, default=None)
    """One score a head that joins the softmax; None: no sinks."""
    bias: Float[Array, "*#batch heads seq kv_seq"] | None = eqx.field(kw_only=True, default=None)
    """Numbers that are added to the scores; None: nothing."""
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = eqx.field(kw_only=True, default=None)
    """Factors of the keys; None: 1."""
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = eqx.field(kw_only=True, default=None)
    """Factors of the values; None: 1."""
    rotated: RotatedChannels | None = eqx.field(kw_only=True, default=None)
    """Further channels of queries and keys; None: there are none."""
    stored: StoredArrays | None = eqx.field(kw_only=True, default=None)
    """The cache that stores the same keys and values. The TPU kernel reads the cache in place, because an array that is
    sliced out of a stack for a kernel would be copied. None: that kernel is not used."""

    operation = "decode attention"

    def describe(self) -> str:
        """Return shapes and dtypes for an error message."""
        return f"query {self.query.dtype}{list(self.query.shape)} and key {self.key.dtype}{list(self.key.shape)}"


class ScoreSettings(NamedTuple):
    """The static settings of a kernel for decoding."""

    scale: float
    softcap: float | None
    interpret: bool = False


def if_given(function: Callable[[Array], Result], array: Array | None) -> Result | None:
    """Return the function's result, or None for None."""
    return None if array is None else function(array)


def lowest(dtype: jnp.dtype) -> float:
    """Return the score of a masked key, which is finite so that the difference of two such scores is not NaN."""
    return float(jnp.finfo(dtype).min) / 4


def apply_softcap(scores: Array, softcap: float | None) -> Array:
    """Return `softcap * tanh(scores / softcap)`, or the scores themselves."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
