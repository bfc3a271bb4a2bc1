"""Routers that leave a part of the choice to chance while training."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._linear import Linear, LinearMap
from .._tokens import Tokens
from ._contract import Router, RouterFacts
from ._routing import best_places, check_top_k, drawn_each, router_logits, Routing, routing_of


class NoisyTopKRouter(Router):
    """Softmax over the `top_k` highest of `H(x) = W x + N(0, 1) softplus(W_noise x)` (Shazeer et al. 2017, eq. 3-5).

    Its routing has the `load` that `NoisyLoad` balances: the probability that an expert is chosen if its noise alone
    is drawn again, `P(x, i) = Phi((W x - kth_excluding(H(x), k, i)) / softplus(W_noise x))` (eq. 8-9), 1 where every
    expert is chosen. The scores are the softmax of `H` over all experts. Without keys `H` is `W x`.
    """

    linear: LinearMap
    noise: LinearMap
    top_k: int = eqx.field(static=True)

    def __init__(self, *, embed: int, experts: int, top_k: int, std: float | None = 0.0, key: Key[Array, ""]):
        """Draw both maps; by default they are zero, as in the paper: all experts are equal, and noise decides."""
        check_top_k("NoisyTopKRouter", top_k, experts)
        first, second = jax.random.split(key)
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=first)
        self.noise = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=second)
        self.top_k = top_k

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> Routing:
        """Choose the `top_k` experts that are best under this token's noise."""
        logits = router_logits(self.linear, x)
        # The floor keeps the quotient's slope finite where softplus underflows.
        deviation = jnp.maximum(jax.nn.softplus(router_logits(self.noise, x)), 1e-6)
        noisy = logits
        if tokens.keys is not None:
            draw = lambda key: jax.random.normal(key, logits.shape[-1:], logits.dtype)
            noisy = logits + drawn_each(draw, tokens.keys) * deviation
        experts = best_places(noisy, self.top_k)
        weights = jax.nn.softmax(jnp.take_along_axis(noisy, experts, axis=-1))
        load = self._load(logits, noisy, deviation)
        return routing_of(tokens, experts, weights, jax.nn.softmax(noisy), logits, load)

    def facts(self) -> RouterFacts:
        """Each token chooses `top_k`."""
        return RouterFacts(self.linear.sizes["candidates"], self.top_k, "token")

    def _load(
        self,
        logits: Float[Array, "*batch seq experts"],
        noisy: Float[Array, "*batch seq experts"],
        deviation: Float[Array, "*batch seq experts"],
    ) -> Float[Array, "*batch seq experts"]:
        if self.top_k == noisy.shape[-1]:
            return jnp.ones_like(noisy)
        # What an expert must beat is the `top_k`-th highest of the others: one place further down for those above it.
        best = jax.lax.top_k(noisy, self.top_k + 1)[0]
        last, following = best[..., self.top_k - 1 : self.top_k], best[..., self.top_k :]
        return jax.scipy.special.ndtr((logits - jnp.where(noisy >= last, following, last)) / deviation)


class RandomSecondRouter(Router):
    """The two likeliest experts, the second only at times (GShard, Lepikhin et al. 2020, algorithm 1).

    Weights are `g1 / (g1 + g2)` and `g2 / (g1 + g2)` of the softmax. While training, the second is taken with
    probability `2 g2 / (g1 + g2)`, which is at most 1; the first keeps its weight either way. Without keys both are.
    """

    linear: LinearMap

    def __init__(self, *, embed: int, experts: int, std: float | None = None, key: Key[Array, ""]):
        """Draw the map."""
        check_top_k("RandomSecondRouter", 2, experts)
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=key)

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> Routing:
        """Choose one or two experts for each token."""
        logits = router_logits(self.linear, x)
        experts = best_places(logits, 2)
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1))
        if tokens.keys is not None:
            draws = drawn_each(lambda key: jax.random.uniform(key, (1,), logits.dtype), tokens.keys)
            taken = jnp.concatenate([jnp.ones_like(draws, bool), 2 * weights[..., 1:] > draws], axis=-1)
            experts, weights = jnp.where(taken, experts, -1), jnp.where(taken, weights, 0)
        return routing_of(tokens, experts, weights, jax.nn.softmax(logits), logits)

    def facts(self) -> RouterFacts:
        """Each token chooses two at most."""
        return RouterFacts(self.linear.sizes["candidates"], 2, "token")
