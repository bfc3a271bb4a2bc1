"""Changes to the logits before a token is drawn: temperature, truncations, penalties; each a module, in any order."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class History(eqx.Module):
    """What each row holds before the draw, prompt included; slots from a row's length on are empty."""

    ids: Int[Array, "batch seq"]
    lengths: Int[Array, "batch"]


# `(logits, history) -> logits`, where a token that must not be drawn gets minus infinity.
Transform = Callable[[Array, History], Array]


class Temperature(eqx.Module):
    """Logits over `temperature`; at 0 only the likeliest token is left, of equal ones the one with the lowest id.

    The value is data, so that another one needs no other program; whether it is 0 is not.
    """

    temperature: Float[Array, ""]
    is_greedy: bool = eqx.field(static=True)

    def __init__(self, temperature: float | int):
        if not 0 <= temperature < float("inf"):
            raise ValueError(
                f"Temperature({temperature}): temperatures are finite and at least 0; pass 0 for the likeliest token."
            )
        self.temperature, self.is_greedy = jnp.asarray(temperature, jnp.float32), temperature == 0

    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Flatten the distribution above 1, sharpen it below."""
        if self.is_greedy:
            likeliest = jnp.argmax(logits, axis=-1, keepdims=True)
            return _only(jnp.arange(logits.shape[1]) == likeliest, logits)
        return logits / self.temperature.astype(logits.dtype)


class TopK(eqx.Module):
    """The `top_k` likeliest tokens (Fan et al. 2018), no more: of equal ones those with the lowest ids."""

    top_k: int = eqx.field(static=True)

    def __check_init__(self):
        if self.top_k < 1:
            raise ValueError(f"TopK({self.top_k}): at least 1 token must be left; leave TopK out to keep all.")

    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Hide all but the first `top_k`."""
        if self.top_k >= logits.shape[1]:
            return logits
        least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
        return _only(_at_least(logits, least, self.top_k), logits)


class TopP(eqx.Module):
    """The fewest likeliest tokens that together have probability `top_p` (nucleus sampling, Holtzman et al. 2020)."""

    top_p: Float[Array, ""]

    def __init__(self, top_p: float | int):
        if not 0 < top_p <= 1:
            raise ValueError(f"TopP({top_p}): a probability above 0 and at most 1 must be kept; 1 keeps all.")
        self.top_p = jnp.asarray(top_p, jnp.float32)

    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Hide every token before which the likelier ones already make up `top_p`; of equal ones lower ids go first."""
        falling = -jnp.sort(-logits, axis=-1)
        share = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share
        # The sum of all rounds to 1 before the end is reached, where `top_p` is 1 nothing must be lost to that.
        inside = (before < self.top_p.astype(logits.dtype)) | (self.top_p >= 1)
        count = jnp.maximum(jnp.sum(inside, axis=-1, keepdims=True), 1)
        least = jnp.take_along_axis(falling, count - 1, axis=-1)
        return _only(_at_least(logits, least, count), logits)


class MinP(eqx.Module):
    """The tokens at least `min_p` times as likely as the likeliest (Nguyen et al. 2024)."""

    min_p: Float[Array, ""]

    def __init__(self, min_p: float | int):
        if not 0 <= min_p <= 1:
            raise ValueError(
                f"MinP({min_p}): a share of the likeliest token's probability is from 0 to 1; 0 keeps all."
            )
        self.min_p = jnp.asarray(min_p, jnp.float32)

    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Hide what falls short, told by `logit >= peak + log(min_p)`."""
        peak = jnp.max(logits, axis=-1, keepdims=True)
        return _only(logits >= peak + jnp.log(self.min_p).astype(logits.dtype), logits)


class RepetitionPenalty(eqx.Module):
    """Of each token that the row holds, prompt included: positive logits over `penalty`, negative ones times it.

    CTRL's penalty (Keskar et al. 2019) as it is commonly computed: above 1 it discourages repetition, below 1 invites
    it. How often a token occurred makes no difference; padding does not count.
    """

    penalty: Float[Array, ""]

    def __init__(self, penalty: float | int):
        if not 0 < penalty < float("inf"):
            raise ValueError(f"RepetitionPenalty({penalty}): a penalty must be finite and above 0; 1 changes nothing.")
        self.penalty = jnp.asarray(penalty, jnp.float32)

    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Penalise what is in the history."""
        batch, vocab = logits.shape
        held = jnp.arange(history.ids.shape[1]) < history.lengths[:, None]
        ids = jnp.where(held, history.ids, vocab)  # beyond the last token: dropped
        seen = jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], ids].set(True, mode="drop")
        penalty = self.penalty.astype(logits.dtype)
        return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


class Chain(eqx.Module):
    """Transforms in a row, itself a transform."""

    transforms: tuple[Transform, ...]

    @property
    def is_greedy(self) -> bool:
        """Whether one of them leaves the likeliest token alone, so that there is nothing to draw."""
        return any(isinstance(transform, Temperature) and transform.is_greedy for transform in self.transforms)

    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Apply them from the first to the last."""
        for transform in self.transforms:
            logits = transform(logits, history)
        return logits


def chain(*transforms: Transform) -> Chain:
    """One transform that applies `transforms` in the order given."""
    flat = (part.transforms if isinstance(part, Chain) else (part,) for part in transforms)
    return Chain(tuple(part for parts in flat for part in parts))


def sampling(
    *,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    repetition_penalty: float | int | None = None,
) -> Chain:
    """The usual transforms in the usual order: penalty, temperature, top-k, top-p, min-p; those not given are left out.

    It is the order of Hugging Face's `generate`: truncations see the distribution that the temperature has shaped.
    """
    return chain(
        *(() if repetition_penalty is None else (RepetitionPenalty(repetition_penalty),)),
        *(() if temperature == 1 else (Temperature(temperature),)),
        *(() if top_k is None else (TopK(top_k),)),
        *(() if top_p is None else (TopP(top_p),)),
        *(() if min_p is None else (MinP(min_p),)),
    )


def _only(kept: Bool[Array, "batch vocab"], logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    return jnp.where(kept, logits, -jnp.inf)


def _at_least(
    logits: Float[Array, "batch vocab"], least: Float[Array, "batch 1"], count: int | Int[Array, "batch 1"]
) -> Bool[Array, "batch vocab"]:
    """The logits above `least` and, of those equal to it, as many with the lowest ids as make up `count`."""
    above, equal = logits > least, logits == least
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
