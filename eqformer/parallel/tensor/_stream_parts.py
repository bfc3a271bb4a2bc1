"""Dropout and learned positions of the part of the stream that a device holds."""

import jax
from jaxtyping import Array, Float, Int, Key

from ... import nn
from .._axes import TENSOR
from .._vary import own_part


class TokensDropout(nn.Module):
    """Dropout of this device's tokens, with their own keys out of all tokens' keys."""

    inner: nn.Dropout

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch full_seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop channels of this device's tokens."""
        return self.inner(x, None if keys is None else own_part(keys, TENSOR, -1))


class FeatureDropout(nn.Module):
    """Dropout of this device's features: its slice of the mask of all features."""

    inner: nn.Dropout

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop this device's channels of each token."""
        if keys is None or self.inner.rate == 0:
            return x
        whole = self.inner.mask(keys, x.shape[-1] * jax.lax.axis_size(TENSOR))
        return self.inner.masked(x, own_part(whole, TENSOR, -1))


class TokensPositions(nn.Module):
    """Learned positions of this device's tokens."""

    inner: nn.LearnedPositions

    def __call__(self, positions: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up the vectors of this device's tokens."""
        return self.inner(own_part(positions, TENSOR, -1))
