"""What a loss returns beside its sum: the tokens' weight and the layers' aux; and the routing metrics made of them."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ...nn import aux_loss, aux_of
from ...parallel import TENSOR, varying_axes


LossFn = Callable[..., Any]  # (model, batch, key) -> (sum, count or LossAux)


class LossAux(eqx.Module):
    """The weight of a loss's tokens, and the `Aux` of routed layers; both add up over microbatches and devices."""

    count: Float[Array, ""]
    aux: PyTree = None


Count = Float[Array, ""] | LossAux


def add_aux_losses(total: Float[Array, ""], count: Float[Array, ""], aux: PyTree) -> tuple[Float[Array, ""], Count]:
    """A loss's sum and count with what routed layers, where there are any, add to it: their losses, and a `LossAux`."""
    if not aux_of(aux):
        return total, count
    return total + aux_loss(aux).astype(total.dtype), LossAux(count, aux)


def loss_count(tally: Count) -> Float[Array, ""]:
    """The weight of the tokens, from a loss that returns it alone or in a `LossAux`."""
    return tally.count if isinstance(tally, LossAux) else tally


def routing_metrics(tally: Count) -> dict[str, Array]:
    """Metrics of the routed layers in a step; empty for a model without such layers.

    `balance_loss`: the layers' part of the loss per token. `dropped_share`: the share of all choices that were dropped
    for lack of capacity. `router_entropy`: in nats a token, the mean over layers. `load_violation`: the load of the
    busiest expert over the even load, minus 1, in the worst layer (MaxVio of arXiv:2408.15664). `expert_load`: each
    expert's share of its layer's choices, `routed_layers experts`; layers with fewer experts are padded with zeros.
    """
    if not isinstance(tally, LossAux) or not (found := aux_of(tally.aux)):
        return {}
    count = tally.count.astype(jnp.float32)
    rows = lambda name: jnp.concatenate([getattr(aux, name).reshape(-1) for aux in found]).astype(jnp.float32)
    loads = [aux.load.reshape(-1, aux.load.shape[-1]).astype(jnp.float32) for aux in found]
    chosen = [jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1) for load in loads]
    shares = [load / total for load, total in zip(loads, chosen)]
    most = max(share.shape[-1] for share in shares)
    return {
        "balance_loss": aux_loss(found) / count,
        "dropped_share": jnp.sum(rows("dropped")) / jnp.sum(jnp.concatenate(chosen)),
        "router_entropy": jnp.mean(rows("entropy") / jnp.maximum(rows("tokens"), 1)),
        "load_violation": jnp.max(jnp.stack([jnp.max(share) * share.shape[-1] for share in shares])) - 1,
        "expert_load": jnp.concatenate([jnp.pad(share, ((0, 0), (0, most - share.shape[-1]))) for share in shares]),
    }


def sum_and_count(found: Any, loss_fn: Callable[..., Any]) -> tuple[Float[Array, ""], Count]:
    """What a loss gave: a sum and a count, which may be a number of Python's; a `ValueError` for anything else."""
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    total, tally = cast(tuple[Any, Any], found if is_pair else (found, None))
    count: Any = tally.count if isinstance(tally, LossAux) else tally
    shapes = [jnp.shape(x) for x in (total, count)] if is_pair else []
    if shapes != [(), ()]:
        given = f"two of shapes {shapes[0]} and {shapes[1]}" if is_pair else _described(found)
        raise ValueError(
            f"{_name(loss_fn)}(model, batch, key): a loss gives the sum over tokens and their count, two numbers, of "
            f"which those of microbatches and devices are added before one division; this one gave {given}. Return "
            "(sum, count)."
        )
    total = jnp.asarray(total)
    if isinstance(tally, LossAux):
        return total, tally
    count = jnp.asarray(tally)
    return total, count if jnp.issubdtype(count.dtype, jnp.inexact) else count.astype(total.dtype)


def check_takes_tokens(loss_fn: Callable[..., Any]) -> None:
    """Raise a `ValueError` for a loss that cannot be called under a plan, with a device's tokens and vocabulary."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # a callable that does not say
        return
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    missing = {"tokens", "vocabulary"} - {parameter.name for parameter in parameters}
    if missing and not takes_all:
        raise ValueError(
            f"make_step({_name(loss_fn)}, plan=...): under a plan a loss is called as loss_fn(model, batch, None, "
            f"tokens=..., vocabulary=...), and this one takes no {' and no '.join(sorted(missing))}; take both, and "
            "pass them on to next_token_loss, or tokens to model.encode and vocabulary.nats to cross_entropy(nats=)."
        )


def check_whole(total: Float[Array, ""], loss_fn: Callable[..., Any], size: int) -> None:
    """Raise a `ValueError` for a sum that differs over `tensor`, of `size` devices, which have the same tokens."""
    if TENSOR in varying_axes(total):
        raise ValueError(
            f"{_name(loss_fn)} under Plan over tensor={size}: the sum differs between devices that have the same "
            "tokens, so it is made of slices as if they were whole: of logits, or of weights. Read logits by "
            "cross_entropy(nats=vocabulary.nats), and leave penalties of weights to the optimizer, as weight_decay."
        )


def _described(found: object) -> str:
    return "one value" if not isinstance(found, tuple | list) else f"{len(found)} values"


def _name(loss_fn: Callable[..., Any]) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
