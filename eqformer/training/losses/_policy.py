"""Policy losses, which raise the rewards of sampled completions: GRPO, DAPO, Dr. GRPO and GSPO."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import get_args, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..._annotation_checks import checked
from ..._shapes import PolicyBatch
from ...nn import in_float32, Tokens
from ...parallel import sum_rows, vary_like
from . import _cross_entropy
from ._loss_aux import add_aux_losses, CountOrAux, LossAux, LossFn
from ._token_losses import batch_tokens
from ._vocabulary import token_nats, Vocabulary


PolicyLoss = Literal["grpo", "dapo", "dr_grpo", "gspo"]
RatioOf = Literal["token", "sequence"]
Mean = Literal["tokens", "rows"] | int


@dataclasses.dataclass(frozen=True)
class _Objective:
    """The choices of a policy loss; the fields are arguments of `policy_loss`."""

    ratio: RatioOf
    mean: Mean | None
    clip_low: float
    clip_high: float
    beta: float = 0.0
    unbiased_kl: bool = True


_OBJECTIVES = {
    "grpo": _Objective("token", "rows", 0.2, 0.2),
    "dapo": _Objective("token", "tokens", 0.2, 0.28),
    "dr_grpo": _Objective("token", None, 0.2, 0.2),
    "gspo": _Objective("sequence", "rows", 3e-4, 4e-4),
}


def policy_loss(
    name: PolicyLoss = "grpo",
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    ratio: RatioOf | None = None,
    mean: Mean | None = None,
    beta: float = 0.0,
    unbiased_kl: bool = True,
) -> LossFn:
    """Return a loss of the rows of a `PolicyBatch`, which is called like `next_token_loss`.

    The loss of a token is `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL`. `A` is the advantage of the
    token's row. The ratio `r` is the token's probability, divided by its probability under the model that sampled it
    (`old_log_probs`). Without `old_log_probs`, `r` is 1, and has the gradient of the log-probability. `KL` is
    `r (exp(d) - d - 1)`, where `d` is the reference's log-probability minus the model's: Schulman's estimator k3, times
    the ratio.

    | name | ratio | mean | clip_low, clip_high | advantages in the paper |
    |---|---|---|---|---|
    | "grpo" (Shao et al., arXiv:2402.03300, eq. 3) | "token" | "rows" | 0.2, 0.2 | `scale=True` |
    | "dapo" (Yu et al., arXiv:2503.14476, eq. 8) | "token" | "tokens" | 0.2, 0.28 | `scale=True` |
    | "dr_grpo" (Liu et al., arXiv:2503.20783) | "token" | a number | 0.2, 0.2 | `scale=False` |
    | "gspo" (Zheng et al., arXiv:2507.18071, eq. 5) | "sequence" | "rows" | 3e-4, 4e-4 | `scale=True` |

    A completion counts if any of its tokens has a weight above 0. The batch must have advantages, which
    `group_advantages(scale=...)` computes. The loss, its gradients and its metrics are the same on any mesh, in any
    number of microbatches.

    Metrics: `entropy` of the model's distribution; `clip_fraction`, the share of tokens whose gradient is clipped; and
    the means of the batch's `row_metrics`. A batch with `reference_log_probs` adds `kl`. A batch with
    `sampler_log_probs` adds `sampler_difference`, the mean of `|log p - sampler_log_prob|`.

    Args:
        name: The name of a row of the table, which gives the values of arguments that are None.
        clip_low: How far a ratio may fall below 1 before its gradient is clipped.
        clip_high: How far a ratio may rise above 1 before its gradient is clipped.
        ratio: "token": each token has its own ratio. "sequence": all tokens of a row have the geometric mean of their
            ratios.
        mean: "tokens": the mean over all tokens. "rows": the mean over rows of each row's mean. A number: the sum over
            tokens, divided by the number of rows times this number, such as the most new tokens of a completion.
        beta: The weight of the KL divergence from the reference.
        unbiased_kl: Whether the estimator of the KL divergence is multiplied by the ratio, which makes its gradient
            unbiased (DeepSeek-V3.2, arXiv:2512.02556); False: without the ratio, as in the first paper on GRPO.
    """
    if name not in _OBJECTIVES:
        raise ValueError(f"policy_loss({name!r}): the losses are {', '.join(_OBJECTIVES)}; pass one.")
    choices = {"clip_low": clip_low, "clip_high": clip_high, "ratio": ratio, "mean": mean}
    overrides = {key: value for key, value in choices.items() if value is not None}
    objective = dataclasses.replace(_OBJECTIVES[name], **overrides, beta=beta, unbiased_kl=unbiased_kl)
    _check_objective(name, objective)

    @checked
    def loss_fn(
        model: PyTree,
        batch: PolicyBatch,
        key: Key[Array, ""] | None = None,
        *,
        chunk: int | None = None,
        tokens: Tokens | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> tuple[Float[Array, ""], CountOrAux]:
        _check_batch(objective, batch)
        tokens = batch_tokens(batch, key) if tokens is None else tokens
        hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
        targets, unembed = jnp.asarray(batch.targets), _at_temperature(model.unembed, batch.temperature)
        nats_fn = token_nats if vocabulary is None else vocabulary.nats
        nats, entropies = _token_statistics(unembed, jax.lax.stop_gradient(hidden), targets, chunk, nats_fn)

        def apply_objective(log_probs: Array) -> tuple[Array, tuple[Array, dict[str, tuple[Array, Array]]]]:
            total, count, metrics = _policy_sums(objective, log_probs, entropies, batch)
            return vary_like(total, log_probs), (count, metrics)

        (value, (count, metrics)), slopes = jax.value_and_grad(apply_objective, has_aux=True)(-nats)
        # A second pass over chunks of logits computes the model's gradients, with the slopes as weights of the nats.
        total, _ = _cross_entropy.cross_entropy(unembed, hidden, targets, -slopes, chunk=chunk, nats=nats_fn)
        # Return the objective's value, but with the gradient of the weighted nats.
        total = total + jax.lax.stop_gradient(value.astype(total.dtype) - total)
        count, metrics = jax.lax.stop_gradient((count, metrics))
        return add_aux_losses(total, LossAux(count, None, metrics), aux)

    return loss_fn


def _check_objective(name: str, objective: _Objective) -> None:
    """Raise a `ValueError` for a choice that is out of its range."""
    if not (0 < objective.clip_low < 1 and objective.clip_high > 0 and objective.beta >= 0):
        raise ValueError(
            f"policy_loss({name!r}, clip_low={objective.clip_low}, clip_high={objective.clip_high}, "
            f"beta={objective.beta}): clip_low must be above 0 and below 1, clip_high above 0, and beta at least 0; "
            "change the number that breaks its rule."
        )
    if objective.ratio not in get_args(RatioOf):
        raise ValueError(f"policy_loss(ratio={objective.ratio!r}): the ratio must be 'token' or 'sequence'.")
    is_number = isinstance(objective.mean, int) and objective.mean > 0
    if objective.mean not in ("tokens", "rows") and not is_number:
        raise ValueError(
            f"policy_loss({name!r}, mean={objective.mean!r}): the mean must be 'tokens', 'rows', or a number of tokens "
            "by which each row's sum is divided; for dr_grpo pass the largest number of new tokens of a completion."
        )


def _check_batch(objective: _Objective, batch: PolicyBatch) -> None:
    """Raise a `ValueError` for a batch without the arrays that a loss reads."""
    if batch.advantages is None:
        raise ValueError(
            "policy_loss: the batch has no advantages; give dataclasses.replace(batch, advantages=...), see "
            "training.group_advantages."
        )
    if objective.beta and batch.reference_log_probs is None:
        raise ValueError(
            f"policy_loss(beta={objective.beta}): the batch needs log-probabilities under a reference model; give "
            "dataclasses.replace(batch, reference_log_probs=training.make_token_log_probs(plan)(reference, batch))."
        )


def _policy_sums(
    objective: _Objective,
    log_probs: Float[Array, "batch seq"],
    entropies: Float[Array, "batch seq"],
    batch: PolicyBatch,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, tuple[Array, Array]]]:
    """Return the sum over this device's tokens, the count that divides it, and the metrics' sums and weights."""
    dtype = log_probs.dtype
    weights = jnp.asarray(batch.weights).astype(dtype)
    # A target with the weight 0 may lie outside of the vocabulary, so that its log-probability is NaN.
    log_probs = jnp.where(weights != 0, log_probs, 0)
    lengths, devices = sum_rows(weights)
    shares = weights / jnp.where(lengths == 0, 1, lengths)[:, None]
    losses, ratios, is_clipped = _clipped_losses(objective, log_probs, shares, batch)
    per_token = {"entropy": entropies, "clip_fraction": is_clipped.astype(dtype)}
    if (reference := _known_log_probs(batch.reference_log_probs, weights)) is not None:
        difference = reference - log_probs
        per_token["kl"] = jnp.exp(difference) - difference - 1
        if objective.beta:
            losses = losses + objective.beta * per_token["kl"] * (ratios if objective.unbiased_kl else 1)
    if (sampler := _known_log_probs(batch.sampler_log_probs, weights)) is not None:
        per_token["sampler_difference"] = jnp.abs(log_probs - sampler)

    # The devices that share a row each count an equal fraction of the row.
    tokens, rows = jnp.sum(weights), jnp.sum(lengths > 0, dtype=dtype) / devices
    count = tokens if objective.mean == "tokens" else rows
    if isinstance(objective.mean, int):
        count = count * objective.mean
    metrics = {name: (jnp.sum(_cross_entropy.apply_weights(x, weights)), tokens) for name, x in per_token.items()}
    for name, values in batch.row_metrics.items():
        metrics[name] = jnp.sum(jnp.asarray(values).astype(dtype)) / devices, jnp.asarray(len(values) / devices, dtype)
    return jnp.sum(losses * (shares if objective.mean == "rows" else weights)), count, metrics


def _clipped_losses(
    objective: _Objective, log_probs: Float[Array, "batch seq"], shares: Float[Array, "batch seq"], batch: PolicyBatch
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Return each token's loss without the KL divergence, its ratio, and whether its gradient is clipped.

    `shares` is the weight of each token, divided by the weight of its row.
    """
    assert batch.advantages is not None, "see _check_batch"
    advantages = jnp.asarray(batch.advantages).astype(log_probs.dtype)[:, None]
    old = _known_log_probs(batch.old_log_probs, shares)
    log_ratios = log_probs - (jax.lax.stop_gradient(log_probs) if old is None else old)
    if objective.ratio == "sequence":
        log_ratios = jnp.broadcast_to(sum_rows(log_ratios * shares)[0][:, None], log_ratios.shape)
    ratios = jnp.exp(log_ratios)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    losses = -jnp.minimum(ratios * advantages, jnp.clip(ratios, low, high) * advantages)
    return losses, ratios, ((ratios < low) & (advantages < 0)) | ((ratios > high) & (advantages > 0))


