"""Transforms of the logits before a token is sampled: temperature, truncations and a penalty.

Each transform is a module, and `chain` joins several transforms in any order. All transforms compute and return float32
at least. With an extreme setting that would overflow float32, only the likeliest token stays, as in the limit. No
setting turns finite logits into NaN.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._annotation_checks import checked, checked_fields
from ..nn import at_least_float32


# Relative difference up to which a computed number counts as equal to a threshold. Settings are rounded to float32, and
# sums over a vocabulary are off by a few units in the last place: an exact comparison would decide a tie by chance.
_ROUNDING = 8 * 2.0**-23


@checked_fields
class History(eqx.Module):
    """The ids of each row so far, with its prompt; entries from a row's length on are unused."""

    ids: Int[Array, "batch seq"]
    lengths: Int[Array, "batch"]


# `(logits, history) -> logits`, where a token that must not be sampled gets minus infinity.
Transform = Callable[[Array, History], Array]


class Temperature(eqx.Module):
    """Division of the logits by `temperature`; at 0 only the likeliest token stays (of equal logits the lowest id).

    The temperature is an array, so that another value reuses the compiled program; whether it is 0 is static.
    """

    temperature: Float[Array, ""]
    is_greedy: bool = eqx.field(static=True)

    def __init__(self, temperature: float | int):
        _check_temperature(temperature)
        self.temperature, self.is_greedy = _as_float32(temperature), temperature == 0

    @checked
    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Divide the logits: a temperature above 1 flattens the distribution, a temperature below 1 sharpens it."""
        logits = _to_float32(logits)
        if self.is_greedy:
            ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
            return _mask_logits(ids == likeliest_ids(logits)[:, None], logits)
        return _limit_overflow(logits / self.temperature.astype(logits.dtype), logits)


class TopK(eqx.Module):
    """Truncation to exactly `top_k` likeliest tokens (Fan et al. 2018); of equal logits the lowest ids stay."""

    top_k: int = eqx.field(static=True)

    def __check_init__(self):
        _check_top_k(self.top_k)

    @checked
    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Set all but the `top_k` largest logits to minus infinity."""
        logits = _to_float32(logits)
        if self.top_k >= logits.shape[1]:
            return logits
        threshold = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
        return _mask_logits(_select_top(logits, threshold, self.top_k), logits)


class TopP(eqx.Module):
    """Nucleus sampling (Holtzman et al. 2020): truncation to the likeliest tokens of total probability `top_p`."""

    top_p: Float[Array, ""]

    def __init__(self, top_p: float | int):
        _check_top_p(top_p)
        self.top_p = _as_float32(top_p)

    @checked
    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Drop each token if likelier tokens already sum to `top_p`; equally likely tokens are ordered by their ids."""
        logits = _to_float32(logits)
        falling = -jnp.sort(-logits, axis=-1)
        sums = jnp.cumsum(jax.nn.softmax(falling, axis=-1), axis=-1)
        # The likelier tokens of a token sum to the previous token's cumulative sum. The difference of the token's
        # cumulative sum and its probability would round, and could keep one token too many at a tie.
        sums_before = jnp.pad(sums[:, :-1], [(0, 0), (1, 0)])
        threshold = self.top_p.astype(logits.dtype) * (1 - _ROUNDING)
        # The sums may round to 1 before the last token; but with `top_p` 1 all tokens must be kept.
        inside = (sums_before < threshold) | (self.top_p >= 1)
        count = jnp.maximum(jnp.sum(inside, axis=-1, keepdims=True), 1)
        threshold = jnp.take_along_axis(falling, count - 1, axis=-1)
        return _mask_logits(_select_top(logits, threshold, count), logits)


class MinP(eqx.Module):
    """Truncation to tokens at least `min_p` times as likely as the likeliest (Nguyen et al. 2024)."""

    min_p: Float[Array, ""]

    def __init__(self, min_p: float | int):
        _check_min_p(min_p)
        self.min_p = _as_float32(min_p)

    @checked
    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Keep the tokens for which `logit - peak >= log(min_p)`."""
        logits = _to_float32(logits)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        threshold = jnp.log(self.min_p).astype(logits.dtype) * (1 + _ROUNDING)  # at most 0
        return _mask_logits((logits == peak) | (logits - peak >= threshold), logits)


