"""Rotary position embedding, and scalings of its frequencies for longer contexts than in training."""

import abc
import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._dtype import at_least_float32
from .._module import Module
from .._norm import Norm
from .._tokens import Tokens


Frequencies = Float[np.ndarray, "half"] | Float[Array, "*batch seq half"]


class PositionEncoding(Module):
    """An encoding of positions in the queries and keys of an `Attention`.

    Keys are cached with their encoding, unless a later token may change the encodings of earlier keys
    (`changes_within` the cache's capacity). Such keys are cached without an encoding, and each call encodes all keys
    that it reads; or, with `can_rerotate`, they are cached rotated, and rotated again when their frequencies change. By
    default the encoding of a token depends on its position alone.
    """

    @property
    def depends_on_length(self) -> bool:
        """Whether the encoding of a token depends on the length of its document."""
        return False

    def changes_within(self, longest: int) -> bool:
        """Return whether the encodings of documents of up to `longest` tokens differ from one another."""
        return self.depends_on_length

    def can_rerotate(self, longest: int) -> bool:
        """Return whether cached keys of rows of up to `longest` tokens can be rotated again; by default False."""
        return False

    def for_tokens(self, tokens: Tokens) -> "PositionEncoding":
        """Return the encoding with the parameters that the model passes with its tokens; by default there are none."""
        return self

    @abc.abstractmethod
    def encode(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        positions: Int[Array, "*batch seq"],
        kv_positions: Int[Array, "*batch kv_seq"],
        lengths: Int[Array, "*batch #seq"] | None,
    ) -> tuple[Float[Array, "*batch seq heads head_dim"], Float[Array, "*batch kv_seq kv_heads head_dim"]]:
        """Encode queries and keys at their positions; `lengths` are the lengths of the tokens' documents."""


