"""Routers that send each token to its best experts."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Num

from .._dims import float32_at_least
from .._dtype import at_least_float32
from .._linear import Linear, LinearMap
from .._norm import Norm
from .._tokens import Tokens
from ._balance import updated_selection_bias
from ._routing import (
    best_places,
    check_top_k,
    drawn_each,
    even_share,
    is_real,
    normalised,
    Router,
    router_logits,
    RouterFacts,
    Routing,
    routing_of,
    Slots,
)


class TopKRouter(Router):
    """The `top_k` experts of the highest score; equal scores: the lowest number.

    Scores `s = score(W x + b)` are softmax, sigmoid or sqrt_softplus. Weights are the scores of the chosen, with
    `normalise` over their sum (of a softmax: the softmax of the chosen logits), times `scale`. `balanced` gives a
    `selection_bias` that is added to the scores for the choice alone and has no gradient: `updated_selection_bias`
    changes it. Of `groups` of neighbouring experts only the `kept_groups` best can be chosen from, by the `group_score`
    `"max"` or `"top2"`, the sum of the two best (bias included). While training, `jitter` multiplies each channel of
    the router's input by a number from U(1 - jitter, 1 + jitter); the logits are then those of the multiplied input.
    With a `norm` the map reads its output, and logits are multiplied by `logit_scale`; `expert_scale` is a learned
    factor on the weights of each expert (Gemma 4).

    - all experts: `top_k=experts`.
    - Switch (Fedus et al. 2021, eq. 1-2): `top_k=1, jitter=0.01`; not normalised, or the router would learn nothing.
    - Mixtral (arXiv:2401.04088, section 2.1), gpt-oss (with `bias`), Qwen: `normalise=True`; OLMoE, Qwen2: without.
    - DeepSeek-V2 (arXiv:2405.04434, section 2.2): softmax, `groups=8, kept_groups=3, scale=16`.
    - DeepSeek-V3 (arXiv:2412.19437, eq. 12-16), GLM-4.5: sigmoid, `normalise=True`, `balanced=True`,
      `groups=8, kept_groups=4, group_score="top2", scale=2.5`.
    """

    linear: LinearMap
    top_k: int = eqx.field(static=True)
    score: str = eqx.field(static=True)
    normalise: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    kept_groups: int = eqx.field(static=True)
    group_score: str = eqx.field(static=True)
    jitter: float = eqx.field(static=True)
    norm: Norm | None
    logit_scale: float = eqx.field(static=True)
    expert_scale: Float[Array, "candidates"] | None
    normalise_eps: float = eqx.field(static=True)
    selection_bias: Float[Array, "candidates"] | None = float32_at_least()

    def __init__(
        self,
        *,
        embed: int,
        experts: int,
        top_k: int,
        score: str = "softmax",
        normalise: bool = False,
        normalise_eps: float = 0.0,
        scale: float = 1.0,
        groups: int = 1,
        kept_groups: int = 1,
        group_score: str = "max",
        balanced: bool = False,
        bias: bool = False,
        jitter: float = 0.0,
        norm: Norm | None = None,
        logit_scale: float = 1.0,
        scales_experts: bool = False,
        std: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the map. Raises a `ValueError` for choices that no routing can satisfy.

        Args:
            embed: Channels of a token.
            experts: How many there are to choose from.
            top_k: How many each token has.
            score: `"softmax"`, `"sigmoid"` or `"sqrt_softplus"` of the logits.
            normalise: Whether the weights of the chosen add up to `scale`.
            normalise_eps: What is added to their sum before; not of a softmax (LFM2: 1e-6).
            scale: What the weights are multiplied by.
            groups: Groups of neighbouring experts.
            kept_groups: The best groups, from which alone experts are chosen.
            group_score: By what groups are compared: `"max"`, or `"top2"`, the sum of the two best.
            balanced: Whether there is a `selection_bias`, which follows the load.
            bias: Whether the map has a bias.
            jitter: While training, by how much the input's channels are varied.
            norm: A norm of the map's input.
            logit_scale: What the logits are multiplied by.
            scales_experts: Whether there is an `expert_scale`.
            std: The deviation of the map's weights; None: as any linear map's.
            key: For the weights.
        """
        check_top_k("TopKRouter", top_k, experts)
        _check_groups(experts, top_k, groups, kept_groups, group_score)
        if score not in SCORES:
            raise ValueError(f"TopKRouter(score={score!r}): the scores are {', '.join(SCORES)}.")
        if not 0 <= jitter < 1:
            raise ValueError(f"TopKRouter(jitter={jitter}): factors lie in 1 -+ jitter; give a number in [0, 1).")
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, bias=bias, std=std, key=key)
        self.selection_bias = jnp.zeros(experts, jnp.float32) if balanced else None
        self.norm, self.logit_scale = norm, logit_scale
        self.expert_scale = jnp.ones(experts, jnp.float32) if scales_experts else None
        self.top_k, self.score, self.normalise, self.scale = top_k, score, normalise, scale
        self.normalise_eps = normalise_eps
        self.groups, self.kept_groups, self.group_score, self.jitter = groups, kept_groups, group_score, jitter

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> Routing:
        """Choose the `top_k` best experts for each token."""
        if self.jitter and tokens.keys is not None:
            draw = lambda key: jax.random.uniform(key, x.shape[-1:], jnp.float32, 1 - self.jitter, 1 + self.jitter)
            exact = at_least_float32(x.dtype)
            x = x.astype(exact) * drawn_each(draw, tokens.keys).astype(exact)
        x = x if self.norm is None else self.norm(x)
        logits = self.logit_scale * router_logits(self.linear, x)
        scores = SCORES[self.score](logits)
        # Chosen by logits, since rounding makes sigmoids of 17 and more equal.
        experts = self._chosen(logits if self.selection_bias is None and self.groups == 1 else scores)
        if self.normalise and self.score == "softmax":
            weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1))
        else:
            weights = jnp.take_along_axis(scores, experts, axis=-1)
            weights = normalised(weights, self.normalise_eps) if self.normalise else weights
        if self.expert_scale is not None:
            weights = weights * self.expert_scale.astype(weights.dtype)[experts]
        return routing_of(tokens, experts, self.scale * weights, scores, logits)

    def facts(self) -> RouterFacts:
        """Each token chooses `top_k`."""
        return RouterFacts(self.linear.sizes["candidates"], self.top_k, "token")

    def rebalanced(self, load: Num[Array, "*layers experts"], rate: float | Float[Array, ""]) -> "TopKRouter":
        """With its selection bias, where it has one, moved towards an even load (`updated_selection_bias`)."""
        if self.selection_bias is None:
            return self
        return eqx.tree_at(lambda r: r.selection_bias, self, updated_selection_bias(self.selection_bias, load, rate))

    def _chosen(self, scores: Float[Array, "*batch seq experts"]) -> Int[Array, "*batch seq top_k"]:
        merit = jax.lax.stop_gradient(scores)
        if self.selection_bias is not None:
            merit = merit + jax.lax.stop_gradient(self.selection_bias).astype(merit.dtype)
        if self.groups > 1:
            grouped = merit.reshape(*merit.shape[:-1], self.groups, -1)
            best = jnp.sum(jax.lax.top_k(grouped, GROUP_SCORES[self.group_score])[0], axis=-1)
            kept = best_places(best, self.kept_groups)
            open_groups = jnp.any(kept[..., None] == jnp.arange(self.groups, dtype=jnp.int32), axis=-2)
            merit = jnp.where(open_groups[..., None], grouped, -jnp.inf).reshape(merit.shape)
        return best_places(merit, self.top_k)


