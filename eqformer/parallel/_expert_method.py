"""How tokens reach the experts of other devices: as a plan says or, where it leaves that open, by sizes."""

from typing import Literal, NamedTuple

from .. import nn


ExpertMethod = Literal["auto", "gather", "exchange"]
# Bytes of the rows that a device makes room for when tokens are gathered: some layers would need terabytes.
MOST = 2**30
FEW = 64  # slots for a pair of devices, of which chance alone fills as many often: a second round would be the rule
RAGGED, PADDED = 1.25, 2.0  # room of a round by default, relative to an even load: pairs' loads differ more


class Exchange(NamedTuple):
    """By which all-to-alls choices are exchanged, ragged or padded ones, and with how much room in a round."""

    is_ragged: bool
    factor: float
    """Relative to an even load: of a device or, padded, of a pair of devices."""

    def room(self, choices: int, devices: int) -> int:
        """A device's places in a round for choices of all or, padded, for those of each device, each with so many."""
        return nn.dispatch.slots_of(self.factor, choices * (devices if self.is_ragged else 1), devices)

    def sent(self, choices: int, devices: int) -> int:
        """The vectors that a device with so many choices sends in a round of an even load, to itself too."""
        room = self.room(choices, devices)
        return min(choices, room) if self.is_ragged else devices * room


def exchange_on(platform: str, factor: float | None) -> Exchange:
    """How a platform exchanges (XLA for CPUs has no ragged all-to-all), with a `factor`, or None for the default."""
    is_ragged = platform in ("tpu", "gpu")
    return Exchange(is_ragged, (RAGGED if is_ragged else PADDED) if factor is None else factor)


def expert_method(method: str, *, tokens: int, top_k: int, devices: int, exchange: Exchange, row_bytes: int) -> str:
    """`"gather"` or `"exchange"`: the method that is given or, for `"auto"`, the cheaper one; both are exact.

    A gather sends each device all tokens of every other one, an exchange `top_k / devices` times as many vectors,
    padded `factor` times that: it is chosen if that is no more or, where a gather would make room for more than `MOST`
    bytes, at most twice as many, as it handles fewer rows. It is not for few tokens, as in decoding.

    Args:
        method: `"auto"`, `"gather"` or `"exchange"`.
        tokens: Those of a device in a microbatch.
        top_k: The experts of a token.
        devices: Those that the experts are split over.
        exchange: How choices would be exchanged.
        row_bytes: The bytes of a token's vector.
    """
    if method != "auto":
        return method
    is_large = devices * tokens * top_k * row_bytes > MOST
    sent = exchange.sent(tokens * top_k, devices)
    return "exchange" if FEW * devices <= sent <= devices * tokens * (1 + is_large) else "gather"


def pieces_of(tokens: int, room: int) -> int:
    """Into how many equal pieces of tokens a gather is cut that would need so many bytes of room at once."""
    return next(
        pieces for pieces in range(1, tokens + 1) if not tokens % pieces and room <= MOST * pieces or pieces == tokens
    )
