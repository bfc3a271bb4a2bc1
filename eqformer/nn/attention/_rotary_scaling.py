"""Ways to stretch rotary frequencies so that a model reads further than it was trained to."""

import abc
import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


Frequencies = Float[np.ndarray, "half"] | Float[Array, "*batch seq half"]


def base_frequencies(dim: int, theta: float) -> Float[np.ndarray, "half"]:
    """`theta^(-2i/dim)` for `i = 0 .. dim/2 - 1`, radians a position, in float64."""
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


class RotaryScaling(eqx.Module):
    """What turns (dim, theta, length) into frequencies and the factor on cosines and sines."""

    depends_on_length: ClassVar[bool]
    has_sets: ClassVar[bool] = False
    """Whether they depend on it by a few sets, of which `alike` tells."""

    @abc.abstractmethod
    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Frequencies of the `dim / 2` pairs, one set or one a document, and the factor."""

    def changes_within(self, longest: int) -> bool:
        """Whether lengths up to the longest have different frequencies, as only those beyond an original one may."""
        return self.depends_on_length and longest > getattr(self, "original_length", 0)

    def alike(self, length: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """One length for all that have the same frequencies, 0 for those of the shortest; else its own for each."""
        return length


class LinearScaling(RotaryScaling):
    """Positions divided by `factor` (Chen et al. 2023)."""

    depends_on_length: ClassVar[bool] = False
    factor: float = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """All frequencies by the same factor."""
        return base_frequencies(dim, theta) / self.factor, 1.0


class ProportionalScaling(RotaryScaling):
    """The slower pairs do not turn: of all, the first `part` have the frequencies that they have among all (Gemma 4).

    A `Rotary` of so many channels alone has frequencies of the whole range, and other pairs.
    """

    depends_on_length: ClassVar[bool] = False
    part: float = eqx.field(static=True)
    factor: float = eqx.field(static=True, default=1.0)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Those of the pairs that turn, over `factor`; zeros for the others."""
        turns = np.arange(dim // 2) < int(self.part * dim // 2)
        return np.where(turns, base_frequencies(dim, theta), 0.0) / self.factor, 1.0


class NTKScaling(RotaryScaling):
    """NTK-aware theta for any length (bloc97 2023), `theta * alpha^(dim / (dim - 2))` (Hunyuan)."""

    depends_on_length: ClassVar[bool] = False
    alpha: float = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Those of the larger theta."""
        return base_frequencies(dim, theta * self.alpha ** (dim / (dim - 2))), 1.0


class DynamicScaling(RotaryScaling):
    """NTK-aware theta that grows with the sequence beyond `original_length` tokens (bloc97, emozilla 2023)."""

    depends_on_length: ClassVar[bool] = True
    factor: float = eqx.field(static=True)
    original_length: int = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """`theta * (factor * length / original_length - factor + 1)^(dim / (dim - 2))`, by each document's length."""
        stretch = jnp.maximum(length, self.original_length).astype(jnp.float32) / self.original_length
        stretched = theta * (self.factor * stretch - (self.factor - 1)) ** (dim / (dim - 2))
        return stretched ** jnp.asarray(-np.arange(0, dim, 2) / dim, jnp.float32), 1.0


class Llama3Scaling(RotaryScaling):
    """Llama 3.1: long waves by `factor`, short ones as they are, a ramp between (Dubey et al. 2024)."""

    depends_on_length: ClassVar[bool] = False
    factor: float = eqx.field(static=True)
    low_frequency_factor: float = eqx.field(static=True)
    high_frequency_factor: float = eqx.field(static=True)
    original_length: int = eqx.field(static=True)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """Waves shorter than `original_length / high` stay, longer than `original_length / low` grow by `factor`."""
        base = base_frequencies(dim, theta)
        turns = self.original_length * base / (2 * math.pi)
        span = self.high_frequency_factor - self.low_frequency_factor
        above = turns - self.low_frequency_factor
        # Without a ramp (Llama 4 Scout), each wave is on one side or the other.
        keep = np.clip(above / span, 0.0, 1.0) if span > 0 else (above >= 0).astype(base.dtype)
        return keep * base + (1 - keep) * base / self.factor, 1.0


class YarnScaling(RotaryScaling):
    """YaRN (Peng et al. 2023): interpolate slow pairs by `factor`, keep fast ones, and sharpen attention."""

    depends_on_length: ClassVar[bool] = False
    factor: float = eqx.field(static=True)
    """By how much slow pairs are interpolated."""
    original_length: int = eqx.field(static=True)
    """The tokens of the rows that the model was trained on first."""
    beta_fast: float = eqx.field(static=True, default=32.0)
    """Pairs that turn more often than this in them stay."""
    beta_slow: float = eqx.field(static=True, default=1.0)
    """Pairs that turn less often are interpolated in full."""
    magnitude: float | None = eqx.field(static=True, default=None)
    """What multiplies cosines and sines; None: `0.1 ln(factor) + 1`. DeepSeek divides two such terms and passes the
    quotient."""
    truncate: bool = eqx.field(static=True, default=True)
    """Whether the ramp's ends are rounded to whole pairs."""

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """A linear ramp over the pairs between the two turning counts."""
        base = base_frequencies(dim, theta)

        def pair_that_turns(times: float) -> float:
            return dim * math.log(self.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        interpolate = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
        magnitude = yarn_magnitude(self.factor) if self.magnitude is None else self.magnitude
        return interpolate * base / self.factor + (1 - interpolate) * base, magnitude


class LongRopeScaling(RotaryScaling):
    """LongRoPE (Ding et al. 2024): a divisor for each pair, one set up to `original_length` tokens and one beyond.

    `magnitude` multiplies cosines and sines: by default `sqrt(1 + ln(factor) / ln(original_length))`, where `factor` is
    the longest length over the original one.
    """

    depends_on_length: ClassVar[bool] = True
    has_sets: ClassVar[bool] = True
    short_divisors: tuple[float, ...] = eqx.field(static=True)
    long_divisors: tuple[float, ...] = eqx.field(static=True)
    original_length: int = eqx.field(static=True)
    factor: float = eqx.field(static=True)
    magnitude: float | None = eqx.field(static=True, default=None)

    def alike(self, length: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """0 up to `original_length`, and one more than this beyond."""
        return jnp.where(length > self.original_length, self.original_length + 1, 0).astype(jnp.int32)

    def frequencies(
        self, dim: int, theta: float, length: Int[Array, "*batch seq 1"]
    ) -> tuple[Frequencies, float | Float[Array, ""]]:
        """The short or the long set, by the length of each document."""
        for name, divisors in (("short", self.short_divisors), ("long", self.long_divisors)):
            if len(divisors) != dim // 2:
                raise ValueError(
                    f"LongRopeScaling({name}_divisors=...): {len(divisors)} divisors for {dim // 2} pairs; "
                    "give one a pair."
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
    """`0.1 * strength * ln(factor) + 1`, the attention temperature of YaRN."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0
