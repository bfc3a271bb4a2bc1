"""Routers: the best experts of each token, choices with noise, and experts that choose their tokens themselves."""

import dataclasses
import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from .._dtype import at_least_float32
from .._linear import Linear, LinearMap
from .._model_contracts import ReadsIds
from .._module import float32_field
from .._norm import Norm
from .._tokens import Tokens
from . import _routing as routing
from ._balance import update_selection_bias


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """Groups of neighbouring experts. A token first chooses its best groups, and then experts from these groups.

    In published configs (DeepSeek), `count` is named `n_group`, and `top_k` is named `topk_group`.
    """

    count: int
    """The number of groups, all of equal size."""
    top_k: int = 1
    """The number of groups that a token chooses."""
    score: str = "max"
    """The score of a group: the score of its best expert (`"max"`), or the sum of its two best scores (`"top2"`)."""

    def check(self, experts: int, top_k: int) -> None:
        """Raise a `ValueError` unless tokens can choose `top_k` of `experts` experts from these groups."""
        call = f"TopKRouter(experts={experts}, top_k={top_k}, groups={self})"
        if self.score not in _SUMMED_EXPERTS:
            raise ValueError(f"{call}: the group scores are {', '.join(_SUMMED_EXPERTS)}, not {self.score!r}.")
        if self.count < 1 or experts % self.count:
            raise ValueError(
                f"{call}: groups are of equal size; give a count of groups that divides {experts} experts."
            )
        size = experts // self.count
        if not 1 <= self.top_k <= self.count:
            raise ValueError(
                f"{call}: a token chooses at least one and at most all of {self.count} groups; change the top_k of the "
                "groups."
            )
        if self.top_k * size < top_k:
            raise ValueError(
                f"{call}: {self.top_k} groups of {size} experts have {self.top_k * size} experts to choose {top_k} "
                "from; choose more groups or lower top_k."
            )
        if self.count > 1 and size < _SUMMED_EXPERTS[self.score]:
            raise ValueError(
                f"{call}: the score {self.score!r} sums the two best experts of a group, and a group has {size}; make "
                "fewer groups or score them by 'max'."
            )


