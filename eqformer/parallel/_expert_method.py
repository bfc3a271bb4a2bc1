"""How tokens reach the experts of other devices: as a plan says or, where it leaves that open, by sizes."""

from typing import Literal

from .. import nn


ExpertMethod = Literal["auto", "gather", "exchange"]
# Bytes of the rows that a device makes room for when tokens are gathered: some layers would need terabytes.
MOST = 2**30
FEW = 64  # slots for a pair of devices, of which chance alone fills as many often: a second round would be the rule


def expert_method(method: str, *, tokens: int, top_k: int, devices: int, factor: float, row_bytes: int) -> str:
    """`"gather"` or `"exchange"`: the method that is given or, for `"auto"`, the cheaper one; both are exact.

    A gather sends each device all tokens of every other one, an exchange `factor * top_k / devices` times as many
    vectors: it is chosen if that is no more or, where a gather would make room for more than `MOST` bytes, at most
    twice as many, as it handles `devices / factor` times fewer rows. It is not for few tokens, as in decoding.

    Args:
        method: `"auto"`, `"gather"` or `"exchange"`.
        tokens: Those of a device in a microbatch.
        top_k: The experts of a token.
        devices: Those that the experts are split over.
        factor: The slots of an exchange, relative to an even load.
        row_bytes: The bytes of a token's vector.
    """
    if method != "auto":
        return method
    is_large = devices * tokens * top_k * row_bytes > MOST
    slots = nn.dispatch.slots_of(factor, tokens * top_k, devices)
    return "exchange" if FEW <= slots <= tokens * (1 + is_large) else "gather"


def pieces_of(tokens: int, room: int) -> int:
    """Into how many equal pieces of tokens a gather is cut that would need so many bytes of room at once."""
    return next(
        pieces for pieces in range(1, tokens + 1) if not tokens % pieces and room <= MOST * pieces or pieces == tokens
    )
