"""Expert-choice routing: each expert chooses its best tokens."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._int_fractions import even_share
from .._linear import Linear, LinearMap
from .._tokens import Tokens
from ._contract import Router, RouterFacts
from ._routing import best_places, is_real, router_logits, Slots


class ExpertChoiceRouter(Router):
    """Each expert takes the `ceil(factor * n / experts)` tokens that score it highest (Zhou et al. 2022, eq. 1-2).

    Scores are the softmax over experts, and the weights; equal scores: the earlier token. `n` counts the real tokens of
    a group: of a row (`per="sequence"`) or of the whole call (`per="batch"`), so that padding changes nothing. A
    token is taken by `factor` experts on average, and possibly by none or by all. The load is balanced by construction.
    Which tokens are taken depends on later ones: the future leaks into a causal model, and a prompt is routed in
    another way alone than with its continuation.
    """

    linear: LinearMap
    factor: float = eqx.field(static=True)
    per: str = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        experts: int,
        factor: float,
        per: str = "sequence",
        std: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the map. Raises a `ValueError` for a factor below 0.01 or above `experts`, or an unknown group.

        Args:
            embed: Channels of a token.
            experts: How many there are to choose from.
            factor: The experts that a token has on average.
            per: Of what an expert chooses its tokens: `"sequence"` or `"batch"`.
            std: The deviation of the map's weights; None: as any linear map's.
            key: For the weights.
        """
        if not 0.01 <= factor <= experts:
            raise ValueError(
                f"ExpertChoiceRouter(factor={factor}, experts={experts}): a token is taken by `factor` experts on "
                "average and by each at most once; give 0.01 <= factor <= experts."
            )
        if per not in ("sequence", "batch"):
            raise ValueError(f"ExpertChoiceRouter(per={per!r}): experts choose among each 'sequence' or the 'batch'.")
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=key)
        self.factor, self.per = factor, per

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> Slots:
        """Choose tokens for each expert, its best first."""
        scores = jax.nn.softmax(router_logits(self.linear, x))
        *batch, seq, experts = scores.shape
        groups = math.prod(batch) if self.per == "sequence" else 1
        by_expert = jnp.swapaxes(scores.reshape(groups, -1, experts), 1, 2)
        real = is_real(tokens, (*batch, seq)).reshape(groups, 1, -1)
        capacity = even_share(self.factor, real.shape[-1], experts)
        token = best_places(jnp.where(real, by_expert, -jnp.inf), capacity)
        weight = jnp.take_along_axis(by_expert, token, axis=-1)
        number = jnp.sum(real, axis=-1, keepdims=True, dtype=jnp.int32)
        is_filled = jnp.arange(capacity, dtype=jnp.int32) < even_share(self.factor, number, experts)
        return Slots(jnp.where(is_filled, token, -1), jnp.where(is_filled, weight, 0))

    def facts(self) -> RouterFacts:
        """Experts choose, so that a token takes `factor` on average."""
        return RouterFacts(self.linear.sizes["candidates"], self.factor, self.per, gives_slots=True)
