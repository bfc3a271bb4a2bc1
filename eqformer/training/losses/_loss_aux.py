"""Results of a loss (the sum, the tokens' weight, the `nn.Aux` of routed layers), their checks, and loss scaling."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ... import nn
from ...nn import aux_loss, aux_of
from ...parallel import TENSOR, varying_axes


LossFn = Callable[..., PyTree]  # (model, batch, key) -> (sum, count or LossAux)


class LossAux(eqx.Module):
    """The total weight of a loss's tokens and the `Aux` of routed layers; both add up over microbatches and devices."""

    count: Float[Array, ""]
    """The total weight of the tokens, by which the loss's sum is divided."""
    aux: PyTree = None
    """The tree of `Aux` that the model's layers returned."""
    metrics: Mapping[str, tuple[Float[Array, ""], Float[Array, ""]]] = eqx.field(default_factory=dict)
    """The loss's own metrics by name: a sum, and the weight by which the step divides the sum."""


CountOrAux = Float[Array, ""] | LossAux
"""The second result of a loss: the total weight of the tokens or, with routed layers or metrics, a `LossAux`."""


def add_aux_losses(total: Float[Array, ""], count: CountOrAux, aux: PyTree) -> tuple[Float[Array, ""], CountOrAux]:
    """Add the losses of routed layers to a loss's sum; return this sum, and a `LossAux` of the count and the aux.

    For a model without routed layers, the sum and the count are returned unchanged.
    """
    if not aux_of(aux):
        return total, count
    return total + aux_loss(aux).astype(total.dtype), with_routing_aux(count, aux)


def loss_count(loss_aux: Any) -> Any:
    """Return the total weight of the tokens, which a loss returns alone or in a `LossAux`.

    Before `sum_and_count` has checked the result of a user's loss, the weight may be an object of any type.
    """
    return loss_aux.count if isinstance(loss_aux, LossAux) else loss_aux


def routing_aux(loss_aux: CountOrAux) -> PyTree:
    """Return the aux of routed layers in a `LossAux`; None for a loss that returned only the weight of its tokens."""
    return _as_loss_aux(loss_aux).aux


def loss_metrics(loss_aux: CountOrAux) -> Mapping[str, tuple[Array, Array]]:
    """Return the sums and weights of a loss's own metrics; an empty dict for a loss without metrics."""
    return _as_loss_aux(loss_aux).metrics


def _as_loss_aux(loss_aux: CountOrAux) -> LossAux:
    return loss_aux if isinstance(loss_aux, LossAux) else LossAux(loss_aux)


def with_routing_aux(loss_aux: CountOrAux, aux: PyTree) -> LossAux:
    """Return the count and the metrics of a loss, together with `aux`, the aux of routed layers."""
    return LossAux(loss_count(loss_aux), aux, loss_metrics(loss_aux))


def routing_metrics(loss_aux: CountOrAux) -> dict[str, Array]:
    """Return metrics of the routed layers in a step; an empty dict for a model without such layers.

    - `balance_loss`: the routed layers' part of the loss per token.
    - `dropped_share`: the share of all choices that were dropped for lack of capacity.
    - `router_entropy`: the mean over layers, in nats a token.
    - `load_violation`: the load of the busiest expert divided by the even load, minus 1, in the worst layer (MaxVio of
      arXiv:2408.15664).
    - `expert_load`: each expert's share of its layer's choices, `routed_layers experts`; layers with fewer experts are
      padded with zeros.
    """
    if not (layer_aux := aux_of(routing_aux(loss_aux))):
        return {}
    count = loss_count(loss_aux).astype(jnp.float32)

    def join_layers(name: str) -> Array:
        return jnp.concatenate([getattr(aux, name).reshape(-1) for aux in layer_aux]).astype(jnp.float32)

    loads = [aux.load.reshape(-1, aux.load.shape[-1]).astype(jnp.float32) for aux in layer_aux]
    choices = [jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1) for load in loads]
    shares = [load / total for load, total in zip(loads, choices)]
    experts = max(share.shape[-1] for share in shares)
    return {
        "balance_loss": aux_loss(layer_aux) / count,
        "dropped_share": jnp.sum(join_layers("dropped")) / jnp.sum(jnp.concatenate(choices)),
        "router_entropy": jnp.mean(join_layers("entropy") / jnp.maximum(join_layers("tokens"), 1)),
        "load_violation": jnp.max(jnp.stack([jnp.max(share) * share.shape[-1] for share in shares])) - 1,
        "expert_load": jnp.concatenate([jnp.pad(share, ((0, 0), (0, experts - share.shape[-1]))) for share in shares]),
    }


