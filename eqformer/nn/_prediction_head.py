"""What stands between an encoder's last layer and its logits."""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float, Key

from ._activation import gelu
from ._linear import Linear
from ._linear_map import LinearMap
from ._module import Module
from ._norm import Norm


class PredictionHead(Module):
    """`output_norm(act(W norm(x)))`, which predicts masked tokens from (BERT); a `Transformer`'s `norm`.

    What `norm` alone gives are the encoder's vectors of tokens: those of the model with `norm` in this module's place.
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
        """Draw the map, of as many channels as the stream.

        Args:
            norm: Of the last layer's output.
            output_norm: Of what the head gives.
            embed: Channels of the stream.
            bias: Whether the map has a bias.
            activation: What the map's output goes through.
            key: For the weights.
        """
        self.norm, self.output_norm, self.activation = norm, output_norm, activation
        self.dense = Linear("embed -> hidden", embed=embed, hidden=embed, bias=bias, key=key)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        """Map each token by itself."""
        return self.output_norm(self.activation(self.dense(self.norm(x))))
