"""An encoder: the layers that read a source for a decoder's cross-attention."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float

from ._contracts import Routed, ScoreBias
from ._dims import modules
from ._module import Module
from ._norm import Norm
from ._stack import Stack
from ._tokens import known_as, Source, Tokens


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

    def __check_init__(self):
        if modules(self.stacks, Routed):
            raise ValueError(
                "Encoder(stacks=...): a layer routes tokens, and what its router counts would be lost; give layers "
                "without a mixture."
            )

    def __call__(self, x: Float[Array, "*batch kv_seq embed"], tokens: Tokens) -> Source:
        """The vectors of the embedded tokens `x`."""
        given = biased(tokens, self.score_bias)
        for number, stack in enumerate(self.stacks):
            x, _, _ = stack(x, given.fold_in(number))
        return Source(self.norm(x), tokens)


def biased(tokens: Tokens, score_bias: ScoreBias | None) -> Tokens:
    """The same tokens, with what a model adds to the scores of its attentions."""
    return known_as(dataclasses.replace(tokens, score_bias=score_bias), tokens)
