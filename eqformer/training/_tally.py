"""What a loss returns beside its sum: the tokens' weight and the layers' aux; and the routing metrics made of them."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..nn import aux_loss, aux_of


class Tally(eqx.Module):
    """The weight of a loss's tokens, and the `Aux` of routed layers; both add up over microbatches and devices."""

    count: Float[Array, ""]
    aux: PyTree = None


Count = Float[Array, ""] | Tally


def tallied(total: Float[Array, ""], count: Float[Array, ""], aux: PyTree) -> tuple[Float[Array, ""], Count]:
    """A loss's sum and count with what routed layers, where there are any, add to it: their losses, and a `Tally`."""
    if not aux_of(aux):
        return total, count
    return total + aux_loss(aux).astype(total.dtype), Tally(count, aux)


def count_of(tally: Count) -> Float[Array, ""]:
    """The weight of the tokens, from a loss that returns it alone or in a `Tally`."""
    return tally.count if isinstance(tally, Tally) else tally


def routing_metrics(tally: Count) -> dict[str, Array]:
    """Metrics of the routed layers in a step; empty for a model without such layers.

    `balance_loss`: the layers' part of the loss per token. `dropped_share`: the share of all choices that were dropped
    for lack of capacity. `router_entropy`: in nats a token, the mean over layers. `load_violation`: the load of the
    busiest expert over the even load, minus 1, in the worst layer (MaxVio of arXiv:2408.15664). `expert_load`: each
    expert's share of its layer's choices, `routed_layers experts`; layers with fewer experts are padded with zeros.
    """
    if not isinstance(tally, Tally) or not (found := aux_of(tally.aux)):
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