def sum_and_count(result: PyTree, loss_fn: LossFn) -> tuple[Float[Array, ""], CountOrAux]:
    """Return the sum and the count that a loss returned, as arrays; raise a `ValueError` for any other result."""
    match result:
        case (total, loss_aux) if loss_aux is not None:
            count = loss_count(loss_aux)
        case _:
            total = loss_aux = count = None
    if total is None or count is None or np.shape(total) != () or np.shape(count) != ():
        raise ValueError(
            f"{_name(loss_fn)}(model, batch, key): a loss must return two numbers, the sum over tokens and the count "
            f"of tokens, but this loss returned {_describe(result)}. Return (sum, count): the step adds the sums and "
            "counts of all microbatches and devices, and then divides once."
        )
    total = jnp.asarray(total)
    if isinstance(loss_aux, LossAux):
        return total, loss_aux
    count = jnp.asarray(loss_aux)
    return total, count if jnp.issubdtype(count.dtype, jnp.inexact) else count.astype(total.dtype)


def check_takes_tokens(loss_fn: LossFn) -> None:
    """Raise a `ValueError` for a loss that does not take `tokens` and `vocabulary`, which a plan passes to losses."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    missing = {"tokens", "vocabulary"} - {parameter.name for parameter in parameters}
    if missing and not takes_all:
        raise ValueError(
            f"make_step({_name(loss_fn)}, plan=...): under a plan a loss is called as loss_fn(model, batch, None, "
            f"tokens=..., vocabulary=...), and this loss takes no {' and no '.join(sorted(missing))}; add both "
            "parameters, and pass both to next_token_loss, or pass tokens to model.encode, and vocabulary.nats to "
            "cross_entropy as nats."
        )


def check_not_split(total: Float[Array, ""], loss_fn: LossFn, size: int) -> None:
    """Raise a `ValueError` for a sum that differs between the `size` devices of axis `tensor`, which share a batch."""
    if TENSOR in varying_axes(total):
        raise ValueError(
            f"{_name(loss_fn)} under Plan over tensor={size}: the sum differs between devices that have the same "
            "tokens, so the loss reads one device's slice of the logits or of a weight as if it were the whole array. "
            "Read logits by cross_entropy(nats=vocabulary.nats), and leave penalties of weights to the optimizer, as "
            "weight_decay."
        )


def _describe(result: PyTree) -> str:
    """Describe a result by its number of values and, if there are two, by their shapes."""
    match result:
        case (total, count):
            return f"two values of shapes {np.shape(loss_count(total))} and {np.shape(loss_count(count))}"
        case tuple() | list():
            return f"{len(result)} values"
        case _:
            return "one value"


def _name(loss_fn: LossFn) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)


# Dynamic loss scaling keeps gradients within float16's range, 6e-8 to 65,504, while they are computed.

MAX_SCALE = 2.0**24
Scale = Float[Array, ""] | None  # a `LossScale`'s value


class LossScale(eqx.Module):
    """The power of two by which the loss, a mean over tokens, is multiplied before it is differentiated.

    A step whose gradients are not finite halves the scale, but not below 1. After `interval` steps in a row with finite
    gradients, the scale doubles, but not above 2^24 (Micikevicius et al., arXiv:1710.03740). Gradients are divided by
    the scale as soon as they are float32.
    """

    value: Float[Array, ""]
    """The scale."""
    finite_in_a_row: Int[Array, ""]
    """The number of steps with finite gradients since the scale last changed."""
    interval: int = eqx.field(static=True, default=2000)
    """The number of steps with finite gradients after which the scale doubles."""

    def advance(self, is_finite: Bool[Array, ""]) -> "LossScale":
        """Return the scale for the next step, after a step whose gradients were finite or not."""
        finite_in_a_row = (self.finite_in_a_row + 1) * is_finite.astype(jnp.int32)
        is_due = finite_in_a_row >= self.interval
        factor = jnp.where(is_finite, jnp.where(is_due, 2.0, 1.0), 0.5)
        value = jnp.clip(self.value * factor, 1.0, MAX_SCALE)
        return LossScale(value, jnp.where(is_due, 0, finite_in_a_row), self.interval)


def init_loss_scale(model: PyTree) -> LossScale | None:
    """Return the scale before the first step, 2^16; None for a model without float16 in parameters or compute dtype."""
    dtypes = {jnp.dtype(node.compute_dtype) for node in nn.modules(model, nn.LanguageModel)}
    dtypes |= {jnp.dtype(x.dtype) for x in jax.tree.leaves(model) if nn.is_trainable(x)}
    if jnp.dtype("float16") not in dtypes:
        return None
    return LossScale(jnp.full((), 2.0**16, jnp.float32), jnp.zeros((), jnp.int32))


def loss_cotangent(scale: Scale, batch: PyTree) -> Float[Array, ""] | int:
    """Return the cotangent of the summed loss: 1 without a scale; else the scale, divided by the number of tokens.

    The number of tokens is the size of the batch's first array, rounded up to a power of two.
    """
    if scale is None:
        return 1
    leaves = jax.tree.leaves(batch)
    tokens = max(leaves[0].size, 1) if leaves else 1
    return scale * 2.0 ** -(tokens - 1).bit_length()


def unscale_gradients(gradients: PyTree, cotangent: Float[Array, ""] | int) -> PyTree:
    """Divide gradients, which are float32 or wider, by the cotangent of the loss with which they were computed."""
    if isinstance(cotangent, int):
        return gradients
    return jax.tree.map(lambda x: x * (1 / cotangent).astype(x.dtype), gradients)
