"""Positions and documents of tokens, and what is known of their order."""

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Int


@runtime_checkable
class HasPositions(Protocol):
    """Tokens with positions, and with segments where rows hold several documents."""

    @property
    def positions(self) -> Any:
        """Return the place of each token in its document; -1 marks padding."""
        ...

    @property
    def segments(self) -> Any:
        """Return the number of each token's document, or None for one document a row."""
        ...


class TokenPositions(eqx.Module):
    """Positions and documents of tokens, and what is known of their order before any number is.

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
    """Return the positions, the documents and the known order of any tokens."""
    if isinstance(tokens, TokenPositions):
        return tokens
    known = (getattr(tokens, name, None) for name in ("whole_rows", "documents", "pieces"))
    return TokenPositions(tokens.positions, tokens.segments, *known)


def optional_token_positions(tokens: HasPositions | None) -> TokenPositions | None:
    """Return the positions of tokens, or None for None."""
    return None if tokens is None else token_positions(tokens)
