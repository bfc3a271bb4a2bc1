"""Routings of tokens to experts, the contract of routers, and functions that routers share."""

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
    """The experts of each token, best first, and their weights, in float32 at least.

    The experts of a token are distinct. The index -1 means no expert (for padding, or a second choice that was not
    sampled), with weight 0. `scores` are the probabilities or affinities of all experts, which balance losses read;
    `logits` are the router's logits before noise. `load` is the smooth probability that a token chooses an expert, from
    routers whose choice is noisy (`NoisyTopKRouter`). Scores and logits of padding are finite and meaningless.
    """

    experts: Int[Array, "*batch seq top_k"]
    weights: Float[Array, "*batch seq top_k"]
    scores: Float[Array, "*batch seq experts"]
    logits: Float[Array, "*batch seq experts"]
    load: Float[Array, "*batch seq experts"] | None = None

    def counts(self, choices: int | None = None) -> Int[Array, "*batch experts"]:
        """Return how many tokens of each row chose each expert, among their first `choices` (all by default)."""
        *batch, _, experts = self.scores.shape
        rows = math.prod(batch)
        chosen = self.experts[..., :choices]
        chosen = chosen.reshape(rows, math.prod(chosen.shape[-2:]))
        index = (jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.maximum(chosen, 0))
        counts = jnp.zeros((rows, experts), jnp.int32).at[index].add((chosen >= 0).astype(jnp.int32))
        return counts.reshape(*batch, experts)

    def gates(self) -> Float[Array, "*batch seq experts"]:
        """Return the weights as a vector over all experts, 0 for experts not chosen: G(x) of Shazeer et al. 2017."""
        chosen = self.experts.reshape(-1, self.experts.shape[-1])
        zeros = jnp.zeros((len(chosen), self.scores.shape[-1]), self.weights.dtype)
        index = (jnp.arange(len(chosen), dtype=jnp.int32)[:, None], jnp.maximum(chosen, 0))
        return zeros.at[index].add(self.weights.reshape(chosen.shape)).reshape(self.scores.shape)


class Slots(eqx.Module):
    """The tokens that each expert chose from each group, and the weights of the expert's outputs for these tokens.

    `token` is an index into the group (a row, or all rows one after another); -1 marks an empty slot, of weight 0.
    """

    token: Int[Array, "groups experts capacity"]
    weight: Float[Array, "groups experts capacity"]


@dataclasses.dataclass(frozen=True)
class RouterFacts:
    """Properties of a router that mixtures, parallel transforms and costs read.

    - `experts`: the number of experts to choose from.
    - `choices`: the maximum number of experts that a token takes; the average number if experts choose their tokens.
    - `among`: the tokens that a choice depends on, all of which one device must hold: "token" for the token alone,
      "sequence" for its row, or "batch" for all tokens of the call.
    - `expert_choice`: whether experts choose their tokens, so that the router returns `Slots`.
    """

    experts: int
    choices: int | float
    among: str
    expert_choice: bool = False


class Router(Module):
    """A choice of experts for tokens, or of tokens for experts, computed in float32 at least; padding is not routed.

    Noise is sampled with the key of each token, so a token has the same experts in any batch and on any mesh; without
    keys there is no noise. Every device runs the whole router, on all features of a token.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> Routing | Slots:
        """Choose experts for each token, or tokens for each expert, and their weights."""

    @abc.abstractmethod
    def facts(self) -> RouterFacts:
        """Return the properties that mixtures, parallel transforms and costs read."""

    def rebalance(self, load: Num[Array, "*layers experts"], rate: float | Float[Array, ""]) -> "Router":
        """Return the router after a step in which experts had this load, adjusted by `rate`.

        By default the router is unchanged. In a stack, the router's arrays have a dim of `layers` in front, as `load`
        has.
        """
        return self


def mask_padding(
    tokens: Tokens,
    experts: Int[Array, "*batch seq top_k"],
    weights: Float[Array, "*batch seq top_k"],
    scores: Float[Array, "*batch seq experts"],
    logits: Float[Array, "*batch seq experts"],
    load: Float[Array, "*batch seq experts"] | None = None,
) -> Routing:
    """Return the routing of these choices, in which padding has no expert.

    Args:
        tokens: The tokens, whose positions mark padding.
        experts: The chosen experts.
        weights: The weights of the choices.
        scores: Probabilities or affinities of all experts.
        logits: The router's logits, before noise.
        load: The smooth probability of each choice, or None.
    """
    real = is_real(tokens, experts.shape[:-1])[..., None]
    load = None if load is None else jnp.where(real, load, 0)
    return Routing(jnp.where(real, experts, -1), jnp.where(real, weights, 0), scores, logits, load)


def is_real(tokens: Tokens, shape: tuple[int, ...]) -> Bool[Array, "*batch seq"]:
    """Return whether each token is no padding, broadcast to `shape`."""
    return jnp.broadcast_to(tokens.positions >= 0, shape)


def router_logits(
    linear: Callable[[Array], Array], x: Float[Array, "*batch seq embed"]
) -> Float[Array, "*batch seq experts"]:
    """Apply a router's map in float32 at least, and at full precision on every platform.

    Small differences of logits decide which expert a token takes.
    """
    with jax.default_matmul_precision("highest"):
        return linear(x.astype(at_least_float32(x.dtype)))


def sample_per_token(sample: Callable[[Key[Array, ""]], Array], keys: Key[Array, "*batch seq"]) -> Array:
    """Return `sample(key)` for the key of each token, which is the same in any batch and on any mesh."""
    samples = jax.vmap(sample)(keys.reshape(-1))
    return samples.reshape(*keys.shape, *samples.shape[1:])


def top_indices(scores: Float[Array, "*lead options"], count: int) -> Int[Array, "*lead count"]:
    """Return the indices of the `count` highest scores, in descending order; of equal scores, the lowest index first.

    No gradient flows into the scores.
    """
    return jax.lax.top_k(jax.lax.stop_gradient(scores), count)[1]


def normalize_scores(scores: Float[Array, "*batch seq _"], eps: float = 0.0) -> Float[Array, "*batch seq _"]:
    """Divide scores by their sum plus `eps`.

    Scores that are all close to 0 stay close to 0, with a finite gradient.
    """
    return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True) + eps, 1e-18)


def check_top_k(router: str, top_k: int, experts: int) -> None:
    """Raise a `ValueError` unless a token can take `top_k` of the experts."""
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"{router}(top_k={top_k}, experts={experts}): a token takes at least one expert and each at most once; "
            "give 1 <= top_k <= experts."
        )


# Capacities: fractions of counts, exact at any size in a device's 32-bit integers.

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
    """Raise a `ValueError` that begins with `call` if indices up to `number` exceed 32 bits."""
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
    assert bits > 0, "the denominator of the share must be below 2^30"
    digits, number = -(-31 // bits), number.astype(jnp.uint32)
    quotient = remainder = jnp.zeros_like(number)
    for position in reversed(range(digits)):
        digit = (number >> (position * bits)) & (2**bits - 1)
        dividend = remainder * 2**bits + digit * numerator
        quotient = quotient * 2**bits + dividend // denominator
        remainder = dividend % denominator
    return (quotient + (remainder > 0).astype(jnp.uint32)).astype(jnp.int32)