class RepetitionPenalty(eqx.Module):
    """Repetition penalty of CTRL (Keskar et al. 2019), for each token that occurs in the row, prompt included.

    A positive logit is divided by `penalty`, and a negative logit is multiplied by it. A penalty above 1 discourages
    repetition, a penalty below 1 encourages it. How often a token occurred makes no difference.
    """

    penalty: Float[Array, ""]

    def __init__(self, penalty: float | int):
        _check_repetition_penalty(penalty)
        self.penalty = _as_float32(penalty)

    @checked
    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Penalize the tokens in the history."""
        logits = _to_float32(logits)
        batch, vocab = logits.shape
        in_row = jnp.arange(history.ids.shape[1]) < history.lengths[:, None]
        ids = jnp.where(in_row, history.ids, vocab)  # entries after the row's last token are dropped
        occurs = jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], ids].set(True, mode="drop")
        penalty = self.penalty.astype(logits.dtype)

        def penalize(logits: Array) -> Array:
            return jnp.where(occurs, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)

        # Penalized logits may overflow. The order of the tokens does not change if a row is first divided by its
        # largest absolute value, so the penalized divided row decides which tokens of an overflowing row are likeliest.
        largest = jnp.max(jnp.where(jnp.isfinite(logits), jnp.abs(logits), 0), axis=-1, keepdims=True)
        return _limit_overflow(penalize(logits), penalize(logits / jnp.clip(largest, 1, 2.0**126)))


class Chain(eqx.Module):
    """Several transforms in order; a chain is a transform, too."""

    transforms: tuple[Transform, ...]

    @property
    def is_greedy(self) -> bool:
        """Whether a transform keeps only the likeliest token, so that no random numbers are needed."""
        return any(getattr(transform, "is_greedy", False) for transform in self.transforms)

    @checked
    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Apply the transforms from the first to the last."""
        logits = _to_float32(logits)
        for transform in self.transforms:
            previous, logits = logits, transform(logits, history)
            if logits.shape != previous.shape or not jnp.issubdtype(logits.dtype, jnp.floating):
                name = getattr(transform, "__name__", type(transform).__name__)
                raise ValueError(
                    f"{name}(logits, history): a transform returns one logit for each id, but from {previous.dtype}"
                    f"{[*previous.shape]} it made {logits.dtype}{[*logits.shape]}; return floats of the shape that it "
                    "gets, minus infinity for ids that must not be sampled."
                )
        return logits


def chain(*transforms: Transform) -> Chain:
    """Join transforms into one transform that applies them in order."""
    flat: list[Transform] = []
    for transform in transforms:
        flat += transform.transforms if isinstance(transform, Chain) else [transform]
    return Chain(tuple(flat))


def sampling(
    *,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    repetition_penalty: float | int | None = None,
) -> Chain:
    """Join the usual transforms in the usual order: penalty, temperature, top-k, top-p, min-p.

    transformers' `generate` has the same order. Truncations see the distribution after the temperature.
    """
    return chain(
        *(() if repetition_penalty is None else (RepetitionPenalty(repetition_penalty),)),
        *(() if temperature == 1 else (Temperature(temperature),)),
        *(() if top_k is None else (TopK(top_k),)),
        *(() if top_p is None else (TopP(top_p),)),
        *(() if min_p is None else (MinP(min_p),)),
    )


def check_sampling(
    *,
    temperature: float | int,
    top_k: int | None,
    top_p: float | int | None,
    min_p: float | int | None,
    repetition_penalty: float | int | None,
) -> None:
    """Raise the `ValueError` of `sampling` for a wrong setting, without making arrays."""
    _check_temperature(temperature)
    if top_k is not None:
        _check_top_k(top_k)
    if top_p is not None:
        _check_top_p(top_p)
    if min_p is not None:
        _check_min_p(min_p)
    if repetition_penalty is not None:
        _check_repetition_penalty(repetition_penalty)


