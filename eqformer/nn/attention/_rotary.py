"""Rotary position embedding, computed from the positions it is given."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._dtype import at_least_float32
from .._module import Module
from ._rotary_scaling import base_frequencies, RotaryScaling


class Rotary(Module):
    """Rotate pairs of channels by `position * theta^(-2i/dim)` (Su et al. 2021).

    The first `dim` channels turn, the rest pass (GPT-NeoX's partial rotary). Pairs are channels `(i, i + dim/2)`, the
    half-split layout of Llama, or `(2i, 2i + 1)` where `interleaved`, the layout of GPT-J and DeepSeek. `scaling`
    stretches the frequencies for longer contexts. Angles are computed in float32 at least, from positions given with
    each call: no table is kept, so any position, order or offset is right.
    """

    dim: int = eqx.field(static=True)
    theta: float = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True, default=False)
    scaling: RotaryScaling | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"Rotary(dim={self.dim}): channels turn in pairs, so dim must be even and at least 2.")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence."""
        return self.scaling is not None and self.scaling.depends_on_length

    def changes_within(self, longest: int) -> bool:
        """Whether they do among lengths up to the longest, so that cached keys may have to be turned anew."""
        return self.scaling is not None and self.scaling.changes_within(longest)

    def __call__(
        self,
        x: Float[Array, "*batch seq heads head_dim"],
        positions: Int[Array, "*batch seq"],
        lengths: Int[Array, "*batch #seq"] | None = None,
    ) -> Float[Array, "*batch seq heads head_dim"]:
        """Rotate `x` to `positions`; `lengths` are the documents', by default one more than a row's last position."""
        if x.shape[-1] < self.dim:
            raise ValueError(f"Rotary(dim={self.dim})(x): x has only {x.shape[-1]} channels; dim must not exceed them.")
        if lengths is None:
            lengths = jnp.max(positions, axis=-1, keepdims=True) + 1
        return self._turned(x, *self._angles(positions, lengths, at_least_float32(x.dtype)))

    def again(
        self,
        x: Float[Array, "*batch seq heads head_dim"],
        positions: Int[Array, "*batch seq"],
        was: Int[Array, "*batch #seq"],
        now: Int[Array, "*batch #seq"],
    ) -> Float[Array, "*batch seq heads head_dim"]:
        """What has been rotated by the frequencies of a length, `was`, rotated by those of another, `now`, instead."""
        exact = at_least_float32(x.dtype)
        (before, up), (after, right) = (self._angles(positions, length, exact) for length in (was, now))
        square = before**2 + up**2
        return self._turned(x, (after * before + right * up) / square, (right * before - after * up) / square)

    def _turned(self, x: Array, cosine: Array, sine: Array) -> Float[Array, "*batch seq heads head_dim"]:
        turning, passing = x[..., : self.dim], x[..., self.dim :]
        wide = turning.astype(cosine.dtype)
        if self.interleaved:
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = jnp.split(wide, 2, axis=-1)
        pairs = (first * cosine - second * sine, second * cosine + first * sine)
        turned = jnp.stack(pairs, axis=-1).reshape(wide.shape) if self.interleaved else jnp.concatenate(pairs, axis=-1)
        return (
            jnp.concatenate([turned.astype(x.dtype), passing], axis=-1) if passing.shape[-1] else turned.astype(x.dtype)
        )

    def _angles(
        self, positions: Int[Array, "*batch seq"], lengths: Int[Array, "*batch #seq"], dtype: jnp.dtype
    ) -> tuple[Float[Array, "*batch seq 1 half"], Float[Array, "*batch seq 1 half"]]:
        frequencies, magnitude = base_frequencies(self.dim, self.theta), 1.0
        if self.scaling is not None:
            frequencies, magnitude = self.scaling.frequencies(self.dim, self.theta, lengths[..., None])
        # Frequencies are rounded to float32 whatever the dtype, as every published model was trained.
        frequencies = jnp.asarray(frequencies, jnp.float32).astype(dtype)
        angles = positions[..., None].astype(dtype) * frequencies
        magnitude = jnp.asarray(magnitude, dtype)
        return (jnp.cos(angles) * magnitude)[..., None, :], (jnp.sin(angles) * magnitude)[..., None, :]
