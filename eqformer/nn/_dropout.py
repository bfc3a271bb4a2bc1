"""Dropout whose mask depends on the token, and on no device."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key

from ._module import Module


class Dropout(Module):
    """Zero each channel with probability `rate` and scale the rest by `1 / (1 - rate)` (Srivastava et al. 2014).

    Each token has a key of its own, so its mask is the same in any batch, on any mesh.
    """

    rate: float = eqx.field(static=True)

    def __check_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"Dropout(rate={self.rate}): the rate is a probability; give one in [0, 1).")

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop channels of each token by its key; without keys nothing is dropped."""
        return x if keys is None or self.rate == 0 else self.masked(x, self.mask(keys, x.shape[-1]))

    def mask(self, keys: Key[Array, "*batch seq"], channels: int) -> Bool[Array, "*batch seq embed"]:
        """Which of so many channels each token keeps."""
        draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, (channels,)))
        return draw(keys.reshape(-1)).reshape(*keys.shape, channels)

    def masked(
        self, x: Float[Array, "*batch seq embed"], mask: Bool[Array, "*batch seq embed"]
    ) -> Float[Array, "*batch seq embed"]:
        """The channels that are kept, scaled, and zeros for others."""
        mask = checkpoint_name(mask, "dropout")  # for remat policies that keep it, so that it is not drawn again
        return jnp.where(mask, x / (1 - self.rate), jnp.zeros_like(x))