def _sqrt_softplus(logits: Float[Array, "*batch seq experts"]) -> Float[Array, "*batch seq experts"]:
    # The square root has no slope at 0, which softplus reaches by underflow.
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), float(jnp.finfo(logits.dtype).tiny)))


def _check_groups(experts: int, top_k: int, groups: int, kept_groups: int, group_score: str) -> None:
    call = f"TopKRouter(experts={experts}, top_k={top_k}, groups={groups}, kept_groups={kept_groups})"
    if group_score not in GROUP_SCORES:
        raise ValueError(f"TopKRouter(group_score={group_score!r}): the group scores are {', '.join(GROUP_SCORES)}.")
    if groups < 1 or experts % groups:
        raise ValueError(f"{call}: groups are of equal size; give a number of groups that divides {experts} experts.")
    size = experts // groups
    if not 1 <= kept_groups <= groups:
        raise ValueError(f"{call}: of {groups} groups at least one and at most all are kept; change kept_groups.")
    if kept_groups * size < top_k:
        raise ValueError(
            f"{call}: {kept_groups} groups of {size} experts leave {kept_groups * size} to choose {top_k} from; "
            "keep more groups or lower top_k."
        )
    if groups > 1 and size < GROUP_SCORES[group_score]:
        raise ValueError(
            f"{call}, group_score={group_score!r}: the score sums the two best experts of a group, and a group has "
            f"{size}; make fewer groups or score them by 'max'."
        )


SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}
GROUP_SCORES = {"max": 1, "top2": 2}  # how many of a group's best experts are summed


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