class TopKRouter(routing.Router):
    """A router that chooses for each token the `top_k` experts with the highest scores; ties go to the lowest index.

    Scores are `s = score(W x + b)` with softmax, sigmoid or sqrt_softplus. The weights are the scores of the chosen
    experts times `scale`. With `normalize` they are first divided by their sum (for a softmax: the softmax of the
    chosen logits). `balanced` adds a `selection_bias` to the scores, only for the choice and without a gradient;
    `update_selection_bias` changes the bias. With `groups` a token chooses experts from its best groups; the scores of
    groups include the selection bias. In training, `jitter` multiplies each channel of the router's input by a number
    from U(1 - jitter, 1 + jitter), so the logits have this noise too. With a `norm` the map reads the norm's output.
    `logit_scale` is a factor of the logits, and `expert_scale` a learned factor of each expert's weight (Gemma 4).

    - all experts: `top_k=experts`.
    - Switch (Fedus et al. 2021, eq. 1-2): `top_k=1, jitter=0.01`; not normalised, or the router would learn nothing.
    - Mixtral (arXiv:2401.04088, section 2.1), gpt-oss (with `bias`), Qwen: `normalize=True`; OLMoE, Qwen2: without.
    - DeepSeek-V2 (arXiv:2405.04434, section 2.2): softmax, `groups=ExpertGroups(8, 3), scale=16`.
    - DeepSeek-V3 (arXiv:2412.19437, eq. 12-16), GLM-4.5: sigmoid, `normalize=True`, `balanced=True`,
      `groups=ExpertGroups(8, 4, "top2"), scale=2.5`.
    """

    linear: LinearMap
    top_k: int = eqx.field(static=True)
    score: str = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    groups: ExpertGroups | None = eqx.field(static=True)
    jitter: float = eqx.field(static=True)
    norm: Norm | None
    logit_scale: float = eqx.field(static=True)
    expert_scale: Float[Array, "candidates"] | None
    normalize_eps: float = eqx.field(static=True)
    selection_bias: Float[Array, "candidates"] | None = float32_field()

    def __init__(
        self,
        *,
        embed: int,
        experts: int,
        top_k: int,
        score: str = "softmax",
        normalize: bool = False,
        normalize_eps: float = 0.0,
        scale: float = 1.0,
        groups: ExpertGroups | None = None,
        balanced: bool = False,
        bias: bool = False,
        jitter: float = 0.0,
        norm: Norm | None = None,
        logit_scale: float = 1.0,
        scales_experts: bool = False,
        std: float | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the map. Raises a `ValueError` for choices that no routing can satisfy.

        Args:
            embed: Channels of a token.
            experts: The number of experts to choose from.
            top_k: The number of experts of each token.
            score: `"softmax"`, `"sigmoid"` or `"sqrt_softplus"` of the logits.
            normalize: Whether the weights of the chosen experts add up to `scale`.
            normalize_eps: Added to the sum of weights before the division; not for a softmax (LFM2: 1e-6).
            scale: A factor of the weights.
            groups: Groups of experts; a token first chooses its best groups. None: one group.
            balanced: Whether there is a `selection_bias`, which follows the load.
            bias: Whether the map has a bias.
            jitter: The largest relative change of the input's channels while training.
            norm: A norm of the map's input.
            logit_scale: A factor of the logits.
            scales_experts: Whether there is an `expert_scale`.
            std: Standard deviation of the map's weights; None: the default of `Linear`.
            key: Random key for the weights.
        """
        routing.check_top_k("TopKRouter", top_k, experts)
        if groups is not None:
            groups.check(experts, top_k)
        _check_score("TopKRouter", score)
        if not 0 <= jitter < 1:
            raise ValueError(
                f"TopKRouter(jitter={jitter}): factors are between 1 - jitter and 1 + jitter; give a number in [0, 1)."
            )
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, bias=bias, std=std, key=key)
        self.selection_bias = jnp.zeros(experts, jnp.float32) if balanced else None
        self.norm, self.logit_scale = norm, logit_scale
        self.expert_scale = jnp.ones(experts, jnp.float32) if scales_experts else None
        self.top_k, self.score, self.normalize, self.scale = top_k, score, normalize, scale
        self.normalize_eps, self.jitter = normalize_eps, jitter
        self.groups = None if groups is None or groups.count == 1 else groups

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> routing.Routing:
        """Choose the `top_k` best experts for each token."""
        if self.jitter and tokens.keys is not None:
            bounds = {"minval": 1 - self.jitter, "maxval": 1 + self.jitter}
            sample = functools.partial(jax.random.uniform, shape=x.shape[-1:], dtype=jnp.float32, **bounds)
            wide = at_least_float32(x.dtype)
            x = x.astype(wide) * routing.sample_per_token(sample, tokens.keys).astype(wide)
        x = x if self.norm is None else self.norm(x)
        logits = self.logit_scale * routing.router_logits(self.linear, x)
        scores = SCORES[self.score](logits)
        # Logits are compared instead of scores if possible, because rounding makes sigmoids of 17 and more equal.
        experts = self._choose_experts(logits if self.selection_bias is None and self.groups is None else scores)
        if self.normalize and self.score == "softmax":
            weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1))
        else:
            weights = jnp.take_along_axis(scores, experts, axis=-1)
            weights = routing.normalize_scores(weights, self.normalize_eps) if self.normalize else weights
        if self.expert_scale is not None:
            weights = weights * self.expert_scale.astype(weights.dtype)[experts]
        return routing.mask_padding(tokens, experts, self.scale * weights, scores, logits)

    def facts(self) -> routing.RouterFacts:
        """State that each token chooses `top_k` experts by itself."""
        return routing.RouterFacts(self.linear.sizes["candidates"], self.top_k, "token")

    def rebalance(self, load: Num[Array, "*layers experts"], rate: float | Float[Array, ""]) -> "TopKRouter":
        """Return the router with its selection bias, if it has one, moved towards an even load."""
        if self.selection_bias is None:
            return self
        return eqx.tree_at(lambda r: r.selection_bias, self, update_selection_bias(self.selection_bias, load, rate))

    def _choose_experts(self, scores: Float[Array, "*batch seq experts"]) -> Int[Array, "*batch seq top_k"]:
        scores = jax.lax.stop_gradient(scores)
        if self.selection_bias is not None:
            scores = scores + jax.lax.stop_gradient(self.selection_bias).astype(scores.dtype)
        if self.groups is not None:
            by_group = scores.reshape(*scores.shape[:-1], self.groups.count, -1)
            best_experts = jax.lax.top_k(by_group, _SUMMED_EXPERTS[self.groups.score])[0]
            chosen_groups = routing.top_indices(jnp.sum(best_experts, axis=-1), self.groups.top_k)
            is_chosen = chosen_groups[..., None] == jnp.arange(self.groups.count, dtype=jnp.int32)
            is_chosen = jnp.any(is_chosen, axis=-2)
            scores = jnp.where(is_chosen[..., None], by_group, -jnp.inf).reshape(scores.shape)
        return routing.top_indices(scores, self.top_k)


def _sqrt_softplus(logits: Float[Array, "*batch seq experts"]) -> Float[Array, "*batch seq experts"]:
    # Softplus underflows to 0 for small logits, and the slope of the square root at 0 is infinite.
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), float(jnp.finfo(logits.dtype).tiny)))


SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}
_SUMMED_EXPERTS = {"max": 1, "top2": 2}  # how many of a group's best experts its score sums


def _check_score(router: str, score: str) -> None:
    if score not in SCORES:
        raise ValueError(f"{router}(score={score!r}): the scores are {', '.join(SCORES)}.")


class NoisyTopKRouter(routing.Router):
    """Softmax over the `top_k` highest of `H(x) = W x + N(0, 1) softplus(W_noise x)` (Shazeer et al. 2017, eq. 3-5).

    The loss `NoisyLoad` balances the routing's `load`: the probability that an expert is chosen if the expert's noise
    is sampled again and the noise of all other experts stays. This is
    `P(x, i) = Phi((W x - kth_excluding(H(x), k, i)) / softplus(W_noise x))` (eq. 8-9), or 1 if `top_k` is the number of
    experts. The scores are the softmax of `H` over all experts. Without keys `H` is `W x`.
    """

    linear: LinearMap
    noise: LinearMap
    top_k: int = eqx.field(static=True)

    def __init__(self, *, embed: int, experts: int, top_k: int, std: float | None = 0.0, key: Key[Array, ""]):
        """Initialize both maps; by default they are zero, as in the paper: all experts are equal, and noise decides."""
        routing.check_top_k("NoisyTopKRouter", top_k, experts)
        linear_key, noise_key = jax.random.split(key)
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=linear_key)
        self.noise = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=noise_key)
        self.top_k = top_k

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> routing.Routing:
        """Choose the `top_k` experts that are best under this token's noise."""
        logits = routing.router_logits(self.linear, x)
        # The floor keeps the slope of the quotient finite if softplus underflows.
        deviation = jnp.maximum(jax.nn.softplus(routing.router_logits(self.noise, x)), 1e-6)
        noisy = logits
        if tokens.keys is not None:
            sample = functools.partial(jax.random.normal, shape=logits.shape[-1:], dtype=logits.dtype)
            noisy = logits + routing.sample_per_token(sample, tokens.keys) * deviation
        experts = routing.top_indices(noisy, self.top_k)
        weights = jax.nn.softmax(jnp.take_along_axis(noisy, experts, axis=-1))
        load = self._load(logits, noisy, deviation)
        return routing.mask_padding(tokens, experts, weights, jax.nn.softmax(noisy), logits, load)

    def facts(self) -> routing.RouterFacts:
        """State that each token chooses `top_k` experts by itself."""
        return routing.RouterFacts(self.linear.sizes["candidates"], self.top_k, "token")

    def _load(
        self,
        logits: Float[Array, "*batch seq experts"],
        noisy: Float[Array, "*batch seq experts"],
        deviation: Float[Array, "*batch seq experts"],
    ) -> Float[Array, "*batch seq experts"]:
        if self.top_k == noisy.shape[-1]:
            return jnp.ones_like(noisy)
        # An expert must beat the expert of rank `top_k` among the other experts. If the expert is among the `top_k`
        # best itself, this other expert has rank `top_k + 1` among all experts. Otherwise it has rank `top_k`.
        best = jax.lax.top_k(noisy, self.top_k + 1)[0]
        last, following = best[..., self.top_k - 1 : self.top_k], best[..., self.top_k :]
        return jax.scipy.special.ndtr((logits - jnp.where(noisy >= last, following, last)) / deviation)


class RandomSecondRouter(routing.Router):
    """The likeliest expert and, at random, the second likeliest (GShard, Lepikhin et al. 2020, algorithm 1).

    Weights are `g1 / (g1 + g2)` and `g2 / (g1 + g2)` of the softmax. In training, the second expert is taken with
    probability `2 g2 / (g1 + g2)`, which is at most 1; the weight of the first expert is the same in both cases.
    Without keys a token takes both experts.
    """

    linear: LinearMap

    def __init__(self, *, embed: int, experts: int, std: float | None = None, key: Key[Array, ""]):
        """Initialize the map."""
        routing.check_top_k("RandomSecondRouter", 2, experts)
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=key)

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> routing.Routing:
        """Choose one or two experts for each token."""
        logits = routing.router_logits(self.linear, x)
        experts = routing.top_indices(logits, 2)
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1))
        if tokens.keys is not None:
            sample = functools.partial(jax.random.uniform, shape=(1,), dtype=logits.dtype)
            uniforms = routing.sample_per_token(sample, tokens.keys)
            is_taken = jnp.concatenate([jnp.ones_like(uniforms, bool), 2 * weights[..., 1:] > uniforms], axis=-1)
            experts, weights = jnp.where(is_taken, experts, -1), jnp.where(is_taken, weights, 0)
        return routing.mask_padding(tokens, experts, weights, jax.nn.softmax(logits), logits)

    def facts(self) -> routing.RouterFacts:
        """State that each token chooses at most two experts by itself."""
        return routing.RouterFacts(self.linear.sizes["candidates"], 2, "token")


