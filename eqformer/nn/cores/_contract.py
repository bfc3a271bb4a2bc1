"""What an attention core is: softmax(scale * query key^T) value under a mask, however it is computed."""

import abc
from typing import Literal, NamedTuple

from jaxtyping import Array, Float

from .._module import Module
from .._tokens import Tokens
from ..attention._mask import Mask
from ._kernel import Kernel


Block = int | Literal["platform"]  # the tokens of a block, or as many as are fastest on the platform


class Fused(NamedTuple):
    """The fused kernels by which a core may compute; with `only`, by that name, it computes by nothing else."""

    kernels: tuple[Kernel, ...] = ()
    only: str | None = None


class Core(Module):
    """How an attention is computed. What is computed comes with each call, so that cores can be exchanged.

    `softcap` bounds the scores, `softcap * tanh(scores / softcap)`, before the mask (Gemma 2, arXiv:2408.00118).
    `sinks` hold one score a head that joins the softmax and is then dropped (gpt-oss).
    """

    @abc.abstractmethod
    def __call__(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens | None = None,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
    ) -> Float[Array, "*batch seq heads v_dim"]:
        """Attend.

        Args:
            query: The queries.
            key: The keys, of which each head serves `heads / kv_heads` heads of queries.
            value: The values.
            mask: Which keys a query may see.
            tokens: The positions and segments of the queries.
            kv_tokens: Those of the keys; None: the queries' own.
            scale: What the scores are multiplied by.
            softcap: The bound of the scores; None: there is none.
            sinks: A score of each head that joins its softmax.
        """

    def lacks(self) -> tuple[str, ...]:
        """Which of `softcap`, `sinks` and `bias` it cannot compute; a core that has not `bias` is never passed one.

        A `bias` of shape `*batch heads seq kv_seq` is added to the scores, before the mask.
        """
        return ("bias",)

    def ring_block(self) -> Block | None:
        """The tokens of a block if the loop of `BlockwiseCore` may compute the same in its place, as a ring does."""
        return None

    def leaves_caches(self) -> bool:
        """Whether what one query a row reads of a cache may be computed by the platform's kernels for it."""
        return False

    def fused(self) -> Fused:
        """The fused kernels by which it computes rows that are known, each on its platform."""
        return Fused()
