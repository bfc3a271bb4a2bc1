"""Choice of how tokens reach the experts of other devices: all are gathered, or choices are exchanged."""

from typing import Literal, NamedTuple

from .. import nn


ExpertMethod = Literal["auto", "gather", "exchange"]
MOST_GATHERED_BYTES = 2**30
"""Bytes of the rows that a device makes room for when tokens are gathered: some layers would need terabytes."""
LEAST_SLOTS = 64
"""Least slots for a pair of devices in an exchange; chance often fills fewer, so that a second round would be usual."""
RAGGED_FACTOR, PADDED_FACTOR = 1.25, 2.0
"""Default room of a round, relative to an even load; loads of pairs of devices differ more than those of devices."""


class Exchange(NamedTuple):
    """All-to-alls that exchange choices, ragged or padded, and their room in a round."""

    is_ragged: bool
    factor: float
    """Room relative to an even load: of a device or, padded, of a pair of devices."""

    def room(self, choices: int, devices: int) -> int:
        """Return a device's slots in a round, if each device has `choices` choices.

        Ragged, they are slots for the choices of all devices; padded, for the choices of each device.
        """
        return nn.dispatch.slots_per_expert(self.factor, choices * (devices if self.is_ragged else 1), devices)

    def sent(self, choices: int, devices: int) -> int:
        """Return the vectors that a device with `choices` choices sends in a round of an even load, to itself too."""
        room = self.room(choices, devices)
        return min(choices, room) if self.is_ragged else devices * room


def exchange_on(platform: str, factor: float | None) -> Exchange:
    """Return the exchange of a platform (XLA for CPUs has no ragged all-to-all); `factor=None` takes the default."""
    is_ragged = platform in ("tpu", "gpu")
    return Exchange(is_ragged, (RAGGED_FACTOR if is_ragged else PADDED_FACTOR) if factor is None else factor)


def choose_expert_method(
    method: str, *, tokens: int, top_k: int, devices: int, exchange: Exchange, row_bytes: int
) -> str:
    """Return `"gather"` or `"exchange"`: `method` itself or, for `"auto"`, the cheaper one; both are exact.

    A gather sends each device all tokens of every other one, an exchange `top_k / devices` times as many vectors,
    padded `factor` times that: it is chosen if that is no more or, where a gather would make room for more than
    `MOST_GATHERED_BYTES`, at most twice as many, as it handles fewer rows. It is not for few tokens, as in decoding.

    Args:
        method: `"auto"`, `"gather"` or `"exchange"`.
        tokens: Tokens of a device in a microbatch.
        top_k: Experts of a token.
        devices: Devices that the experts are split over.
        exchange: How choices would be exchanged.
        row_bytes: Bytes of a token's vector.
    """
    if method != "auto":
        return method
    is_large = devices * tokens * top_k * row_bytes > MOST_GATHERED_BYTES
    sent = exchange.sent(tokens * top_k, devices)
    return "exchange" if LEAST_SLOTS * devices <= sent <= devices * tokens * (1 + is_large) else "gather"


def count_pieces(tokens: int, room_bytes: int) -> int:
    """Return into how many equal pieces of tokens a gather is cut that would need `room_bytes` of room at once."""
    return next(
        pieces
        for pieces in range(1, tokens + 1)
        if not tokens % pieces and room_bytes <= MOST_GATHERED_BYTES * pieces or pieces == tokens
    )