def _check_temperature(temperature: float | int) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"Temperature({temperature}): temperatures are finite and at least 0; pass 0 for the likeliest token."
        )


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"TopK({top_k}): at least 1 token must be left; leave TopK out to keep all.")


def _check_top_p(top_p: float | int) -> None:
    if not 0 < top_p <= 1:
        raise ValueError(f"TopP({top_p}): a probability above 0 and at most 1 must be kept; 1 keeps all.")


def _check_min_p(min_p: float | int) -> None:
    if not 0 <= min_p <= 1:
        raise ValueError(f"MinP({min_p}): a share of the likeliest token's probability is from 0 to 1; 0 keeps all.")


def _check_repetition_penalty(penalty: float | int) -> None:
    if not 0 < penalty < float("inf"):
        raise ValueError(f"RepetitionPenalty({penalty}): a penalty must be finite and above 0; 1 changes nothing.")


def keep_top(logits: Float[Array, "batch vocab"], top_k: Int[Array, ""]) -> Float[Array, "batch vocab"]:
    """Keep the `top_k` largest logits, as `TopK` does, for a number of tokens that is traced."""
    falling = -jnp.sort(-logits, axis=-1)
    threshold = jax.lax.dynamic_slice_in_dim(falling, top_k - 1, 1, axis=1)
    return _mask_logits(_select_top(logits, threshold, top_k), logits)


def likeliest_ids(logits: Float[Array, "*batch vocab"]) -> Int[Array, "*batch"]:
    """Return `jnp.argmax(logits, axis=-1)`: each row's lowest id with the highest logit (or with NaN, if any)."""
    # XLA computes argmax as one reduction of pairs, which takes 3.6 ms on a CPU for 16 rows of 49,152 logits; these two
    # reductions take 1 ms.
    highest = jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where((logits == highest) | jnp.isnan(logits), ids, logits.shape[-1]), axis=-1)


def clamp_setting(setting: float | int) -> float:
    """Clamp a setting to 2^-100 .. 2^100, so that neither the setting nor its reciprocal overflows; 0 stays 0."""
    # Settings above 1e30 or below 1e-30 give the same results as these bounds. The reciprocal must not overflow either,
    # because XLA may replace a division by a product with the reciprocal.
    return float(min(max(setting, 2.0**-100), 2.0**100)) if setting else 0.0


def _as_float32(setting: float | int) -> Float[Array, ""]:
    return jnp.asarray(clamp_setting(setting), jnp.float32)


def _to_float32(logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    return logits.astype(at_least_float32(logits.dtype))


def _limit_overflow(
    logits: Float[Array, "batch vocab"], fallback: Float[Array, "batch vocab"]
) -> Float[Array, "batch vocab"]:
    """Return the logits; in rows whose maximum overflowed, keep only the tokens with the highest `fallback`.

    The distribution over these tokens is the limit of the row's distribution: two logits that overflow are equal, or so
    far apart that the probability of the smaller logit's token is 0 in floating point.
    """
    highest, best = (jnp.max(x, axis=-1, keepdims=True) for x in (logits, fallback))
    limit = jnp.where(fallback == best, jnp.zeros_like(fallback), -jnp.inf)
    return jnp.where(jnp.isinf(highest) & jnp.isfinite(best), limit, logits)


def _mask_logits(keep: Bool[Array, "batch vocab"], logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    return jnp.where(keep, logits, -jnp.inf)


def _select_top(
    logits: Float[Array, "batch vocab"],
    threshold: Float[Array, "batch 1"],
    count: int | Int[Array, ""] | Int[Array, "batch 1"],
) -> Bool[Array, "batch vocab"]:
    """Select `count` logits: all logits above `threshold`, and then logits equal to `threshold`, lowest ids first."""
    above, equal = logits > threshold, logits == threshold
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
