"""The record of one attention: softmax(scale * query key^T + bias) value under a mask."""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from ..._array_checks import checked_fields
from ._mask import ChosenKeys, Mask
from ._positions import optional_token_positions, token_positions, TokenPositions


@checked_fields
class AttentionCall(eqx.Module):
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
    """The keys that a query sees, by positions and segments, wherever tokens stand in the arrays."""
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
        """The most documents that a row is known to hold, one after another; None for rows of one document."""
        return None if self.tokens.segments is None else self.tokens.documents

    @property
    def unknown_rows(self) -> str | None:
        """The reason why the mask is not known to follow from the tokens' order in the arrays, or None if it is."""
        if self.kv_tokens is not None and self.piece is None:
            return "it has no keys of a cache or of another sequence"
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
    """Return the call with all dims of the batch merged into one, and positions of every row."""
    batch = call.query.shape[:-3]

    def merge_rows(x: Int[Array, "*#batch seq"]) -> Int[Array, "_ seq"]:
        return jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(-1, x.shape[-1])

    merge_positions = lambda tokens: jax.tree.map(merge_rows, tokens)
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    tokens, kv_tokens = merge_positions(call.tokens), merge_positions(call.kv_tokens)
    return dataclasses.replace(call, query=query, key=key, value=value, tokens=tokens, kv_tokens=kv_tokens)
