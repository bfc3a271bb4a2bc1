"""Auxiliary losses that balance the load of experts, and the update of selection biases with the same aim."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from .._tokens import Tokens
from ._routing import is_real, normalize_scores, Routing


DeviceSum = Callable[[Array], Array]
"""The sum of an array over devices."""


def sum_on_one_device(x: Array) -> Array:
    """Return the array itself, which is its sum over the devices if there is one device."""
    return x


class BalanceLoss(eqx.Module):
    """An auxiliary loss of a routing: `coefficient` times a sum over the tokens of this call.

    The losses of devices add up. In the end, the model's whole loss is divided by the sum of its tokens' weights. If
    only few tokens have a weight, the coefficient must therefore be smaller in proportion. "Batch" means the rows of a
    call: the rows of one microbatch, if there are several microbatches. `total` sums an array over all devices that
    share the batch, and `row_total` over the devices that hold parts of the same rows (context parallelism). On one
    device both are the identity.
    """

    coefficient: eqx.AbstractVar[float]

    @abc.abstractmethod
    def __call__(
        self,
        routing: Routing,
        tokens: Tokens,
        total: DeviceSum = sum_on_one_device,
        row_total: DeviceSum = sum_on_one_device,
    ) -> Float[Array, ""]:
        """Return this device's share of the loss."""


class LoadBalance(BalanceLoss):
    """`experts * sum_i f_i P_i`, where `f_i` is the share of choices that expert `i` gets, and `P_i` its mean score.

    `f` and `P` each sum to one (if scores are a softmax, or with `normalize`), so even loads cost 1 for each token. `f`
    has no gradient. `f` is taken over the batch; with `per="sequence"`, it is taken over each row, and rows are
    weighted by their length. With `choices`, `f` counts only the first `choices` choices of each token. The loss is a
    sum over tokens that is linear in their scores, so only `f` is summed over devices.

    - `per="batch"`, `top_k` 1: Switch (Fedus et al. 2021, eq. 4-6), coefficient 0.01. With more choices, the loss of
      transformers' Mixtral is `top_k` times this loss.
    - `choices=1`: GShard (Lepikhin et al. 2020, algorithm 1, which has `1 / experts` in front instead of `experts`).
    - `per="sequence"`: DeepSeek-V2's expert-level loss (arXiv:2405.04434, eq. 23-25); with `normalize=True`, the loss
      of DeepSeek-V3 for sigmoid scores (arXiv:2412.19437, eq. 17-20).
    """

    coefficient: float = eqx.field(static=True)
    per: str = eqx.field(static=True, default="batch")
    normalize: bool = eqx.field(static=True, default=False)
    choices: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.per not in ("batch", "sequence"):
            raise ValueError(f"LoadBalance(per={self.per!r}): loads are counted per 'batch' or per 'sequence'.")
        if self.choices is not None and self.choices < 1:
            raise ValueError(f"LoadBalance(choices={self.choices}): count at least the first choice, or None for all.")

    def __call__(
        self,
        routing: Routing,
        tokens: Tokens,
        total: DeviceSum = sum_on_one_device,
        row_total: DeviceSum = sum_on_one_device,
    ) -> Float[Array, ""]:
        """Return the loss; only counts are summed over devices."""
        real = is_real(tokens, routing.scores.shape[:-1])
        counts, size = routing.counts(self.choices), jnp.sum(real, axis=-1, dtype=jnp.int32)
        if self.per == "batch":
            counts, size = total(jnp.sum(counts, axis=tuple(range(counts.ndim - 1)))), total(jnp.sum(size))
        else:
            counts, size = row_total(counts), row_total(size)
        scores = normalize_scores(routing.scores) if self.normalize else routing.scores
        # The factors are floats, because the choices of a batch over all devices may exceed 32-bit integers.
        assignments = jnp.maximum(size, 1).astype(scores.dtype) * routing.experts[..., : self.choices].shape[-1]
        share = counts.astype(scores.dtype) / assignments[..., None]
        costs = jnp.sum(share[..., None, :] * scores, axis=-1)
        return self.coefficient * counts.shape[-1] * jnp.sum(jnp.where(real, costs, 0))


class RouterZ(BalanceLoss):
    """`logsumexp(logits)^2` of each token, against large logits (ST-MoE, Zoph et al. 2022, eq. 5; factor 0.001)."""

    coefficient: float = eqx.field(static=True)

    def __call__(
        self,
        routing: Routing,
        tokens: Tokens,
        total: DeviceSum = sum_on_one_device,
        row_total: DeviceSum = sum_on_one_device,
    ) -> Float[Array, ""]:
        """Return the loss; nothing is summed over devices."""
        squares = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
        return self.coefficient * jnp.sum(jnp.where(is_real(tokens, squares.shape), squares, 0))


class Importance(BalanceLoss):
    """`CV(sum over tokens of G(x))^2`, `G` the weights of all experts (Shazeer et al. 2017, eq. 6-7).

    CV^2, the squared coefficient of variation, is the variance divided by the squared mean. It is computed over the
    whole batch, and multiplied by the number of tokens of this call. `total` must be differentiable.
    """

    coefficient: float = eqx.field(static=True)

    def __call__(
        self,
        routing: Routing,
        tokens: Tokens,
        total: DeviceSum = sum_on_one_device,
        row_total: DeviceSum = sum_on_one_device,
    ) -> Float[Array, ""]:
        """Return the loss; the sums of weights are summed over devices."""
        return self.coefficient * _squared_variation(routing.gates(), tokens, total)


class NoisyLoad(BalanceLoss):
    """`CV(sum over tokens of P(x, i))^2`, `P` the routing's `load` (Shazeer et al. 2017, eq. 10-11).

    Everything else is as in `Importance`.
    """

    coefficient: float = eqx.field(static=True)

    def __call__(
        self,
        routing: Routing,
        tokens: Tokens,
        total: DeviceSum = sum_on_one_device,
        row_total: DeviceSum = sum_on_one_device,
    ) -> Float[Array, ""]:
        """Return the loss; raise a `ValueError` for a routing without `load`."""
        if routing.load is None:
            raise ValueError(
                "NoisyLoad(...)(routing): the routing has load=None; only NoisyTopKRouter gives a load, "
                "take LoadBalance for other routers."
            )
        return self.coefficient * _squared_variation(routing.load, tokens, total)


def update_selection_bias(
    bias: Float[Array, "*layers experts"], load: Num[Array, "*layers experts"], rate: float | Float[Array, ""]
) -> Float[Array, "*layers experts"]:
    """Return the selection bias after a step: larger by `rate` for experts below the mean load, smaller by `rate` for
    experts above the mean load.

    `load` counts the tokens of the whole batch that chose each expert, in a row for each layer. The rule is from
    arXiv:2408.15664.
    """
    missing = jnp.sum(load, axis=-1, keepdims=True) - load.shape[-1] * load
    return bias + rate * jnp.sign(missing).astype(bias.dtype)


def _squared_variation(
    amounts: Float[Array, "*batch seq experts"], tokens: Tokens, total: DeviceSum
) -> Float[Array, ""]:
    """Return the squared coefficient of variation of the experts' sums, times the tokens of this call."""
    real = is_real(tokens, amounts.shape[:-1])
    *_, experts = amounts.shape
    sums = total(jnp.sum(jnp.where(real[..., None], amounts, 0).reshape(-1, experts), axis=0))
    mean = jnp.mean(sums)
    return jnp.sum(real).astype(sums.dtype) * jnp.var(sums / jnp.where(mean > 0, mean, 1))
