"""What a fused kernel of attention is, and what it must know of rows before a program is compiled."""

import abc
import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._tokens import Tokens
from ..attention._mask import Mask


class Rows(NamedTuple):
    """A mask that is known to follow from the order of tokens: rows of one document, or of several one after another.

    `window` and `ahead` count tokens as in `Mask`. `documents` is the most that a row holds, None for rows of one
    document. Of rows cut into pieces, a call is given queries and keys of their `own` piece, or keys that are all
    `past` to the queries; a piece may begin and end within a document.
    """

    is_causal: bool
    window: int | None
    documents: int | None
    piece: Literal["own", "past"] | None = None
    ahead: int | None = None


def known_rows(mask: Mask, tokens: Tokens, kv_tokens: Tokens | None) -> Rows | None:
    """What is known of a call's rows; None for a cache's keys, chunks, and tokens whose order is not known."""
    is_packed = tokens.are_packed_in_order
    if kv_tokens is not None or mask.chunk is not None or not (is_packed or tokens.are_whole_rows):
        return None
    return Rows(mask.is_causal, mask.window, tokens.documents if is_packed else None, ahead=mask.ahead)


class Places(NamedTuple):
    """The positions and segments of tokens with one dim for the batch."""

    positions: Int[Array, "batch seq"]
    segments: Int[Array, "batch seq"] | None


def places_of(tokens: Tokens, batch: tuple[int, ...]) -> Places:
    """Positions and segments for arrays whose dims of the batch are `batch`."""
    shape = *batch, tokens.positions.shape[-1]
    flat = lambda x: jnp.broadcast_to(x, shape).reshape(-1, shape[-1])
    return Places(flat(tokens.positions), None if tokens.segments is None else flat(tokens.segments))


class Call(NamedTuple):
    """The static settings of a call of a fused kernel; scores are multiplied by `scale` and bounded by `softcap`."""

    rows: Rows
    scale: float
    softcap: float | None


@dataclasses.dataclass(frozen=True)
class Kernel(abc.ABC):
    """A fused kernel of attention of rows to themselves, in two halves that are differentiated elsewhere.

    `interpret` runs it as plain JAX on any platform, where that can be done, for tests.
    """

    platform: ClassVar[str]
    """What it runs on, as `jax.lax.platform_dependent` names it."""
    interpret: bool = False

    @abc.abstractmethod
    def refusal(self, call: Call, query: Array, key: Array, value: Array) -> str | None:
        """Why it cannot compute a call, of rows or of pieces of such length, or None."""

    @abc.abstractmethod
    def forward(
        self,
        call: Call,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch kv_seq kv_heads head_dim"],
        value: Float[Array, "batch kv_seq kv_heads v_dim"],
        places: Places,
        kv_places: Places,
    ) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
        """The attended values and the logarithm of each row's sum of exponentials.

        Args:
            call: The settings of the call.
            query: The queries.
            key: The keys.
            value: The values.
            places: The positions and segments of the queries.
            kv_places: Those of the keys.
        """

    @abc.abstractmethod
    def backward(
        self,
        call: Call,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch kv_seq kv_heads head_dim"],
        value: Float[Array, "batch kv_seq kv_heads v_dim"],
        places: Places,
        kv_places: Places,
        output: Float[Array, "batch seq heads v_dim"],
        logsum: Float[Array, "batch heads seq"],
        to_output: Float[Array, "batch seq heads v_dim"],
    ) -> tuple[
        Float[Array, "batch seq heads head_dim"],
        Float[Array, "batch kv_seq kv_heads head_dim"],
        Float[Array, "batch kv_seq kv_heads v_dim"],
    ]:
        """The gradients of query, key and value.

        Args:
            call: The settings of the call.
            query: The queries.
            key: The keys.
            value: The values.
            places: The positions and segments of the queries.
            kv_places: Those of the keys.
            output: What `forward` gave.
            logsum: The logarithm of each row's sum that it gave.
            to_output: The gradient of the output.
        """