class SparseMixerRouter(routing.Router):
    """The two best experts, each weighted by a softmax over the experts with almost the same logit (Phi-3.5-MoE).

    The first expert has the highest logit `m`. Its weight is its part of the softmax over the logits `z` with
    `m - z <= 2 tolerance max(|z|, m)`. The second expert is chosen, and weighted, in the same way among the experts
    without the first. The weights do not add up to 1. This is how SparseMixer (Liu et al. 2024, arXiv:2409.12136)
    routes at inference, here also in training: choices are not sampled, and gradients are the gradients of the softmax.
    """

    linear: LinearMap
    tolerance: float = eqx.field(static=True)

    def __init__(
        self, *, embed: int, experts: int, tolerance: float = 0.01, std: float | None = None, key: Key[Array, ""]
    ):
        """Draw the map.

        Args:
            embed: Channels of a token.
            experts: The number of experts to choose from.
            tolerance: Half of the largest relative distance between the best logit and a logit that joins its softmax.
            std: Standard deviation of the map's weights; None: the default of `Linear`.
            key: Random key for the weights.
        """
        routing.check_top_k("SparseMixerRouter", 2, experts)
        if not tolerance >= 0:
            raise ValueError(f"SparseMixerRouter(tolerance={tolerance}): a distance of logits is at least 0.")
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=key)
        self.tolerance = tolerance

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> routing.Routing:
        """Choose two experts for each token."""
        logits = routing.router_logits(self.linear, x)
        experts = routing.top_indices(logits, 2)
        is_first = jnp.arange(logits.shape[-1], dtype=jnp.int32) == experts[..., :1]
        weights = [self._weigh(logits, experts[..., :1], jnp.zeros_like(is_first))]
        weights.append(self._weigh(logits, experts[..., 1:], is_first))
        weights = jnp.concatenate(weights, axis=-1)
        return routing.mask_padding(tokens, experts, weights, jax.nn.softmax(logits), logits)

    def facts(self) -> routing.RouterFacts:
        """State that each token chooses two experts by itself."""
        return routing.RouterFacts(self.linear.sizes["candidates"], 2, "token")

    def _weigh(
        self,
        logits: Float[Array, "*batch seq experts"],
        best: Int[Array, "*batch seq 1"],
        is_excluded: Bool[Array, "*batch seq experts"],
    ) -> Float[Array, "*batch seq 1"]:
        """Return the softmax of the `best` expert, among experts with nearly its logit that are not excluded."""
        highest = jnp.take_along_axis(logits, best, axis=-1)
        is_near = highest - logits <= 2 * self.tolerance * jnp.maximum(jnp.abs(logits), highest)
        shared = jnp.where(is_near & ~is_excluded, logits, -jnp.inf)
        return jnp.take_along_axis(jax.nn.softmax(shared), best, axis=-1)


