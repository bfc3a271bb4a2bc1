"""Heads of text encoders: pooling of tokens' vectors to one vector of a text, dense layers, and classification."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._dtype import at_least_float32
from ._linear import LinearMap
from ._mlp import identity
from ._module import Module
from ._norm import Norm
from ._tokens import Tokens


POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways to make one vector of a text from the vectors of its tokens, by their names in sentence-transformers."""


class Pooling(Module):
    """One vector of a text from the vectors of its tokens, in float32 at least.

    `"cls"` is the vector of the first token, and `"lasttoken"` is the vector of the last token. `"max"` and `"mean"`
    are taken over all tokens. `"weightedmean"` is a mean that weights the first token by 1, the second by 2, and so on.
    `"mean_sqrt_len_tokens"` is the sum over the tokens divided by the square root of their number. The vectors of
    several modes are concatenated. Padding is left out.
    """

    modes: tuple[str, ...] = eqx.field(static=True)

    def __check_init__(self):
        if unknown := [mode for mode in self.modes if mode not in POOLINGS]:
            raise ValueError(f"Pooling(modes={self.modes!r}): {unknown[0]!r} is not one of {', '.join(POOLINGS)}.")
        if not self.modes:
            raise ValueError("Pooling(modes=()): a text needs a vector; give at least one mode.")

    def __call__(
        self, hidden: Float[Array, "batch seq embed"], tokens: Tokens, skipped: int | Int[Array, ""] = 0
    ) -> Float[Array, "batch features"]:
        """Return a vector for each row, from its tokens after the first `skipped` tokens, such as a prompt's."""
        hidden = hidden.astype(at_least_float32(hidden.dtype))
        is_read = tokens.positions >= skipped
        is_read &= tokens.positions >= 0
        return jnp.concatenate([_pool(mode, hidden, is_read, tokens.positions) for mode in self.modes], axis=-1)


def _pool(
    mode: str,
    hidden: Float[Array, "batch seq embed"],
    is_read: Bool[Array, "batch seq"],
    positions: Int[Array, "batch seq"],
) -> Float[Array, "batch embed"]:
    """Return each row's vector in one mode."""
    if mode in ("cls", "lasttoken"):
        last = hidden.shape[1] - 1 - jnp.argmax(is_read[:, ::-1], axis=1)
        index = jnp.argmax(is_read, axis=1) if mode == "cls" else last
        return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]
    if mode == "max":
        return jnp.max(jnp.where(is_read[..., None], hidden, -jnp.inf), axis=1)
    weights = is_read.astype(hidden.dtype)
    if mode == "weightedmean":
        weights = weights * (positions + 1).astype(hidden.dtype)
    # A product with zero would keep the NaN of a padding token.
    total = jnp.sum(jnp.where(is_read[..., None], hidden * weights[..., None], 0), axis=1)
    count = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-9)
    return total / (jnp.sqrt(count) if mode == "mean_sqrt_len_tokens" else count)


class DenseLayer(Module):
    """A dense layer of a head, `norm(act(W x + b))`, plus the input if it is residual."""

    linear: LinearMap
    activation: Callable[[Array], Array] = eqx.field(static=True, default=identity)
    norm: Norm | None = None
    """Norm of the activation's output."""
    is_residual: bool = eqx.field(static=True, default=False)
    """Whether the input is added to the output."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Apply the layer to each vector."""
        y = self.activation(self.linear(x))
        y = y if self.norm is None else self.norm(y)
        return x + y if self.is_residual else y


class UnitLength(Module):
    """The direction of a vector: the vector divided by its length."""

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Return each vector with length 1; zeros stay zeros."""
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


class ClassificationHead(Module):
    """Scores of labels for each text, or without a pooling for each token, in float32 at least."""

    pooling: Pooling | None
    """The pooling of a text's tokens to one vector; None: each token is classified."""
    dense: DenseLayer | None
    """A dense layer before the scores; None: there is none."""
    output: LinearMap
    """The map to the scores, `embed -> labels`."""

    def __call__(self, hidden: Float[Array, "batch seq embed"], tokens: Tokens) -> Float[Array, "batch *seq labels"]:
        """Return the scores, which are logits of the labels."""
        return self.score(hidden if self.pooling is None else self.pooling(hidden, tokens))

    def score(self, vectors: Float[Array, "*batch embed"]) -> Float[Array, "*batch labels"]:
        """Return the scores of vectors of texts, or of tokens."""
        x = vectors.astype(at_least_float32(vectors.dtype))
        return self.output(x if self.dense is None else self.dense(x))
