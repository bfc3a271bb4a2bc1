"""Encoders: the layers that read a source for a decoder's cross-attention, and the prediction head of masked models."""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float, Key

from ._activation import gelu
from ._contracts import Routed, ScoreBias
from ._dims import modules
from ._linear import Linear, LinearMap
from ._model_contracts import LayerStack, TokenEmbedding
from ._module import Module
from ._norm import Norm
from ._stack import run_layers
from ._tokens import Source, Tokens


class Encoder(Module):
    """Layers that read a source's embeddings, for the cross-attention of the model that holds them."""

    stacks: tuple[LayerStack, ...]
    """The layers; their masks say whether tokens see later tokens."""
    norm: Norm | Callable[[Array], Array]
    """Norm of the last layer's output."""
    score_bias: ScoreBias | None = None
    """Bias added to the scores of the encoder's attention layers that use one."""
    start: int = eqx.field(static=True, default=0)
    """The id with which the decoder begins each text."""
    embedding: TokenEmbedding | None = None
    """The encoder's own embedding table (T5Gemma), which may have other sizes; None: the model's."""

    def __check_init__(self):
        if modules(self.stacks, Routed):
            raise ValueError(
                "Encoder(stacks=...): a layer routes tokens, and the counts of its router would be lost; give layers "
                "without a mixture of experts."
            )

    def __call__(self, x: Float[Array, "*batch kv_seq embed"], tokens: Tokens) -> Source:
        """Encode embedded tokens."""
        x, _, _ = run_layers(self.stacks, x, tokens.replaced(score_bias=self.score_bias), None)
        return Source(self.norm(x), tokens)


class PredictionHead(Module):
    """Head of a masked language model (BERT), `output_norm(act(W norm(x)))`; it stands as a `Transformer`'s `norm`.

    The output of its `norm` alone is the encoder's vector of each token: replace the head by its `norm` to get those.
    """

    norm: Norm
    dense: LinearMap
    output_norm: Norm
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        norm: Norm,
        output_norm: Norm,
        *,
        embed: int,
        bias: bool = False,
        activation: Callable[[Array], Array] = gelu,
        key: Key[Array, ""],
    ):
        """Draw the weights of the dense layer.

        Args:
            norm: Norm of the last layer's output.
            output_norm: Norm of the head's output.
            embed: Channels of the residual stream.
            bias: Whether the dense layer has a bias.
            activation: Applied to the output of the dense layer.
            key: For the weights.
        """
        self.norm, self.output_norm, self.activation = norm, output_norm, activation
        self.dense = Linear("embed -> hidden", embed=embed, hidden=embed, bias=bias, key=key)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        """Apply the head to each token."""
        return self.output_norm(self.activation(self.dense(self.norm(x))))