class Rotary(PositionEncoding):
    """Rotate pairs of channels by `position * theta^(-2i/dim)` (Su et al. 2021).

    The first `dim` channels are rotated, the others pass unchanged (GPT-NeoX's partial rotary). Pairs are channels
    `(i, i + dim/2)`, the half-split layout of Llama, or `(2i, 2i + 1)` if `interleaved`, the layout of GPT-J and
    DeepSeek. `scaling` changes the frequencies for longer contexts, and `reverse` negates the angles (nanochat). Angles
    are computed in float32 at least, from the positions of each call: there is no table, so positions may have any
    order and offset.
    """

    dim: int = eqx.field(static=True)
    theta: float = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True, default=False)
    scaling: "RotaryScaling | None" = eqx.field(static=True, default=None)
    reverse: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"Rotary(dim={self.dim}): channels are rotated in pairs, so dim must be even and at least 2."
            )
        if self.scaling is not None and self.dim < self.scaling.least_dim:
            raise ValueError(
                f"Rotary(dim={self.dim}, scaling={type(self.scaling).__name__}(...)): this scaling takes the power "
                f"dim / (dim - 2) of a factor, so dim must be at least {self.scaling.least_dim}; give more channels or "
                "another scaling."
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the document."""
        return self.scaling is not None and self.scaling.depends_on_length

    def changes_within(self, longest: int) -> bool:
        """Return whether documents of up to `longest` tokens have different frequencies."""
        return self.scaling is not None and self.scaling.changes_within(longest)

    def can_rerotate(self, longest: int) -> bool:
        """Return whether frequencies change at few lengths, so that few calls must rotate cached keys again."""
        return self.scaling is not None and self.scaling.has_frequency_sets and self.changes_within(longest)

    def for_tokens(self, tokens: Tokens) -> "Rotary":
        """Return the rotary with the parameters that the model passes with its tokens; by default there are none."""
        return self

    def encode(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        positions: Int[Array, "*batch seq"],
        kv_positions: Int[Array, "*batch kv_seq"],
        lengths: Int[Array, "*batch #seq"] | None,
    ) -> tuple[Float[Array, "*batch seq heads head_dim"], Float[Array, "*batch kv_seq kv_heads head_dim"]]:
        """Rotate queries and keys to their positions."""
        return self(query, positions, lengths), self(key, kv_positions, lengths)

    def __call__(
        self,
        x: Float[Array, "*batch seq heads head_dim"],
        positions: Int[Array, "*batch seq"],
        lengths: Int[Array, "*batch #seq"] | None = None,
    ) -> Float[Array, "*batch seq heads head_dim"]:
        """Rotate `x` to its positions; `lengths` are the lengths of the tokens' documents (default: each row is one
        document)."""
        if x.shape[-1] < self.dim:
            raise ValueError(f"Rotary(dim={self.dim})(x): x has only {x.shape[-1]} channels; dim must not exceed them.")
        if lengths is None:
            lengths = jnp.max(positions, axis=-1, keepdims=True) + 1
        return self._rotate_pairs(x, *self._cosines_and_sines(positions, lengths, at_least_float32(x.dtype)))

    def rerotate(
        self,
        x: Float[Array, "*batch seq heads head_dim"],
        positions: Int[Array, "*batch seq"],
        old_lengths: Int[Array, "*batch #seq"],
        new_lengths: Int[Array, "*batch #seq"],
    ) -> Float[Array, "*batch seq heads head_dim"]:
        """Rotate `x`, which is rotated by the frequencies of the old lengths, to the frequencies of the new lengths."""
        dtype = at_least_float32(x.dtype)
        old_cosine, old_sine = self._cosines_and_sines(positions, old_lengths, dtype)
        cosine, sine = self._cosines_and_sines(positions, new_lengths, dtype)
        square = old_cosine**2 + old_sine**2
        return self._rotate_pairs(
            x, (cosine * old_cosine + sine * old_sine) / square, (sine * old_cosine - cosine * old_sine) / square
        )

    def _rotate_pairs(
        self,
        x: Float[Array, "*batch seq heads head_dim"],
        cosine: Float[Array, "*batch seq 1 half"],
        sine: Float[Array, "*batch seq 1 half"],
    ) -> Float[Array, "*batch seq heads head_dim"]:
        rotary_channels, passing = x[..., : self.dim], x[..., self.dim :]
        wide = rotary_channels.astype(cosine.dtype)
        if self.interleaved:
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = jnp.split(wide, 2, axis=-1)
        pairs = (first * cosine - second * sine, second * cosine + first * sine)
        if self.interleaved:
            rotated = jnp.stack(pairs, axis=-1).reshape(wide.shape).astype(x.dtype)
        else:
            rotated = jnp.concatenate(pairs, axis=-1).astype(x.dtype)
        return jnp.concatenate([rotated, passing], axis=-1) if passing.shape[-1] else rotated

    def _cosines_and_sines(
        self, positions: Int[Array, "*batch seq"], lengths: Int[Array, "*batch #seq"], dtype: jnp.dtype
    ) -> tuple[Float[Array, "*batch seq 1 half"], Float[Array, "*batch seq 1 half"]]:
        """Return the cosines and the sines of all angles, times the magnitude."""
        frequencies, magnitude = self._frequencies(lengths, dtype)
        angles = positions[..., None].astype(dtype) * frequencies
        angles = -angles if self.reverse else angles
        magnitude = jnp.asarray(magnitude, dtype)
        return (jnp.cos(angles) * magnitude)[..., None, :], (jnp.sin(angles) * magnitude)[..., None, :]

    def _frequencies(
        self, lengths: Int[Array, "*batch #seq"], dtype: jnp.dtype
    ) -> tuple[Float[Array, "... half"], float | Float[Array, ""]]:
        """Return the frequency of each pair, and the magnitude."""
        frequencies, magnitude = base_frequencies(self.dim, self.theta), 1.0
        if self.scaling is not None:
            frequencies, magnitude = self.scaling.frequencies(self.dim, self.theta, lengths[..., None])
        # Frequencies are rounded to float32 in any dtype, as in the training of all published models.
        return jnp.asarray(frequencies, jnp.float32).astype(dtype), magnitude


class RotaryThenNorm(PositionEncoding):
    """Rotary positions, then norms of the rotated queries and keys (Hunyuan); most models normalize before they rotate.

    Cached keys cannot be rotated again, because a norm with weights does not commute with a rotation.
    """

    query_norm: Norm
    key_norm: Norm
    rotary: Rotary

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the document."""
        return self.rotary.depends_on_length

    def changes_within(self, longest: int) -> bool:
        """Return whether documents of up to `longest` tokens have different frequencies."""
        return self.rotary.changes_within(longest)

    def encode(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        positions: Int[Array, "*batch seq"],
        kv_positions: Int[Array, "*batch kv_seq"],
        lengths: Int[Array, "*batch #seq"] | None,
    ) -> tuple[Float[Array, "*batch seq heads head_dim"], Float[Array, "*batch kv_seq kv_heads head_dim"]]:
        """Rotate queries and keys to their positions, then normalize them."""
        query, key = self.rotary.encode(query, key, positions, kv_positions, lengths)
        return self.query_norm(query), self.key_norm(key)


