"""An encoder: the layers that read a source for a decoder's cross-attention."""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float

from ._contracts import Routed, ScoreBias
from ._dims import modules
from ._embedding import Embedding
from ._in_turn import in_turn
from ._module import Module
from ._norm import Norm
from ._stack import Stack
from ._tokens import Source, Tokens


class Encoder(Module):
    """Layers that read a source's embeddings, for the cross-attention of the model that holds them."""

    stacks: tuple[Stack, ...]
    """The layers, which see tokens both ways where their masks say so."""
    norm: Norm | Callable[[Array], Array]
    """Of the last layer's output."""
    score_bias: ScoreBias | None = None
    """What is added to the scores of its own attentions that say so."""
    start: int = eqx.field(static=True, default=0)
    """The id with which the decoder begins each text."""
    embedding: Embedding | None = None
    """Its own table (T5Gemma), which may be of other sizes; None: the model's."""

    def __check_init__(self):
        if modules(self.stacks, Routed):
            raise ValueError(
                "Encoder(stacks=...): a layer routes tokens, and what its router counts would be lost; give layers "
                "without a mixture."
            )

    def __call__(self, x: Float[Array, "*batch kv_seq embed"], tokens: Tokens) -> Source:
        """The vectors of the embedded tokens `x`."""
        x, _, _ = in_turn(self.stacks, x, tokens.replaced(score_bias=self.score_bias), None)
        return Source(self.norm(x), tokens)
