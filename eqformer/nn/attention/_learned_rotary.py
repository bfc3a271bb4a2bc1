"""Rotary positions with learned frequencies: a model holds a factor for each frequency, which its layers share."""

import copy

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._model_contracts import RotaryFactors
from .._module import float32_field
from .._tokens import Tokens
from ._rotary import Rotary


class LearnedFrequencies(RotaryFactors):
    """The factors `exp(alpha)` of rotary frequencies, which all layers with a `LearnedRotary` share (Mistral Large 4).

    A `Transformer` holds these factors in its field `frequencies`, and passes `alpha` to its layers as
    `Tokens.rotary_alpha`.
    """

    alpha: Float[Array, "half"] = float32_field()
    """Logarithm of the factor of each frequency."""

    def __init__(self, dim: int):
        """Initialize the factors of `dim / 2` frequencies to 1."""
        self.alpha = jnp.zeros(dim // 2, jnp.float32)


class LearnedRotary(Rotary):
    """A `Rotary` whose frequencies are multiplied by the factors of the model's `LearnedFrequencies`."""

    alpha: Float[Array, "half"] | None = eqx.field(init=False, default=None)
    """Logarithms of the factors. `for_tokens` sets them during a call; they are not parameters of the layer."""

    def for_tokens(self, tokens: Tokens) -> "LearnedRotary":
        """Return the rotary with the factors that the model passes with its tokens."""
        if tokens.rotary_alpha is None or tokens.rotary_alpha.shape != (self.dim // 2,):
            passed = None if tokens.rotary_alpha is None else f"{tokens.rotary_alpha.shape[0]} numbers"
            raise ValueError(
                f"LearnedRotary(dim={self.dim}): Tokens.rotary_alpha must hold the factors of {self.dim // 2} "
                f"frequencies, which the model passes, but it is {passed}; build the model with "
                f"nn.Transformer(frequencies=nn.LearnedFrequencies({self.dim}))."
            )
        bound = copy.copy(self)
        object.__setattr__(bound, "alpha", tokens.rotary_alpha)
        return bound

    def _frequencies(
        self, lengths: Int[Array, "*batch #seq"], dtype: jnp.dtype
    ) -> tuple[Float[Array, "... half"], float | Float[Array, ""]]:
        """Return the frequency of each pair times its learned factor, and the magnitude."""
        assert self.alpha is not None, "LearnedRotary is called as `rotary.for_tokens(tokens)(x, positions)`"
        frequencies, magnitude = Rotary._frequencies(self, lengths, dtype)
        return frequencies * jnp.exp(self.alpha.astype(dtype)), magnitude