# Scalings of the frequencies.


def base_frequencies(dim: int, theta: float) -> Float[np.ndarray, "half"]:
    """Return `theta^(-2i/dim)` for `i = 0 .. dim/2 - 1`, radians a position, in float64."""
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


class RotaryScaling(eqx.Module):
    """A rule for the frequencies of a `Rotary`, from its dim, its theta and the lengths of documents."""

    depends_on_length: ClassVar[bool]
    has_frequency_sets: ClassVar[bool] = False
    """Whether lengths share a few sets of frequencies; `representative_length` then returns a length for each set."""
    least_dim: ClassVar[int] = 2
    """The smallest `Rotary.dim` for which the scaling is defined."""
    changes_norms: ClassVar[bool] = False
    """Whether the magnitude may differ from 1, so that rotated queries and keys have other norms than before."""

    @abc.abstractmethod
    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Return the frequencies of the `dim / 2` pairs, and the magnitude: a factor of all cosines and sines.

        Frequencies have batch dims if they depend on the length of the document.
        """

    def changes_within(self, longest: int) -> bool:
        """Return whether the frequencies of documents of up to `longest` tokens differ from one another.

        Documents of up to `original_length` tokens have the same frequencies.
        """
        return self.depends_on_length and longest > getattr(self, "original_length", 0)

    def representative_length(self, length: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return a length that stands for all lengths with the same frequencies; 0 for the shortest lengths."""
        return length