def _known_log_probs(
    log_probs: Float[Array | np.ndarray, "batch seq"] | None, weights: Float[Array, "batch seq"]
) -> Float[Array, "batch seq"] | None:
    """Return a batch's log-probabilities, with 0 for targets without weight; None if the batch has none."""
    return None if log_probs is None else jnp.where(weights != 0, jnp.asarray(log_probs).astype(weights.dtype), 0)


# Statistics of tokens.


@checked
def token_log_probs(
    model: PyTree,
    batch: PolicyBatch,
    *,
    chunk: int | None = None,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> Float[Array, "batch seq"]:
    """Return `log p_i[target_i]` of each target of a batch, without dropout; no gradients go through the result.

    The logits are divided by the batch's temperature. `chunk`, `tokens` and `vocabulary` are as in `next_token_loss`.
    """
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    unembed = _at_temperature(model.unembed, batch.temperature)
    nats_fn = token_nats if vocabulary is None else vocabulary.nats
    nats = _cross_entropy.chunked_token_nats(
        unembed, jax.lax.stop_gradient(hidden), jnp.asarray(batch.targets), chunk=chunk, nats=nats_fn
    )
    return jax.lax.stop_gradient(-nats)


class _AtTemperature(eqx.Module):
    """Logits divided by a temperature, as `generation.Temperature` divides them."""

    unembed: Callable[[Array], Array]
    temperature: float = eqx.field(static=True)

    def __call__(self, hidden: Float[Array, "tokens embed"]) -> Float[Array, "tokens vocab"]:
        return in_float32(self.unembed(hidden)) / self.temperature


def _at_temperature(unembed: Callable[[Array], Array], temperature: float) -> Callable[[Array], Array]:
    return unembed if temperature == 1 else _AtTemperature(unembed, float(temperature))


def _token_statistics(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    chunk: int | None,
    nats_fn: _cross_entropy.TokenNats,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Return each token's `-log p[target]`, and the entropy of its distribution, from chunks of logits."""
    flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def read_statistics(logits: Array, arrays: tuple) -> tuple[tuple[()], tuple[Array, Array]]:
        nats, log_normalizers = nats_fn(logits, arrays[0])
        # The entropy is `log Z` minus the mean logit. The mean logit is the derivative of `log Z` with respect to a
        # factor of the logits; this derivative is also correct on devices that split the vocabulary.
        _, pull_back = jax.vjp(
            lambda factors: nats_fn(logits * factors[:, None], arrays[0])[1],
            vary_like(jnp.ones_like(log_normalizers), log_normalizers),
        )
        (mean_logits,) = pull_back(vary_like(jnp.ones_like(log_normalizers), log_normalizers))
        return (), (nats, log_normalizers - mean_logits)

    nats, entropies = _cross_entropy.read_over_chunks(unembed, flat, read_statistics, chunk)[1]
    return nats.reshape(targets.shape), entropies.reshape(targets.shape)


# Advantages.


class GroupAdvantages(NamedTuple):
    """Advantages of completions within their groups, and the spread of each group's rewards."""

    advantages: Float[np.ndarray, "batch"]
    stds: Float[np.ndarray, "batch"]
    """The standard deviation of the rewards of a row's group; 0 for a group without signal, whose rewards are equal."""


@checked
def group_advantages(
    rewards: Sequence[float] | Float[np.ndarray, "batch"], group: int, *, scale: bool = True
) -> GroupAdvantages:
    """Return each reward minus the mean of its group; `scale` divides by the group's standard deviation plus 1e-4.

    A group is `group` rewards in a row, of completions of one prompt. The variance is a sum of squares divided by
    `group - 1`, as in TRL. If all rewards of a group are equal, its advantages are exactly 0.
    """
    values = np.asarray(rewards, np.float64)
    if group < 2 or values.ndim != 1 or not values.size or values.size % group:
        raise ValueError(
            f"group_advantages(rewards, group={group}): rewards are compared in whole groups of at least 2, but the "
            f"rewards have shape {values.shape}; pass the number of completions of a prompt as group."
        )
    groups = values.reshape(-1, group)
    is_equal = np.all(groups == groups[:, :1], axis=1, keepdims=True)
    stds = np.where(is_equal, 0.0, np.std(groups, axis=1, ddof=1, keepdims=True))
    advantages = np.where(is_equal, 0.0, groups - np.mean(groups, axis=1, keepdims=True))
    advantages = advantages / (stds + 1e-4) if scale else advantages
    return GroupAdvantages(
        advantages.reshape(-1).astype(np.float32), np.broadcast_to(stds, groups.shape).reshape(-1).astype(np.float32)
    )