class HashRouter(routing.Router, ReadsIds):
    """The experts that a table lists for the token's id (Roller et al. 2021, arXiv:2106.04426; DeepSeek-V4).

    Only the weights are learned: they are the scores of the listed experts, as in a `TopKRouter` of the same `score`,
    `normalize` and `scale`. The table is not trained. A model passes the ids of its tokens to its layers.
    """

    linear: LinearMap
    table: Int[Array, "ids top_k"]
    score: str = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        experts: int,
        top_k: int,
        vocab: int,
        score: str = "softmax",
        normalize: bool = False,
        scale: float = 1.0,
        std: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the map, and for each id distinct experts, all with the same probability.

        Args:
            embed: Channels of a token.
            experts: The number of experts to choose from.
            top_k: The number of experts of each token.
            vocab: The number of token ids.
            score: `"softmax"`, `"sigmoid"` or `"sqrt_softplus"` of the logits.
            normalize: Whether the weights of a token's experts add up to `scale`.
            scale: A factor of the weights.
            std: Standard deviation of the map's weights; None: the default of `Linear`.
            key: Random key for the weights and the table.
        """
        routing.check_top_k("HashRouter", top_k, experts)
        _check_score("HashRouter", score)
        linear_key, table_key = jax.random.split(key)
        self.linear = Linear("embed -> candidates", embed=embed, candidates=experts, std=std, key=linear_key)
        self.table = routing.top_indices(jax.random.uniform(table_key, (vocab, experts)), top_k)
        self.score, self.normalize, self.scale = score, normalize, scale

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> routing.Routing:
        """Look up the experts of each token, and weigh them."""
        if tokens.ids is None:
            raise ValueError(
                "HashRouter(x): the router reads the ids of its tokens; call it within a Transformer, or pass "
                "Tokens(positions, ids=ids)."
            )
        logits = routing.router_logits(self.linear, x)
        scores, experts = SCORES[self.score](logits), self.table[tokens.ids]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        weights = routing.normalize_scores(weights, 0.0) if self.normalize else weights
        return routing.mask_padding(tokens, experts, self.scale * weights, scores, logits)

    def facts(self) -> routing.RouterFacts:
        """State that each token takes `top_k` experts by its own id."""
        return routing.RouterFacts(self.linear.sizes["candidates"], self.table.shape[-1], "token")


class ExpertChoiceRouter(routing.Router):
    """Expert-choice routing: each expert takes the `ceil(factor * n / experts)` tokens with its highest scores.

    The method is from Zhou et al. (2022, eq. 1-2). Scores are a softmax over experts, and are also the weights. If
    scores are equal, the earlier token is taken. `n` is the number of tokens other than padding in a group; a group is
    a row (`per="sequence"`) or the whole call (`per="batch"`). A token is taken by `factor` experts on average, but
    perhaps by none or by all. The load is balanced by construction. Which tokens are taken depends on later tokens: the
    future leaks into a causal model, and a prompt alone is routed differently from the prompt with its continuation.
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
        """Initialize the map. Raises a `ValueError` for a factor below 0.01 or above `experts`, or an unknown group.

        Args:
            embed: Channels of a token.
            experts: The number of experts.
            factor: The average number of experts of a token.
            per: The group from which an expert chooses its tokens: `"sequence"` or `"batch"`.
            std: Standard deviation of the map's weights; None: the default of `Linear`.
            key: Random key for the weights.
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

    def __call__(self, x: Float[Array, "*batch seq embed"], tokens: Tokens) -> routing.Slots:
        """Choose tokens for each expert, its best first."""
        scores = jax.nn.softmax(routing.router_logits(self.linear, x))
        *batch, seq, experts = scores.shape
        groups = math.prod(batch) if self.per == "sequence" else 1
        by_expert = jnp.swapaxes(scores.reshape(groups, -1, experts), 1, 2)
        real = routing.is_real(tokens, (*batch, seq)).reshape(groups, 1, -1)
        capacity = routing.even_share(self.factor, real.shape[-1], experts)
        token = routing.top_indices(jnp.where(real, by_expert, -jnp.inf), capacity)
        weight = jnp.take_along_axis(by_expert, token, axis=-1)
        real_tokens = jnp.sum(real, axis=-1, keepdims=True, dtype=jnp.int32)
        is_filled = jnp.arange(capacity, dtype=jnp.int32) < routing.even_share(self.factor, real_tokens, experts)
        return routing.Slots(jnp.where(is_filled, token, -1), jnp.where(is_filled, weight, 0))

    def facts(self) -> routing.RouterFacts:
        """State that experts choose their tokens, so that a token takes `factor` experts on average."""
        return routing.RouterFacts(self.linear.sizes["candidates"], self.factor, self.per, expert_choice=True)