class LinearScaling(RotaryScaling):
    """Positions divided by `factor` (Chen et al. 2023)."""

    depends_on_length: ClassVar[bool] = False
    factor: float = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Divide all frequencies by the factor."""
        return base_frequencies(dim, theta) / self.factor, 1.0


class ProportionalScaling(RotaryScaling):
    """Rotation of the first `part` of all pairs; the other pairs pass unchanged (Gemma 4).

    Rotated pairs have the same frequencies as if all pairs were rotated. A `Rotary` with a smaller `dim` differs: it
    spreads the whole range of frequencies over fewer pairs, and each pair consists of other channels.
    """

    depends_on_length: ClassVar[bool] = False
    part: float = eqx.field(static=True)
    factor: float = eqx.field(static=True, default=1.0)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Divide the frequencies of the rotated pairs by `factor`; the other pairs have frequency 0."""
        is_rotated = np.arange(dim // 2) < int(self.part * dim // 2)
        return np.where(is_rotated, base_frequencies(dim, theta), 0.0) / self.factor, 1.0


class NTKScaling(RotaryScaling):
    """NTK-aware theta for any length (bloc97 2023), `theta * alpha^(dim / (dim - 2))` (Hunyuan)."""

    depends_on_length: ClassVar[bool] = False
    least_dim: ClassVar[int] = 4
    alpha: float = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Return the frequencies of the larger theta."""
        return base_frequencies(dim, theta * self.alpha ** (dim / (dim - 2))), 1.0


class DynamicScaling(RotaryScaling):
    """NTK-aware theta that grows with the document beyond `original_length` tokens (bloc97, emozilla 2023)."""

    depends_on_length: ClassVar[bool] = True
    least_dim: ClassVar[int] = 4
    factor: float = eqx.field(static=True)
    original_length: int = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Return frequencies of `theta * (factor * length / original_length - factor + 1)^(dim / (dim - 2))`."""
        stretch = jnp.maximum(length, self.original_length).astype(jnp.float32) / self.original_length
        stretched = theta * (self.factor * stretch - (self.factor - 1)) ** (dim / (dim - 2))
        return stretched ** jnp.asarray(-np.arange(0, dim, 2) / dim, jnp.float32), 1.0


class Llama3Scaling(RotaryScaling):
    """Low frequencies divided by `factor`, high frequencies kept, and a ramp between (Llama 3.1; Dubey et al. 2024)."""

    depends_on_length: ClassVar[bool] = False
    factor: float = eqx.field(static=True)
    low_frequency_factor: float = eqx.field(static=True)
    high_frequency_factor: float = eqx.field(static=True)
    original_length: int = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Keep pairs that make `high_frequency_factor` rotations or more in `original_length` tokens.

        Pairs that make `low_frequency_factor` rotations or fewer have their frequencies divided by `factor`.
        """
        base = base_frequencies(dim, theta)
        rotations = self.original_length * base / (2 * math.pi)
        span = self.high_frequency_factor - self.low_frequency_factor
        above = rotations - self.low_frequency_factor
        # Without a ramp (Llama 4 Scout), each frequency is either kept or divided.
        keep = np.clip(above / span, 0.0, 1.0) if span > 0 else (above >= 0).astype(base.dtype)
        return keep * base + (1 - keep) * base / self.factor, 1.0


class YarnScaling(RotaryScaling):
    """YaRN (Peng et al. 2023): interpolate slow pairs by `factor`, keep fast pairs, scale cosines and sines."""

    depends_on_length: ClassVar[bool] = False
    changes_norms: ClassVar[bool] = True
    factor: float = eqx.field(static=True)
    """The factor of the interpolation of slow pairs."""
    original_length: int = eqx.field(static=True)
    """The context length of pretraining."""
    beta_fast: float = eqx.field(static=True, default=32.0)
    """Pairs that make more than this number of rotations in `original_length` tokens are kept."""
    beta_slow: float = eqx.field(static=True, default=1.0)
    """Pairs that make fewer than this number of rotations in `original_length` tokens are interpolated in full."""
    magnitude: float | None = eqx.field(static=True, default=None)
    """The factor of cosines and sines; None: `yarn_magnitude(factor)`. DeepSeek passes a quotient of two magnitudes."""
    truncate: bool = eqx.field(static=True, default=True)
    """Whether the ends of the ramp are rounded to whole pairs."""

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Divide slow pairs' frequencies by `factor`, with a linear ramp between `beta_fast` and `beta_slow`."""
        base = base_frequencies(dim, theta)

        def pair_with_rotations(count: float) -> float:
            return dim * math.log(self.original_length / (count * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_with_rotations(self.beta_fast), pair_with_rotations(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        interpolate = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
        magnitude = yarn_magnitude(self.factor) if self.magnitude is None else self.magnitude
        return interpolate * base / self.factor + (1 - interpolate) * base, magnitude


class LongRopeScaling(RotaryScaling):
    """LongRoPE (Ding et al. 2024): a divisor for the frequency of each pair.

    Documents of up to `original_length` tokens take `short_divisors`, longer documents take `long_divisors`.
    `magnitude` multiplies cosines and sines: by default `sqrt(1 + ln(factor) / ln(original_length))`, where `factor` is
    the longest length divided by the original length.
    """

    depends_on_length: ClassVar[bool] = True
    changes_norms: ClassVar[bool] = True
    has_frequency_sets: ClassVar[bool] = True
    short_divisors: tuple[float, ...] = eqx.field(static=True)
    long_divisors: tuple[float, ...] = eqx.field(static=True)
    original_length: int = eqx.field(static=True)
    factor: float = eqx.field(static=True)
    magnitude: float | None = eqx.field(static=True, default=None)

    def representative_length(self, length: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return 0 for lengths up to `original_length`, and `original_length + 1` for longer lengths."""
        return jnp.where(length > self.original_length, self.original_length + 1, 0).astype(jnp.int32)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Return frequencies divided by the short or the long divisors, by the length of each document."""
        for name, divisors in (("short", self.short_divisors), ("long", self.long_divisors)):
            if len(divisors) != dim // 2:
                raise ValueError(
                    f"LongRopeScaling({name}_divisors=...): {len(divisors)} divisors for {dim // 2} pairs; "
                    "give one for each pair."
                )
        base = base_frequencies(dim, theta)
        short, long = (
            jnp.asarray(base / np.asarray(d), jnp.float32) for d in (self.short_divisors, self.long_divisors)
        )
        magnitude = self.magnitude
        if magnitude is None:
            growth = max(math.log(self.factor), 0.0) / math.log(self.original_length)
            magnitude = math.sqrt(1 + growth)
        return jnp.where(length > self.original_length, long, short), magnitude


def yarn_magnitude(factor: float, strength: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines, `0.1 * strength * ln(factor) + 1`."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0
