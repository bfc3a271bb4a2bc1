"""Who goes where: the experts that each token takes, or the tokens that each expert takes."""

import abc
import dataclasses
import fractions
import math
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from .._dtype import at_least_float32
from .._module import Module
from .._tokens import Tokens


class Routing(eqx.Module):
    """Each token's experts, best first, and what their outputs are multiplied by, in float32 at least.

    `experts` are distinct; -1 stands for none (padding, a second choice that was not drawn) and has weight 0. `scores`
    are the probabilities or affinities of all experts that balance losses read, `logits` what they were made of, before
    any noise was added. `load` is the smooth probability that a token takes an expert, of routers with noise in their
    choice (`NoisyTopKRouter`). Padding has finite scores and logits that mean nothing.
    """

    experts: Int[Array, "*batch seq top_k"]
    weights: Float[Array, "*batch seq top_k"]
    scores: Float[Array, "*batch seq experts"]
    logits: Float[Array, "*batch seq experts"]
    load: Float[Array, "*batch seq experts"] | None = None

    def counts(self, choices: int | None = None) -> Int[Array, "*batch experts"]:
        """How many tokens of each row took each expert, by their first `choices` (all by default)."""
        *batch, _, experts = self.scores.shape
        rows = math.prod(batch)
        chosen = self.experts[..., :choices]
        chosen = chosen.reshape(rows, math.prod(chosen.shape[-2:]))
        place = (jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.maximum(chosen, 0))
        counts = jnp.zeros((rows, experts), jnp.int32).at[place].add((chosen >= 0).astype(jnp.int32))
        return counts.reshape(*batch, experts)

    def gates(self) -> Float[Array, "*batch seq experts"]:
        """The weights at their experts' places, 0 elsewhere: G(x) of Shazeer et al. 2017."""
        chosen = self.experts.reshape(-1, self.experts.shape[-1])
        empty = jnp.zeros((len(chosen), self.scores.shape[-1]), self.weights.dtype)
        place = (jnp.arange(len(chosen), dtype=jnp.int32)[:, None], jnp.maximum(chosen, 0))
        return empty.at[place].add(self.weights.reshape(chosen.shape)).reshape(self.scores.shape)


class Slots(eqx.Module):
    """The tokens that each expert takes from each group, and what its outputs for them are multiplied by.

    `token` is the place within the group (a row, or all rows one after another); -1 marks an empty slot, of weight 0.
    """

    token: Int[Array, "groups experts capacity"]
    weight: Float[Array, "groups experts capacity"]


def routing_of(
    tokens: Tokens,
    experts: Int[Array, "*batch seq top_k"],
    weights: Float[Array, "*batch seq top_k"],
    scores: Float[Array, "*batch seq experts"],
    logits: Float[Array, "*batch seq experts"],
    load: Float[Array, "*batch seq experts"] | None = None,
) -> Routing:
    """The routing with padding sent nowhere."""
    real = is_real(tokens, experts.shape[:-1])[..., None]
    load = None if load is None else jnp.where(real, load, 0)
    return Routing(jnp.where(real, experts, -1), jnp.where(real, weights, 0), scores, logits, load)


def is_real(tokens: Tokens, shape: tuple[int, ...]) -> Bool[Array, "*batch seq"]:
    """Which tokens are no padding, for tokens of that shape."""
    return jnp.broadcast_to(tokens.positions >= 0, shape)


def router_logits(
    linear: Callable[[Array], Array], x: Float[Array, "*batch seq embed"]
) -> Float[Array, "*batch seq experts"]:
    """The map in float32 at least, and in full on every platform: small differences decide who goes where."""
    with jax.default_matmul_precision("highest"):
        return linear(x.astype(at_least_float32(x.dtype)))


def drawn_each(draw: Callable[[Key[Array, ""]], Array], keys: Key[Array, "*batch seq"]) -> Array:
    """`draw(key)` of every token's own key, and so the same in any batch and on any mesh."""
    numbers = jax.vmap(draw)(keys.reshape(-1))
    return numbers.reshape(*keys.shape, *numbers.shape[1:])


def best_places(merit: Float[Array, "*lead options"], count: int) -> Int[Array, "*lead count"]:
    """Where the `count` highest are, the highest first and of equal ones the lowest place; nothing to differentiate."""
    return jax.lax.top_k(jax.lax.stop_gradient(merit), count)[1]


def normalised(scores: Float[Array, "*batch seq some"], eps: float = 0.0) -> Float[Array, "*batch seq some"]:
    """The scores over their sum and `eps`; of scores that are all next to 0 nearly nothing, with a finite slope."""
    return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True) + eps, 1e-18)


def check_top_k(router: str, top_k: int, experts: int) -> None:
    """Raise unless a token can take `top_k` of the experts."""
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"{router}(top_k={top_k}, experts={experts}): a token takes at least one expert and each at most once; "
            "give 1 <= top_k <= experts."
        )


@dataclasses.dataclass(frozen=True)
class RouterFacts:
    """What a router says of itself.

    - `experts`: how many there are to choose from.
    - `choices`: how many a token takes at most; how many on average, where experts choose their tokens.
    - `among`: the tokens that a choice depends on, which a device must have: a "token" alone, all of its row
      ("sequence") or all of the call ("batch").
    - `gives_slots`: experts choose their tokens, so that it gives `Slots`.
    """

    experts: int
    choices: int | float
    among: str
    gives_slots: bool = False


class Router(Module):
    """What brings tokens and experts together, computed in float32 at least; padding goes nowhere.

    Noise is drawn from each token's own key and there is none without keys, so a token's experts are the same in any
    batch and on any mesh. Every device runs the whole of a router, on all features of a token.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> Routing | Slots:
        """Choose experts for each token, or tokens for each expert, and their weights."""

    @abc.abstractmethod
    def facts(self) -> RouterFacts:
        """What mixtures, transforms and costs must know."""

    def rebalanced(self, load: Num[Array, "*layers experts"], rate: float | Float[Array, ""]) -> "Router":
        """The router after a step in which experts had this load, moved by `rate`; the same unless it has a rule.

        In a stack its arrays have a dim of `layers` in front, as `load` has.
        """
        return self


Count = TypeVar("Count", int, jax.Array)
INT32_MAX = 2**31 - 1


def even_share(factor: float, number: Count, parts: int) -> Count:
    """Return `min(number, ceil(factor * number / parts))`, for a count on the host or counts on a device.

    The factor is taken as a fraction of whole numbers: 1.1 is 11/10, so 100 in 10 parts give 11, not 12. No product
    exceeds 32 bits.
    """
    share = min(fractions.Fraction(factor).limit_denominator(1000) / parts, fractions.Fraction(1))
    if isinstance(number, int):
        return -(-share.numerator * number // share.denominator)
    return _ceil_of_product(share, number)


def check_indices(call: str, what: str, number: int) -> None:
    """Raise a `ValueError` that begins with `call` if `number` places exceed 32-bit indices."""
    if number > INT32_MAX:
        raise ValueError(
            f"{call}: {number:,} {what} on one device, and indices of 32 bits reach {INT32_MAX:,}; run fewer tokens at "
            "once (more devices, more microbatches), or lower the factor."
        )


def _ceil_of_product(share: fractions.Fraction, number: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return `ceil(share * number)` for a share of at most 1, by long division over the digits of `number`."""
    numerator, denominator = share.numerator, share.denominator
    # The remainder is below the denominator: with one more digit, both products of a step fit into 32 bits.
    bits = 31 - denominator.bit_length()
    assert bits > 0, "a share of thousandths of fewer than a million parts"
    digits, number = -(-31 // bits), number.astype(jnp.uint32)
    quotient = remainder = jnp.zeros_like(number)
    for position in reversed(range(digits)):
        digit = (number >> (position * bits)) & (2**bits - 1)
        dividend = remainder * 2**bits + digit * numerator
        quotient = quotient * 2**bits + dividend // denominator
        remainder = dividend % denominator
    return (quotient + (remainder > 0).astype(jnp.uint32)).astype(jnp.int32)
